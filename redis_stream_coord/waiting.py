"""Waiting for new entries, with blocking commands that consume nothing.

On one server a single connection waits for all idle shards at once. When another shard becomes idle, the wait is
ended with CLIENT UNBLOCK and begun anew with that shard in it: cancelling it would cost the connection, which would be
one answer behind. On a Cluster a command cannot name keys of several slots, so each idle shard has a wait of its own.
"""

from __future__ import annotations

import asyncio

from . import commands
from .errors import CoordError, PermissionDeniedError
from .keys import GroupKeys
from .runner import AsyncRunner
from .settings import RedisSettings

_BLOCK_SECONDS = 1.0
_BLOCK_SECONDS_WITHOUT_UNBLOCK = 0.05


class EntryWaiter:
    """Waits for entries of any number of shards.

    Parameters:
        settings: how to reach Redis.
        keys: of the group.
        commands_runner: a runner for commands that do not block.
    """

    def __init__(self, settings: RedisSettings, keys: GroupKeys, commands_runner: AsyncRunner) -> None:
        self._keys = keys
        self._runner = AsyncRunner(settings, block_seconds=_BLOCK_SECONDS)
        self._commands = commands_runner
        self._waiting: dict[int, tuple[str, asyncio.Event]] = {}
        self._filled = asyncio.Event()
        self._blocked: frozenset[int] | None = None  # shards of the wait under way
        self._connection: int | None = None
        self._can_unblock = True

    async def wait(self, shard: int, after: str) -> None:
        """Wait until a shard has an entry beyond `after`. May return early."""
        if self._runner.is_cluster:
            await self._block({shard: after})
            return
        arrived = asyncio.Event()
        self._waiting[shard] = (after, arrived)
        self._filled.set()
        try:
            # The wait under way may not have reached Redis yet, and then there is nothing to end: try again.
            while self._blocked is not None and shard not in self._blocked and not await self._unblock():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await arrived.wait()
        finally:
            if self._waiting.get(shard) == (after, arrived):
                del self._waiting[shard]

    async def run(self) -> None:
        """Wait for all idle shards of one server together, for ever."""
        while True:
            await self._filled.wait()
            if not self._waiting:
                self._filled.clear()
                continue
            after = {shard: entry_id for shard, (entry_id, _) in self._waiting.items()}
            for shard in await self._block(after):
                if shard in self._waiting and self._waiting[shard][0] == after[shard]:
                    self._waiting.pop(shard)[1].set()

    async def _block(self, after: dict[int, str]) -> list[int]:
        seconds = _BLOCK_SECONDS if self._can_unblock else _BLOCK_SECONDS_WITHOUT_UNBLOCK
        self._blocked = frozenset(after)
        try:
            if self._connection is None and self._can_unblock and not self._runner.is_cluster:
                self._connection = await self._runner.run(commands.client_id(), retry=False)
            wait = commands.wait_for_entries(self._keys, after, block_seconds=seconds)
            return await self._runner.run(wait, retry=False)
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
            return await self._commands.run(commands.unblock(self._connection), retry=False) == 1
        except PermissionDeniedError:
            self._can_unblock = False
        except CoordError:
            pass
        return True

    async def close(self) -> None:
        """Close the connection."""
        await self._runner.close()
