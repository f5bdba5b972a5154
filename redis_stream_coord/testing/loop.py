"""An event loop without sockets on a virtual clock: when nothing is ready, the time of the next timer comes at once."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

# Not 0: a time of 0 would look like one that was never set.
_BEGIN_SECONDS = 1000.0
# So many turns of the loop without any time passing mean that something asks again and again without waiting.
_MOST_TURNS = 200_000


class Scheduled(Protocol):
    """Whose callbacks can be held back: a process of the environment."""

    def step(
        self, callback: Callable[..., Any], arguments: Sequence[Any], context: contextvars.Context | None
    ) -> None: ...


# The process that the code at hand belongs to. Tasks and callbacks inherit it with their context.
PROCESS: contextvars.ContextVar[Scheduled | None] = contextvars.ContextVar("redis_stream_coord_process", default=None)


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in an order that depends on nothing but what they do.

    Callbacks that belong to a process (see `PROCESS`) go through its `step`, which may hold them back.

    Raises (from whatever runs it): RuntimeError: nothing is ready, and no timer is set.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = _BEGIN_SECONDS
        self._selector = self
        self._turns = 0
        self._conditions: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._outside = 0  # calls in threads of an executor, which take real time
        self._woken = threading.Event()

    def time(self) -> float:
        return self._now

    # --- what BaseEventLoop wants of a selector and of its subclass ---------------------------------------------------

    def select(self, timeout: float | None) -> list[Any]:
        """Let time pass until the next timer."""
        if self._meet_conditions() or timeout == 0:
            self._reach_due()
            self._turns += 1
            if self._turns > _MOST_TURNS:
                raise RuntimeError(f"{_MOST_TURNS} turns of the event loop, and no time has passed")
            return []
        self._turns = 0
        if self._outside:
            self._woken.wait()
            self._woken.clear()
        elif timeout is None:
            raise RuntimeError(
                "nothing will ever happen: what is waited for can only come from a consumer that is frozen or crashed"
            )
        else:
            self._now += timeout
        return []

    def _reach_due(self) -> None:
        """Let the time come that a timer is set to, if asyncio is about to run it: it does so a nanosecond early.

        Otherwise what waits for the rest of a sum of floats would wait again and again, and no time would pass.
        """
        first: float = self._scheduled[0].when() if self._scheduled else self._now  # type: ignore[attr-defined]
        if self._now < first < self._now + self._clock_resolution:  # type: ignore[attr-defined]
            self._now = first

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        self._woken.set()

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._outside += 1
        future.add_done_callback(self._came_back)
        return future

    def end_executor(self) -> None:
        """End the threads of the executor; waits for what runs in them."""
        executor = getattr(self, "_default_executor", None)
        if executor is not None:
            executor.shutdown(wait=True)

    def _came_back(self, _: Any) -> None:
        self._outside -= 1

    # --- processes ----------------------------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        context = context or contextvars.copy_context()
        return super().call_soon(process.step, callback, args, context, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is None:
            return super().call_soon_threadsafe(callback, *args, context=context)
        context = context or contextvars.copy_context()
        return super().call_soon_threadsafe(process.step, callback, args, context, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        context = context or contextvars.copy_context()
        return super().call_at(when, process.step, callback, args, context, context=context)

    # --- waiting for a condition --------------------------------------------------------------------------------------

    async def until(self, ready: Callable[[], bool], timeout_seconds: float | None) -> bool:
        """Wait until something holds; it is looked at before any time passes. Returns whether it does."""
        if ready():
            return True
        met: asyncio.Future[None] = self.create_future()
        condition = (ready, met)
        self._conditions.append(condition)
        try:
            await asyncio.wait_for(met, timeout_seconds)
        except asyncio.TimeoutError:
            return ready()
        finally:
            if condition in self._conditions:
                self._conditions.remove(condition)
        return True

    def _meet_conditions(self) -> bool:
        met = [condition for condition in self._conditions if condition[0]()]
        for condition in met:
            self._conditions.remove(condition)
            if not condition[1].done():
                condition[1].set_result(None)
        return bool(met)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run until a coroutine has ended, and return its result."""
        return self.run_until_complete(coroutine)
