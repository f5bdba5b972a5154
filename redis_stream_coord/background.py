"""The event loop of plain code: one thread for all consumers of the process, while there are any."""

from __future__ import annotations

import asyncio
import os
import threading

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


def _forget() -> None:
    """In a forked child: the thread did not come along."""
    global _lock, _loop, _thread, _users
    _lock, _loop, _thread, _users = threading.Lock(), None, None, 0


os.register_at_fork(after_in_child=_forget)
