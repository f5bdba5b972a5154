"""Which shards are paused. May be changed before the consumer has started, and from any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Pauses:
    """What the user has paused and not resumed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paused: frozenset[int] = frozenset()
        self._paused_all = False
        self._resumed: frozenset[int] = frozenset()  # since all were paused

    def pause(self, shards: Iterable[int] | None) -> None:
        """Pause these shards; ``None``: all, also those assigned later."""
        chosen = None if shards is None else frozenset(shards)
        with self._lock:
            if chosen is None:
                self._paused_all, self._resumed = True, frozenset()
            else:
                self._paused |= chosen

    def resume(self, shards: Iterable[int] | None) -> None:
        """Undo `pause` for these shards; ``None``: all of it."""
        chosen = None if shards is None else frozenset(shards)
        with self._lock:
            if chosen is None:
                self._paused_all, self._paused = False, frozenset()
            else:
                self._paused -= chosen
                self._resumed |= chosen

    def paused(self, shard: int) -> bool:
        """Whether a shard is paused."""
        return shard in self._paused or (self._paused_all and shard not in self._resumed)
