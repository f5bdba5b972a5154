"""Plain functions of the user on the virtual clock: in threads that take turns with the event loop, one at a time.

A handler has to be able to wait (for a reply that got lost, for a resharding, or by `Environment.sleep`) while the
others go on. So each runs in a thread; but only one of these threads and the loop runs at any moment, and hands over
explicitly. Nothing depends on the operating system's scheduling.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import LifecycleError
from ..threads import harmless
from .loop import HEAR_SECONDS, VirtualLoop

T = TypeVar("T")

# What a thread is in whose turn somebody looks at it, and takes his time.
_DEBUGGERS = frozenset({"bdb", "pdb", "pydevd"})
_PACKAGE = str(Path(__file__).parents[1])

_here = threading.local()


class Ended(BaseException):
    """Raised in a handler that still waits when its environment ends."""


class Strand:
    """One thread. Created by the event loop's thread, which alone resumes it.

    Parameters:
        loop: with which it takes turns.
        name: of the thread.
        turn_seconds: it is lost when it keeps its turn for so many real seconds: what it waits for cannot come
            meanwhile, and the test would never end.

    Attributes:
        loop: as given.
        lost: it kept its turn for too long.
        parked: it waits for its turn in the midst of a function.
    """

    def __init__(self, loop: VirtualLoop, name: str, turn_seconds: float) -> None:
        self.loop = loop
        self._turn_seconds = turn_seconds
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._job: tuple[contextvars.Context, Callable[[], Any], asyncio.Future[Any]] | None = None
        self._ending = False
        self.lost = False
        self._losing = threading.Lock()
        self.parked = False
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.thread.start()

    @staticmethod
    def current() -> Strand | None:
        """Return the one that this thread is, if it is one."""
        return getattr(_here, "strand", None)

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function and wait for it."""
        future: asyncio.Future[T] = self.loop.create_future()
        self._job = (contextvars.copy_context(), function, future)
        self._resume()
        return await future

    def _resume(self) -> None:
        if self.lost:
            return
        self._go.release()
        waited = 0.0
        while not self._back.acquire(timeout=HEAR_SECONDS):
            waited += HEAR_SECONDS
            stuck = waited > self._turn_seconds
            if (stuck and not self._is_debugged()) or self.loop.interrupted:
                where = self._where()
                if self._lose() and stuck and not self._ending:
                    self.loop.stop_by(_stuck(where, self._turn_seconds))
                return

    def _lose(self) -> bool:
        """Go on without it. It may do what it likes from now on, but nobody listens. Returns whether that was so."""
        with self._losing:
            self.lost = not self._back.acquire(blocking=False)
            return self.lost

    def _is_debugged(self) -> bool:
        frame = sys._current_frames().get(self.thread.ident or 0)
        while frame is not None:
            if frame.f_globals.get("__name__", "").partition(".")[0] in _DEBUGGERS:
                return True
            frame = frame.f_back
        return False

    def _where(self) -> str:
        frames = traceback.extract_stack(sys._current_frames().get(self.thread.ident or 0))
        ours = [position for position, frame in enumerate(frames) if frame.filename.startswith(_PACKAGE)]
        return "".join(traceback.format_list(frames[max(ours, default=-1) + 1 :])).rstrip()

    def park(self, ready: Callable[[], bool], timeout_seconds: float | None) -> None:
        """From within: let the others go on until something holds, or for that long."""
        self._check_ending()
        waiting = self.loop.create_task(self.loop.until(ready, timeout_seconds))
        waiting.add_done_callback(self._woken)
        self.parked = True
        self._back.release()
        self._go.acquire()
        self.parked = False
        self._check_ending()

    def _check_ending(self) -> None:
        if self._ending or self.lost:
            raise Ended

    def _woken(self, waiting: asyncio.Task[bool]) -> None:
        if not self._ending and not waiting.cancelled():
            self._resume()

    def _main(self) -> None:
        _here.strand = self
        while True:
            self._go.acquire()
            if self._job is None:
                self._back.release()
                return
            context, function, future = self._job
            self._job = None
            result: Any = None
            raised: Exception | None = None
            try:
                result = context.run(function)
            except BaseException as error:  # noqa: BLE001 - handed on to whoever waits
                raised = harmless(error)
            with self._losing:
                if self.lost:
                    return
                if not future.done():
                    # The loop stands still while this thread has its turn.
                    if raised is None:
                        future.set_result(result)
                    else:
                        future.set_exception(raised)
                        future.exception()  # whoever waited may be gone
                self._back.release()

    def end(self) -> None:
        """End the thread, and whatever still waits in it."""
        if not self.thread.is_alive() or self.lost:
            return
        self._ending = True
        for _ in range(2 if self.parked else 1):
            self._resume()
        if not self.lost:
            self.thread.join()


def _stuck(where: str, seconds: float) -> LifecycleError:
    return LifecycleError(
        f"a handler or callback has kept its turn for {seconds:g} real seconds, here:\n{where}\n",
        hint="Nothing else runs meanwhile, so what it waits for cannot come. In a handler wait with env.sleep(): in "
        "place of event.wait() with `while not event.is_set(): env.sleep(0.1)`; and hold no lock while you do.",
    )


class Strands:
    """Runs plain functions for a consumer; in place of `redis_stream_coord.threads.DaemonThreads`.

    Parameters:
        loop: with which they take turns.
        limit: most functions at once.
        name: prefix of the threads' names.
        turn_seconds: see `Strand`.
    """

    def __init__(self, loop: VirtualLoop, limit: int, name: str, turn_seconds: float) -> None:
        self._loop = loop
        self._turn_seconds = turn_seconds
        self._limit = limit
        self._name = name
        self._strands: list[Strand] = []
        self._idle: list[Strand] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.threads: list[threading.Thread] = []

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run ``function(*arguments)`` and wait for it."""
        while not self._idle and len(self._strands) >= self._limit:
            free: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(free)
            await free
        if not self._idle:
            strand = Strand(self._loop, f"{self._name}-{len(self._strands)}", self._turn_seconds)
            self._strands.append(strand)
            self.threads.append(strand.thread)
            self._idle.append(strand)
        strand = self._idle.pop()
        running = asyncio.ensure_future(strand.run(lambda: function(*arguments)))
        running.add_done_callback(lambda _: self._give_back(strand))
        return await asyncio.shield(running)

    def start(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Have ``function(*arguments)`` run. Returns: the future of its outcome, which the caller may end before."""
        outcome: asyncio.Future[T] = self._loop.create_future()

        def ended(running: asyncio.Future[T]) -> None:
            if running.cancelled() or (error := running.exception()) is None:
                if not outcome.done() and not running.cancelled():
                    outcome.set_result(running.result())
            elif not outcome.done():
                outcome.set_exception(error)

        asyncio.ensure_future(self.call(function, *arguments)).add_done_callback(ended)
        return outcome

    def _give_back(self, strand: Strand) -> None:
        if strand.lost:
            return
        self._idle.append(strand)
        while self._waiting:
            free = self._waiting.popleft()
            if not free.done():
                free.set_result(None)
                break

    def close(self) -> None:
        """End the threads that have nothing to do. The others end with the environment."""
        for strand in self._idle:
            strand.end()

    def end(self) -> None:
        """End all of them, whatever they do."""
        for strand in self._strands:
            strand.end()
