"""Groups in memory, for the tests of applications: real consumers, producers and scripts, and a virtual clock."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

from ..admin import Admin
from ..async_admin import AsyncAdmin
from ..async_consumer import AsyncConsumer
from ..consumer import Consumer
from ..engine import Engine
from ..errors import ConfigError, LifecycleError
from ..group_view import GroupView
from ..keys import DEFAULT_PREFIX, StreamKeys
from ..logs import logger
from ..models import Timings
from ..monitor import AsyncMonitor, Monitor
from ..settings import RedisSettings
from ..telemetry import observed
from .judge import Judge
from .loop import PROCESS
from .machine import MemorySettings, Process, World

T = TypeVar("T")
_Self = TypeVar("_Self", bound="_Environment")

# Nothing has happened for so long: then nothing happens by itself. Acknowledgements wait 0.01 s for company, a batch
# 0.1 s, the first retry at most 0.1 s.
_QUIET_SECONDS = 0.25
_END_ROUNDS = 100
_TURN_SECONDS = 30.0


class _Environment:
    """What both share.

    Parameters:
        seed: decides what chance decides: latencies, jitter, names of sessions. The same seed gives the same run.
        key_prefix: that of `redis`, as in `RedisSettings`; the one under which the environment looks.
        turn_seconds: a plain handler or callback that blocks for so many real seconds is given up, and the test fails:
            everything else stands still meanwhile.

    Attributes:
        seed, key_prefix: as given.
        timings: of groups made with `create`.
    """

    def __init__(self, *, seed: int = 0, key_prefix: str = DEFAULT_PREFIX, turn_seconds: float = _TURN_SECONDS) -> None:
        self.seed = seed
        self.key_prefix = key_prefix
        self.timings = Timings()
        self._world = World(seed, turn_seconds)
        self._world.loop.progress = lambda: self._busy() or self._world.server.changes
        self._judge = Judge(self._world.server)
        self._closed = False
        self._observer = Monitor(self.redis)

    @property
    def redis(self) -> RedisSettings:
        """Settings to give to consumers, producers and so on. Each time it is asked for, those of a new process: what
        is made with the same settings is frozen, and crashes, together.
        """
        self._check_open()
        return MemorySettings(process=Process(self._world), key_prefix=self.key_prefix)

    @property
    def client(self) -> Any:
        """A redis-py client of the server in memory, for whatever else a test wants to look at or to break. Answers are
        not decoded; it cannot block. `RedisSettings.from_client` takes it.
        """
        settings = self.redis
        client = self._world.server.client()
        client.stream_coord_settings = settings
        return client

    @property
    def now(self) -> float:
        """Virtual seconds; only differences mean something."""
        return self._world.loop.time()

    def sleep(self, seconds: float) -> None:
        """In a plain handler or callback: take so long. Others go on meanwhile."""
        self._check_open()
        self._world.wait(lambda: False, seconds)

    # --- trouble ------------------------------------------------------------------------------------------------------

    def freeze(self, consumer: Consumer | AsyncConsumer) -> None:
        """Stop a consumer's process in its tracks, as SIGSTOP does. It knows nothing of it afterwards."""
        self._process(consumer).frozen = True

    def thaw(self, consumer: Consumer | AsyncConsumer) -> None:
        """Let a frozen process go on. Raises: `LifecycleError`: it has crashed."""
        process = self._process(consumer)
        if process.crashed:
            raise LifecycleError(
                "this consumer has crashed, and nothing of it ever runs again", hint="Start a new one."
            )
        process.thaw()

    def crash(self, consumer: Consumer | AsyncConsumer) -> None:
        """End a consumer's process, as SIGKILL does: nothing is acknowledged, and nobody is told."""
        process = self._process(consumer)
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
            of: only replies to this script, such as ``publish``, ``ack`` or ``heartbeat``, or to this plain command,
                such as ``XADD``; ``None``: to any command.

        Raises:
            ConfigError: there is no such script, or `count` is not positive.
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
        # Also those of earlier layouts: after a scale-in they are drained, and what they hold stays.
        shards = range(int(self._do("HGET", StreamKeys(stream, self.key_prefix).record, "top") or 0))
        return {shard: found for shard in shards if (found := self.raw(_key(stream, shard)))}

    def raw(self, key: str) -> list[tuple[str, dict[str, bytes]]]:
        """Return the entries of any one Redis stream, for example that of the dead letters: id and fields."""
        return [
            (entry_id.decode(), dict(zip(map(bytes.decode, flat[::2]), flat[1::2], strict=True)))
            for entry_id, flat in self._do("XRANGE", key, "-", "+")
        ]

    def _do(self, *command: Any) -> Any:
        self._check_open()
        return self._world.server.do(*command)

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
    def _present(self) -> Iterator[None]:
        self._check_open()
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

    def _check_open(self) -> None:
        self._world.loop.check_usable()

    def _process(self, consumer: Consumer | AsyncConsumer) -> Process:
        self._check_open()
        machine = consumer._config.settings.machine if isinstance(consumer, (Consumer, AsyncConsumer)) else None
        if not isinstance(machine, Process) or machine.world is not self._world:
            raise LifecycleError(
                f"this {type(consumer).__name__} is not one of the environment's consumers",
                hint="Pass redis=env.redis to it.",
            )
        return machine

    def _busy(self) -> list[str]:
        """Return the members in whose handlers something is."""
        return sorted(engine.config.member for engine in self._engines() if engine.handling and not _frozen(engine))

    async def _settle(self, within_seconds: float) -> None:
        self._check_waits_outside()
        server, until = self._world.server, self.now + within_seconds
        happened: collections.deque[str] = collections.deque(maxlen=500)
        server.watchers.append(watch := lambda call: happened.append(call.name))
        try:
            while True:
                before = server.changes
                await asyncio.sleep(_QUIET_SECONDS)
                busy = self._busy()
                if server.changes == before and not busy:
                    return
                if self.now > until:
                    often = ", ".join(
                        f"{name} {count}x" for name, count in collections.Counter(happened).most_common(4)
                    )
                    what = f"handlers of {', '.join(busy)} are busy" if busy else f"something still happens ({often})"
                    raise AssertionError(f"not idle within {within_seconds} virtual seconds: {what}")
        finally:
            server.watchers.remove(watch)

    def _check_waits_outside(self) -> None:
        """Whoever waits for all handlers from within one waits for himself."""
        if PROCESS.get() is not None:
            raise LifecycleError(
                "a handler or callback cannot wait until all is idle",
                hint="It is busy itself. The test has to do that.",
            )

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
        """End everything: all processes, as a crash does.

        Raises:
            LifecycleError: called from a handler, or within `AsyncEnvironment.run`.
        """
        if self._closed:
            return
        loop = self._world.loop
        if loop.is_running():
            raise LifecycleError("an environment cannot end while time passes", hint="Leave that to the test.")
        self._closed = True
        # What processes say that end in the midst of something is no concern of the test.
        logger.addFilter(_nothing)
        with contextlib.ExitStack() as end:
            end.callback(logger.removeFilter, _nothing)
            end.callback(self._world.server.close)
            end.callback(loop.close)
            end.callback(loop.end_executor)
            end.callback(lambda: loop.run(loop.shutdown_asyncgens()))
            for process in self._world.processes:
                end.callback(process.end)
            end.callback(lambda: loop.run(self._end_processes()))


class Environment(_Environment):
    """For plain code: `Consumer`, `Producer`, `Admin`.

    Time passes only in `settle`, `advance` and in what waits, such as `Consumer.stop`; publishing takes none. Handlers
    and callbacks run in threads that take turns, so never two at once.

    Attributes:
        admin, monitor: of the server in memory.
    """

    def __init__(self, *, seed: int = 0, key_prefix: str = DEFAULT_PREFIX, turn_seconds: float = _TURN_SECONDS) -> None:
        super().__init__(seed=seed, key_prefix=key_prefix, turn_seconds=turn_seconds)
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
        self._world.loop.run(asyncio.sleep(_forward(seconds)))

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

    def __init__(self, *, seed: int = 0, key_prefix: str = DEFAULT_PREFIX, turn_seconds: float = _TURN_SECONDS) -> None:
        super().__init__(seed=seed, key_prefix=key_prefix, turn_seconds=turn_seconds)
        self.admin = AsyncAdmin(self.redis, requested_by="tests")
        self.monitor = AsyncMonitor(self.redis)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine of a test on the virtual clock, and return its result."""
        return self._world.loop.run(main)

    async def create(self, stream: str, *, group: str, shards: int | None = None, **options: Any) -> GroupView:
        """Create a group with the timings of the environment; `options`: see `Admin.create`."""
        options = {"timings": self.timings, "reason": "a test", **options}
        return await self.admin.create(stream, group=group, shards=shards, **options)

    async def settle(self, *, within_seconds: float = 60.0) -> None:
        """Let consumers work until they are idle; see `Environment.settle`."""
        await self._settle(within_seconds)

    async def advance(self, seconds: float) -> None:
        """Let so many virtual seconds pass."""
        await asyncio.sleep(_forward(seconds))

    async def expire(self, consumer: AsyncConsumer) -> None:
        """Freeze a consumer until its lease has run out; see `Environment.expire`."""
        self.freeze(consumer)
        await self.advance(self._expiry_seconds(consumer))


def _forward(seconds: float) -> float:
    if seconds < 0:
        raise ConfigError(f"seconds={seconds} must not be negative: time goes forward only")
    return seconds


def _nothing(_: logging.LogRecord) -> bool:
    return False


def _frozen(engine: Engine) -> bool:
    machine = engine.config.settings.machine
    return isinstance(machine, Process) and machine.frozen


def _key(stream: str, shard: int) -> str:
    return StreamKeys(stream).shard(shard).stream
