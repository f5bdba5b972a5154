"""Redis went back to a time before: its record alone, or the whole server, under live consumers and with none alive."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from redis_stream_coord import Backup, CoordError, MetadataRegressionError, Timings
from tests.integration.kit import GROUP, STEADY, Bench, Crew, Handled, Watched
from tests.servers import Server, available
from tests.waiting import eventually

# Nobody expires while the server is down for a moment, and a round may take its time.
_TIMINGS = Timings(heartbeat_seconds=0.2, lease_seconds=3.0, rebalance_seconds=6.0)


@contextmanager
def traffic(bench: Bench) -> Iterator[Callable[[], int]]:
    """Publish to all shards until the end; yields how many were published."""
    over, count = threading.Event(), itertools.count()
    sent = [0]

    def publish() -> None:
        while not over.wait(0.002):
            number = next(count)
            with suppress(CoordError):
                bench.producer.publish({"n": str(number)}, key=f"key-{number % 40}")
                sent[0] += 1

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield lambda: sent[0]
    finally:
        over.set()
        thread.join()


def handled(members: list[Watched]) -> list[tuple[str, Handled]]:
    calls = [(member.consumer.member, one) for member in members for one in list(member.recorder.began)]
    return sorted(calls, key=lambda call: call[1].began)


def check_tokens(members: list[Watched]) -> None:
    """No token was ever in two hands, or on two shards; and on a shard they only grow."""
    owner: dict[int, tuple[str, int]] = {}
    last: dict[int, int] = {}
    for member, one in handled(members):
        token = one.token[1]
        assert owner.setdefault(token, (member, one.shard)) == (member, one.shard), f"token {token} was given twice"
        assert token >= last.get(one.shard, 0), f"shard {one.shard} was handed out under an old token"
        last[one.shard] = token


@pytest.mark.parametrize("server", ["redis62", "valkey9"], indirect=True)
def test_a_record_that_went_back_under_live_consumers(bench: Bench, crew: Crew) -> None:
    bench.create(shards=6, timings=_TIMINGS)
    a, b = crew.start("a"), crew.start("b")
    bench.settled(["a", "b"])
    old = bench.record_of()
    c = crew.start("c")
    bench.settled(["a", "b", "c"])
    with traffic(bench) as sent:
        eventually(lambda: sent() > 100, what="some traffic")
        with bench.redis.pipeline() as pipe:
            pipe.delete(bench.keys.metadata).hset(bench.keys.metadata, mapping=old).execute()
        eventually(lambda: bench.events("correction_round_closed"), within_seconds=20, what="the round is over")
        bench.settled(["a", "b", "c"], within_seconds=20)
        before = sent()
        eventually(lambda: sent() > before + 100, what="more traffic")
    witnesses = {event["witness"] for event in bench.events("metadata_regression")}
    assert "member" in witnesses
    eventually(
        lambda: len({one.id for _, one in handled([a, b, c])}) >= sent(),
        what="everything is handled",
        within_seconds=20,
    )
    check_tokens([a, b, c])
    assert bench.view().degraded() == []
    eventually(lambda: a.consumer.health.ok, what="a is well")


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_a_member_says_that_it_waits_for_a_round(bench: Bench, crew: Crew) -> None:
    bench.create(shards=4, timings=STEADY)
    a, b = crew.start("a"), crew.start("b")
    bench.settled(["a", "b"])
    # As if it had all been a's, and b had a shard in hand that the record gives to nobody.
    old = bench.record_of()
    b.consumer.request_stop()
    assert b.consumer.wait(10)
    a.owns(0, 1, 2, 3)
    a.recorder.hold()
    lost = max(set(range(4)) - {int(name[6:]) for name, value in old.items() if " holder=a " in value})
    bench.fill(lost)
    eventually(lambda: a.recorder.began, what="it is in the handler")
    with bench.redis.pipeline() as pipe:
        pipe.delete(bench.keys.metadata).hset(bench.keys.metadata, mapping=old).execute()
    eventually(lambda: not a.consumer.health.ok, what="it is noticed")
    assert "correction round" in a.consumer.health.waits_for
    reasons = eventually(lambda: bench.view().degraded(), what="the group says so")
    assert any("correction round" in reason for reason in reasons)
    health = bench.monitor.health()
    assert health.status == "DEGRADED"
    a.recorder.release()
    eventually(lambda: a.consumer.health.ok, within_seconds=30, what="it is over")


# --- the whole server -----------------------------------------------------------------------------------------------


@pytest.fixture
def whole(stream: str) -> Iterator[tuple[Server, Bench]]:
    """A server of its own, that may be killed, and a group on it."""
    if "redis7" not in available():
        pytest.skip("redis7 is not installed")
    with Server("redis7") as server:
        bench = Bench(server.url, server.client(protocol=2), stream)
        yield server, bench
        bench.close()


def snapshot(server: Server, bench: Bench, folder: Path) -> Path:
    bench.redis.save()
    return Path(shutil.copy(server.directory / "dump.rdb", folder / "old.rdb"))


def go_back(server: Server, old: Path) -> None:
    server.kill()
    shutil.copy(old, server.directory / "dump.rdb")
    server.start()


def test_a_server_that_went_back_a_thousand_events_under_live_consumers_and_producers(
    whole: tuple[Server, Bench], tmp_path: Path
) -> None:
    server, bench = whole
    crew = Crew(bench)
    try:
        bench.create(shards=6, timings=_TIMINGS)
        a, b = crew.start("a"), crew.start("b")
        bench.settled(["a", "b"])
        old = snapshot(server, bench, tmp_path)
        c = crew.start("c")
        bench.settled(["a", "b", "c"])
        with traffic(bench) as sent:
            eventually(lambda: sent() >= 1000, within_seconds=60, what="a thousand events")
            version = bench.view().version
            go_back(server, old)
            assert bench.view().version < version
            # Noticed: by a and b, who are in the record, and by c, who is not.
            eventually(lambda: bench.events("metadata_regression"), within_seconds=20, what="it is noticed")
            eventually(lambda: bench.events("correction_round_closed"), within_seconds=30, what="the round is over")
            bench.settled(["a", "b", "c"], within_seconds=30)
            before = sent()
            eventually(lambda: sent() > before + 200, within_seconds=30, what="more traffic")
        ids = [bench.fill(shard, 1)[0] for shard in range(6)]
        eventually(lambda: set(ids) <= {one.id for _, one in handled([a, b, c])}, what="new ones are handled")
        check_tokens([a, b, c])
        assert bench.admin.verify(bench.stream, group=GROUP) == []
    finally:
        crew.stop()


@pytest.mark.parametrize("newer", [True, False])
def test_a_server_that_went_back_while_nobody_was_there(
    whole: tuple[Server, Bench], tmp_path: Path, newer: bool
) -> None:
    """Only a backup can tell; with it the written procedure is followed to its end. No token comes a second time."""
    server, bench = whole
    first, second = Crew(bench), Crew(bench)
    try:
        bench.create(shards=4, timings=_TIMINGS)
        old = snapshot(server, bench, tmp_path)
        a = first.start("a")
        a.owns(0, 1, 2, 3)
        for number in range(1000):
            bench.producer.publish({"n": str(number)}, key=f"key-{number}")
        eventually(lambda: len(a.recorder.done()) == 1000, within_seconds=30, what="a thousand events")
        first.stop()
        bench.admin.backup().save(tmp_path / "records.json")
        go_back(server, old)

        backup = Backup.load(tmp_path / "records.json")
        found = bench.admin.verify(bench.stream, group=GROUP, against=backup)
        assert [(one.kind, one.error) for one in found] == [("witness", "MetadataRegressionError")]
        bench.admin.freeze(bench.stream, group=GROUP, reason="OPS-1")
        if newer:
            bench.admin.restore(backup, bench.stream, group=GROUP, reason="OPS-1")
            bench.admin.unfreeze(bench.stream, group=GROUP, reason="OPS-1 done")
        else:
            bench.admin.recreate(bench.stream, group=GROUP, reason="OPS-1", timings=_TIMINGS)
        assert bench.admin.verify(bench.stream, group=GROUP, against=backup if newer else None) == []

        b = second.start("b")
        eventually(lambda: b.consumer.assignment == {0, 1, 2, 3}, within_seconds=20, what="b has everything")
        ids = [bench.fill(shard, 1)[0] for shard in range(4)]
        b.finishes(*ids)
        assert {one.token for _, one in handled([a])}.isdisjoint({one.token for _, one in handled([b])})
        assert min(one.token for _, one in handled([b])) > max(one.token for _, one in handled([a]))
    finally:
        first.stop()
        second.stop()


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_a_record_that_went_back_while_nobody_was_there(bench: Bench, crew: Crew) -> None:
    """The fences were not restored, and are ahead."""
    bench.create(shards=2, timings=_TIMINGS)
    old, backup = bench.record_of(), bench.admin.backup()
    a = crew.start("a")
    a.owns(0, 1)
    a.finishes(*bench.fill(0, 3))
    a.consumer.request_stop()
    assert a.consumer.wait(10)
    bench.redis.delete(bench.keys.metadata)
    bench.redis.hset(bench.keys.metadata, mapping=old)
    found = bench.admin.verify(bench.stream, group=GROUP)
    assert {(one.kind, one.shard) for one in found} == {("witness", 0), ("witness", 1)}
    with pytest.raises(MetadataRegressionError, match="fence"):
        bench.admin.restore(backup, bench.stream, group=GROUP, reason="OPS-1")
    bench.admin.recreate(bench.stream, group=GROUP, reason="OPS-1", timings=_TIMINGS)
    assert bench.admin.verify(bench.stream, group=GROUP) == []
    b = crew.start("b")
    b.finishes(*bench.fill(0, 3))
    assert len(b.recorder.done(0)) == 3, "what a had acknowledged does not come again"
    check_tokens([a, b])
