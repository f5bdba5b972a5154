"""A failover loses acknowledgements that consumers know to be accepted: what is pending again is found and handled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from redis_stream_coord import Batch, Consumer, DeadLetter, Message, Outgoing, Producer, Retry
from redis_stream_coord.commands import Entry, Page
from redis_stream_coord.keys import StreamKeys
from redis_stream_coord.outstanding import Outstanding
from redis_stream_coord.runner import AsyncRunner
from redis_stream_coord.testing import Environment, Recorder
from redis_stream_coord.waiting import LOOK_AGAIN_SECONDS

STREAM, GROUP, MEMBER = "orders", "billing", "a"


def start(env: Environment, handler: Any, **options: Any) -> Consumer:
    made = Consumer(STREAM, group=GROUP, redis=env.redis, member=MEMBER, handler=handler, **options)
    made.start()
    return made


def publish(env: Environment, count: int = 1, key: str = "ann") -> list[str]:
    with Producer(STREAM, redis=env.redis) as producer:
        outgoing = [Outgoing(fields={"n": str(n)}, key=key) for n in range(count)]
        return [receipt.id for receipt in producer.publish_many(outgoing)]


def lose_acks(env: Environment, ids: Sequence[str], *, shard: int = 0, member: str = MEMBER) -> None:
    """Make entries pending again, just as they are when the new primary has not heard of their acknowledgement."""
    stream = StreamKeys(STREAM).shard(shard).stream
    claimed = env.client.xclaim(stream, GROUP, member, 0, list(ids), force=True, justid=True)
    assert [one.decode() for one in claimed] == list(ids)


def pending(env: Environment) -> list[str]:
    return [entry_id for ids in env.pending(STREAM, group=GROUP).values() for entry_id in ids]


def ids_of(recorder: Recorder) -> list[str]:
    return [message.id for message in recorder.messages]


def handled_at_once(messages: list[Message], recorder: Recorder) -> None:
    for message in messages:
        recorder(message)


def as_plain(recorder: Recorder) -> dict[str, Any]:
    return {"handler": recorder}


def as_batch(recorder: Recorder) -> dict[str, Any]:
    return {"handler": Batch(lambda messages: handled_at_once(messages, recorder), max_size=10)}


def as_lanes(recorder: Recorder) -> dict[str, Any]:
    return {"handler": recorder, "concurrency": 4}


def as_manual(recorder: Recorder) -> dict[str, Any]:
    def handle(message: Message) -> None:
        recorder(message)
        message.ack()

    return {"handler": handle, "ack": "manual"}


@pytest.mark.parametrize("shape", [as_plain, as_batch, as_lanes, as_manual])
@pytest.mark.parametrize("member", [MEMBER, "an owner before it, whose entry was taken over by what was lost too"])
def test_entry_whose_acknowledgement_was_lost_is_handled_again(
    coord_env: Environment, shape: Callable[[Recorder], dict[str, Any]], member: str, caplog: pytest.LogCaptureFixture
) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    handled = Recorder()
    start(env, **shape(handled))
    ids = publish(env, 5)
    env.settle()
    assert ids_of(handled) == ids
    assert pending(env) == []
    lose_acks(env, ids[2:4], member=member)
    env.advance(LOOK_AGAIN_SECONDS)
    assert ids_of(handled) == [*ids, *ids[2:4]]
    assert pending(env) == []
    # Whoever looks at this number to tell what comes again is told so.
    assert [message.deliveries for message in handled.messages] == [1, 1, 1, 1, 1, 2, 2]
    assert len({message.token for message in handled.messages}) == 1
    assert [record.levelname for record in caplog.records if ids[2] in record.getMessage()] == ["WARNING"]
    env.advance(10 * LOOK_AGAIN_SECONDS)
    assert len(handled.messages) == 7


def test_what_waits_for_it_goes_on(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    handled = Recorder()
    start(env, handled)
    ids = publish(env, 3)
    env.settle()
    lose_acks(env, ids[1:2])
    resharding = env.admin.scale(STREAM, shards=2, reason="test", wait=False)
    env.admin.wait(resharding, timeout_seconds=2 * LOOK_AGAIN_SECONDS)
    assert ids_of(handled) == [*ids, ids[1]]
    assert pending(env) == []


def test_more_than_fits_into_one_read_comes_in_order(coord_env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redis_stream_coord.outstanding._PAGE", 7)
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    handled = Recorder()
    start(env, handled, prefetch=3)
    ids = publish(env, 40)
    env.settle()
    lose_acks(env, ids[5:35])
    more = publish(env, 2)
    env.advance(LOOK_AGAIN_SECONDS + 5)
    assert pending(env) == []
    assert [one for one in ids_of(handled)[40:] if one not in more] == ids[5:35]
    assert len(handled.messages) == 40 + 30 + 2


def test_shard_that_is_never_idle_looks_too(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    handled = Recorder(lambda _: env.sleep(0.5))
    start(env, handled, prefetch=8)
    first = publish(env, 4)
    env.settle()
    lose_acks(env, first[1:2])
    ids = publish(env, 100)
    env.advance(20)
    assert ids_of(handled).count(first[1]) == 2
    assert pending(env), "it was to have something to do all the time"
    env.advance(60)
    assert pending(env) == []
    assert sorted(ids_of(handled)) == sorted([*first, first[1], *ids])
    assert [one for one in ids_of(handled) if one in ids] == ids


def test_entry_in_a_handler_does_not_come_again(coord_env: Environment) -> None:
    """Nor what was read ahead behind it, while one that was lost comes back."""
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    slow: list[str] = []
    handled = Recorder(lambda message: env.sleep(100) if message.id in slow else None)
    start(env, handled, concurrency=2)
    first = publish(env, 2)
    env.settle()
    with Producer(STREAM, redis=env.redis) as producer:
        env.sleep(0.1)
        slow.append("")
        receipt = producer.publish({"n": "slow"}, key="bob")
        slow.append(receipt.id)
        behind = [producer.publish({"n": "behind"}, key="bob").id for _ in range(3)]
    env.advance(1)
    assert ids_of(handled) == [*first, receipt.id]
    lose_acks(env, first[:1])
    publish(env, 1, key="ann")  # nobody is woken before the wait has passed, otherwise
    env.advance(2 * LOOK_AGAIN_SECONDS)
    assert ids_of(handled).count(first[0]) == 2
    env.advance(200)
    assert ids_of(handled).count(receipt.id) == 1
    assert [one for one in ids_of(handled) if one in behind] == behind
    assert pending(env) == []


def test_what_the_application_has_yet_to_acknowledge_does_not_come_again(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    handled = Recorder()
    start(env, handled, ack="manual")
    ids = publish(env, 6)
    env.settle()
    messages = list(handled.messages)
    for message in messages[2:4]:
        message.ack()
    env.advance(5 * LOOK_AGAIN_SECONDS)
    assert ids_of(handled) == ids
    assert pending(env) == [*ids[:2], *ids[4:]]
    lose_acks(env, ids[3:4])
    env.advance(5 * LOOK_AGAIN_SECONDS)
    assert ids_of(handled) == [*ids, ids[3]]
    assert pending(env) == [*ids[:2], *ids[3:]]
    for message in [*messages[:2], *messages[4:], handled.messages[-1]]:
        message.ack()
    env.advance(5 * LOOK_AGAIN_SECONDS)
    assert ids_of(handled) == [*ids, ids[3]]
    assert pending(env) == []


def test_what_is_left_pending_fills_more_than_a_page(coord_env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not hide what lies behind it, and one look does not go on for ever."""
    monkeypatch.setattr("redis_stream_coord.outstanding._PAGE", 3)
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    handled = Recorder()
    start(env, handled, ack="manual")
    ids = publish(env, 12)
    env.settle()
    handled.messages[11].ack()
    env.settle()
    lose_acks(env, ids[11:])
    looks: list[Any] = []
    env._world.server.watchers.append(lambda call: looks.append(call) if call.name == "outstanding" else None)
    env.advance(5 * LOOK_AGAIN_SECONDS)
    assert ids_of(handled) == [*ids, ids[11]]
    # One for each time that it looks again, and one at once after what was found.
    assert len(looks) <= 6


def test_acknowledged_while_redis_answers(coord_env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was pending when Redis looked, and is acknowledged before its answer is here, was not lost."""
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    handled = Recorder()
    start(env, handled, ack="manual")
    ids = publish(env, 4)
    env.settle()
    lost, in_look, in_read, _ = handled.messages
    lost.ack()
    env.settle()
    lose_acks(env, ids[:1])
    run, seen = AsyncRunner.run, []

    async def slow(self: AsyncRunner, command: Any, **options: Any) -> Any:
        answer = await run(self, command, **options)
        late = in_look if command.name == "outstanding" else in_read if command.name == "read" and seen else None
        if late is not None and late not in seen:
            seen.append(late)
            assert late.id in (answer if command.name == "outstanding" else [entry.id for entry in answer.entries])
            late.ack()
            await asyncio.sleep(1)
            assert late.id not in pending(env)
        return answer

    monkeypatch.setattr(AsyncRunner, "run", slow)
    env.advance(2 * LOOK_AGAIN_SECONDS)
    assert seen == [in_look, in_read]
    assert ids_of(handled) == [*ids, ids[0]]
    env.advance(5 * LOOK_AGAIN_SECONDS)
    assert ids_of(handled) == [*ids, ids[0]]
    assert pending(env) == [ids[0], ids[3]]


def test_entry_of_a_loop_does_not_come_again(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    ids = publish(env, 3)
    seen = []
    loop = Consumer(STREAM, group=GROUP, redis=env.redis, member=MEMBER)
    for message in loop:
        seen.append(message.id)
        env.advance(3 * LOOK_AGAIN_SECONDS)
        if len(seen) == 2:
            lose_acks(env, ids[:1])
            env.advance(3 * LOOK_AGAIN_SECONDS)
        if len(seen) == 4:
            loop.request_stop()
    assert sorted(seen) == sorted([*ids, ids[0]])
    assert pending(env) == []


def test_entry_that_fails_does_not_come_again_by_another_way(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)

    def fail(message: Message) -> None:
        if message.text("n") == "1" and message.deliveries < 3:
            raise ValueError("not yet")

    handled = Recorder(fail)
    start(env, handled, retry=Retry(backoff_seconds=30, max_backoff_seconds=30))
    ids = publish(env, 3)
    env.advance(200)
    assert ids_of(handled) == [ids[0], ids[1], ids[1], ids[1], ids[2]]
    assert [message.deliveries for message in handled.messages if message.id == ids[1]][-1] == 3
    assert pending(env) == []


def test_fatal_error_leaves_its_entry_alone(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)

    def fail(message: Message) -> None:
        raise KeyError(message.id)

    handled = Recorder(fail)
    stopped = start(env, handled, retry=Retry(fatal=(KeyError,)))
    ids = publish(env, 2)
    with pytest.raises(KeyError):
        stopped.wait(5)
    env.advance(5 * LOOK_AGAIN_SECONDS)
    assert ids_of(handled) == ids[:1]


def test_what_was_handled_is_not_given_up_unseen(coord_env: Environment) -> None:
    """Its count says that it was delivered before, and that has not ended its owner."""
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    handled = Recorder()
    start(env, handled, poison=DeadLetter("dead", after_deliveries=1))
    ids = publish(env, 2)
    env.settle()
    lose_acks(env, ids[:1])
    env.advance(LOOK_AGAIN_SECONDS)
    assert ids_of(handled) == [*ids, ids[0]]
    assert env.raw("dead") == []
    assert pending(env) == []


def test_what_was_handled_and_deleted_is_not_reported_as_lost(
    coord_env: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    handled = Recorder()
    start(env, handled)
    ids = publish(env, 2)
    env.settle()
    lose_acks(env, ids)
    env.client.xdel(StreamKeys(STREAM).shard(0).stream, ids[0])
    env.advance(LOOK_AGAIN_SECONDS)
    assert ids_of(handled) == [*ids, ids[1]]
    assert pending(env) == []
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_paused_shard_hands_nothing_out(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    handled = Recorder()
    paused = start(env, handled)
    ids = publish(env, 2)
    env.settle()
    paused.pause()
    lose_acks(env, ids[:1])
    env.advance(3 * LOOK_AGAIN_SECONDS)
    assert ids_of(handled) == ids
    paused.resume()
    env.advance(LOOK_AGAIN_SECONDS)
    assert ids_of(handled) == [*ids, ids[0]]
    assert pending(env) == []


def test_group_that_vanished_is_made_anew_all_the_same(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    handled = Recorder()
    start(env, handled)
    ids = publish(env, 3)
    env.settle()
    env.client.xgroup_destroy(StreamKeys(STREAM).shard(0).stream, GROUP)
    env.advance(3 * LOOK_AGAIN_SECONDS)
    more = publish(env, 2)
    env.advance(1)
    assert ids_of(handled) == [*ids, *more]
    lose_acks(env, more[:1])
    env.advance(2 * LOOK_AGAIN_SECONDS)
    assert ids_of(handled) == [*ids, *more, more[0]]
    assert pending(env) == []


# --- the decisions alone ----------------------------------------------------------------------------------------------


def page_of(*ids: str, again: int, **options: Any) -> Page:
    entries = [Entry(entry_id, 1, (), None, None, 0) for entry_id in ids]
    chosen = {"caught_up": True, "wait_after": None, "held": False, "recreated_at": None, "gone": ()} | options
    return Page(entries=entries, last=ids[-1] if ids else None, again=again, **chosen)


def test_reply_that_was_lost_is_no_acknowledgement_that_was() -> None:
    """What is pending beyond the last id that was received comes with the next read, as a first delivery."""
    some = Outstanding(lambda: 0.0)
    some.received(page_of("9-0", "10-0", again=0).entries)
    assert some.look(["9-0", "10-0", "11-0"], some.ids, "10-0") == "10-0"
    assert not some.reads_again
    some.acknowledged(["9-0"])
    assert some.look(["9-0", "10-0", "11-0"], some.ids, "10-0") == "8-18446744073709551615"
    page, after = some.sort(page_of("9-0", "10-0", "11-0", "12-0", again=3), some.ids)
    assert [(entry.id, entry.deliveries) for entry in page.entries] == [("9-0", 2), ("11-0", 1), ("12-0", 1)]
    assert (after, page.again, some.lost, some.reads_again) == ("12-0", 2, {"9-0"}, False)


def test_group_that_vanishes_meanwhile_is_read_from_where_it_was_made_anew() -> None:
    some = Outstanding(lambda: 0.0)
    assert some.look(["5-3"], some.ids, "10-0") == "5-2"
    page, after = some.sort(page_of("7-0", "8-0", again=0, recreated_at="6-0"), some.ids)
    assert ([entry.id for entry in page.entries], after, some.reads_again) == (["7-0", "8-0"], "8-0", False)


def test_what_is_pending_no_more_ends_the_reading() -> None:
    some = Outstanding(lambda: 0.0)
    some.look(["5-3", "6-0"], some.ids, "10-0")
    _, after = some.sort(page_of("5-3", again=1, caught_up=False), some.ids)
    assert (after, some.reads_again) == ("5-3", True)
    _, after = some.sort(page_of(again=0), some.ids)
    assert (after, some.reads_again) == ("10-0", False)
