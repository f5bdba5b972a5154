"""Waiting until a stream has something new, with blocking commands that consume nothing.

On one server a single connection waits for all streams at once. When there is one more to wait for, the wait is ended
with CLIENT UNBLOCK and begun anew with that one in it: cancelling it would cost the connection, which would be one
answer behind. On a Cluster a command cannot name keys of several slots, so each stream has a wait of its own there.
"""

from __future__ import annotations

import asyncio

from . import commands
from .errors import CoordError, PermissionDeniedError
from .runner import AsyncRunner
from .settings import RedisSettings

_BLOCK_SECONDS = 1.0
_BLOCK_SECONDS_WITHOUT_UNBLOCK = 0.05


class Waiter:
    """Waits for any number of streams.

    Parameters:
        settings: how to reach Redis.
        control: a runner for commands that do not block.
    """

    def __init__(self, settings: RedisSettings, control: AsyncRunner) -> None:
        self._runner = AsyncRunner(settings, block_seconds=_BLOCK_SECONDS)
        self._control = control
        self._waiting: dict[str, list[tuple[str, asyncio.Event]]] = {}
        self._filled = asyncio.Event()
        self._blocked: dict[str, str] | None = None  # the wait under way: stream -> id
        self._connection: int | None = None
        self._can_unblock = True

    async def wait(self, stream: str, after: str) -> None:
        """Wait until the stream at a key has an entry beyond an id. May return early: look, and wait again."""
        if self._runner.is_cluster:
            await self._block({stream: after})
            return
        one = (after, asyncio.Event())
        self._waiting.setdefault(stream, []).append(one)
        self._filled.set()
        try:
            # The wait under way may not have reached Redis yet, and then there is nothing to end: try again.
            while self._blocked is not None and not self._covers(stream, after) and not await self._unblock():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await one[1].wait()
        finally:
            if one in self._waiting.get(stream, []):
                self._waiting[stream].remove(one)
            if not self._waiting.get(stream):
                self._waiting.pop(stream, None)

    def _covers(self, stream: str, after: str) -> bool:
        """Whether the wait under way ends when that stream gets an entry beyond that id."""
        return self._blocked is not None and stream in self._blocked and _order(self._blocked[stream]) <= _order(after)

    async def run(self) -> None:
        """Wait for all streams of one server together, for ever."""
        while True:
            await self._filled.wait()
            if not self._waiting:
                self._filled.clear()
                continue
            # Whoever waits from the lowest id is served first; the others look, and wait again.
            after = {stream: min((one[0] for one in ones), key=_order) for stream, ones in self._waiting.items()}
            for stream in await self._block(after):
                for since, arrived in self._waiting.get(stream, ()):
                    if _order(since) >= _order(after[stream]):
                        arrived.set()
                self._waiting[stream] = [one for one in self._waiting.get(stream, ()) if not one[1].is_set()]
                if not self._waiting[stream]:
                    del self._waiting[stream]

    async def _block(self, after: dict[str, str]) -> list[str]:
        seconds = _BLOCK_SECONDS if self._can_unblock else _BLOCK_SECONDS_WITHOUT_UNBLOCK
        self._blocked = after
        try:
            if self._connection is None and self._can_unblock and not self._runner.is_cluster:
                self._connection = await self._runner.run(commands.client_id(), retry=False)
            return await self._runner.run(commands.wait(after, block_seconds=seconds), retry=False)
        except CoordError as error:
            # Whoever reads meets the same trouble, and reports it. The connection is another one from now on.
            self._connection = None
            if isinstance(error, PermissionDeniedError):
                self._can_unblock = False
            await asyncio.sleep(0.1)
            return list(after)
        finally:
            self._blocked = None

    async def _unblock(self) -> bool:
        """End the wait under way. Returns whether there is nothing left to end."""
        if not self._can_unblock:
            return True
        if self._connection is None:
            return False
        try:
            return await self._control.run(commands.unblock(self._connection), retry=False) == 1
        except PermissionDeniedError:
            self._can_unblock = False
        except CoordError:
            pass
        return True

    async def close(self) -> None:
        """Close the connection."""
        await self._runner.close()


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
