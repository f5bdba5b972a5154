"""Worker threads for plain functions. They are daemons: one that never returns cannot keep the process from ending."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """Runs plain functions in threads, in the order given, at most `limit` at a time.

    Unlike `concurrent.futures`, which joins its threads when the interpreter ends, however long that takes.

    Parameters:
        limit: most threads at once; they are started as needed.
        name: prefix of the threads' names.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self._unoccupied = 0  # threads without work less calls without a thread
        self._lock = threading.Lock()
        self._outcomes: _Outcomes | None = None

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run ``function(*arguments)`` in a thread and wait for it. Cancelling stops the waiting only."""
        return await self.start(function, *arguments)

    def start(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Have ``function(*arguments)`` run in a thread. Returns: the future of its outcome, on the running loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()
        if self._outcomes is None or self._outcomes.loop is not loop:
            self._outcomes = _Outcomes(loop)
        outcomes = self._outcomes

        def job() -> None:
            result: T | None = None
            raised: Exception | None = None
            try:
                result = context.run(function, *arguments)
            except BaseException as error:  # noqa: BLE001 - handed on to whoever waits
                raised = harmless(error)
            with self._lock:
                self._unoccupied += 1
            outcomes.add(future, result, raised)

        with self._lock:
            self._unoccupied -= 1
            start = self._unoccupied < 0 and len(self.threads) < self._limit
            self._unoccupied += start
        if start:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self.threads)}", daemon=True)
            self.threads.append(thread)
            thread.start()
        self._queue.put(job)
        return future

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def close(self) -> None:
        """Let the threads end when they have nothing more to do."""
        for _ in self.threads:
            self._queue.put(None)


class _Outcomes:
    """Hands what functions returned or raised to the loop where their callers wait.

    The loop is woken once for all that ends until it looks: each time costs a system call, and the thread its turn.

    Parameters:
        loop: the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ended: deque[tuple[asyncio.Future[Any], Any, Exception | None]] = deque()
        self._woken = False

    def add(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        """Note the outcome of a call. From any thread."""
        self._ended.append((future, result, error))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waited
                self.loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        # First of all: what comes from now on wakes the loop again, so that nothing is left behind.
        self._woken = False
        while self._ended:
            future, result, error = self._ended.popleft()
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)


def harmless(error: BaseException) -> Exception:
    """Wrap what asyncio would not take for a failure: it ends the loop, cancels whoever waits, or never arrives."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"a handler or callback raised {error!r}")
    wrapped.__cause__ = error
    return wrapped
