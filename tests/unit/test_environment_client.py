"""What else stands beside the consumers in the environment in memory: a plain client, key prefixes, frozen timers."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import pytest
import redis

from redis_stream_coord import Admin, AsyncAdmin, Consumer, LifecycleError, Producer
from redis_stream_coord.testing import AsyncEnvironment, Environment, Recorder

STREAM, GROUP = "orders", "billing"


@pytest.fixture
def env(coord_env: Environment) -> Environment:
    coord_env.create(STREAM, group=GROUP, shards=2)
    return coord_env


def start(env: Environment, handled: Any, member: str = "a", **options: Any) -> Consumer:
    consumer = Consumer(STREAM, group=GROUP, redis=env.redis, member=member, handler=handled, **options)
    consumer.start()
    return consumer


def publish(env: Environment, count: int) -> None:
    with Producer(STREAM, redis=env.redis) as producer:
        for n in range(count):
            producer.publish({"n": str(n)}, key=str(n))


# --- the client -----------------------------------------------------------------------------------------------------


def test_what_the_client_appends_wakes_an_idle_consumer(env: Environment) -> None:
    handled = Recorder()
    start(env, handled)
    env.settle()
    env.client.xadd("orders:0", {"n": "1"})
    env.settle()
    with env.client.pipeline() as pipeline:
        pipeline.xadd("orders:1", {"n": "2"})
        pipeline.execute()
    env.settle()
    assert handled.texts("n") == ["1", "2"]


def test_the_client_lives_in_virtual_time_in_pipelines_too(env: Environment) -> None:
    seconds, _ = env.client.time()
    env.advance(50)
    direct = env.client.xadd("x", {"n": "1"})
    first, second = env.client.pipeline().xadd("x", {"n": "2"}).time().execute()
    assert int(direct.split(b"-")[0]) // 1000 == int(first.split(b"-")[0]) // 1000 == second[0] == seconds + 50


def test_the_client_says_that_it_cannot_block(env: Environment) -> None:
    with pytest.raises(redis.ResponseError, match="cannot block"):
        env.client.blpop("nothing", timeout=1)
    env.client.rpush("something", "x")
    assert env.client.blpop("something", timeout=1) == (b"something", b"x")


# --- what is kept where ---------------------------------------------------------------------------------------------


def test_repair_finds_the_groups_again(env: Environment) -> None:
    env.client.delete("redis-stream:coord:groups")
    assert env.admin.repair("index", reason="test") == [f"{STREAM}:{GROUP} added"]
    assert env.monitor.groups() == [(STREAM, GROUP)]


async def test_repair_finds_the_groups_again_for_coroutines(async_coord_env: AsyncEnvironment) -> None:
    env = async_coord_env
    await env.create(STREAM, group=GROUP, shards=1)
    env.client.delete("redis-stream:coord:groups")
    async with AsyncAdmin(env.redis, requested_by="test") as admin:
        assert await admin.repair("index", reason="test") == [f"{STREAM}:{GROUP} added"]


def test_entries_of_shards_that_go_are_shown(env: Environment) -> None:
    publish(env, 20)
    env.admin.scale(STREAM, shards=1, reason="test", wait=False)
    start(env, Recorder(lambda message: env.sleep(1)))
    env.advance(3)
    assert env.monitor.routing(STREAM).layout.shards == 1
    assert sum(map(len, env.entries(STREAM).values())) == 20


def test_the_environment_looks_under_its_own_key_prefix() -> None:
    with Environment(key_prefix="shop") as env:
        assert env.redis.key_prefix == "shop"
        env.create(STREAM, group=GROUP, shards=2)
        handled = Recorder()
        start(env, handled)
        publish(env, 10)
        env.settle()
        assert set(env.owners(STREAM, group=GROUP)) == {0, 1}
        assert sum(map(len, env.entries(STREAM).values())) == len(handled.messages) == 10
        assert env.pending(STREAM, group=GROUP) == {}
        keys = {key.decode() for key in env.client.scan_iter()} - {"orders:0", "orders:1"}
        assert {key.partition(":")[0] for key in keys} == {"shop"}
        other = attrs.evolve(env.redis, key_prefix="other")
        with Admin(other, requested_by="test") as admin:
            assert admin.verify() == []
        # Found only there, where it looks.
        env.client.hdel("shop:{orders:billing}:metadata", "version")
        with pytest.raises(Exception, match="version"):
            env.check()
        env.client.flushall()


# --- time -----------------------------------------------------------------------------------------------------------


def test_timer_that_was_cancelled_while_it_was_held_back_never_fires(env: Environment) -> None:
    process, fired = env.redis.process, []  # type: ignore[attr-defined]
    loop = env._world.loop
    early, late = (process._context.run(loop.call_later, 1, fired.append, n) for n in range(2))
    process.frozen = True
    env.advance(2)
    early.cancel()
    process.thaw()
    env.advance(1)
    assert fired == [1]
    assert not late.cancelled()


def test_process_that_is_frozen_again_at_once_does_nothing_between(env: Environment) -> None:
    process, fired = env.redis.process, []  # type: ignore[attr-defined]
    process._context.run(env._world.loop.call_later, 1, fired.append, 1)
    process.frozen = True
    env.advance(2)
    process.thaw()
    process.frozen = True
    env.advance(2)
    assert fired == []
    process.thaw()
    env.advance(1)
    assert fired == [1]


def test_thawed_consumer_has_no_trouble_with_its_own_timers(env: Environment, caplog: pytest.LogCaptureFixture) -> None:
    consumer = start(env, Recorder())
    start(env, Recorder(), member="b")
    for seconds in (1, 5, 20):
        env.freeze(consumer)
        env.advance(seconds)
        env.thaw(consumer)
        env.settle()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_an_idle_group_changes_nothing(env: Environment) -> None:
    start(env, Recorder())
    start(env, Recorder(), member="b")
    publish(env, 10)
    env.settle()
    env.advance(70)
    before = env._world.server.changes
    env.advance(120)
    assert env._world.server.changes == before


# --- the end --------------------------------------------------------------------------------------------------------


def test_end_says_nothing_of_what_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    with Environment() as env:
        env.create(STREAM, group=GROUP, shards=2)
        start(env, lambda message: env.sleep(1000))
        publish(env, 4)
        env.advance(1)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    logging.getLogger("redis_stream_coord").warning("of somebody else")
    assert "of somebody else" in caplog.text


def test_end_comes_all_the_way_though_a_part_of_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Environment()
    env.create(STREAM, group=GROUP, shards=2)
    start(env, lambda message: env.sleep(1000))
    publish(env, 4)
    env.advance(1)
    threads = [strand.thread for process in env._world.processes for one in process._strands for strand in one._strands]
    assert any(thread.is_alive() for thread in threads)

    async def fail() -> None:
        raise LifecycleError("on purpose")

    monkeypatch.setattr(env._world.loop, "shutdown_asyncgens", fail)
    with pytest.raises(LifecycleError, match="on purpose"):
        env.close()
    assert not any(thread.is_alive() for thread in threads)
    assert env._world.loop.is_closed()
