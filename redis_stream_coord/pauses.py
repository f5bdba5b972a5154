"""Which shards are paused. May be changed before the consumer has started, and from any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from .checks import check_kind, check_number
from .routing import MAX_SHARDS


class Pauses:
    """What the user has paused and not resumed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paused: frozenset[int] = frozenset()
        self._paused_all = False
        self._resumed: frozenset[int] = frozenset()  # since all were paused

    def pause(self, shards: Iterable[int] | None) -> None:
        """Pause these shards; ``None``: all, also those assigned later."""
        chosen = _chosen(shards)
        with self._lock:
            if chosen is None:
                self._paused_all, self._resumed = True, frozenset()
            else:
                self._paused |= chosen

    def resume(self, shards: Iterable[int] | None) -> None:
        """Undo `pause` for these shards; ``None``: all of it."""
        chosen = _chosen(shards)
        with self._lock:
            if chosen is None:
                self._paused_all, self._paused = False, frozenset()
            else:
                self._paused -= chosen
                self._resumed |= chosen

    def paused(self, shard: int) -> bool:
        """Whether a shard is paused."""
        return shard in self._paused or (self._paused_all and shard not in self._resumed)


def _chosen(shards: Iterable[int] | None) -> frozenset[int] | None:
    if shards is None:
        return None
    check_kind("shards", shards, Iterable, hint="Pass the indexes of shards, such as [0].")
    chosen = frozenset(shards)
    for shard in chosen:
        check_number("shards", shard, 0, MAX_SHARDS - 1)
    return chosen
