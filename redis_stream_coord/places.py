"""Which of the processes of one pod this is: a number that no living process of the pod has, and that comes back.

A member id has to be one process's, and should be the same after a restart, so that its shards need not move. The name
of the pod is stable, but several worker processes share it. Each takes the lowest free number by binding an abstract
Unix socket: Linux gives it back when the process ends, however that happens, and all containers of a pod share the
network namespace in which it is unique. Nothing is written anywhere, and nobody can connect to it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import sys
import weakref

_MOST = 1000

_taken: weakref.WeakSet[Place] = weakref.WeakSet()


class Place:
    """A number that is taken until `release`, until this object is garbage, or until the process ends.

    Parameters:
        number: from 1.
        bound: the socket.
    """

    def __init__(self, number: int, bound: socket.socket) -> None:
        self.number = number
        # Not the socket itself, which warns when it is garbage before it was closed.
        self._close = weakref.finalize(self, os.close, bound.detach())
        self._close.atexit = False
        _taken.add(self)

    def release(self) -> None:
        """Give the number back."""
        with contextlib.suppress(OSError):
            self._close()


def take(scope: str) -> Place | None:
    """Take the lowest free number.

    Parameters:
        scope: among whom it is unique, beside the pod or machine.

    Returns:
        The place; ``None`` where the platform has no such sockets.
    """
    if sys.platform != "linux":
        return None
    name = hashlib.blake2s(scope.encode(), digest_size=16).hexdigest()
    for number in range(1, _MOST + 1):
        try:
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                bound.bind(f"\0redis-stream-coord:{name}:{number}")
            except BaseException:
                bound.close()
                raise
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return None
        else:
            return Place(number, bound)
    return None


def _forget() -> None:
    """In a forked child: the numbers are the parent's, and must be free when it ends."""
    for place in list(_taken):
        place.release()


os.register_at_fork(after_in_child=_forget)
