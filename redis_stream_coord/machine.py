"""What the library takes from the machine that it runs on: clock, chance, threads, and the classes of redis-py.

One object for all of it, which settings name (`RedisSettings.machine`): what uses the same settings lives on the same
machine. There is one real one. The environment of `redis_stream_coord.testing` has another, with a virtual clock and a
Redis in memory; this is its only way in.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.sentinel
import redis.cluster
import redis.retry
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry

from . import background
from .threads import DaemonThreads

T = TypeVar("T")


class Threads(Protocol):
    """What runs plain functions for a coroutine; see `DaemonThreads`."""

    threads: list[Any]

    async def call(self, function: Callable[..., T], *arguments: Any) -> T: ...
    def start(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]: ...
    def close(self) -> None: ...


class Repeating(Protocol):
    """A function that is called again and again; see `background.Repeating`."""

    def stop(self) -> None: ...


class Plain:
    """The classes of redis-py for plain code."""

    client: Any = redis.Redis
    cluster: Any = redis.cluster.RedisCluster
    cluster_node: Any = redis.cluster.ClusterNode
    sentinel: Any = redis.sentinel.Sentinel
    retry: Any = redis.retry.Retry


class Async:
    """The classes of redis-py for coroutines."""

    client: Any = redis.asyncio.Redis
    cluster: Any = redis.asyncio.cluster.RedisCluster
    cluster_node: Any = redis.asyncio.cluster.ClusterNode
    sentinel: Any = redis.asyncio.sentinel.Sentinel
    retry: Any = AsyncRetry


class Machine:
    """The real one.

    Attributes:
        random: for jitter; no secret.
        plain, coroutine: classes of redis-py.
    """

    random: random.Random = random.Random()  # noqa: S311 - jitter, not a secret
    plain: Any = Plain
    coroutine: Any = Async

    def clock(self) -> float:
        """Seconds on a clock that never jumps and, where the platform has one, goes on while the machine sleeps.

        A lease measured on a clock that stops in suspend would look valid long after Redis gave the shards away.
        """
        boottime = getattr(time, "CLOCK_BOOTTIME", None)
        return time.monotonic() if boottime is None else time.clock_gettime(boottime)

    def word(self) -> str:
        """Return a word that nobody has used: names a session."""
        return secrets.token_hex(8)

    def default_member(self) -> str | None:
        """Return an id for a member that was given none; ``None``: make one of what the process is called."""
        return None

    def sleep(self, seconds: float) -> None:
        """Wait, in plain code."""
        time.sleep(seconds)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin the life of a consumer on the running event loop."""
        return asyncio.get_running_loop().create_task(coroutine)

    def acquire(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of plain code; see `background.acquire`."""
        return background.acquire()

    def release(self) -> Any:
        """Give it back; see `background.release`."""
        return background.release()

    def submit(
        self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop
    ) -> concurrent.futures.Future[T]:
        """Run a coroutine on that loop, for plain code."""
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def block(
        self, wait: Callable[[float | None], T], ready: Callable[[], bool], timeout_seconds: float | None = None
    ) -> T:
        """Wait, in plain code, for what happens on that loop.

        Parameters:
            wait: does it, for so many seconds at most, and returns the result.
            ready: whether `wait` would return at once.
            timeout_seconds: given to `wait`; ``None``: for ever.
        """
        return wait(timeout_seconds)

    def threads(self, limit: int, name: str) -> Threads:
        """Return what runs plain functions for that loop; see `DaemonThreads`."""
        return DaemonThreads(limit, name)

    def repeat(self, function: Callable[[], None], every_seconds: float, name: str) -> Repeating:
        """Call a plain function again and again in the background, until told to stop."""
        return background.Repeating(function, every_seconds, name)


MACHINE = Machine()
