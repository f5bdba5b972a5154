"""Processes on one virtual clock and one server in memory: what `redis_stream_coord.machine` is in real life."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import random
import weakref
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import attrs
import redis

from ..errors import ConfigError, LifecycleError
from ..machine import Machine
from ..scripts import catalogue
from ..settings import MEMORY_SCHEME, Address, RedisSettings
from .clients import AsyncClient, PlainClient
from .loop import PROCESS, Step, VirtualLoop
from .server import MemoryServer
from .strands import Strand, Strands

T = TypeVar("T")

_LATENCY_SECONDS = (0.00005, 0.0005)


class World:
    """Everything that the processes of one environment share.

    Parameters:
        seed: decides what chance decides: latencies, jitter, names of sessions.
        turn_seconds: most real seconds that a plain handler may keep its turn.

    Attributes:
        processes: all that were ever made.
    """

    def __init__(self, seed: int, turn_seconds: float) -> None:
        self.turn_seconds = turn_seconds
        self.random = random.Random(seed)  # noqa: S311 - has to be the same each time
        self.loop = VirtualLoop()
        self.server = MemoryServer(self.loop.time)
        self.processes: list[Process] = []
        self._members = 0
        self._to_lose: list[str | None] = []

    def latency(self) -> float:
        """Return how long a command, or its reply, is on its way."""
        return self.random.uniform(*_LATENCY_SECONDS)

    def lose(self, count: int, of: str | None) -> None:
        """Lose the next replies. Parameters: of: only to this script or plain command; ``None``: to any.

        Raises:
            ConfigError: there is no such script, or no reply to lose.
        """
        if count < 1:
            raise ConfigError(f"count={count} must be positive")
        if of is not None and not of.isupper() and of not in catalogue():
            raise ConfigError(
                f"of={of!r} is not the name of a script",
                hint=f"One of {', '.join(sorted(catalogue()))}; or of a plain command in capitals, such as 'XADD'.",
            )
        self._to_lose += [of] * count

    def loses(self, command: Sequence[Any]) -> bool:
        """Whether the reply to a command gets lost. Each loss is used up."""
        if not self._to_lose:
            return False
        name = self.server.name_of(command)
        for wanted in (name, None):
            if wanted in self._to_lose:
                self._to_lose.remove(wanted)
                return True
        return False

    def next_member(self) -> str:
        self._members += 1
        return f"member-{self._members}"

    def wait(self, ready: Callable[[], bool], timeout_seconds: float | None) -> None:
        """From plain code: let everything go on until something holds, or for that long."""
        strand = Strand.current()
        if strand is not None and strand.loop is self.loop:
            strand.park(ready, timeout_seconds)
        elif self.loop.is_running():
            raise LifecycleError(
                "plain code cannot wait on the event loop",
                hint="Await the Async* twin, or call this from a plain handler, in its own thread.",
            )
        else:
            self.loop.run(self.loop.until(ready, timeout_seconds))


class Process(Machine):
    """What seems a process of its own: its consumers and connections are frozen, and die, together.

    Attributes:
        frozen: nothing of it runs.
        crashed: and never will.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.random
        self.plain = SimpleNamespace(client=functools.partial(PlainClient, self), retry=_no_retry)
        self.coroutine = SimpleNamespace(client=functools.partial(AsyncClient, self), retry=_no_retry)
        self.frozen = False
        self.crashed = False
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._strands: list[Strands] = []
        self._held_back: list[Step] = []
        self._context = contextvars.copy_context()
        self._context.run(PROCESS.set, self)
        world.processes.append(self)

    # --- see `Machine` ------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        return self.world.loop.time()

    def word(self) -> str:
        return f"{self.random.getrandbits(64):016x}"

    def default_member(self) -> str | None:
        return self.world.next_member()

    def sleep(self, seconds: float) -> None:
        self.world.wait(lambda: False, seconds)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        if asyncio.get_running_loop() is not self.world.loop:
            coroutine.close()
            raise LifecycleError(
                "a consumer of this environment runs on the environment's event loop only",
                hint="Run the test with AsyncEnvironment.run(), or let the fixture async_coord_env do it.",
            )
        return self._context.copy().run(self.world.loop.create_task, coroutine)

    def acquire(self) -> asyncio.AbstractEventLoop:
        self.world.loop.check_usable()
        return self.world.loop

    def release(self) -> Any:
        return None

    def submit(
        self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop
    ) -> concurrent.futures.Future[T]:
        return self._context.copy().run(asyncio.run_coroutine_threadsafe, coroutine, loop)

    def block(
        self, wait: Callable[[float | None], T], ready: Callable[[], bool], timeout_seconds: float | None = None
    ) -> T:
        if not ready():
            if self.frozen and timeout_seconds is None:
                raise LifecycleError(
                    f"nothing will ever happen: this consumer {'has crashed' if self.crashed else 'is frozen'}",
                    hint="Thaw it first." if not self.crashed else "The end of the environment tidies it up.",
                )
            self.world.wait(ready, timeout_seconds)
        return wait(0)

    def threads(self, limit: int, name: str) -> Any:
        self._strands.append(Strands(self.world.loop, limit, name, self.world.turn_seconds))
        return self._strands[-1]

    def repeat(self, function: Callable[[], None], every_seconds: float, name: str) -> Any:
        strands = self.threads(1, name)

        async def run() -> None:
            while True:
                await asyncio.sleep(every_seconds)
                await strands.call(function)

        return _Repeating(self._context.copy().run(self.world.loop.create_task, run()), strands)

    # --- what can happen to it ----------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        """Run a callback, or hold it back while the process is frozen."""
        if self.frozen:
            self._held_back.append(step)
        else:
            step.run()

    def thaw(self) -> None:
        """Let it run again: first what came meanwhile. Also one that has crashed, so that it can end."""
        self.frozen = False
        held_back, self._held_back = self._held_back, []
        for step in held_back:
            self.world.loop.call_again(self, step)

    def check_connected(self) -> None:
        """Raise `redis.ConnectionError` if nothing may reach the server any more."""
        if self.crashed:
            raise redis.ConnectionError("the process has crashed")

    def end(self) -> None:
        """End its threads."""
        for strands in self._strands:
            strands.end()


class _Repeating:
    def __init__(self, task: asyncio.Task[None], strands: Strands) -> None:
        self._task = task
        self._strands = strands

    def stop(self) -> None:
        self._task.cancel()
        self._strands.close()


def _no_retry(*_: Any) -> None:
    return None


@attrs.frozen(kw_only=True)
class MemorySettings(RedisSettings):
    """Settings that lead to the server in memory, for the consumers and connections of one process."""

    url: str = attrs.field(default=f"{MEMORY_SCHEME}://", init=False)
    process: Process = attrs.field(repr=False)

    def _parsed(self) -> Address:
        return Address("standalone", (("in-memory", 0),), "", "", 0, False, None, None)

    @property
    def machine(self) -> Machine:
        return self.process
