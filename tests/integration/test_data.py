"""Entries: handed out in order, each acknowledged once it is finished, and what happens when some of it vanishes."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from redis_stream_coord import DeadLetter, FencedError, LifecycleError, Message, NotFoundError, Timings
from redis_stream_coord.commands import ack, claim, read
from redis_stream_coord.waiting import LOOK_AGAIN_SECONDS
from tests.integration.kit import FAST, GROUP, SLOW, STEADY, Bench, Crew, Peer, Recorder
from tests.waiting import eventually


def logged(caplog: pytest.LogCaptureFixture, text: str) -> Callable[[], bool]:
    return lambda: any(text in record.getMessage() for record in list(caplog.records))


# --- handing out and acknowledging ----------------------------------------------------------------------------------


def test_message_carries_what_was_published(bench: Bench, crew: Crew) -> None:
    view = bench.create(shards=1, timings=STEADY)
    seen: list[Message] = []
    a = crew.start("a", Recorder(seen.append))
    given = {"text": "größer", "raw": b"\xff\x00"}
    receipt = bench.producer.publish(given, key="customer-7", event_id="event-1")
    assert given == {"text": "größer", "raw": b"\xff\x00"}
    plain = bench.redis.xadd(bench.stream_key(0), {"text": "by another producer"})
    a.finishes(receipt.id, plain)
    first, second = seen
    assert (first.stream, first.shard, first.id) == (bench.stream, 0, receipt.id)
    assert (first.key, first.event_id, first.deliveries) == (b"customer-7", "event-1", 1)
    assert dict(first.fields) == {"text": "größer".encode(), "raw": b"\xff\x00"}
    assert first.text("text") == "größer"
    assert first.token == (view.incarnation, bench.view().shards[0].token)
    assert (second.key, second.event_id, second.text("text")) == (None, None, "by another producer")


def test_failing_handler_gets_the_entry_again_in_place_and_others_wait(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=STEADY)
    deliveries: list[tuple[str, int]] = []
    ids = bench.fill(0, 3)

    def fail_three_times(message: Message) -> None:
        if message.shard == 1:
            return  # an entry of another shard may have the same id
        deliveries.append((message.id, message.deliveries))
        if message.id == ids[1] and message.deliveries <= 3:
            raise ValueError("on purpose")

    a = crew.start("a", Recorder(fail_three_times))
    other = bench.fill(1)
    a.finishes(*ids, *other)
    assert a.recorder.ids(0) == [ids[0], ids[1], ids[1], ids[1], ids[1], ids[2]]
    expected = [(ids[0], 1), (ids[1], 1), (ids[1], 2), (ids[1], 3), (ids[1], 4), (ids[2], 1)]
    assert deliveries == expected
    eventually(lambda: not bench.pending(0), what="all acknowledgements")


def test_entry_that_failed_is_not_acknowledged_and_its_count_outlives_its_owner(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=STEADY)

    def fail(_: Message) -> None:
        raise ValueError("on purpose")

    a = crew.start("a", Recorder(fail))
    ids = bench.fill(0, 2)
    eventually(lambda: len(a.recorder.began) >= 3, what="three deliveries")
    a.consumer.stop()
    assert list(bench.pending(0)) == ids
    b = crew.start("b")
    b.finishes(*ids)
    assert b.recorder.ids() == ids
    assert [handled.deliveries for handled in b.recorder.began] == [len(a.recorder.began) + 1, 1]


def test_entry_that_comes_as_the_last_handler_ends_is_noticed(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=STEADY)
    count = 400
    key = bench.key_of(0)
    over = threading.Event()

    def publish_next(message: Message) -> None:
        number = int(message.text("n")) + 1
        if number < count:
            bench.producer.publish({"n": str(number)}, key=key)
        else:
            over.set()

    a = crew.start("a", Recorder(publish_next))
    a.owns(0)
    bench.producer.publish({"n": "0"}, key=key)
    assert over.wait(LOOK_AGAIN_SECONDS * 5)
    began = [handled.began for handled in a.recorder.began]
    assert max(later - one for one, later in itertools.pairwise(began)) < LOOK_AGAIN_SECONDS / 2


def test_entry_that_was_only_read_ahead_does_not_count_as_delivered(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=SLOW)
    ids = bench.fill(0, 4)
    recorder = Recorder()
    for number in range(2):
        recorder.hold()
        member = crew.start(f"m{number}", recorder)
        eventually(lambda number=number: recorder.ids() == ids[: number + 1], what="an entry in the handler")
        eventually(lambda: set(bench.pending(0)) == set(ids[len(recorder.done()) :]), what="the others read ahead")
        member.consumer.request_stop()
        recorder.release()
        member.consumer.wait()
    # With so little patience an entry that nobody tried yet would be given up.
    last = crew.start("last", recorder, poison=DeadLetter("dead", after_deliveries=1))
    last.finishes(*ids)
    assert recorder.ids() == ids
    assert [handled.deliveries for handled in recorder.began] == [1, 1, 1, 1]
    assert not bench.redis.exists("dead")


def test_manual_acknowledgement_is_all_that_acknowledges(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=STEADY)
    kept: list[Message] = []
    a = crew.start("a", Recorder(kept.append), ack="manual")
    ids = bench.fill(0, 4)
    a.finishes(*ids)
    bench.heartbeats_pass("a")
    assert list(bench.pending(0)) == ids
    # In the wrong order, and from another thread than the handler's: the position waits for the smallest.
    for at, above, below in ((2, None, 0), (0, 0, 1), (1, 2, 3)):
        kept[at].ack()
        eventually(lambda at=at: ids[at] not in bench.pending(0), what="the acknowledgement")
        position = order(bench.fence(0)["position"])
        assert above is None or order(ids[above]) <= position
        assert position < order(ids[below])
    # What was not acknowledged is delivered again to the next owner.
    a.consumer.stop()
    b = crew.start("b")
    b.finishes(ids[3])
    assert b.recorder.ids() == [ids[3]]
    with pytest.raises(FencedError):
        kept[3].ack()


def order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))


BIG = 18446744073709551615
IDS = ["5-0", "5-1", "7-0", f"7-{BIG}", "100-10000000000000000000"]
BEFORE = [f"4-{BIG}", "5-0", f"6-{BIG}", f"7-{BIG - 1}", "100-9999999999999999999"]


@pytest.mark.parametrize("first", range(len(IDS)))
def test_position_is_just_before_the_smallest_pending_entry(bench: Bench, first: int) -> None:
    bench.create(shards=1, timings=STEADY)
    stream = bench.stream_key(0)
    for entry_id in IDS:
        bench.redis.xadd(stream, {"n": "1"}, id=entry_id)
    peer = Peer(bench, "a")
    peer.beat()
    fence = peer.fence(0)
    bench.runner.run(claim(bench.keys, fence))
    bench.runner.run(read(bench.keys, fence, after="0-0", count=10, max_bytes=1 << 20))
    rest = IDS[:first] + IDS[first + 1 :]
    for entry_id in reversed(rest):
        assert bench.runner.run(ack(bench.keys, fence, [entry_id])) == 1
    assert bench.runner.run(ack(bench.keys, fence, [IDS[0] if first else IDS[1]])) == 0
    assert bench.fence(0)["position"] == BEFORE[first]
    # A group made anew there gets exactly what was not acknowledged, and what came later.
    bench.redis.xgroup_destroy(stream, GROUP)
    page = bench.runner.run(read(bench.keys, fence, after=IDS[-1], count=10, max_bytes=1 << 20))
    assert page.recreated_at == BEFORE[first]
    assert [entry.id for entry in page.entries] == IDS[first:]
    bench.runner.run(ack(bench.keys, fence, IDS))
    assert bench.fence(0)["position"] == IDS[-1]


# --- vanished -------------------------------------------------------------------------------------------------------


def test_vanished_consumer_group_is_made_anew_at_the_recorded_position(
    bench: Bench, crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    bench.create(shards=2, timings=STEADY)
    a = crew.start("a")
    early = bench.fill(0, 3)
    a.finishes(*early)
    eventually(lambda: not bench.pending(0), what="all acknowledgements")
    a.recorder.hold()
    ids = bench.fill(0, 3)
    eventually(lambda: a.recorder.ids(0)[-1:] == ids[:1], what="an entry in the handler")
    bench.redis.xgroup_destroy(bench.stream_key(0), GROUP)
    ids += bench.fill(0, 3)
    a.recorder.release()
    a.finishes(*ids)
    eventually(lambda: GROUP in [info["name"] for info in groups(bench, 0)] and not bench.pending(0), what="the group")
    assert logged(caplog, f"made anew at {early[-1]}")()
    # Nothing is lost, nothing at or below the position comes again.
    seen = a.recorder.ids(0)
    assert seen[:3] == early
    assert not set(seen[3:]) & set(early)
    assert list(dict.fromkeys(seen[3:])) == ids
    assert bench.fence(0)["position"] == ids[-1]
    a.finishes(*bench.fill(1))


def test_vanished_consumer_group_is_noticed_where_nothing_comes(
    bench: Bench, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redis_stream_coord.waiting.LOOK_AGAIN_SECONDS", 0.2)
    bench.create(shards=1, timings=STEADY)
    a = crew.start("a")
    ids = bench.fill(0, 2)
    a.finishes(*ids)
    eventually(lambda: not bench.pending(0), what="all acknowledgements")
    bench.redis.xgroup_destroy(bench.stream_key(0), GROUP)
    eventually(lambda: groups(bench, 0), what="the group")
    assert groups(bench, 0)[0]["last-delivered-id"] == ids[-1]
    ids += bench.fill(0)
    a.finishes(*ids)
    assert a.recorder.ids() == ids


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_acknowledgement_that_a_failover_lost(bench: Bench, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner finds the entry, also where nothing comes, and what waits for it goes on."""
    monkeypatch.setattr("redis_stream_coord.waiting.LOOK_AGAIN_SECONDS", 0.2)
    monkeypatch.setattr("redis_stream_coord.outstanding._LOOK_SECONDS", 0.1)
    bench.create(shards=1, timings=STEADY)
    held: list[Message] = []
    manual = crew.start("a", Recorder(held.append), ack="manual")
    ids = bench.fill(0, 4)
    manual.finishes(*ids)
    for message in held[1:]:
        message.ack()
    eventually(lambda: list(bench.pending(0)) == ids[:1], what="all acknowledgements but one")
    for entry_id in ids[1:3]:
        bench.redis.xclaim(bench.stream_key(0), GROUP, "a", 0, [entry_id], force=True, justid=True)
    resharding = bench.admin.scale(bench.stream, shards=2, reason="a test", wait=False)
    eventually(lambda: len(manual.recorder.ended) == 6, what="what was lost")
    assert manual.recorder.ids() == [*ids, *ids[1:3]]
    assert [one.deliveries for one in manual.recorder.began] == [1, 1, 1, 1, 2, 2]
    for message in (held[0], *held[4:]):
        message.ack()
    bench.admin.wait(resharding, timeout_seconds=10)
    assert not bench.pending(0)
    assert manual.recorder.ids() == [*ids, *ids[1:3]]


def groups(bench: Bench, shard: int) -> list[Any]:
    return list(bench.redis.xinfo_groups(bench.stream_key(shard)))


def test_entry_deleted_while_pending_is_reported_and_not_handed_out(
    bench: Bench, crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    bench.create(shards=1, timings=STEADY)
    ids = bench.fill(0, 5)
    stream = bench.stream_key(0)
    bench.redis.xreadgroup(GROUP, "crashed", {stream: ">"})
    bench.redis.xdel(stream, ids[0], ids[3])
    a = crew.start("a")
    left = [ids[1], ids[2], ids[4]]
    a.finishes(*left)
    assert a.recorder.ids() == left
    eventually(lambda: not bench.pending(0), what="all acknowledgements")
    for entry_id in (ids[0], ids[3]):
        assert logged(caplog, f"{entry_id} was deleted or trimmed")()
    assert bench.consumers(0) == {"a"}
    a.finishes(*bench.fill(0))


def test_trimmed_entries_block_nothing(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=STEADY)
    bench.fill(0, 5)
    stream = bench.stream_key(0)
    bench.redis.xreadgroup(GROUP, "crashed", {stream: ">"}, count=3)
    bench.redis.xtrim(stream, maxlen=1, approximate=False)
    (left,) = [entry_id for entry_id, _ in bench.redis.xrange(stream)]
    a = crew.start("a", prefetch=2)
    a.finishes(left)
    assert a.recorder.ids() == [left]
    eventually(lambda: not bench.pending(0), what="all acknowledgements")


def test_vanished_stream_is_said_so_and_comes_back_with_create(
    bench: Bench, crew: Crew, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redis_stream_coord.waiting.LOOK_AGAIN_SECONDS", 0.2)
    bench.create(shards=2, timings=STEADY)
    a = crew.start("a")
    a.owns(0, 1)
    bench.redis.delete(bench.stream_key(0))
    eventually(logged(caplog, "stream key does not exist"), what="a record that says so")
    assert not bench.redis.exists(bench.stream_key(0))
    a.finishes(*bench.fill(1, 3))
    bench.create(shards=None, exist_ok=True)
    ids = bench.fill(0, 3)
    a.finishes(*ids)
    assert a.recorder.ids(0) == ids
    assert a.kinds(0) == ["assigned"]


def test_flushed_server_stops_the_consumers_and_nothing_brings_the_metadata_back(
    bench: Bench, crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    bench.create(shards=2, timings=STEADY)
    a, b = crew.start("a"), crew.start("b")
    bench.settled(["a", "b"])
    eventually(lambda: a.consumer.assignment | b.consumer.assignment == {0, 1}, what="claims")
    bench.redis.flushall()
    for watched in (a, b):
        watched.called("lost")
        assert not watched.consumer.health.ok
        assert "no such group" in watched.consumer.health.waits_for
        assert watched.consumer.assignment == frozenset()
    assert logged(caplog, "there is no such group")()
    tries_to_join(bench)
    left = set(bench.redis.keys())
    # At most a fence, written by an owner that had not heard of it yet.
    assert left <= {bench.keys.fence(shard) for shard in range(2)}
    # A group of the same name is a new one, which they join.
    bench.create(shards=2, timings=STEADY)
    bench.settled(["a", "b"])
    ids = bench.fill(0) + bench.fill(1)
    eventually(lambda: set(a.recorder.done()) | set(b.recorder.done()) == set(ids), what="all entries")


def test_deleted_group_stops_its_consumers_and_a_new_one_is_joined(
    bench: Bench, crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    # Neither heartbeat nor lease can be how they hear of it, and yet they try again soon.
    timings = Timings(heartbeat_seconds=1.5, lease_seconds=60.0, rebalance_seconds=60.0)
    before = bench.create(shards=2, timings=timings)
    a = crew.start("a")
    ids = bench.fill(0) + bench.fill(1)
    a.finishes(*ids)
    with pytest.raises(Exception, match="live members"):
        bench.delete()
    bench.delete(force=True)
    a.called("lost", within_seconds=0.8)
    assert logged(caplog, "the group does not exist any more")()
    assert not a.consumer.health.ok
    assert "no such group" in a.consumer.health.waits_for
    with pytest.raises(NotFoundError):
        bench.view()
    tombstones = [bench.fence(shard) for shard in range(2)]
    for tombstone in tombstones:
        assert (tombstone["member"], tombstone["nonce"], tombstone["token"]) == ("-", "-", "0")
        assert int(tombstone["incarnation"]) > before.incarnation
    eventually(lambda: len(a.recorder.done()) == 2, what="the end of what was in a handler")
    waiting = bench.fill(0, 2)
    tries_to_join(bench)
    assert not bench.redis.exists(bench.keys.metadata, bench.keys.leases)
    assert [bench.fence(shard) for shard in range(2)] == tombstones
    assert [info for shard in range(2) for info in groups(bench, shard)] == []
    after = bench.create(shards=2, timings=FAST, start="oldest")
    assert after.incarnation > max(int(tombstone["incarnation"]) for tombstone in tombstones)
    a.owns(0, 1)
    a.finishes(*waiting)
    # From the oldest entry on, as asked for, and under the new lifecycle.
    assert a.recorder.ids(0) == [ids[0], ids[0], *waiting]
    assert {handled.token[0] for handled in a.recorder.began} == {before.incarnation, after.incarnation}


def test_consumer_of_a_group_that_does_not_exist_ends_with_the_remedy(bench: Bench, crew: Crew) -> None:
    a = crew.start("a")
    with pytest.raises(NotFoundError, match=r"Admin\(.*\)\.create\("):
        a.consumer.wait(5)
    assert bench.redis.keys() == []


def test_group_can_start_at_new_entries_only(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=STEADY)
    bench.fill(0, 3)
    bench.admin.create(bench.stream, group="other", reason="a test", start="new", timings=FAST)
    recorder = Recorder()
    other = crew.start("a", recorder, group="other")
    other.owns(0)
    ids = bench.fill(0, 2)
    other.finishes(*ids)
    assert recorder.ids() == ids


def tries_to_join(bench: Bench, count: int = 3) -> None:
    """Wait until scripts were called so many times more; of the test's own calls none is a script."""

    def calls() -> int:
        stats = bench.redis.info("commandstats")
        return int(stats.get("cmdstat_evalsha", {"calls": 0})["calls"])

    before = calls()
    eventually(lambda: calls() >= before + count, within_seconds=20, what="tries to join")


# --- lifecycle of the object ---------------------------------------------------------------------------------------


def test_consumer_is_started_once_and_cannot_wait_for_itself(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=STEADY)
    refused: list[Exception] = []
    done = threading.Event()

    def wait_for_itself(_: Message) -> None:
        try:
            a.consumer.stop()
        except LifecycleError as error:
            refused.append(error)
        done.set()

    a = crew.start("a", Recorder(wait_for_itself))
    with pytest.raises(LifecycleError):
        a.consumer.start()
    bench.fill(0)
    assert done.wait(5)
    assert len(refused) == 1
    assert a.consumer.wait(5)


def test_nothing_is_logged_above_info_in_an_ordinary_life(
    bench: Bench, crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    bench.create(timings=STEADY)
    crew.start("a")
    bench.settled(["a"])
    b = crew.start("b")
    bench.settled(["a", "b"])
    for shard in range(4):
        bench.fill(shard)
    b.consumer.stop()
    bench.settled(["a"])
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []
