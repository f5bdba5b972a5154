"""What goes on behind plain code: the event loop, one thread for all consumers of the process, and what is repeated."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_users = 0


def acquire() -> asyncio.AbstractEventLoop:
    """Return the running loop, and start its thread if this is its first user."""
    global _loop, _thread, _users
    with _lock:
        _users += 1
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_run, args=(_loop,), name="redis-stream-coord-loop", daemon=True)
            _thread.start()
        return _loop


def release() -> threading.Thread | None:
    """Give the loop back. The last user ends it.

    Returns:
        The thread that is about to end, to be waited for from another one; ``None`` while others use the loop.
    """
    global _loop, _thread, _users
    with _lock:
        _users -= 1
        if _users > 0 or _loop is None:
            return None
        loop, thread, _loop, _thread = _loop, _thread, None, None
    loop.call_soon_threadsafe(loop.stop)
    return thread


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class Repeating:
    """A daemon thread that calls a function again and again.

    Parameters:
        function: what to call. It does not raise.
        every_seconds: the pause before each call.
        name: of the thread.
    """

    def __init__(self, function: Callable[[], None], every_seconds: float, name: str) -> None:
        self._function = function
        self._every_seconds = every_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_seconds):
            self._function()

    def stop(self) -> None:
        """End it, and wait until it has ended."""
        self._stopped.set()
        self._thread.join()


def _forget() -> None:
    """In a forked child: the thread did not come along."""
    global _lock, _loop, _thread, _users
    _lock, _loop, _thread, _users = threading.Lock(), None, None, 0


os.register_at_fork(after_in_child=_forget)
