"""Processes that are told what to do through a pipe."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

_STOP_SECONDS = 10.0


class Child:
    """A process that runs ``serve(pipe, *arguments)`` on an event loop of its own.

    Spawned, not forked: a fork would share this process's connections and threads.

    Parameters:
        serve: coroutine function of a module; it ends when it is sent ``("quit",)``.
        arguments: for it, after its end of the pipe.
    """

    def __init__(self, serve: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(serve, theirs, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *words: Any) -> Any:
        """Send a request and wait for its answer."""
        self.pipe.send(words)
        return self.pipe.recv()

    def stop(self) -> None:
        """Tell it to end, and wait for that."""
        self.pipe.send(("quit",))
        self._process.join(_STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()


def _main(serve: Callable[..., Awaitable[None]], pipe: Connection, arguments: tuple[Any, ...]) -> None:
    asyncio.run(serve(pipe, *arguments))


async def received(pipe: Connection) -> Any:
    """Wait for the next request, while the loop goes on."""
    return await asyncio.to_thread(pipe.recv)


def now_ms() -> float:
    """Milliseconds on a clock that all processes of this machine share."""
    return time.monotonic_ns() / 1e6
