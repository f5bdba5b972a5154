"""The route of a shard during reshardings: its phase only moves up, and its cuts say where layouts ended."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest

from redis_stream_coord import ConflictError, CoordError, commands
from redis_stream_coord.commands import Fence, SagaRecord
from redis_stream_coord.keys import GroupKeys, StreamKeys
from redis_stream_coord.models import Layout
from tests.unit.fake import FakeGroup, fake_group

STREAM = StreamKeys("orders")
SAGA = SagaRecord(
    id="s1",
    state="CUTOVER",
    epoch=2,
    source=1,
    target=2,
    ordered=True,
    quiesce=False,
    back=False,
    opened=True,
    void=0,
    began_ms=0,
    changed_ms=0,
)


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    with fake_group(shards=1) as group:
        yield group


def saga(epoch: int = 2, **changes: object) -> SagaRecord:
    return attrs.evolve(SAGA, epoch=epoch, **changes)


def route(group: FakeGroup, shard: int = 0) -> dict[str, str]:
    found = group.client.hgetall(STREAM.shard(shard).route)
    return {name.decode(): value.decode() for name, value in found.items()}


def phase(group: FakeGroup, shard: int = 0) -> str:
    return "{state} {epoch}".format(**route(group, shard))


def append(group: FakeGroup, shard: int = 0) -> str:
    return str(group.client.xadd(STREAM.shard(shard).stream, {"n": "1"}).decode())


def word_of(group: FakeGroup, command: commands.Command[object]) -> str:
    with pytest.raises(CoordError) as caught:
        group.run(command)
    return caught.value.word


def open_at(epoch: int, shard: int = 0) -> commands.Command[None]:
    return commands.open_route(STREAM, shard, epoch=epoch, layout=f"{epoch}:2:s1")


def test_close_notes_the_last_entry(group: FakeGroup) -> None:
    last = append(group)
    assert group.run(commands.close(STREAM, 0, saga())) == last
    assert route(group)["cuts"] == f"2:{last}:0"
    assert phase(group) == "closed 2"


def test_the_last_entry_counts_though_it_was_deleted(group: FakeGroup) -> None:
    last = append(group)
    group.client.xdel(STREAM.shard(0).stream, last)
    assert group.run(commands.close(STREAM, 0, saga())) == last


def test_closing_again_gives_the_recorded_cut(group: FakeGroup) -> None:
    cut = group.run(commands.close(STREAM, 0, saga()))
    append(group)  # by somebody who does not ask the route
    assert group.run(commands.close(STREAM, 0, saga())) == cut


@pytest.mark.parametrize("opened", [False, True])
def test_a_late_close_changes_nothing(group: FakeGroup, opened: bool) -> None:
    group.run(commands.close(STREAM, 0, saga(3)))
    if opened:
        group.run(open_at(3))
    before = route(group)
    assert word_of(group, commands.close(STREAM, 0, saga(2))) == "AHEAD"
    assert route(group) == before


def test_an_open_route_is_ahead_of_its_own_close(group: FakeGroup) -> None:
    group.run(commands.close(STREAM, 0, saga()))
    group.run(open_at(2))
    assert word_of(group, commands.close(STREAM, 0, saga())) == "AHEAD"
    assert phase(group) == "open 2"


def test_open_needs_exactly_its_own_close(group: FakeGroup) -> None:
    assert word_of(group, open_at(2)) == "NOT_CLOSED"
    group.run(commands.close(STREAM, 0, saga(3)))
    assert word_of(group, open_at(2)) == "AHEAD"
    assert word_of(group, open_at(4)) == "NOT_CLOSED"
    group.run(open_at(3))
    group.run(open_at(3))
    assert (phase(group), route(group)["layout"]) == ("open 3", "3:2:s1")


def test_a_missing_route_is_neither_closed_nor_opened(group: FakeGroup) -> None:
    group.client.delete(STREAM.shard(0).route)
    for command in (commands.close(STREAM, 0, saga()), open_at(2), commands.evidence(STREAM, 0, ["billing"])):
        assert word_of(group, command) == "ROUTE_MISSING"
    assert not route(group)


def test_rebuild_makes_it_closed_with_the_recorded_cuts(group: FakeGroup) -> None:
    view = attrs.evolve(group.run(commands.resharding(STREAM)), cuts={0: "1:5-1:1"})
    assert group.run(commands.rebuild(STREAM, 0, view)) is False
    group.client.delete(STREAM.shard(0).route)
    assert group.run(commands.rebuild(STREAM, 0, view)) is True
    assert (phase(group), route(group)["cuts"]) == ("closed 1", "1:5-1:1")


def test_rebuild_takes_no_record_that_was_read_long_ago(group: FakeGroup) -> None:
    view = group.run(commands.resharding(STREAM))
    group.client.delete(STREAM.shard(0).route)
    group.clock.advance(31)
    assert word_of(group, commands.rebuild(STREAM, 0, view)) == "STALE_RECORD"
    assert not route(group)


def test_a_rebuilt_route_closes_at_the_larger_cut(group: FakeGroup) -> None:
    first = group.run(commands.close(STREAM, 0, saga()))
    group.client.delete(STREAM.shard(0).route)
    later = append(group)
    view = attrs.evolve(group.run(commands.resharding(STREAM)), cuts={0: f"2:{first}:0"})
    group.run(commands.rebuild(STREAM, 0, view))
    assert group.run(commands.close(STREAM, 0, saga())) == later
    assert route(group)["cuts"] == f"2:{later}:0"


def test_the_cut_of_an_abandoned_epoch_holds_nobody(group: FakeGroup) -> None:
    held = saga(2, source=2, target=1)
    group.run(commands.close(STREAM, 0, held))
    assert route(group)["cuts"].endswith(":1")
    cut = group.run(commands.close(STREAM, 0, saga(3, source=2, target=1, state="REOPENING", void=2)))
    assert route(group)["cuts"] == f"3:{cut}:0"


def test_cuts_stack_and_are_settled_together(group: FakeGroup) -> None:
    for epoch in (2, 3, 4):
        group.run(commands.close(STREAM, 0, saga(epoch)))
    assert group.run(commands.settle(STREAM, 0, 3)) == 1
    assert route(group)["cuts"].startswith("4:")


def provision(layout: Layout, shard: int, resharding: int) -> commands.Command[int]:
    return commands.provision(GroupKeys("orders", "billing"), shard, start="$", layout=layout, resharding=resharding)


def test_provisioning_is_too_late_once_the_shard_is_closed_for_it(group: FakeGroup) -> None:
    view = group.run(commands.resharding(STREAM))
    assert word_of(group, provision(view.layout, 1, 2)) == "ROUTE_MISSING"
    group.run(commands.rebuild(STREAM, 1, view))
    group.run(provision(view.layout, 1, 2))
    group.run(commands.close(STREAM, 1, saga()))
    with pytest.raises(ConflictError) as caught:
        group.run(provision(view.layout, 1, 2))
    assert caught.value.word == "LATE"


def test_a_group_that_is_new_on_a_used_shard_begins_at_its_last_entry(group: FakeGroup) -> None:
    append(group, 1)
    view = group.run(commands.resharding(STREAM))
    group.run(commands.rebuild(STREAM, 1, view))
    group.run(provision(view.layout, 1, 2))
    assert group.run(commands.evidence(STREAM, 1, ["billing"])).drained("billing", 1)


# --- the barrier ------------------------------------------------------------------------------------------------------


def claimed(group: FakeGroup, incarnation: int) -> Fence:
    fence = Fence(0, "a", "n1", incarnation, 1)
    group.run(commands.claim(group.keys, fence))
    return fence


def test_nothing_beyond_a_held_cut_is_read_until_it_is_passed(group: FakeGroup) -> None:
    fence = claimed(group, group.view().incarnation)
    before = [append(group) for _ in range(3)]
    group.run(commands.close(STREAM, 0, saga(2, source=2, target=1)))
    after = [append(group) for _ in range(2)]
    page = group.run(commands.read(group.keys, fence, after="0-0", count=100))
    assert ([entry.id for entry in page.entries], page.held, page.wait_after) == (before, True, before[-1])
    group.run(commands.pass_barrier(group.keys, 0, epoch=2, incarnation=fence.incarnation))
    page = group.run(commands.read(group.keys, fence, after=before[-1], count=100))
    assert ([entry.id for entry in page.entries], page.held) == (after, False)


def test_the_smallest_of_several_barriers_counts(group: FakeGroup) -> None:
    fence = claimed(group, group.view().incarnation)
    ids = []
    for epoch in (2, 3, 4):
        ids.append(append(group))
        group.run(commands.close(STREAM, 0, saga(epoch, source=2, target=1)))
    for passed, expected in ((0, ids[:1]), (2, ids[1:2]), (4, ids[2:])):
        group.run(commands.pass_barrier(group.keys, 0, epoch=passed, incarnation=fence.incarnation))
        page = group.run(commands.read(group.keys, fence, after="0-0", count=100))
        assert [entry.id for entry in page.entries if entry.deliveries == 1][-1:] == expected[-1:]


def test_a_cut_that_is_not_held_stops_nobody(group: FakeGroup) -> None:
    fence = claimed(group, group.view().incarnation)
    group.run(commands.close(STREAM, 0, saga(2, source=2, target=1, ordered=False)))
    last = append(group)
    page = group.run(commands.read(group.keys, fence, after="0-0", count=100))
    assert ([entry.id for entry in page.entries], page.held) == ([last], False)


def test_what_an_earlier_lifecycle_consumed_passes_nothing(group: FakeGroup) -> None:
    incarnation = group.view().incarnation
    claimed(group, incarnation)
    assert word_of(group, commands.pass_barrier(group.keys, 0, epoch=2, incarnation=incarnation - 1)) == "AHEAD"


def test_a_claim_keeps_what_was_passed(group: FakeGroup) -> None:
    incarnation = group.view().incarnation
    group.run(commands.pass_barrier(group.keys, 0, epoch=7, incarnation=incarnation))
    claimed(group, incarnation)
    assert group.client.hget(group.keys.fence(0), "passed") == b"7"


# --- evidence ---------------------------------------------------------------------------------------------------------


def test_evidence_of_consumption(group: FakeGroup) -> None:
    fence = claimed(group, group.view().incarnation)
    first, second = append(group), append(group)
    found = group.run(commands.evidence(STREAM, 0, ["billing"])).groups["billing"]
    assert (found.first, found.pending) == (first, 0)
    assert not found.consumed(first)
    group.run(commands.read(group.keys, fence, after="0-0", count=1))
    found = group.run(commands.evidence(STREAM, 0, ["billing"])).groups["billing"]
    assert (found.first, found.pending) == (first, 1)
    group.run(commands.ack(group.keys, fence, [first]))
    found = group.run(commands.evidence(STREAM, 0, ["billing"])).groups["billing"]
    assert found.consumed(first)
    assert not found.consumed(second)


def test_evidence_names_strangers_and_misses_who_vanished(group: FakeGroup) -> None:
    group.client.xgroup_create(STREAM.shard(0).stream, "other")
    group.client.xgroup_destroy(STREAM.shard(0).stream, "billing")
    found = group.run(commands.evidence(STREAM, 0, ["billing"]))
    assert list(found.strangers) == ["other"]
    assert not found.groups["billing"].found
    assert not found.drained("billing", 1)


def test_an_open_shard_is_not_drained(group: FakeGroup) -> None:
    assert not group.run(commands.evidence(STREAM, 0, ["billing"])).drained("billing", 2)
    group.run(commands.close(STREAM, 0, saga(2)))
    assert group.run(commands.evidence(STREAM, 0, ["billing"])).drained("billing", 2)


def test_rebuild_takes_no_record_that_was_read_before_the_last_entry_came(group: FakeGroup) -> None:
    """A late request, when the route is lost: the shard has been closed, cut and opened since the record was read."""
    before = group.run(commands.resharding(STREAM))
    group.clock.advance(1.0)
    group.client.xadd(STREAM.shard(0).stream, {"n": "1"}, id=f"{before.now_ms + 1000}-0")
    group.client.delete(STREAM.shard(0).route)
    assert word_of(group, commands.rebuild(STREAM, 0, before)) == "STALE_RECORD"
    assert group.run(commands.rebuild(STREAM, 0, group.run(commands.resharding(STREAM)))) is True


def test_rebuild_does_not_wait_for_an_id_ahead_of_the_clock(group: FakeGroup) -> None:
    group.client.xadd(STREAM.shard(0).stream, {"n": "1"}, id="9000000000000-0")
    group.client.delete(STREAM.shard(0).route)
    assert group.run(commands.rebuild(STREAM, 0, group.run(commands.resharding(STREAM)))) is True
