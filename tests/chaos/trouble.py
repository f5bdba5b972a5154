"""Handlers in trouble: they fail, refuse and dawdle at random, before they have done anything."""

from __future__ import annotations

import asyncio
import random
import time

from redis_stream_coord import Message

_FAILS, _REFUSES, _DAWDLES, _SLEEPS = 0.01, 0.003, 0.25, 0.0005  # probabilities for each try
_DAWDLE_SECONDS = (0.02, 0.07)  # so that busy shards have something read ahead when a fault comes
_SLEEP_SECONDS = (0.5, 1.2)
_DELAY_SECONDS = 0.05


class Planned(Exception):  # noqa: N818 - what an application may raise, not an error of ours
    """Raised by a handler on purpose."""


class Trouble:
    """What happens to a handler this time.

    Parameters:
        seed: of all that is random; a number, or the name of a process and a number.
    """

    def __init__(self, seed: str) -> None:
        self._draw = random.Random(seed)

    def plain(self, message: Message) -> bool:
        """Return whether the handler may go on; it may have waited. Raises: anything."""
        time.sleep(self._seconds())
        return self._goes_on(message)

    async def coroutine(self, message: Message) -> bool:
        """`plain` for a coroutine."""
        await asyncio.sleep(self._seconds())
        return self._goes_on(message)

    def _seconds(self) -> float:
        chance = self._draw.random()
        if chance < _SLEEPS:
            return self._draw.uniform(*_SLEEP_SECONDS)
        return self._draw.uniform(*_DAWDLE_SECONDS) if chance < _SLEEPS + _DAWDLES else 0.0

    def _goes_on(self, message: Message) -> bool:
        chance = self._draw.random()
        if chance < _FAILS:
            # CancelledError is none that the engine sent: it has escaped from something that the handler awaited.
            kinds = (ValueError, KeyError, OSError, asyncio.TimeoutError, asyncio.CancelledError, Planned)
            raise self._draw.choice(kinds)("planned")
        if chance < _FAILS + _REFUSES:
            message.nack(delay_seconds=self._draw.uniform(0, _DELAY_SECONDS))
            return False
        return True
