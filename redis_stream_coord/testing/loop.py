"""An event loop without sockets on a virtual clock: when nothing is ready, the time of the next timer comes at once."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, Protocol, TypeVar

import attrs

from ..errors import LifecycleError

T = TypeVar("T")

# Not 0: a time of 0 would look like one that was never set.
_BEGIN_SECONDS = 1000.0
# So many turns of the loop without any time passing mean that something asks again and again without waiting.
_MOST_TURNS = 200_000
# A test that waits for something, without a timeout of its own, while nothing happens for so long waits in vain.
_HOPELESS_SECONDS = 3600.0
_LOOK_EVERY_SECONDS = 60.0
# So long at most until SIGINT is heard where the loop waits in real time.
HEAR_SECONDS = 0.2


@attrs.define(eq=False)
class Step:
    """A callback of a process. It looks whether it was cancelled when it is carried out: that may be long after the
    event loop thought that it was, if the process was frozen meanwhile.

    Attributes:
        context: in which it runs.
        handle: what whoever scheduled it may cancel.
    """

    _callback: Callable[..., Any]
    _arguments: tuple[Any, ...]
    context: contextvars.Context
    handle: asyncio.Handle | None = None

    def run(self) -> None:
        if self.handle is None or not self.handle.cancelled():
            self._callback(*self._arguments)


class Scheduled(Protocol):
    """Whose callbacks can be held back: a process of the environment."""

    def step(self, step: Step) -> None: ...


# The process that the code at hand belongs to. Tasks and callbacks inherit it with their context.
PROCESS: contextvars.ContextVar[Scheduled | None] = contextvars.ContextVar("redis_stream_coord_process", default=None)


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in an order that depends on nothing but what they do.

    Callbacks that belong to a process (see `PROCESS`) go through its `step`, which may hold them back.

    Attributes:
        progress: returns what changes whenever anything happens that somebody may have waited for.
    """

    def __init__(self) -> None:
        self._now = _BEGIN_SECONDS
        super().__init__()
        self._selector = self
        self._turns = 0
        self._conditions: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._outside = 0  # calls in threads of an executor, which take real time
        self._woken = threading.Event()
        self._stopped_by: BaseException | None = None
        self.progress: Callable[[], object] = lambda: None
        self._progress: object = None
        self._progress_at = self._looked_at = self._now
        self._timers: weakref.WeakSet[asyncio.TimerHandle] = weakref.WeakSet()  # those of the test itself

    def time(self) -> float:
        return self._now

    # --- what BaseEventLoop wants of a selector and of its subclass ---------------------------------------------------

    def select(self, timeout: float | None) -> list[Any]:
        """Let time pass until the next timer.

        Raises (from whatever runs the loop):
            LifecycleError: nothing is ready, and no timer is set, or for an hour nothing came of it.
        """
        if self._stopped_by is not None:
            stopped_by, self._stopped_by = self._stopped_by, None
            raise stopped_by
        if self._meet_conditions() or timeout == 0:
            self._reach_due()
            self._turns += 1
            if self._turns > _MOST_TURNS:
                self._turns = 0
                raise LifecycleError(
                    f"{_MOST_TURNS} turns of the event loop, and no time has passed",
                    hint="Something asks again and again without waiting.",
                )
            return []
        self._turns = 0
        if self._outside:
            self._woken.wait(HEAR_SECONDS)
            self._woken.clear()
        elif timeout is None:
            raise LifecycleError(
                "nothing will ever happen: what is waited for can only come from a consumer that is frozen or crashed",
                hint="Thaw it, or do not wait for it.",
            )
        else:
            self._now += timeout
            if self._now - self._looked_at > _LOOK_EVERY_SECONDS:
                self._look_for_progress()
        return []

    def _look_for_progress(self) -> None:
        """Heartbeats go on for ever, so a test that waits in vain would never end."""
        before, self._progress = self._progress, self.progress()
        self._looked_at = self._now
        awaited = any(timer.when() > self._now and not timer.cancelled() for timer in self._timers)
        if self._progress != before or awaited:
            self._progress_at = self._now
        elif self._now - self._progress_at > _HOPELESS_SECONDS:
            self._progress_at = self._now
            raise LifecycleError(
                "for an hour of virtual time nothing has happened, and the test still waits: for a message that never "
                "comes, or for a consumer that is frozen or crashed",
                hint="Leave the loop over messages when the last one came, or wait with a timeout.",
            )

    def stop_by(self, error: BaseException) -> None:
        """Have whoever runs the loop get an error, at the next turn. From any thread that has the turn."""
        self._stopped_by = error

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
        step = Step(callback, args, context or contextvars.copy_context())
        step.handle = super().call_soon(process.step, step, context=step.context)
        return step.handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is None:
            return super().call_soon_threadsafe(callback, *args, context=context)
        step = Step(callback, args, context or contextvars.copy_context())
        step.handle = super().call_soon_threadsafe(process.step, step, context=step.context)
        return step.handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is None:
            timer = super().call_at(when, callback, *args, context=context)
            self._timers.add(timer)
            return timer
        step = Step(callback, args, context or contextvars.copy_context())
        timer = super().call_at(when, process.step, step, context=step.context)
        step.handle = timer
        return timer

    def call_again(self, process: Scheduled, step: Step) -> None:
        """Have a process carry out soon what it held back."""
        super().call_soon(process.step, step, context=step.context)

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
        """Run until a coroutine has ended, and return its result.

        Raises:
            LifecycleError: the environment has ended, or this is called while an event loop runs in this thread.
        """
        problem = self._problem()
        if problem is not None:
            coroutine.close()
            raise problem
        self._progress_at = self._looked_at = self._now
        with self._interruptible():
            return self.run_until_complete(coroutine)

    def check_usable(self) -> None:
        """Raise `LifecycleError` if the environment has ended."""
        if self.is_closed():
            raise LifecycleError(
                "this environment has ended", hint="Make another one; looks at it belong before its end."
            )

    def _problem(self) -> LifecycleError | None:
        """Return why the loop cannot be run from here."""
        try:
            self.check_usable()
        except LifecycleError as error:
            return error
        if self.is_running():
            return LifecycleError(
                "time passes already", hint="From a handler or callback wait with env.sleep(); all else the test does."
            )
        if asyncio._get_running_loop() is not None:
            return LifecycleError(
                "another event loop is running",
                hint="In a coroutine test use the fixture async_coord_env, or AsyncEnvironment.run() in a plain one.",
            )
        return None

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Raise KeyboardInterrupt between two callbacks only: in the midst of a script it would get lost in Lua. A
        second SIGINT is raised at once, for a coroutine that blocks.
        """
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.stop_by(KeyboardInterrupt())

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def interrupted(self) -> bool:
        """Whether SIGINT came, and has not been raised yet."""
        return isinstance(self._stopped_by, KeyboardInterrupt)
