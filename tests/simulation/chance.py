"""The source of everything that is left to chance, cheap enough to draw from several times a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_MASK = (1 << 64) - 1


class Chance:
    """A small generator (an LCG, upper bits). A step has one of its own, so that removing other steps leaves its
    choices as they are.

    Parameters:
        seed: where it begins.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = (seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
        self.draw()

    def draw(self) -> int:
        """Return 32 bits."""
        self._state = state = (self._state * 6364136223846793005 + 1442695040888963407) & _MASK
        return state >> 32

    def below(self, n: int) -> int:
        return (self.draw() * n) >> 32

    def likely(self, percent: int) -> bool:
        return self.below(100) < percent

    def pick(self, of: Sequence[T]) -> T:
        return of[self.below(len(of))]
