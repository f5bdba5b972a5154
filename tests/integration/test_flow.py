"""Steering consumers while they run: pause and resume, flush, lag, moving a group to another place."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta, timezone

import pytest

from redis_stream_coord import (
    AsyncConsumer,
    Message,
    NotFoundError,
    Outgoing,
    RedisSettings,
    RedisUnavailableError,
    Retry,
)
from tests.integration.kit import GROUP, SLOW, Bench, Crew, Recorder, two_servers
from tests.proxy import LossyProxy
from tests.waiting import aeventually, eventually


def publish_many(bench: Bench, count: int, shard: int = 0) -> list[str]:
    many = [Outgoing(fields={"n": str(n)}, key=bench.key_of(shard)) for n in range(count)]
    return [receipt.id for receipt in bench.producer.publish_many(many)]


def acknowledged(bench: Bench, shard: int = 0) -> None:
    eventually(lambda: not bench.pending(shard), what="all acknowledgements")


# --- pause and resume -----------------------------------------------------------------------------------------------


@two_servers
def test_paused_shard_is_kept_and_the_others_go_on(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2)
    a = crew.start("a")
    a.finishes(*bench.fill(0), *bench.fill(1))
    a.consumer.pause([0])
    held = bench.fill(0, 3)
    bench.fill(1, 3)
    eventually(lambda: len(a.recorder.done(1)) == 4, what="the other shard")
    bench.heartbeats_pass("a")
    assert not set(held) & set(a.recorder.ids(0))
    a.owns(0, 1)
    assert a.kinds(0) == ["assigned"]
    a.consumer.resume([0])
    eventually(lambda: a.recorder.done(0)[1:] == held, what="what was held back, in order")


@two_servers
def test_pause_of_all_holds_for_shards_assigned_later_and_one_can_be_resumed(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2)
    a, b = crew.start("a"), crew.start("b")
    bench.settled(["a", "b"])
    eventually(lambda: a.consumer.assignment | b.consumer.assignment == {0, 1}, what="claims")
    a.consumer.pause()
    b.consumer.stop()
    a.owns(0, 1)
    first, second = bench.fill(0, 2), bench.fill(1, 2)
    bench.heartbeats_pass("a")
    assert a.recorder.ids() == []
    a.consumer.resume([1])
    eventually(lambda: a.recorder.done(1) == second, what="one shard")
    bench.heartbeats_pass("a")
    assert a.recorder.ids(0) == []
    a.consumer.resume()
    eventually(lambda: a.recorder.done(0) == first, what="the other shard")


@two_servers
def test_pause_before_the_start_holds(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2)
    ids = {shard: bench.fill(shard) for shard in range(2)}
    a = crew.prepare("a")
    a.consumer.pause()
    a.consumer.resume([1])
    a.consumer.start()
    a.finishes(*ids[1])
    bench.heartbeats_pass("a")
    assert a.recorder.ids(0) == []
    assert "resume() of shards [0]" in a.consumer.health.waits_for
    a.consumer.resume()
    a.finishes(*ids[0])


@two_servers
def test_pause_before_the_start_holds_for_coroutines(bench: Bench) -> None:
    bench.create(shards=2)
    ids = {shard: bench.fill(shard) for shard in range(2)}
    seen: list[str] = []

    async def handle(message: Message) -> None:
        seen.append(message.id)

    async def main() -> None:
        consumer = AsyncConsumer(bench.stream, group=GROUP, redis=bench.url, member="a", handler=handle)
        consumer.pause([0])
        async with consumer:
            await aeventually(lambda: seen == ids[1], what="the other shard")
            await aeventually(lambda: "resume() of shards [0]" in consumer.health.waits_for, what="that it is told")
            assert consumer.health.ok
            consumer.resume([0])
            await aeventually(lambda: len(seen) == 2, what="both")

    asyncio.run(main())


@two_servers
def test_entry_that_waits_for_a_thread_is_not_handed_out_on_a_paused_shard(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2)
    a = crew.start("a", handler_threads=1)
    a.owns(0, 1)
    a.recorder.hold()
    (held,) = bench.fill(0)
    eventually(lambda: a.recorder.ids() == [held], what="the only thread taken")
    (waiting,) = bench.fill(1)
    eventually(lambda: bench.pending(1), what="the other entry read")
    a.consumer.pause([1])
    bench.heartbeats_pass("a")
    a.recorder.release()
    later = bench.fill(0)
    a.finishes(held, *later)
    assert a.recorder.ids(1) == []
    a.consumer.resume()
    a.finishes(waiting)


@two_servers
def test_entry_that_fails_is_not_tried_again_on_a_paused_shard(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)

    def fail(_: Message) -> None:
        raise ValueError("on purpose")

    a = crew.start("a", Recorder(fail), retry=Retry(backoff_seconds=0.01, max_backoff_seconds=0.01))
    ids = bench.fill(0)
    eventually(lambda: len(a.recorder.ids()) > 2, what="tries")
    a.consumer.pause()
    bench.heartbeats_pass("a", 1)
    tries = len(a.recorder.ids())
    bench.heartbeats_pass("a")
    assert len(a.recorder.ids()) == tries
    a.recorder.action = None
    a.consumer.resume()
    a.finishes(*ids)
    assert a.recorder.began[-1].deliveries == tries + 1


@two_servers
def test_paused_shard_can_be_given_up(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=SLOW)
    a = crew.start("a")
    a.owns(0)
    a.consumer.pause()
    ids = bench.fill(0, 2)
    began = time.monotonic()
    a.consumer.stop()
    assert time.monotonic() - began < 5
    b = crew.start("b")
    b.finishes(*ids)


# --- flush ----------------------------------------------------------------------------------------------------------


@two_servers
def test_flush_sends_what_is_queued(bench: Bench, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redis_stream_coord.acks.ACK_DELAY_SECONDS", 3600.0)
    bench.create(shards=2)
    kept: list[Message] = []
    a = crew.start("a", Recorder(kept.append), ack="manual")
    ids = bench.fill(0, 2) + bench.fill(1, 2)
    a.finishes(*ids)
    eventually(lambda: len(kept) == 4, what="all messages")
    for message in kept:
        message.ack()
    bench.heartbeats_pass("a", 1)
    assert len(bench.pending(0)) == len(bench.pending(1)) == 2
    a.consumer.flush()
    assert bench.pending(0) == bench.pending(1) == {}


@two_servers
def test_flush_that_took_too_long_says_so_and_the_rest_is_sent_later(
    bench: Bench, crew: Crew, proxy: LossyProxy
) -> None:
    bench.create(shards=1, timings=SLOW)
    bench.load_scripts()
    kept: list[Message] = []
    a = crew.start("a", Recorder(kept.append), ack="manual", redis=RedisSettings(proxy.url, timeout_seconds=1.0))
    ids = bench.fill(0)
    a.finishes(*ids)
    eventually(lambda: kept, what="the message")
    proxy.refuse()
    proxy.cut()
    kept[0].ack()
    with pytest.raises(RedisUnavailableError, match=r"within 0\.2 s"):
        a.consumer.flush(timeout_seconds=0.2)
    assert list(bench.pending(0)) == ids
    proxy.accept()
    acknowledged(bench)


# --- lag ------------------------------------------------------------------------------------------------------------


@two_servers
def test_lag_counts_what_has_not_been_received(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2)
    a = crew.start("a", prefetch=2)
    a.owns(0, 1)
    assert a.consumer.lag() == {0: 0, 1: 0}
    a.recorder.hold()
    ids = publish_many(bench, 20)
    eventually(lambda: len(bench.pending(0)) >= 2, what="entries read ahead")
    bench.heartbeats_pass("a")
    assert a.consumer.lag() == {0: 20 - len(bench.pending(0)), 1: 0}
    # Of one that is gone in the middle Redis cannot tell how many are left.
    bench.redis.xdel(bench.stream_key(0), ids[10])
    assert a.consumer.lag() == {0: None, 1: 0}
    a.recorder.release()
    a.finishes(*ids[:10], *ids[11:])
    eventually(lambda: a.consumer.lag() == {0: 0, 1: 0}, what="no lag")


@pytest.mark.parametrize("server", ["redis62"], indirect=True)
def test_lag_is_unknown_where_redis_does_not_count(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    a = crew.start("a")
    a.finishes(*bench.fill(0, 2))
    assert a.consumer.lag() == {0: None}


# --- seek -----------------------------------------------------------------------------------------------------------


def seek(bench: Bench, to: str | datetime, shards: list[int] | None = None, **options: str) -> None:
    bench.admin.seek(bench.stream, group=GROUP, to=to, reason="to try again", shards=shards, **options)


@two_servers
def test_seek_to_the_oldest_hands_everything_out_again_in_order(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=SLOW)
    a = crew.start("a")
    first, second = publish_many(bench, 10, 0), publish_many(bench, 10, 1)
    eventually(lambda: len(a.recorder.done()) == 20, what="everything once")
    tokens = [bench.view().shards[shard].token for shard in range(2)]
    seek(bench, "oldest", request_id="again-1")
    later = bench.fill(0, 2)
    eventually(lambda: len(a.recorder.done()) == 42, what="everything twice, and what came later")
    assert a.recorder.ids(0) == first + first + later
    assert a.recorder.ids(1) == second + second
    # The old owner's fence is of no use any more, and a new lease was not waited for.
    assert all(bench.view().shards[shard].token > tokens[shard] for shard in range(2))
    assert a.kinds(0) == ["assigned", "lost", "assigned"]
    asked = [dict(fields) for _, fields in bench.redis.xrange(bench.keys.audit)]
    (entry,) = [fields for fields in asked if fields["action"] == "seek"]
    assert (entry["request_id"], entry["requested_by"], entry["reason"]) == ("again-1", "tests", "to try again")
    assert entry["outcome"] == "accepted"
    assert bench.events("sought")
    acknowledged(bench)


@two_servers
def test_seek_on_one_shard_leaves_the_others_alone(bench: Bench, crew: Crew) -> None:
    bench.create(shards=3, timings=SLOW)
    a, b = crew.start("a"), crew.start("b")
    ids = {shard: publish_many(bench, 5, shard) for shard in range(3)}
    eventually(lambda: len(a.recorder.done()) + len(b.recorder.done()) == 15, what="everything")
    seek(bench, "oldest", [1])
    eventually(lambda: len(a.recorder.done()) + len(b.recorder.done()) == 20, what="one shard again")
    assert a.recorder.ids(1) + b.recorder.ids(1) == ids[1] * 2
    for shard in (0, 2):
        assert a.recorder.ids(shard) + b.recorder.ids(shard) == ids[shard]
    # Whoever had it got it back.
    assert bench.view().violations() == []


@two_servers
def test_seek_to_the_newest_skips_what_was_read_ahead_too(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    a = crew.start("a", Recorder(lambda _: time.sleep(0.02)))
    publish_many(bench, 300)
    eventually(lambda: len(a.recorder.ids()) >= 5, what="the first ones")
    seek(bench, "newest")
    before = len(a.recorder.ids())
    (last,) = bench.fill(0)
    a.finishes(last)
    # A hundred had been read ahead. What is in a handler goes on, and the word takes a moment.
    assert len(a.recorder.ids()) - before <= 25
    assert a.recorder.ids()[-1] == last
    acknowledged(bench)


@two_servers
def test_seek_to_an_id_goes_on_beyond_it(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    a = crew.start("a")
    ids = publish_many(bench, 6)
    a.finishes(*ids)
    seek(bench, ids[3])
    eventually(lambda: len(a.recorder.done()) == 8, what="the last two again")
    assert a.recorder.ids() == ids + ids[4:]


@two_servers
def test_seek_to_a_time_goes_on_with_what_was_published_then(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    stream = bench.stream_key(0)
    start = datetime(2024, 5, 1, 12, 0, 0, 123_000, tzinfo=timezone.utc)
    ms = 1_714_564_800_123
    ids = [bench.redis.xadd(stream, {"n": "1"}, id=one) for one in (f"{ms - 1}-7", f"{ms}-0", f"{ms}-9", f"{ms + 1}-0")]
    a = crew.start("a")
    a.finishes(*ids)
    for micros in (0, 600):
        # Within one millisecond Redis knows no order by time: rather one too many than one too few.
        count = len(a.recorder.done())
        seek(bench, (start + timedelta(microseconds=micros)).astimezone(timezone(timedelta(hours=2))))
        eventually(lambda count=count: len(a.recorder.done()) == count + 3, what="the last three again")
        assert a.recorder.ids()[-3:] == ids[1:]
    seek(bench, datetime(1969, 12, 31, tzinfo=timezone.utc))
    eventually(lambda: a.recorder.ids()[-4:] == ids, what="all of them again")


@two_servers
def test_seek_while_an_entry_is_in_its_handler_hands_it_out_again_afterwards(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    a = crew.start("a")
    ids = publish_many(bench, 3)
    a.recorder.hold(lambda message: message.id == ids[1])
    eventually(lambda: a.recorder.ids() == ids[:2], what="the second one in its handler")
    seek(bench, "oldest")
    bench.heartbeats_pass("a")
    assert a.recorder.ids() == ids[:2]
    a.recorder.release()
    eventually(lambda: a.recorder.ids() == ids[:2] + ids, what="everything again")
    acknowledged(bench)


@two_servers
def test_seek_while_the_shard_moves_does_not_hold_up_the_move(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=SLOW)
    a = crew.start("a")
    a.owns(0, 1)
    a.recorder.hold()
    bench.fill(0)
    bench.fill(1)
    eventually(lambda: len(a.recorder.ids()) == 2, what="both in their handlers")
    seek(bench, "oldest")
    workers = list(a.consumer._engine._workers.values())  # type: ignore[union-attr]
    eventually(lambda: all(worker._handling.stopping.is_set() for worker in workers), what="the fences met")
    b = crew.start("b")
    eventually(lambda: bench.view().members["a"].revoking, what="a revoke")
    a.recorder.release()
    bench.settled(["a", "b"])
    for shard in range(2):
        eventually(
            lambda shard=shard: len(a.recorder.done(shard) + b.recorder.done(shard)) >= 2, what="each of them again"
        )


@two_servers
def test_seek_to_a_shard_or_group_that_is_not_there_is_refused(bench: Bench) -> None:
    bench.create(shards=2)
    bench.fill(0)
    before = {shard: bench.redis.xinfo_groups(bench.stream_key(shard)) for shard in range(2)}
    with pytest.raises(NotFoundError, match=r"\[7\]"):
        seek(bench, "newest", [0, 7])
    with pytest.raises(NotFoundError):
        bench.admin.seek(bench.stream, group="nobody", to="oldest", reason="a test")
    assert {shard: bench.redis.xinfo_groups(bench.stream_key(shard)) for shard in range(2)} == before


@two_servers
def test_acknowledgement_after_a_seek_tells_at_once_that_the_fence_is_gone(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=SLOW)
    a = crew.start("a", Recorder(lambda _: time.sleep(0.02)))
    ids = publish_many(bench, 300)
    eventually(lambda: len(a.recorder.ids()) >= 5, what="the first ones")
    # As `seek` does it, without the event that it ends with: only the fence tells.
    bench.redis.xgroup_setid(bench.stream_key(0), GROUP, ids[-1])
    bench.redis.hset(bench.keys.fence(0), mapping={"member": "-", "nonce": "sought"})
    before = len(a.recorder.ids())
    (last,) = bench.fill(0)
    eventually(lambda: last in a.recorder.ids() or bench.fence(0)["member"] == "a", what="a new claim")
    assert len(a.recorder.ids()) - before <= 25
