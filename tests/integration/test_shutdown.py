"""Every way to stop a consumer: it drains, acknowledges, leaves, and ends in bounded time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from redis_stream_coord import (
    AsyncConsumer,
    Consumer,
    DrainTimeoutError,
    LifecycleError,
    Message,
    RedisSettings,
)
from tests.integration.kit import FAST, GROUP, SLOW, Bench, Crew, Recorder, Watched, taking_at_most
from tests.proxy import LossyProxy
from tests.waiting import aeventually, eventually

pytestmark = pytest.mark.parametrize("server", ["redis7"], indirect=True)

# What a busy machine may add to a bound; a lease of SLOW is far longer.
GENEROUS_SECONDS = 10.0


class Program:
    """A child that runs a consumer of either face; see `tests.integration.stop_child`."""

    def __init__(self, bench: Bench, face: str, folder: Path) -> None:
        self.hold_file = folder / "hold"
        self.output = folder / f"{face}.out"
        self.errors = folder / f"{face}.err"
        given = {
            "url": bench.url,
            "stream": bench.stream,
            "group": GROUP,
            "member": "child",
            "face": face,
            "hold": str(self.hold_file),
            "shutdown_seconds": 20.0,
        }
        given["redis"] = given.pop("url")
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.integration.stop_child", json.dumps(given)],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )

    def says(self, word: str, count: int = 1) -> None:
        def look() -> bool:
            assert self.process.poll() is None, self.errors.read_text()
            return self.words().count(word) >= count

        eventually(look, within_seconds=30, what=f"{count} x {word!r}")

    def words(self) -> list[str]:
        return self.output.read_text().split()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def ends(self, *, within_seconds: float = 30.0) -> int:
        return self.process.wait(within_seconds)


@pytest.fixture
def program(bench: Bench, tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    programs: list[Program] = []

    def start(face: str) -> Program:
        programs.append(Program(bench, face, tmp_path))
        return programs[-1]

    yield start
    for one in programs:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()


# --- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("face", ["sync", "async"])
def test_signal_drains_acknowledges_leaves_and_ends_with_0(
    bench: Bench, program: Callable[[str], Program], face: str, number: signal.Signals
) -> None:
    bench.create(shards=1, timings=SLOW)
    child = program(face)
    child.says("ready")
    child.hold_file.touch()
    first, second = bench.fill(0, 2)
    child.says("began")
    child.signal(number)
    # While the handler runs it still owns the shard: it says that it leaves, and is not gone.
    eventually(lambda: bench.view().shards[0].state == "revoking", what="the draining shard")
    child.hold_file.unlink()
    assert child.ends() == 0
    assert bench.view().members == {}
    # What was in the handler is acknowledged; what was only read ahead is not handed out any more.
    assert set(bench.pending(0)) <= {second}
    assert first not in bench.pending(0)
    assert child.words() == ["ready", "began", "finished", "ended"]
    assert child.errors.read_text() == ""


@pytest.mark.parametrize("face", ["sync", "async"])
def test_second_signal_ends_at_once(bench: Bench, program: Callable[[str], Program], face: str) -> None:
    bench.create(shards=1, timings=SLOW)
    child = program(face)
    child.says("ready")
    child.hold_file.touch()
    (entry_id,) = bench.fill(0)
    child.says("began")
    child.signal(signal.SIGTERM)
    eventually(lambda: bench.view().shards[0].state == "revoking", what="the draining shard")
    child.signal(signal.SIGTERM)
    assert child.ends(within_seconds=GENEROUS_SECONDS) == -signal.SIGTERM
    assert set(bench.pending(0)) == {entry_id}


@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_first_signal_in_a_stop_that_was_asked_for_otherwise_ends_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """The orchestrator's SIGTERM often comes when the consumer is stopping already, of its own accord."""
    killed: list[int] = []
    monkeypatch.setattr(f"{kind.__module__}.end_at_once", killed.append)
    bench.create(shards=1)

    def act() -> None:
        consumer.request_stop()
        for _ in range(2):
            consumer._signalled(*([signal.SIGTERM, None] if kind is Consumer else [signal.SIGTERM]))
            counts.append(len(killed))

    counts: list[int] = []

    def handle(_: Message) -> None:
        act()

    async def ahandle(_: Message) -> None:
        act()

    consumer = kind(bench.stream, group=GROUP, redis=bench.url, handler=handle if kind is Consumer else ahandle)
    bench.fill(0)
    asyncio.run(consumer.run()) if kind is AsyncConsumer else consumer.run()
    assert counts == [0, 1]


def test_signal_handlers_are_given_back(bench: Bench) -> None:
    bench.create(shards=1)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    consumer = Consumer(bench.stream, group=GROUP, redis=bench.url, handler=lambda _: consumer.request_stop())
    bench.fill(0)
    consumer.run()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


# --- stop, with, cancellation --------------------------------------------------------------------------------------


class BodyError(Exception):
    """What the body of a `with` raises."""


@pytest.mark.parametrize("error", [None, BodyError("on purpose")], ids=["end", "exception"])
def test_leaving_with_drains_and_leaves(bench: Bench, error: BodyError | None) -> None:
    bench.create(shards=2, timings=SLOW)
    (entry_id,) = bench.fill(0)
    recorder = Recorder()
    recorder.hold()
    caught: BodyError | None = None
    try:
        with Consumer(bench.stream, group=GROUP, redis=bench.url, handler=recorder):
            eventually(lambda: recorder.ids(), what="the entry in the handler")
            threading.Timer(0.2, recorder.release).start()
            if error is not None:
                raise error
    except BodyError as raised:
        caught = raised
    assert caught is error
    assert recorder.done() == [entry_id]
    assert bench.pending(0) == {}
    assert bench.view().members == {}


@pytest.mark.parametrize("way", ["end", "exception", "cancel"])
def test_leaving_async_with_drains_and_leaves(bench: Bench, way: str) -> None:
    bench.create(shards=2, timings=SLOW)
    (entry_id,) = bench.fill(0)
    done: list[str] = []

    async def main() -> None:
        began, may_end = asyncio.Event(), asyncio.Event()

        async def handle(message: Message) -> None:
            began.set()
            await may_end.wait()
            done.append(message.id)

        async def body() -> None:
            async with AsyncConsumer(bench.stream, group=GROUP, redis=bench.url, handler=handle):
                await began.wait()
                asyncio.get_running_loop().call_later(0.2, may_end.set)
                if way == "exception":
                    raise BodyError
                if way == "cancel":
                    task.cancel()
                    await asyncio.sleep(60)

        task = asyncio.create_task(body())
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        expected = {"end": type(None), "exception": BodyError, "cancel": asyncio.CancelledError}[way]
        assert isinstance(outcome, expected)
        assert bench.view().members == {}
        # Nothing of it runs on.
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert done == [entry_id]
    assert bench.pending(0) == {}


def test_cancelling_the_task_that_runs_it_drains_and_leaves(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    (entry_id,) = bench.fill(0)
    done: list[str] = []

    async def main() -> None:
        began, may_end = asyncio.Event(), asyncio.Event()

        async def handle(message: Message) -> None:
            began.set()
            await may_end.wait()
            done.append(message.id)

        consumer = AsyncConsumer(bench.stream, group=GROUP, redis=bench.url, handler=handle)
        task = asyncio.create_task(consumer.run())
        await began.wait()
        asyncio.get_running_loop().call_later(0.2, may_end.set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await consumer.wait()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert done == [entry_id]
    assert bench.pending(0) == {}
    assert bench.view().members == {}


def test_stop_twice_before_start_and_start_twice(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    a = crew.prepare("a")
    a.consumer.stop()
    a.consumer.request_stop()
    assert a.consumer.wait(0)
    assert a.consumer.health.waits_for == "to be started"
    a.consumer.start()
    a.owns(0)
    with pytest.raises(LifecycleError, match="once"):
        a.consumer.start()
    a.consumer.stop()
    a.consumer.stop()
    assert a.consumer.wait(0)
    with pytest.raises(LifecycleError, match="once"):
        a.consumer.start()
    assert a.consumer.assignment == frozenset()
    assert bench.view().members == {}


def test_async_stop_twice_before_start_and_start_twice(bench: Bench) -> None:
    bench.create(shards=1)

    async def handle(_: Message) -> None: ...

    async def main() -> None:
        consumer = AsyncConsumer(bench.stream, group=GROUP, redis=bench.url, handler=handle)
        await consumer.stop()
        await consumer.start()
        await aeventually(lambda: consumer.assignment == {0}, what="the shard")
        with pytest.raises(LifecycleError, match="once"):
            await consumer.start()
        with pytest.raises(LifecycleError, match="once"):
            await consumer.run()
        # A refused start stops nothing.
        assert consumer.assignment == {0}
        await asyncio.gather(consumer.stop(), consumer.stop())
        await consumer.stop()

    asyncio.run(main())
    assert bench.view().members == {}


# --- with Redis away, with handlers that do not return -------------------------------------------------------------


def test_handler_that_never_returns_is_abandoned_in_time(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=SLOW)
    a = crew.start("a", shutdown_seconds=0.5)
    a.owns(0, 1)
    a.recorder.hold()
    (entry_id,) = bench.fill(0)
    eventually(lambda: a.recorder.ids(), what="the entry in the handler")
    with taking_at_most(0.5 + GENEROUS_SECONDS / 2, "the stop"), pytest.raises(DrainTimeoutError) as caught:
        a.consumer.stop()
    assert "Shards [0]" in str(caught.value)
    assert set(bench.pending(0)) == {entry_id}
    assert bench.view().members == {}
    # The failure is told once; after that the consumer is simply stopped.
    assert a.consumer.wait(0)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "handler never returns"])
@pytest.mark.parametrize("away", ["hangs", "refuses"])
def test_stop_while_redis_is_away_ends_in_time(
    bench: Bench, crew: Crew, proxy: LossyProxy, away: str, busy: bool
) -> None:
    bench.create(shards=1)
    a = crew.start("a", redis=RedisSettings(proxy.url, timeout_seconds=0.5), shutdown_seconds=1.0)
    a.owns(0)
    if busy:
        a.recorder.hold()
        bench.fill(0)
        eventually(lambda: a.recorder.ids(), what="the entry in the handler")
    if away == "hangs":
        proxy.pause()
    else:
        proxy.refuse()
        proxy.cut()
    with taking_at_most(1.0 + GENEROUS_SECONDS / 2, "the stop"):
        a.consumer.request_stop()
        try:
            assert a.consumer.wait(30)
        except DrainTimeoutError:
            assert busy
    proxy.resume()
    eventually(lambda: bench.redis.ping(), what="Redis")


@pytest.mark.parametrize("away", [False, True], ids=["answer held back", "no connection"])
def test_stop_during_the_join_ends_in_time(bench: Bench, crew: Crew, proxy: LossyProxy, away: bool) -> None:
    bench.create(shards=1)
    if away:
        proxy.refuse()
    else:
        proxy.pause()
    a = crew.start("a", redis=RedisSettings(proxy.url, timeout_seconds=0.5), shutdown_seconds=1.0)
    assert not a.consumer.health.ok
    assert a.consumer.health.state == "joining"
    with taking_at_most(1.0 + GENEROUS_SECONDS / 2, "the stop"):
        a.consumer.stop()
    assert a.calls == []


# --- hold ----------------------------------------------------------------------------------------------------------


def test_rolling_deploy_with_hold_moves_no_shard(bench: Bench, crew: Crew) -> None:
    bench.create(shards=6, timings=SLOW)
    names = ("pod-0", "pod-1", "pod-2")
    running: dict[str, Watched] = {name: crew.start(name) for name in names}
    before = bench.settled(names)
    for name in names:
        running[name].owns(*before.members[name].assigned)
    for name in names:
        running[name].consumer.stop(hold=True)
        assert bench.view().owners == before.owners
        running[name] = crew.start(name)
        running[name].owns(*before.members[name].assigned)
    after = bench.settled(names)
    assert after.owners == before.owners
    assert after.group_epoch == before.group_epoch
    ids = {shard: bench.fill(shard)[0] for shard in range(6)}
    for shard, entry_id in ids.items():
        running[before.shards[shard].holder or ""].finishes(entry_id)


def test_leaving_with_does_not_undo_a_hold(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=SLOW)
    with crew.prepare("a").consumer as consumer:
        eventually(lambda: consumer.assignment, what="the shard")
        consumer.request_stop(hold=True)
    assert set(bench.view().members) == {"a"}


def test_held_shards_go_to_others_when_nobody_comes_back_within_the_lease(bench: Bench, crew: Crew) -> None:
    bench.create(shards=4, timings=FAST)
    a, b = crew.start("a"), crew.start("b")
    before = bench.settled(["a", "b"])
    a.owns(*before.members["a"].assigned)
    stopped = time.monotonic()
    a.consumer.stop(hold=True)
    assert bench.view().owners == before.owners
    b.owns(0, 1, 2, 3)
    assert time.monotonic() - stopped > FAST.lease_seconds / 2
    assert set(bench.view().members) == {"b"}
