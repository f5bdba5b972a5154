"""The connections of a process: few, never behind by an answer, made anew by themselves, and gone at the end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from redis_stream_coord import (
    Admin,
    AsyncAdmin,
    AsyncConsumer,
    AsyncMonitor,
    AsyncProducer,
    Consumer,
    CoordError,
    LifecycleError,
    Message,
    Monitor,
    Producer,
    RedisSettings,
    RedisUnavailableError,
    Router,
    Timings,
)
from redis_stream_coord import commands as library_commands
from redis_stream_coord.keys import StreamKeys
from redis_stream_coord.runner import AsyncRunner
from tests.integration.kit import FAST, GROUP, SLOW, Bench, Crew, Recorder, sha
from tests.integration.test_shutdown import Program
from tests.proxy import LossyProxy
from tests.servers import Server
from tests.waiting import aeventually, eventually

pytestmark = pytest.mark.parametrize("server", ["redis7"], indirect=True)

# Heartbeats, data, and the one that blocks.
CONNECTIONS = 3


class Clients:
    """Counts the connections that came since it was made, by CLIENT LIST."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        bench.redis.ping()
        self._known = self._ids()

    def _ids(self) -> set[str]:
        return {client["id"] for client in self._bench.redis.client_list()}

    @property
    def count(self) -> int:
        return len(self._ids() - self._known)


# --- how many ------------------------------------------------------------------------------------------------------


def test_consumer_of_64_shards_has_three_connections_and_leaves_none(bench: Bench, crew: Crew) -> None:
    bench.create(shards=64, timings=SLOW)
    ids = [bench.fill(shard)[0] for shard in range(64)]
    threads = set(threading.enumerate())
    clients = Clients(bench)
    a = crew.start("a")
    a.owns(*range(64))
    a.finishes(*ids, within_seconds=20)
    assert clients.count == CONNECTIONS
    a.consumer.stop()
    eventually(lambda: clients.count == 0, what="no connection left")
    eventually(lambda: set(threading.enumerate()) <= threads, what="no thread left")


def test_consumers_of_several_groups_share_three_connections(bench: Bench) -> None:
    groups = [f"group-{number}" for number in range(5)]
    bench.admin.create(bench.stream, group=groups[0], shards=8, timings=SLOW, reason="a test")
    for group in groups[1:]:
        bench.admin.create(bench.stream, group=group, timings=SLOW, reason="a test")
    bench.fill(0)
    threads = set(threading.enumerate())
    clients = Clients(bench)
    recorders = [Recorder() for _ in groups]
    with ExitStack() as stack:
        consumers = [
            stack.enter_context(Consumer(bench.stream, group=group, redis=bench.url, handler=recorder))
            for group, recorder in zip(groups, recorders, strict=True)
        ]
        eventually(lambda: all(len(consumer.assignment) == 8 for consumer in consumers), what="all shards")
        eventually(lambda: all(recorder.done() for recorder in recorders), what="the entry in every group")
        assert clients.count == CONNECTIONS
        # The others go on when one ends.
        consumers[0].stop()
        bench.fill(1)
        eventually(lambda: all(len(recorder.done()) == 2 for recorder in recorders[1:]), what="the second entry")
        assert clients.count == CONNECTIONS
    eventually(lambda: clients.count == 0, what="no connection left")
    eventually(lambda: set(threading.enumerate()) <= threads, what="no thread left")


def test_async_consumers_on_one_loop_share_three_connections(bench: Bench) -> None:
    groups = [f"group-{number}" for number in range(5)]
    bench.admin.create(bench.stream, group=groups[0], shards=8, timings=SLOW, reason="a test")
    for group in groups[1:]:
        bench.admin.create(bench.stream, group=group, timings=SLOW, reason="a test")
    bench.producer.refresh()
    clients = Clients(bench)
    handled: list[str] = []

    async def handle(message: Message) -> None:
        handled.append(message.id)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            consumers = [
                await stack.enter_async_context(
                    AsyncConsumer(bench.stream, group=group, redis=bench.url, handler=handle)
                )
                for group in groups
            ]
            await aeventually(lambda: all(len(one.assignment) == 8 for one in consumers), what="all shards")
            bench.fill(3)
            await aeventually(lambda: len(handled) == 5, what="the entry in every group")
            assert clients.count == CONNECTIONS
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await aeventually(lambda: clients.count == 0, what="no connection left")

    # Twice: what belongs to a loop does not outlive it.
    asyncio.run(main())
    handled.clear()
    asyncio.run(main())


@pytest.mark.parametrize("face", ["sync", "async", "async twice"])
def test_nothing_is_said_at_exit(bench: Bench, tmp_path: Path, face: str) -> None:
    """No unraisable error, no event loop that is closed, no task destroyed while pending, with -W error."""
    bench.create(shards=2, timings=SLOW)
    child = Program(bench, face, tmp_path)
    try:
        for number in range(1, 3 if face == "async twice" else 2):
            child.says("ready", number)
            bench.fill(0)
            child.says("finished", number)
            child.signal(15)
        assert child.ends() == 0
    finally:
        child.process.kill()
        child.process.wait()
    assert child.words()[-1] == "ended"
    assert child.errors.read_text() == ""


# --- answers and requests stay together ----------------------------------------------------------------------------


def test_cancelled_call_never_leaves_a_connection_one_answer_behind(bench: Bench, seed: int) -> None:
    bench.create(shards=2)
    draw = random.Random(seed)
    (entry_id,) = bench.fill(0)
    stream = StreamKeys(bench.stream).shard(0).stream

    async def main() -> None:
        runner = AsyncRunner(RedisSettings(bench.url), block_seconds=1.0)
        cancelled = 0
        for _ in range(100):
            waits = [
                library_commands.wait({stream: entry_id}, block_seconds=0.01),  # answers that there is nothing
                library_commands.wait({stream: "0-0"}, block_seconds=1.0),  # answers at once
                library_commands.wait({stream: entry_id}, block_seconds=0.1),  # blocks
            ]
            task = asyncio.create_task(runner.run(draw.choice(waits)))
            await asyncio.sleep(draw.choice([0, 0, draw.uniform(0, 0.004), draw.uniform(0, 0.015)]))
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            cancelled += isinstance(outcome, asyncio.CancelledError)
            # Two commands whose answers cannot be taken for each other, or for that of the wait.
            layout, client = await asyncio.gather(
                runner.run(library_commands.layout(StreamKeys(bench.stream))),
                runner.run(library_commands.client_id()),
            )
            assert layout.shards == 2
            assert isinstance(client, int)
            assert await runner.run(library_commands.wait({stream: "0-0"}, block_seconds=1.0)) == {stream: entry_id}
        assert cancelled > 15
        await runner.close()

    asyncio.run(main())


def test_nothing_but_what_is_idempotent_is_sent_again(bench: Bench, proxy: LossyProxy) -> None:
    bench.create(shards=1)
    bench.load_scripts()
    length = bench.redis.xlen(bench.stream_key(0))
    with Producer(bench.stream, redis=RedisSettings(proxy.url, timeout_seconds=0.5)) as producer:
        producer.refresh()
        for _ in range(5):
            proxy.drop_next_reply(sha("publish"))
            with pytest.raises(CoordError):
                producer.publish({"n": "1"}, key="k")
        assert bench.redis.xlen(bench.stream_key(0)) == length + 5
        # No answer at all: the request is still on its way when its caller has given up.
        proxy.pause()
        began = time.monotonic()
        with pytest.raises(CoordError):
            producer.publish({"n": "1"}, key="k")
        assert time.monotonic() - began < 5
        proxy.resume()
        producer.publish({"n": "2"}, key="k")
        assert bench.redis.xlen(bench.stream_key(0)) in (length + 6, length + 7)


# --- Redis away ----------------------------------------------------------------------------------------------------


def test_silence_is_noticed_within_the_timeout_and_the_consumer_comes_back(
    bench: Bench, crew: Crew, proxy: LossyProxy
) -> None:
    timings = Timings(heartbeat_seconds=0.5, lease_seconds=30.0, rebalance_seconds=30.0)
    bench.create(shards=2, timings=timings)
    a = crew.start("a", redis=RedisSettings(proxy.url, timeout_seconds=0.5))
    a.owns(0, 1)
    proxy.pause()
    (entry_id,) = bench.fill(0)
    b = crew.start("b")
    eventually(lambda: "a" in bench.view().members and "b" in bench.view().members, what="both members")
    eventually(lambda: not a.consumer.health.ok, within_seconds=5, what="that it is noticed")
    assert "no answer from Redis" in a.consumer.health.waits_for
    # The lease holds: nothing is given up for that.
    assert a.consumer.assignment
    proxy.resume()
    eventually(lambda: a.consumer.health.ok, within_seconds=20, what="a is well again")
    view = bench.settled(["a", "b"], within_seconds=30)
    owner = {"a": a, "b": b}[view.shards[0].holder or ""]
    eventually(lambda: entry_id in a.recorder.done() + b.recorder.done(), within_seconds=20, what="the entry")
    owner.finishes(*bench.fill(0), within_seconds=20)


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_nothing_is_lost_when_redis_is_gone_for_a_while(stream: str, server: Server, how: str) -> None:
    settings = {"appendfsync": "always"}
    with Server("redis7", appendonly=True, config=settings) as own:
        bench = Bench(own.url, own.client(protocol=2), stream)
        bench.create(shards=4, timings=FAST)
        crew = Crew(bench)
        quick = RedisSettings(bench.url, timeout_seconds=0.5)
        try:
            a, b = crew.start("a", redis=quick), crew.start("b", redis=quick)
            bench.settled(["a", "b"])
            ids = {entry_id for shard in range(4) for entry_id in bench.fill(shard, 50)}
            if how == "killed":
                own.kill()
                eventually(lambda: not a.consumer.health.ok, what="that it is noticed")
                # Longer than the lease: both come back as if nothing had been.
                eventually(lambda: not a.consumer.assignment, what="the end of the lease")
                own.start()
            else:
                own.suspend()
                eventually(lambda: not a.consumer.assignment, what="the end of the lease")
                own.resume()
            bench.settled(["a", "b"], within_seconds=20)
            ids |= {entry_id for shard in range(4) for entry_id in bench.fill(shard, 5)}
            eventually(
                lambda: ids <= set(a.recorder.done()) | set(b.recorder.done()), within_seconds=20, what="every entry"
            )
            eventually(lambda: all(not bench.pending(shard) for shard in range(4)), what="every acknowledgement")
            assert a.consumer.health.ok
            assert b.consumer.health.ok
        finally:
            own.start()
            own.resume()
            crew.stop()
            bench.close()


# --- fork ----------------------------------------------------------------------------------------------------------


@contextmanager
def in_child(act: Callable[[], None]) -> Iterator[None]:
    """Run a function in a forked child; it has failed if it raises."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(60)
        try:
            act()
            code = 0
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(writing)
    yield
    with os.fdopen(reading) as said:
        text = said.read()
    assert os.waitpid(pid, 0)[1] == 0, text


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(LifecycleError, match="before a fork"):
        call()


def test_what_was_made_before_a_fork_is_refused_in_the_child_and_goes_on_in_the_parent(
    bench: Bench, crew: Crew
) -> None:
    bench.create(shards=1, timings=SLOW)
    a = crew.start("a")
    a.owns(0)
    bench.fill(0)
    fresh = Consumer(bench.stream, group=GROUP, redis=bench.url, handler=lambda _: None)
    router = Router(bench.stream, redis=bench.url)

    def child() -> None:
        refused(a.consumer.stop)
        refused(a.consumer.wait)
        refused(a.consumer.lag)
        refused(fresh.start)
        refused(fresh.run)
        refused(lambda: bench.producer.publish({"n": "1"}, key="k"))
        refused(lambda: router.route("k"))
        refused(router.refresh)
        refused(lambda: bench.admin.retain(bench.stream, retention="all", reason="a test"))
        refused(lambda: bench.monitor.groups())
        for one in (bench.producer, router, bench.admin, bench.monitor):
            one.close()

    with in_child(child):
        pass
    a.finishes(*bench.fill(0, 3))
    assert bench.view().members.keys() == {"a"}
    router.close()


def test_async_objects_made_before_a_fork_are_refused_in_the_child(bench: Bench) -> None:
    bench.create(shards=1, timings=SLOW)

    async def handle(_: Message) -> None: ...

    consumer = AsyncConsumer(bench.stream, group=GROUP, redis=bench.url, handler=handle)
    producer = AsyncProducer(bench.stream, redis=bench.url)
    admin, monitor = AsyncAdmin(bench.url, requested_by="tests"), AsyncMonitor(bench.url)

    async def main() -> None:
        for call in (
            consumer.start,
            lambda: producer.publish({"n": "1"}, key="k"),
            lambda: admin.retain(bench.stream, retention="all", reason="a test"),
            monitor.groups,
        ):
            with pytest.raises(LifecycleError, match="before a fork"):
                await call()

    with in_child(lambda: asyncio.run(main())):
        pass


def test_what_is_made_after_a_fork_works_beside_the_parents(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=SLOW)
    a = crew.start("a")
    a.owns(0, 1)
    bench.fill(0)

    def child() -> None:
        recorder = Recorder()
        with (
            Monitor(bench.url) as monitor,
            Producer(bench.stream, redis=bench.url) as producer,
            Consumer(bench.stream, group=GROUP, redis=bench.url, handler=recorder, member="child") as consumer,
            Admin(bench.url, requested_by="tests"),
        ):
            (shard,) = eventually(lambda: consumer.assignment, within_seconds=20, what="a shard in the child")
            assert set(monitor.describe(bench.stream, group=GROUP).members) == {"a", "child"}
            key = next(f"k{n}" for n in range(1000) if producer.route(f"k{n}").shard == shard)
            entry_id = producer.publish({"n": "1"}, key=key).id
            eventually(lambda: entry_id in recorder.done(), within_seconds=20, what="the entry in the child")

    with in_child(child):
        pass
    a.owns(0, 1)
    a.finishes(*bench.fill(0), *bench.fill(1))


# --- the time that a call may take ---------------------------------------------------------------------------------


def test_runner_gives_up_in_time_while_nothing_answers(bench: Bench, proxy: LossyProxy) -> None:
    proxy.pause()
    with Monitor(RedisSettings(proxy.url, timeout_seconds=0.5)) as monitor:
        began = time.monotonic()
        with pytest.raises(RedisUnavailableError) as caught:
            monitor.groups()
        assert time.monotonic() - began < 5
    assert caught.value.retriable
