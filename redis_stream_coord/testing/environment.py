"""Groups in memory, for the tests of applications: real consumers, producers and scripts, and a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any, TypeVar

from ..admin import Admin
from ..async_admin import AsyncAdmin
from ..async_consumer import AsyncConsumer
from ..consumer import Consumer
from ..engine import Engine
from ..errors import LifecycleError
from ..keys import StreamKeys
from ..models import GroupView, Timings
from ..monitor import AsyncMonitor, Monitor
from ..settings import RedisSettings
from ..telemetry import observed
from .judge import Judge
from .machine import MemorySettings, Process, World

T = TypeVar("T")
_Self = TypeVar("_Self", bound="_Environment")

# Nothing has happened for so long: then nothing happens by itself. Acknowledgements wait 0.01 s for company, a batch
# 0.1 s, the first retry at most 0.1 s.
_QUIET_SECONDS = 0.25
_END_ROUNDS = 100


class _Environment:
    """What both share.

    Parameters:
        seed: decides what chance decides: latencies, jitter, names of sessions. The same seed gives the same run.

    Attributes:
        seed: as given.
        timings: of groups made with `create`.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed
        self.timings = Timings()
        self._world = World(seed)
        self._judge = Judge(self._world.server)
        self._closed = False
        self._observer = Monitor(self.redis)

    @property
    def redis(self) -> RedisSettings:
        """Settings to give to consumers, producers and so on. Each time it is asked for, those of a new process: what
        is made with the same settings is frozen, and crashes, together.
        """
        return MemorySettings(process=Process(self._world))

    @property
    def client(self) -> Any:
        """A redis-py client of the server in memory, for whatever else a test wants to look at or to break. Answers are
        not decoded; commands that block are not for it.
        """
        return self._world.server.client()

    @property
    def now(self) -> float:
        """Virtual seconds; only differences mean something."""
        return self._world.loop.time()

    def sleep(self, seconds: float) -> None:
        """In a plain handler or callback: take so long. Others go on meanwhile."""
        self._world.wait(lambda: False, seconds)

    # --- trouble ------------------------------------------------------------------------------------------------------

    def freeze(self, consumer: Consumer | AsyncConsumer) -> None:
        """Stop a consumer's process in its tracks, as SIGSTOP does. It knows nothing of it afterwards."""
        _process(consumer).frozen = True

    def thaw(self, consumer: Consumer | AsyncConsumer) -> None:
        """Let a frozen process go on."""
        _process(consumer).thaw()

    def crash(self, consumer: Consumer | AsyncConsumer) -> None:
        """End a consumer's process, as SIGKILL does: nothing is acknowledged, and nobody is told."""
        process = _process(consumer)
        process.frozen = process.crashed = True

    def _expiry_seconds(self, consumer: Consumer | AsyncConsumer) -> float:
        """How long it takes at most until the others have noticed that a consumer is gone."""
        config = consumer._config
        timings = self.describe(config.keys.stream, group=config.keys.group).timings
        return timings.lease_seconds + 2 * timings.heartbeat_seconds

    def lose_replies(self, count: int = 1, *, of: str | None = None) -> None:
        """Lose the next replies of Redis: what was asked for is done, and the client hears nothing until its timeout.

        Parameters:
            count: how many.
            of: only replies to this script, such as ``publish``, ``ack`` or ``heartbeat``; ``None``: to any command.
        """
        self._world.lose(count, of)

    def take_redis_away(self) -> None:
        """Refuse connections from now on. What is stored stays."""
        self._world.server.leave()

    def bring_redis_back(self) -> None:
        """Accept connections again."""
        self._world.server.come_back()

    # --- looking ------------------------------------------------------------------------------------------------------

    def describe(self, stream: str, *, group: str) -> GroupView:
        """Return the whole record of a group; also while Redis is away. Raises: `NotFoundError`, `MetadataError`."""
        with self._present():
            return self._observer.describe(stream, group=group)

    def owners(self, stream: str, *, group: str) -> Mapping[int, str | None]:
        """Return for each shard of a group the member that holds it, or ``None``."""
        return self.describe(stream, group=group).owners

    def pending(self, stream: str, *, group: str) -> Mapping[int, list[str]]:
        """Return for each shard with any the ids of entries that were delivered and are not acknowledged."""
        found = {}
        for shard in self.describe(stream, group=group).shards:
            rows = self._world.server.do("XPENDING", _key(stream, shard), group, "-", "+", 1_000_000)
            if rows:
                found[shard] = [row[0].decode() for row in rows]
        return found

    def acknowledged(self, stream: str, *, group: str) -> Mapping[int, list[str]]:
        """Return for each shard with any the ids of entries that were acknowledged, in that order."""
        return {
            shard: ids
            for shard in self.describe(stream, group=group).shards
            if (ids := self._judge.acknowledged(_key(stream, shard), group))
        }

    def entries(self, stream: str) -> Mapping[int, list[tuple[str, dict[str, bytes]]]]:
        """Return for each shard with any its entries: id and fields, those of the library among them."""
        shards = range(self._layout_shards(stream))
        return {shard: found for shard in shards if (found := self.raw(_key(stream, shard)))}

    def raw(self, key: str) -> list[tuple[str, dict[str, bytes]]]:
        """Return the entries of any one Redis stream, for example that of the dead letters: id and fields."""
        return [
            (entry_id.decode(), dict(zip(map(bytes.decode, flat[::2]), flat[1::2], strict=True)))
            for entry_id, flat in self._world.server.do("XRANGE", key, "-", "+")
        ]

    def _layout_shards(self, stream: str) -> int:
        return int(self._world.server.do("HGET", StreamKeys(stream).record, "shards") or 0)

    def check(self) -> None:
        """Look whether everything is as the protocol promises: one owner for each shard, tokens that only grow, no
        reads or acknowledgements of somebody who lost the shard, valid targets, and no entry that is neither to be
        delivered, nor pending, nor acknowledged. Done at the end by itself, if the test did not fail.

        Raises:
            AssertionError: it is not; says what.
        """
        with self._present():
            found = self._judge.look(self._observer, [engine for engine in self._engines() if not _frozen(engine)])
        if found:
            raise AssertionError("; ".join(found))

    @contextlib.contextmanager
    def _present(self) -> Any:
        server = self._world.server
        away, server.away = server.away, False
        try:
            yield
        finally:
            server.away = away

    def _engines(self) -> list[Engine]:
        return [
            one
            for one in observed()
            if isinstance(one, Engine)
            and isinstance(one.config.settings.machine, Process)
            and one.config.settings.machine.world is self._world
        ]

    def _busy(self) -> bool:
        return any(engine.handling for engine in self._engines() if not _frozen(engine))

    async def _settle(self, within_seconds: float) -> None:
        server, until = self._world.server, self.now + within_seconds
        while True:
            before = server.changes
            await asyncio.sleep(_QUIET_SECONDS)
            busy = self._busy()
            if server.changes == before and not busy:
                return
            if self.now > until:
                what = "handlers are busy" if busy else "something still happens"
                raise AssertionError(f"not idle within {within_seconds} virtual seconds: {what}")

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _end_processes(self) -> None:
        for process in self._world.processes:
            process.crashed = True
            process.thaw()
        me = asyncio.current_task()
        for _ in range(_END_ROUNDS):
            tasks = [task for task in asyncio.all_tasks() if task is not me]
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.exception()  # looked at, so that nobody reports it

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.close()

    def close(self) -> None:
        """End everything: all processes, as a crash does. Not from within `AsyncEnvironment.run`."""
        if self._closed:
            return
        self._closed = True
        loop = self._world.loop
        try:
            loop.run(self._end_processes())
            for process in self._world.processes:
                process.end()
            loop.run(loop.shutdown_asyncgens())
            loop.end_executor()
        finally:
            loop.close()
            self._world.server.close()


class Environment(_Environment):
    """For plain code: `Consumer`, `Producer`, `Admin`.

    Time passes only in `settle`, `advance` and in what waits, such as `Consumer.stop`; publishing takes none. Handlers
    and callbacks run in threads that take turns, so never two at once.

    Attributes:
        admin, monitor: of the server in memory.
    """

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.admin = Admin(self.redis, requested_by="tests")
        self.monitor = Monitor(self.redis)

    def create(self, stream: str, *, group: str, shards: int | None = None, **options: Any) -> GroupView:
        """Create a group with the timings of the environment; `options`: see `Admin.create`."""
        options = {"timings": self.timings, "reason": "a test", **options}
        return self.admin.create(stream, group=group, shards=shards, **options)

    def settle(self, *, within_seconds: float = 60.0) -> None:
        """Let consumers work until they are idle: no handler runs, and nothing has changed for a quarter of a virtual
        second. What waits longer by itself, such as a lease or a long backoff, is not waited for: use `advance`.

        Raises:
            AssertionError: they are not idle within that many virtual seconds.
        """
        self._world.loop.run(self._settle(within_seconds))

    def advance(self, seconds: float) -> None:
        """Let so many virtual seconds pass."""
        self._world.loop.run(asyncio.sleep(seconds))

    def expire(self, consumer: Consumer) -> None:
        """Freeze a consumer for as long as it takes until its lease has run out and another live member has noticed."""
        self.freeze(consumer)
        self.advance(self._expiry_seconds(consumer))


class AsyncEnvironment(_Environment):
    """For coroutines: `AsyncConsumer`, `AsyncProducer`, `AsyncAdmin`, on the environment's event loop; see `run`.

    Time passes whenever the test awaits something; `asyncio.sleep` takes virtual seconds.

    Attributes:
        admin, monitor: of the server in memory.
    """

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.admin = AsyncAdmin(self.redis, requested_by="tests")
        self.monitor = AsyncMonitor(self.redis)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine of a test on the virtual clock, and return its result."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._world.loop.run(main)
        main.close()
        raise LifecycleError("another event loop is running", hint="Call run() from a plain test function.")

    async def create(self, stream: str, *, group: str, shards: int | None = None, **options: Any) -> GroupView:
        """Create a group with the timings of the environment; `options`: see `Admin.create`."""
        options = {"timings": self.timings, "reason": "a test", **options}
        return await self.admin.create(stream, group=group, shards=shards, **options)

    async def settle(self, *, within_seconds: float = 60.0) -> None:
        """Let consumers work until they are idle; see `Environment.settle`."""
        await self._settle(within_seconds)

    async def advance(self, seconds: float) -> None:
        """Let so many virtual seconds pass."""
        await asyncio.sleep(seconds)

    async def expire(self, consumer: AsyncConsumer) -> None:
        """Freeze a consumer until its lease has run out; see `Environment.expire`."""
        self.freeze(consumer)
        await self.advance(self._expiry_seconds(consumer))


def _process(consumer: Consumer | AsyncConsumer) -> Process:
    machine = consumer._config.settings.machine
    if not isinstance(machine, Process):
        raise LifecycleError("this consumer is not one of the environment", hint="Pass redis=env.redis to it.")
    return machine


def _frozen(engine: Engine) -> bool:
    machine = engine.config.settings.machine
    return isinstance(machine, Process) and machine.frozen


def _key(stream: str, shard: int) -> str:
    return StreamKeys(stream).shard(shard).stream
