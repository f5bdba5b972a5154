"""How often an entry was handed out is counted on beyond the end of a process: no less than one, and never too much."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from redis_stream_coord import DeadLetter, Poison
from tests.integration.kit import SLOW, Bench, Child, Crew, Recorder
from tests.waiting import eventually

redis7 = pytest.mark.parametrize("server", ["redis7"], indirect=True)


def publish(bench: Bench, key: str, *names: str) -> list[str]:
    return [bench.producer.publish({"n": name}, key=key).id for name in names]


def counts(bench: Bench, shard: int = 0) -> dict[str, int]:
    rows = bench.redis.xpending_range(bench.stream_key(shard), bench.keys.group, "-", "+", 1000)
    return {row["message_id"]: row["times_delivered"] for row in rows}


def written(bench: Bench, *ids: str, shard: int = 0) -> None:
    """Wait until Redis knows that exactly these have been handed out."""
    eventually(lambda: {i for i, n in counts(bench, shard).items() if n > 1} == set(ids), what="the deliveries noted")


def killed(child: Child) -> None:
    child.signal(signal.SIGKILL)
    child.process.wait()


def deliveries(recorder: Recorder) -> dict[tuple[int, str], int]:
    """Of the first call with each entry."""
    first: dict[tuple[int, str], int] = {}
    for one in list(recorder.began):
        first.setdefault((one.shard, one.id), one.deliveries)
    return first


# --- several at once ------------------------------------------------------------------------------------------------


def test_every_entry_that_was_in_a_handler_is_counted_and_no_other(bench: Bench, crew: Crew, tmp_path: Path) -> None:
    bench.create(shards=1)
    child = crew.child("child", tmp_path, concurrency=3)
    child.hold()
    keys = [bench.key_of(0, number) for number in range(4)]
    first = [publish(bench, key, "0", "1") for key in keys[:3]]
    child.notes_eventually("began", 3)
    waiting = publish(bench, keys[3], "0", "1")
    eventually(lambda: len(bench.pending(0)) == 8, what="all of them read")
    in_handlers = [ids[0] for ids in first]
    written(bench, *in_handlers)
    killed(child)
    b = crew.start("b", concurrency=3)
    everything = [*(entry_id for ids in first for entry_id in ids), *waiting]
    b.finishes(*everything)
    assert deliveries(b.recorder) == {(0, i): 2 if i in in_handlers else 1 for i in everything}


@redis7
def test_first_entry_that_was_only_read_ahead_is_not_blamed(bench: Bench, crew: Crew, tmp_path: Path) -> None:
    """Its key was busy until a moment ago, and then there was no free slot for it."""
    bench.create(shards=1)
    child = crew.child("child", tmp_path, concurrency=2, hold_key=bench.key_of(0, 1))
    child.hold()
    stuck = publish(bench, bench.key_of(0, 1), "0")
    child.notes_eventually("began", id=stuck[0])
    written(bench, *stuck)
    killed(child)
    # The same picture in Redis, with something older in front of it that nobody had.
    bench.redis.xgroup_setid(bench.stream_key(0), bench.keys.group, "0-0")
    given: list[str] = []
    b = crew.start("b", concurrency=2, poison=Poison(lambda message: given.append(message.id), after_deliveries=1))
    eventually(lambda: given == stuck, what="the one that was in a handler")
    later = publish(bench, bench.key_of(0, 1), "1")
    b.finishes(*later)
    assert given == stuck


@redis7
def test_entry_that_kills_its_process_beside_others_is_poison_in_the_end(
    bench: Bench, crew: Crew, tmp_path: Path
) -> None:
    bench.create(shards=1)
    keys = [bench.key_of(0, number) for number in range(3)]
    (bad,) = publish(bench, keys[1], "bad")
    good = [*publish(bench, keys[0], "0", "1"), *publish(bench, keys[2], "0", "1")]
    # Those that were in a handler beside it each time have been delivered as often: nobody can tell which one it was.
    beside = {good[0], good[2]}
    seen = []
    for _ in range(4):
        child = crew.child("child", tmp_path, concurrency=3, deadly="bad", handler_seconds=0.05)
        assert child.process.wait(20) == 1
        seen.append(next(note["deliveries"] for note in child.notes("began") if note["id"] == bad))
    # The very first one may be missed, if the process ends before it is written down.
    assert seen in ([1, 2, 3, 4], [1, 1, 2, 3])
    b = crew.start("b", concurrency=3, poison=DeadLetter("dead", after_deliveries=3))
    eventually(lambda: not bench.pending(0), what="everything done")
    assert bad not in b.recorder.ids()
    dead = {dict(fields)["rsc-dead-id"] for _, fields in bench.redis.xrange("dead")}
    assert {bad} <= dead <= {bad, *beside}
    assert set(b.recorder.ids()) == set(good) - dead


def test_what_was_handed_out_and_not_acknowledged_is_counted(bench: Bench, crew: Crew, tmp_path: Path) -> None:
    bench.create(shards=1)
    child = crew.child("child", tmp_path, manual=True, never=True)
    ids = bench.fill(0, 3)
    child.notes_eventually("finished", 3)
    written(bench, *ids)
    child.hold()
    ids += bench.fill(0, 2)
    child.notes_eventually("began", id=ids[3])
    eventually(lambda: len(bench.pending(0)) == 5, what="all of them read")
    written(bench, *ids[:4])
    killed(child)
    b = crew.start("b")
    b.finishes(*ids)
    assert [one.deliveries for one in b.recorder.began] == [2, 2, 2, 2, 1]


@redis7
def test_acknowledged_in_the_handler_nothing_is_written(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    a = crew.start("a", Recorder(lambda message: message.ack()), ack="manual")
    a.finishes(*bench.fill(0))
    eventually(lambda: not bench.pending(0), what="the first acknowledgement")
    bench.redis.config_resetstat()
    a.finishes(*bench.fill(0, 300), within_seconds=30)
    eventually(lambda: not bench.pending(0), what="all acknowledgements")
    calls = bench.redis.info("commandstats").get("cmdstat_xclaim", {"calls": 0})["calls"]
    # A handler may be held up by the machine for longer than the delay, now and then.
    assert calls < 30, calls


# --- waiting for a thread, or for the loop --------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["one thread", "loop"])
def test_entries_that_wait_for_their_handler_are_not_blamed(bench: Bench, crew: Crew, tmp_path: Path, way: str) -> None:
    shards = 3
    bench.create(shards=shards)
    options = {"handler_threads": 1} if way == "one thread" else {"iterate": True}
    child = crew.child("child", tmp_path, **options)
    child.hold()
    child.notes_eventually("assigned")
    eventually(lambda: all(bench.consumers(shard) or bench.fence(shard) for shard in range(shards)), what="claims")
    ids = {shard: bench.fill(shard, 2) for shard in range(shards)}
    (began,) = child.notes_eventually("began")
    eventually(lambda: all(len(bench.pending(shard)) == 2 for shard in ids), what="all of them read")
    written(bench, began["id"], shard=began["shard"])
    killed(child)
    b = crew.start("b")
    eventually(lambda: len(b.recorder.done()) == 2 * shards, what="all of them")
    expected = {(shard, entry_id): 1 for shard, of_shard in ids.items() for entry_id in of_shard}
    assert deliveries(b.recorder) == {**expected, (began["shard"], began["id"]): 2}


# --- giving up a shard ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"concurrency": 3}, {"ack": "manual"}], ids=str)
def test_entries_read_ahead_are_not_counted_when_the_shard_is_given_up(
    bench: Bench, crew: Crew, options: dict[str, object]
) -> None:
    bench.create(shards=1, timings=SLOW)
    a = crew.start("a", Recorder(lambda message: message.ack()), **options)
    a.recorder.hold()
    ids = bench.fill(0, 4)
    eventually(lambda: len(bench.pending(0)) == 4, what="all of them read")
    eventually(lambda: a.recorder.ids() == ids[:1], what="one in the handler")
    a.consumer.request_stop()
    a.recorder.release()
    assert a.consumer.wait(10)
    b = crew.start("b")
    b.finishes(*ids[1:])
    assert [one.deliveries for one in b.recorder.began] == [1, 1, 1]


@redis7
@pytest.mark.parametrize("options", [{}, {"concurrency": 3}, {"ack": "manual"}], ids=str)
def test_failed_delivery_is_counted_when_the_shard_is_given_up(
    bench: Bench, crew: Crew, options: dict[str, object]
) -> None:
    bench.create(shards=1, timings=SLOW)

    def fail(_: object) -> None:
        raise ValueError("on purpose")

    a = crew.start("a", Recorder(fail), **options)
    a.recorder.hold()
    ids = bench.fill(0, 2)
    eventually(lambda: a.recorder.ids() == ids[:1], what="one in the handler")
    a.consumer.request_stop()
    a.recorder.release()
    assert a.consumer.wait(10)
    b = crew.start("b", **options)
    b.finishes(*ids)
    assert [one.deliveries for one in b.recorder.began] == [2, 1]
