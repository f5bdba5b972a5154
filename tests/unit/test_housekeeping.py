"""What time brings about, and what it does not."""

from __future__ import annotations

from redis_stream_coord.models import Timings
from redis_stream_coord.testing.conformance.bench import Peer
from tests.unit.fake import FakeGroup, fake_group

NEVER = "9007199254740991"


def due(group: FakeGroup) -> str:
    return str(group.client.hget(group.keys.metadata, "next_due_ms").decode())


def test_a_deadline_that_nothing_waits_for_any_more_is_no_change() -> None:
    """It is forgotten when it passes, by whoever comes first: that cost a version, after every rebalance."""
    with fake_group(shards=2, timings=Timings(rebalance_seconds=20.0)) as group:
        a, b = Peer(group, "a", "a1"), Peer(group, "b", "b1")
        a.beat()
        b.beat()
        a.beat()
        assert len(a.revoking) == 1
        a.drain()
        for _ in range(2):
            b.beat()
            a.beat()
        assert [len(a.assigned), len(b.assigned)] == [1, 1]
        before = group.view()
        deadline = int(due(group))
        while group.clock.ms <= deadline + 3000:
            group.clock.advance(3)
            a.beat()
            b.beat()
        after = group.view()
        assert due(group) == NEVER
        assert (after.version, after.group_epoch) == (before.version, before.group_epoch)


def test_a_deadline_that_passes_in_vain_is_one() -> None:
    with fake_group(shards=2, timings=Timings(rebalance_seconds=20.0)) as group:
        a, b = Peer(group, "a", "a1"), Peer(group, "b", "b1")
        a.beat()
        b.beat()
        a.beat()
        before = group.view()
        for _ in range(7):
            group.clock.advance(3)
            b.beat()
            if "a" in group.view().members:
                a.beat()
        after = group.view()
        assert set(after.members) == {"b"}
        assert after.version > before.version
        assert due(group) == NEVER
