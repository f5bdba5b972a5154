"""The environment in memory that applications test with: what it promises, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from redis_stream_coord import (
    AsyncConsumer,
    AsyncProducer,
    Batch,
    Consumer,
    CoordError,
    CorruptMetadataError,
    LifecycleError,
    Message,
    NotFoundError,
    Outgoing,
    Producer,
    PublishError,
    RedisUnavailableError,
    Retry,
    Router,
    RoutingUnavailableError,
)
from redis_stream_coord.commands import Fence, claim
from redis_stream_coord.keys import GroupKeys
from redis_stream_coord.testing import AsyncEnvironment, AsyncRecorder, Environment, Recorder
from redis_stream_coord.testing.server import Call

STREAM, GROUP = "orders", "billing"


def consumer(env: Environment, member: str, handler: Callable[[Message], None], **options: Any) -> Consumer:
    made = Consumer(STREAM, group=GROUP, redis=env.redis, member=member, handler=handler, **options)
    made.start()
    return made


def fill(env: Environment, count: int = 20) -> list[str]:
    """Publish so many entries under five keys; return their ids."""
    with Producer(STREAM, redis=env.redis) as producer:
        receipts = producer.publish_many(
            Outgoing(fields={"n": str(n)}, key=f"key-{n % 5}", event_id=None) for n in range(count)
        )
    return [f"{receipt.shard}:{receipt.id}" for receipt in receipts]


def places(recorder: Recorder | AsyncRecorder) -> list[str]:
    return [f"{message.shard}:{message.id}" for message in recorder.messages]


def total(found: Any) -> int:
    return sum(map(len, found.values()))


# --- the main thing -------------------------------------------------------------------------------------------------


def test_entries_are_handled_acknowledged_and_seen_from_outside(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=4)
    handled = Recorder()
    a = consumer(env, "a", handled)
    ids = fill(env)
    assert handled.messages == []
    env.settle()
    assert sorted(places(handled)) == sorted(ids)
    assert [message.text("n") for message in handled.of_key("key-2")] == ["2", "7", "12", "17"]
    assert env.pending(STREAM, group=GROUP) == {}
    acknowledged = env.acknowledged(STREAM, group=GROUP)
    assert sorted(f"{shard}:{entry_id}" for shard, ids in acknowledged.items() for entry_id in ids) == sorted(ids)
    assert set(env.owners(STREAM, group=GROUP).values()) == {"a"}
    assert a.assignment == {0, 1, 2, 3}
    assert a.health.ok
    assert a.lag() == dict.fromkeys(range(4), 0)
    assert total(env.entries(STREAM)) == 20
    a.stop()
    assert set(env.owners(STREAM, group=GROUP).values()) == {None}


def test_fifteen_virtual_seconds_take_far_less(coord_env: Environment) -> None:
    coord_env.create(STREAM, group=GROUP, shards=4)
    consumer(coord_env, "a", Recorder())
    coord_env.settle()
    began, before = time.process_time(), coord_env.now
    coord_env.advance(15)
    assert coord_env.now - before == pytest.approx(15)
    assert time.process_time() - began < 1.5  # some 20 ms on an idle machine


def test_failing_handler_is_tried_again(coord_env: Environment) -> None:
    def fail_twice(message: Message) -> None:
        if message.deliveries < 3:
            raise ValueError("not yet")

    coord_env.create(STREAM, group=GROUP, shards=1)
    handled = Recorder(fail_twice)
    consumer(coord_env, "a", handled, retry=Retry(backoff_seconds=10.0, max_backoff_seconds=20.0))
    fill(coord_env, 1)
    coord_env.settle()
    assert len(handled.messages) == 1
    assert total(coord_env.pending(STREAM, group=GROUP)) == 1
    coord_env.advance(40)
    assert len(handled.messages) == 3
    assert coord_env.pending(STREAM, group=GROUP) == {}


def test_group_that_is_missing_is_said(coord_env: Environment) -> None:
    missing = consumer(coord_env, "a", Recorder())
    with pytest.raises(NotFoundError):
        missing.wait(5)


def test_iterating_lets_time_pass(coord_env: Environment) -> None:
    coord_env.create(STREAM, group=GROUP, shards=4)
    ids = fill(coord_env)
    seen = []
    for message in Consumer(STREAM, group=GROUP, redis=coord_env.redis):
        seen.append(f"{message.shard}:{message.id}")
        if len(seen) == len(ids):
            break
    coord_env.settle()
    assert sorted(seen) == sorted(ids)


def test_run_returns_when_a_handler_asks_for_it(coord_env: Environment) -> None:
    coord_env.create(STREAM, group=GROUP, shards=1)
    fill(coord_env, 3)
    one = Consumer(STREAM, group=GROUP, redis=coord_env.redis, handler=lambda message: one.request_stop())
    one.run()
    assert one.health.state == "gone"


# --- handlers that wait ---------------------------------------------------------------------------------------------


def test_handlers_that_wait_do_so_at_the_same_time_and_never_run_at_once(coord_env: Environment) -> None:
    env = coord_env
    running: set[int] = set()
    most = [0]

    def slow(message: Message) -> None:
        running.add(message.shard)
        most[0] = max(most[0], len(running))
        env.sleep(7)
        running.discard(message.shard)

    env.create(STREAM, group=GROUP, shards=4)
    a = consumer(env, "a", Recorder(slow))
    fill(env)
    busy = len(env.entries(STREAM))
    env.advance(1)
    assert len(running) == busy > 1
    assert a.health.ok
    env.settle(within_seconds=200)
    assert most[0] == busy
    assert env.pending(STREAM, group=GROUP) == {}


def test_handler_threads_bound_how_many_wait(coord_env: Environment) -> None:
    env = coord_env
    began = Recorder(lambda message: env.sleep(5))
    env.create(STREAM, group=GROUP, shards=4)
    consumer(env, "a", began, handler_threads=2)
    fill(env)
    env.advance(1)
    assert len(began.messages) == 2
    env.settle(within_seconds=200)
    assert len(began.messages) == 20


def test_handler_that_takes_too_long_costs_its_shard(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=2)

    def stick(message: Message) -> None:
        if message.shard == 0:
            env.sleep(1000)

    a = consumer(env, "a", stick, max_handler_seconds=30.0, shutdown_seconds=5.0)
    handled = Recorder()
    env.settle()
    fill(env)
    env.advance(10)
    assert a.assignment == {0, 1}
    consumer(env, "b", handled)
    env.advance(60)
    assert env.owners(STREAM, group=GROUP)[0] == "b"
    assert {message.shard for message in handled.messages} >= {0}


def test_batches_callbacks_and_flush(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=2)
    batches: list[int] = []
    calls: list[tuple[str, set[int]]] = []
    a = Consumer(
        STREAM,
        group=GROUP,
        redis=env.redis,
        member="a",
        handler=Batch(lambda messages: batches.append(len(messages)), max_size=4, within_seconds=0.1),
        on_assigned=lambda shards: calls.append(("assigned", set(shards))),
        on_revoked=lambda shards: calls.append(("revoked", set(shards))),
        on_lost=lambda shards: calls.append(("lost", set(shards))),
    )
    with a:
        fill(env)
        env.advance(0.0)
        env.settle()
        assert sum(batches) == 20
        assert max(batches) == 4
        a.flush()
        assert env.pending(STREAM, group=GROUP) == {}
        env.freeze(a)
        env.advance(14)
        env.thaw(a)
        env.settle()
    assert calls == [("assigned", {0, 1}), ("lost", {0, 1}), ("assigned", {0, 1}), ("revoked", {0, 1})]


def test_router_keeps_its_layout_fresh(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=3)
    with Router(STREAM, redis=env.redis, lease_seconds=10.0) as router:
        before = router.route("key")
        env.advance(60)
        env.take_redis_away()
        assert router.route("key") == before
        env.advance(11)
        with pytest.raises(RoutingUnavailableError):
            router.route("key")
        env.bring_redis_back()
        assert router.route("key") == before


def test_handler_may_publish(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=2)
    env.create("invoices", group=GROUP, shards=2)
    invoices = Producer("invoices", redis=env.redis)

    def bill(message: Message) -> None:
        invoices.publish({"order": message.id}, key=message.key or b"", event_id=message.id)

    consumer(env, "a", bill)
    fill(env)
    env.settle()
    assert total(env.entries("invoices")) == 20


def test_stuck_handler_ends_with_the_environment() -> None:
    held: list[str] = []

    def stick(message: Message) -> None:
        try:
            env.sleep(1e6)
        finally:
            held.append(message.id)

    with Environment() as env:
        env.create(STREAM, group=GROUP, shards=1)
        consumer(env, "a", stick)
        fill(env, 1)
        env.advance(1)
        assert held == []
        with pytest.raises(AssertionError, match="handlers of a are busy"):
            env.settle()
    assert len(held) == 1


# --- trouble --------------------------------------------------------------------------------------------------------


def test_frozen_consumer_expires_and_its_late_acknowledgement_is_refused(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    kept = Recorder()
    a = consumer(env, "a", kept, ack="manual")
    fill(env, 1)
    env.settle()
    after = Recorder()
    consumer(env, "b", after, ack="manual")
    env.expire(a)
    assert env.owners(STREAM, group=GROUP) == {0: "b"}
    assert [message.deliveries for message in after.messages] == [2]
    assert not kept.messages[0].owned
    with pytest.raises(CoordError):
        kept.messages[0].ack()
    env.thaw(a)
    env.settle()
    assert "a" in env.describe(STREAM, group=GROUP).members
    assert total(env.pending(STREAM, group=GROUP)) == 1


def test_consumer_that_was_frozen_for_less_than_its_lease_goes_on(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=2)
    handled = Recorder()
    a = consumer(env, "a", handled)
    env.settle()
    env.freeze(a)
    fill(env)
    env.advance(10)
    assert handled.messages == []
    env.thaw(a)
    env.settle()
    assert len(handled.messages) == 20
    assert a.assignment == {0, 1}


def test_crash_leaves_everything_to_the_others_after_the_lease(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=4)
    a = consumer(env, "a", Recorder(lambda message: env.sleep(3600)))
    ids = fill(env)
    env.advance(1)
    env.crash(a)
    handled = Recorder()
    consumer(env, "b", handled)
    env.settle()
    assert handled.messages == []
    env.advance(21)
    assert sorted(places(handled)) == sorted(ids)


def test_what_shares_settings_shares_a_process(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=2)
    settings = env.redis
    one, two = (Consumer(STREAM, group=GROUP, redis=settings, member=name, handler=Recorder()) for name in ("a", "b"))
    one.start()
    two.start()
    consumer(env, "c", Recorder())
    env.settle()
    env.crash(one)
    env.advance(21)
    assert set(env.describe(STREAM, group=GROUP).members) == {"c"}


def test_lost_reply_of_a_publish(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=1)
    producer = Producer(STREAM, redis=env.redis)
    env.lose_replies(of="publish")
    with pytest.raises(PublishError, match="may or may not"):
        producer.publish({}, key="k")
    assert total(env.entries(STREAM)) == 1
    env.lose_replies(of="publish")
    before = env.now
    assert producer.publish({}, key="k", event_id="e").duplicate
    assert env.now - before == pytest.approx(5, abs=0.1)
    assert total(env.entries(STREAM)) == 2


@pytest.mark.parametrize("script", ["heartbeat", "claim", "read", "ack", None])
def test_lost_replies_cost_time_and_nothing_else(coord_env: Environment, script: str | None) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=2)
    handled = Recorder()
    env.lose_replies(3, of=script)
    consumer(env, "a", handled)
    ids = fill(env)
    env.advance(60)
    assert sorted(places(handled)) == sorted(ids)
    assert env.pending(STREAM, group=GROUP) == {}
    assert "a" in env.describe(STREAM, group=GROUP).members


def test_redis_goes_away_and_comes_back(coord_env: Environment) -> None:
    env = coord_env
    env.create(STREAM, group=GROUP, shards=2)
    handled = Recorder()
    a = consumer(env, "a", handled)
    producer = Producer(STREAM, redis=env.redis)
    env.settle()
    env.take_redis_away()
    with pytest.raises(RedisUnavailableError):
        env.admin.create("other", group=GROUP, shards=1, reason="test")
    env.advance(60)
    assert a.assignment == frozenset()
    assert not a.health.ok
    assert set(env.owners(STREAM, group=GROUP).values()) == {"a"}
    env.bring_redis_back()
    env.advance(5)
    producer.publish({}, key="k")
    env.settle()
    assert a.health.ok
    assert len(handled.messages) == 1


def test_what_can_never_happen_is_said(coord_env: Environment) -> None:
    coord_env.create(STREAM, group=GROUP, shards=1)
    a = consumer(coord_env, "a", Recorder())
    coord_env.settle()
    coord_env.crash(a)
    with pytest.raises(LifecycleError, match="nothing will ever happen"):
        a.stop()


# --- check ----------------------------------------------------------------------------------------------------------


def test_check_finds_an_entry_that_got_lost() -> None:
    with Environment() as env:
        env.create(STREAM, group=GROUP, shards=1)
        consumer(env, "a", Recorder(), ack="manual")
        fill(env, 2)
        env.settle()
        env.check()
        ((first, _),) = env.pending(STREAM, group=GROUP).values()
        env.client.xack("orders:0", GROUP, first)
        with pytest.raises(AssertionError, match="neither acknowledged nor kept"):
            env.check()
        env.admin.delete(STREAM, group=GROUP, reason="so that the last check finds nothing", force=True)


def test_check_finds_a_fence_that_goes_back() -> None:
    with Environment() as env:
        env.create(STREAM, group=GROUP, shards=1)
        consumer(env, "a", Recorder())
        env.settle()
        keys, incarnation = GroupKeys(STREAM, GROUP), env.describe(STREAM, group=GROUP).incarnation
        env.client.delete(keys.fence(0))
        env.admin._runner.run(claim(keys, Fence(0, "z", "zombie", incarnation, 0)))
        with pytest.raises(AssertionError, match=r"the fence .* went from"):
            env.check()


def test_environment_checks_at_its_end_unless_the_test_failed() -> None:
    def broken() -> Environment:
        env = Environment()
        env.create(STREAM, group=GROUP, shards=1)
        env.client.hdel(GroupKeys(STREAM, GROUP).metadata, "version")
        return env

    with pytest.raises(CorruptMetadataError), broken():
        pass
    with pytest.raises(ZeroDivisionError), broken():
        raise ZeroDivisionError


# --- the same seed, the same run ------------------------------------------------------------------------------------


def story(seed: int) -> list[tuple[Any, ...]]:
    """A run with a bit of everything; returns every command that was carried out, and every message."""
    happened: list[tuple[Any, ...]] = []

    def note(call: Call) -> None:
        answer = call.answer[:2] if isinstance(call.answer, list) else call.answer
        happened.append((call.at, call.connection, call.name, str(call.keys), str(call.arguments), str(answer)))

    with Environment(seed=seed) as env:
        env._world.server.watchers.append(note)
        env.create(STREAM, group=GROUP, shards=5)

        def handle(message: Message) -> None:
            happened.append((env.now, message.shard, message.id, message.token, message.deliveries))
            env.sleep(0.3)
            if message.text("n") == "3" and message.deliveries < 3:
                raise ValueError

        members = [consumer(env, name, handle, concurrency=2) for name in "abc"]
        fill(env)
        env.advance(0.5)
        env.crash(members[0])
        env.lose_replies(2)
        env.advance(30)
        env.take_redis_away()
        env.advance(5)
        env.bring_redis_back()
        fill(env)
        env.settle(within_seconds=300)
        members[1].stop()
        env.settle()
    return happened


def test_the_same_seed_gives_the_same_run() -> None:
    first = story(7)
    assert len(first) > 200
    assert story(7) == first
    assert story(8) != first


# --- nothing is left, and nothing real is used ----------------------------------------------------------------------


def test_no_sockets_no_sleep_no_threads_and_no_files_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("not in memory")

    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    monkeypatch.setattr(time, "sleep", forbidden)
    monkeypatch.setattr(socket, "socketpair", forbidden)
    monkeypatch.setattr(socket.socket, "connect", forbidden)
    for _ in range(3):
        story(1)
    gc.collect()
    assert threading.active_count() == threads
    if files:
        assert len(os.listdir("/proc/self/fd")) <= files


def test_environments_do_not_see_each_other() -> None:
    with Environment() as one, Environment() as other:
        one.create(STREAM, group=GROUP, shards=1)
        one.advance(100)
        assert other.monitor.groups() == []
        assert other.now < one.now
        other.create(STREAM, group=GROUP, shards=2)
        assert len(one.owners(STREAM, group=GROUP)) == 1


def test_fakeredis_of_the_application_keeps_the_real_time() -> None:
    import fakeredis

    with Environment() as env:
        env.create(STREAM, group=GROUP, shards=1)
        with fakeredis.FakeRedis() as client:
            seconds, _ = client.time()
            assert abs(seconds - time.time()) < 5


# --- coroutines -----------------------------------------------------------------------------------------------------


async def test_coroutines_need_no_other_plugin(async_coord_env: AsyncEnvironment) -> None:
    env = async_coord_env
    await env.create(STREAM, group=GROUP, shards=4)
    handled = AsyncRecorder()
    async with (
        AsyncProducer(STREAM, redis=env.redis) as producer,
        AsyncConsumer(STREAM, group=GROUP, redis=env.redis, member="a", handler=handled) as a,
    ):
        for n in range(20):
            await producer.publish({"n": str(n)}, key=f"key-{n % 5}")
        await env.settle()
        assert len(handled.messages) == 20
        assert env.pending(STREAM, group=GROUP) == {}
        b = AsyncConsumer(STREAM, group=GROUP, redis=env.redis, member="b", handler=handled)
        await b.start()
        await env.settle()
        assert a.assignment | b.assignment == {0, 1, 2, 3}
        await env.expire(b)
        assert set(env.owners(STREAM, group=GROUP).values()) == {"a"}
        assert b.assignment == frozenset()
        env.thaw(b)
        await env.settle()
        assert len(b.assignment) == 2
        env.crash(b)
        await env.advance(21)
        assert set(env.owners(STREAM, group=GROUP).values()) == {"a"}


async def test_coroutines_sleep_virtual_seconds(async_coord_env: AsyncEnvironment) -> None:
    env = async_coord_env
    await env.create(STREAM, group=GROUP, shards=1)
    handled = AsyncRecorder(lambda _: asyncio.sleep(300))
    async with AsyncConsumer(STREAM, group=GROUP, redis=env.redis, handler=handled, shutdown_seconds=1e6) as a:
        async with AsyncProducer(STREAM, redis=env.redis) as producer:
            await producer.publish({}, key="k")
        await env.advance(100)
        assert a.health.ok
        assert env.acknowledged(STREAM, group=GROUP) == {}
        await env.advance(210)
        assert total(env.acknowledged(STREAM, group=GROUP)) == 1


async def test_coroutines_may_use_threads_which_take_real_time(async_coord_env: AsyncEnvironment) -> None:
    env = async_coord_env
    await env.create(STREAM, group=GROUP, shards=1)
    handled = AsyncRecorder(lambda _: asyncio.to_thread(threading.Event().wait, 0.05))
    async with AsyncConsumer(STREAM, group=GROUP, redis=env.redis, handler=handled):
        async with AsyncProducer(STREAM, redis=env.redis) as producer:
            await producer.publish({}, key="k")
        await env.settle()
        assert total(env.acknowledged(STREAM, group=GROUP)) == 1


async def test_async_iteration(async_coord_env: AsyncEnvironment) -> None:
    env = async_coord_env
    await env.create(STREAM, group=GROUP, shards=2)
    async with AsyncProducer(STREAM, redis=env.redis) as producer:
        for n in range(5):
            await producer.publish({"n": str(n)}, key="k")
    seen: list[str] = []
    messages = aiter_of(AsyncConsumer(STREAM, group=GROUP, redis=env.redis))
    async for message in messages:
        seen.append(message.text("n"))
        if len(seen) == 5:
            break
    await messages.aclose()
    assert seen == ["0", "1", "2", "3", "4"]


def aiter_of(one: AsyncConsumer) -> Any:
    return one.__aiter__()


def test_consumer_on_another_event_loop_is_refused() -> None:
    async def start() -> None:
        await AsyncConsumer(STREAM, group=GROUP, redis=env.redis, handler=AsyncRecorder()).start()

    with AsyncEnvironment() as env:
        with pytest.raises(LifecycleError, match="event loop"):
            asyncio.run(start())

        async def nested() -> None:
            env.run(start())

        with pytest.raises(LifecycleError, match="another event loop"):
            asyncio.run(nested())


def test_plain_consumer_cannot_wait_on_the_loop_of_coroutines(async_coord_env: AsyncEnvironment) -> None:
    async def main() -> None:
        await async_coord_env.create(STREAM, group=GROUP, shards=1)
        Consumer(STREAM, group=GROUP, redis=async_coord_env.redis, handler=Recorder()).start()

    with pytest.raises(LifecycleError, match="plain code cannot wait"):
        async_coord_env.run(main())


def test_consumer_of_another_server_is_not_taken() -> None:
    stranger = Consumer(STREAM, group=GROUP, redis="redis://nowhere", handler=Recorder())
    with Environment() as env, pytest.raises(LifecycleError, match="not one of the environment"):
        env.freeze(stranger)


def test_loop_goes_on_while_a_rebalance_waits_for_it(coord_env: Environment) -> None:
    """Elsewhere asking for the next message with a rebalance under way waited for itself."""
    coord_env.create(STREAM, group=GROUP, shards=4)
    ids = fill(coord_env, 20)
    loop = Consumer(STREAM, group=GROUP, redis=coord_env.redis, member="a")
    handled: dict[str, list[str]] = {"a": [], "b": []}

    def note(member: str, message: Message) -> None:
        handled[member].append(f"{message.shard}:{message.id}")
        if sum(map(len, handled.values())) == len(ids):
            loop.request_stop()

    for message in loop:
        if not handled["a"]:
            consumer(coord_env, "b", lambda message: note("b", message))
            # Longer than a lease, and shorter than a rebalance may take.
            coord_env.advance(30)
            assert "b" in coord_env.owners(STREAM, group=GROUP).values()
            assert message.owned
        note("a", message)
    assert handled["b"]
    assert sorted(handled["a"] + handled["b"]) == sorted(ids)
    assert coord_env.pending(STREAM, group=GROUP) == {}
