"""The environment in memory, used wrongly: each mistake is said at once, nothing hangs, and nothing is left behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from redis_stream_coord import (
    AsyncConsumer,
    AsyncProducer,
    ConfigError,
    Consumer,
    LifecycleError,
    Message,
    Monitor,
    Producer,
    RedisSettings,
)
from redis_stream_coord.testing import AsyncEnvironment, AsyncRecorder, Environment, Recorder, loop

STREAM, GROUP = "orders", "billing"


@pytest.fixture
def env(coord_env: Environment) -> Environment:
    coord_env.create(STREAM, group=GROUP, shards=2)
    return coord_env


def start(env: Environment, member: str, handler: Callable[[Message], Any]) -> Consumer:
    consumer = Consumer(STREAM, group=GROUP, redis=env.redis, member=member, handler=handler)
    consumer.start()
    return consumer


def publish(env: Environment, count: int = 1) -> None:
    with Producer(STREAM, redis=env.redis) as producer:
        for n in range(count):
            producer.publish({"n": str(n)}, key=str(n))


# --- what is passed where -------------------------------------------------------------------------------------------


def test_url_of_the_server_in_memory_leads_nowhere(env: Environment) -> None:
    with pytest.raises(ConfigError, match=r"env\.redis itself"):
        Monitor(env.redis.url)
    with pytest.raises(ConfigError, match="must be text"):
        RedisSettings(env.redis)  # type: ignore[arg-type]
    changed = attrs.evolve(env.redis, timeout_seconds=1.0)
    assert Monitor(changed).groups() == [(STREAM, GROUP)]


def test_settings_of_its_client_lead_to_the_server_in_memory(env: Environment) -> None:
    with Monitor(RedisSettings.from_client(env.client)) as monitor:
        assert monitor.groups() == [(STREAM, GROUP)]


def test_what_is_no_consumer_of_the_environment_is_refused(env: Environment) -> None:
    with Environment() as other:
        stranger = Consumer(STREAM, group=GROUP, redis=other.redis, handler=Recorder())
        for wrong in (stranger, Producer(STREAM, redis=env.redis), None):
            for trouble in (env.freeze, env.thaw, env.crash, env.expire):
                with pytest.raises(LifecycleError, match="not one of the environment"):
                    trouble(wrong)  # type: ignore[arg-type]


def test_replies_to_lose_have_to_exist(env: Environment) -> None:
    with pytest.raises(ConfigError, match=r"publsh.*publish"):
        env.lose_replies(of="publsh")
    with pytest.raises(ConfigError, match="positive"):
        env.lose_replies(0)
    env.lose_replies(of="XADD")


def test_time_goes_forward_only(env: Environment) -> None:
    with pytest.raises(ConfigError, match="forward"):
        env.advance(-1)


# --- at the wrong time ----------------------------------------------------------------------------------------------


def test_after_its_end_everything_says_so() -> None:
    with Environment() as env:
        env.create(STREAM, group=GROUP, shards=1)
        consumer = start(env, "a", Recorder())
        later = Consumer(STREAM, group=GROUP, redis=env.redis, handler=Recorder())
    env.close()
    calls: list[Callable[[], Any]] = [
        env.settle,
        env.check,
        later.start,
        lambda: env.redis,
        lambda: env.client,
        lambda: env.advance(1),
        lambda: env.sleep(1),
        lambda: env.create("x", group=GROUP, shards=1),
        lambda: env.owners(STREAM, group=GROUP),
        lambda: env.pending(STREAM, group=GROUP),
        lambda: env.acknowledged(STREAM, group=GROUP),
        lambda: env.entries(STREAM),
        lambda: env.raw("orders:0"),
        lambda: env.freeze(consumer),
    ]
    for call in calls:
        with pytest.raises(LifecycleError, match="this environment has ended"):
            call()


def test_handler_cannot_let_time_pass_for_all_or_end_everything() -> None:
    threads = threading.active_count()
    said: list[str] = []

    def handle(message: Message) -> None:
        for call in (env.settle, lambda: env.advance(1), env.close):
            try:
                call()
            except LifecycleError as error:
                said.append(str(error))

    with Environment() as env:
        env.create(STREAM, group=GROUP, shards=1)
        start(env, "a", handle)
        publish(env)
        env.settle()
    assert [line.partition(".")[0] for line in said] == [
        "time passes already",
        "time passes already",
        "an environment cannot end while time passes",
    ]
    assert threading.active_count() == threads


async def test_coroutine_handler_cannot_wait_until_all_is_idle(async_coord_env: AsyncEnvironment) -> None:
    env = async_coord_env
    await env.create(STREAM, group=GROUP, shards=1)
    said: list[BaseException] = []

    async def handle(message: Message) -> None:
        try:
            await env.settle()
        except LifecycleError as error:
            said.append(error)

    async with AsyncConsumer(STREAM, group=GROUP, redis=env.redis, handler=handle):
        async with AsyncProducer(STREAM, redis=env.redis) as producer:
            await producer.publish({}, key="k")
        await env.settle()
    assert "It is busy itself" in str(said[0])


def test_plain_environment_within_another_event_loop_is_refused(env: Environment) -> None:
    async def main() -> None:
        for call in (env.settle, lambda: env.advance(1), lambda: start(env, "a", Recorder())):
            with pytest.raises(LifecycleError, match="async_coord_env"):
                call()

    asyncio.run(main())


def test_crashed_consumer_stays_dead(env: Environment) -> None:
    handled = Recorder(lambda message: env.sleep(10))
    consumer = start(env, "a", handled)
    publish(env)
    env.advance(1)
    env.crash(consumer)
    with pytest.raises(LifecycleError, match="has crashed"):
        env.thaw(consumer)
    with pytest.raises(LifecycleError, match="has crashed"):
        consumer.stop()
    env.advance(60)
    assert len(handled.messages) == 1


# --- waiting in vain ------------------------------------------------------------------------------------------------


def test_frozen_consumer_is_not_waited_for_though_others_live(env: Environment) -> None:
    one, _ = start(env, "a", Recorder()), start(env, "b", Recorder())
    env.settle()
    env.freeze(one)
    for call in (one.stop, one.flush, one.lag):
        with pytest.raises(LifecycleError, match="this consumer is frozen"):
            call()
    assert not one.wait(5)
    env.thaw(one)
    one.stop()


def test_loop_over_messages_that_never_come_ends(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_HOPELESS_SECONDS", 120.0)
    publish(env, 3)
    seen = []

    def consume() -> None:
        for message in Consumer(STREAM, group=GROUP, redis=env.redis):
            seen.append(message)
            env.sleep(200)  # what passes time is not in vain

    with pytest.raises(LifecycleError, match="a message that never comes"):
        consume()
    assert len(seen) == 3


def test_async_wait_in_vain_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_HOPELESS_SECONDS", 120.0)

    async def main(env: AsyncEnvironment) -> None:
        await env.create(STREAM, group=GROUP, shards=1)
        one, other = (AsyncConsumer(STREAM, group=GROUP, redis=env.redis, handler=AsyncRecorder()) for _ in range(2))
        await one.start()
        await other.start()
        await env.advance(300)
        env.freeze(one)
        await one.stop()

    with AsyncEnvironment() as env, pytest.raises(LifecycleError, match="frozen or crashed"):
        env.run(main(env))


def test_settle_says_what_keeps_happening(env: Environment) -> None:
    producer = Producer(STREAM, redis=env.redis)
    start(env, "a", lambda message: producer.publish({}, key="k") and None)
    publish(env)
    with pytest.raises(AssertionError, match=r"something still happens \(.*publish \d+x"):
        env.settle(within_seconds=0.5)


def test_settle_says_who_is_busy(env: Environment) -> None:
    start(env, "a", lambda message: env.sleep(1e4))
    publish(env)
    with pytest.raises(AssertionError, match="handlers of a are busy"):
        env.settle()


def fail_of_a_stuck_handler(handler: Callable[[Environment, Message], Any], saying: str) -> None:
    def run() -> None:
        with Environment(turn_seconds=0.3) as env:
            env.create(STREAM, group=GROUP, shards=2)
            start(env, "a", lambda message: handler(env, message))
            publish(env, 20)
            env.settle()

    with pytest.raises(LifecycleError, match=saying):
        run()


def all_end(threads: set[threading.Thread]) -> None:
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_handler_that_blocks_is_named_and_the_test_goes_on() -> None:
    before, gate = set(threading.enumerate()), threading.Event()

    def wait_for_the_test(env: Environment, message: Message) -> None:
        gate.wait()

    fail_of_a_stuck_handler(wait_for_the_test, r"kept its turn(.|\n)*wait_for_the_test")
    gate.set()
    all_end(set(threading.enumerate()) - before)


def test_lock_that_is_held_while_time_passes_is_said() -> None:
    before, lock = set(threading.enumerate()), threading.Lock()

    def hold(env: Environment, message: Message) -> None:
        with lock:
            env.sleep(1)

    fail_of_a_stuck_handler(hold, "hold no lock")
    all_end(set(threading.enumerate()) - before)


_INTERRUPTED = """
import signal, threading, time
from redis_stream_coord import Consumer, Producer
from redis_stream_coord.testing import Environment


def test_it(coord_env):
    coord_env.create("orders", group="billing", shards=4)
    Consumer("orders", group="billing", redis=coord_env.redis, handler=lambda message: time.sleep(60)).start()
    with Producer("orders", redis=coord_env.redis) as producer:
        producer.publish({}, key="k")
    threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    coord_env.advance(1e7)
"""


def test_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(_INTERRUPTED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    began = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "KeyboardInterrupt" in done.stdout
    assert time.monotonic() - began < 30
