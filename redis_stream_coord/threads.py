"""Worker threads for plain functions. They are daemons: one that never returns cannot keep the process from ending."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
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

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run ``function(*arguments)`` in a thread and wait for it. Cancelling stops the waiting only."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()

        def job() -> None:
            result: T | None = None
            raised: BaseException | None = None
            try:
                result = context.run(function, *arguments)
            except BaseException as error:  # noqa: BLE001 - handed on to whoever waits
                raised = _harmless(error)
            with self._lock:
                self._unoccupied += 1
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waited
                loop.call_soon_threadsafe(_set, future, result, raised)

        with self._lock:
            self._unoccupied -= 1
            start = self._unoccupied < 0 and len(self.threads) < self._limit
            self._unoccupied += start
        if start:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self.threads)}", daemon=True)
            self.threads.append(thread)
            thread.start()
        self._queue.put(job)
        return await future

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()

    def close(self) -> None:
        """Let the threads end when they have nothing more to do."""
        for _ in self.threads:
            self._queue.put(None)


def _harmless(error: BaseException) -> Exception:
    """Wrap what asyncio would not take for a failure: it ends the loop, cancels whoever waits, or never arrives."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"a handler or callback raised {error!r}")
    wrapped.__cause__ = error
    return wrapped


def _set(future: asyncio.Future[T], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
