"""Make a failing schedule short: delta debugging over the things that were tried (Zeller and Hildebrandt 2002)."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def minimise(numbers: Sequence[int], fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """Return a part of `numbers` that still fails, and does not without any one of them.

    Parameters:
        numbers: all of them fail together.
        fails: whether these alone do.
    """
    kept, parts = list(numbers), 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        for first in range(0, len(kept), size):
            without = kept[:first] + kept[first + size :]
            if without and fails(without):
                kept, parts = without, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(len(kept), 2 * parts)
    return kept
