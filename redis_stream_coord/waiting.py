"""Waiting until a stream has something new, with blocking commands that consume nothing.

On one server a single connection waits for all streams at once. When there is one more to wait for, the wait is ended
with CLIENT UNBLOCK and begun anew with that one in it: cancelling it would cost the connection, which would be one
answer behind. On a Cluster a command cannot name keys of several slots, so each stream has a wait of its own there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import attrs

from . import commands
from .errors import CoordError, PermissionDeniedError
from .runner import AsyncRunner
from .settings import RedisSettings
from .tasks import end

# Nothing ever comes from a stream that vanished, or to a consumer group that did: so let them look now and then.
LOOK_AGAIN_SECONDS = 10.0
_BLOCK_SECONDS = 1.0
_BLOCK_SECONDS_WITHOUT_UNBLOCK = 0.05
# While a lot arrives, waits are begun anew no more often than this: most streams come back to wait within that time,
# and each wait names all of them. The first arrival after a quiet time is never delayed.
_BUSY_SECONDS = 0.002
_READS_FIRST_SECONDS = 0.001


@attrs.define(eq=False)
class _Waiting:
    """One who waits: beyond which id, and what tells him."""

    after: str
    order: tuple[int, ...]
    arrived: asyncio.Event = attrs.field(factory=asyncio.Event)


class Waiter:
    """Waits for any number of streams.

    Parameters:
        settings: how to reach Redis.
        control: a runner for commands that do not block.
    """

    def __init__(self, settings: RedisSettings, control: AsyncRunner) -> None:
        self._runner = AsyncRunner(settings, block_seconds=_BLOCK_SECONDS)
        self._clock = settings.machine.clock
        self._control = control
        self._waiting: dict[str, list[_Waiting]] = {}
        self._filled = asyncio.Event()
        self._blocked: dict[str, _Waiting] | None = None  # the wait under way: stream -> who waits from the lowest id
        self._expected: dict[str, str] = {}  # stream -> beyond which id somebody will most likely wait next
        self._outdated = asyncio.Event()  # somebody waits for what the wait under way does not cover
        self._began = 0.0
        self._connection: int | None = None
        self._can_unblock = True

    async def wait(self, stream: str, after: str) -> None:
        """Wait until the stream at a key has an entry beyond an id. May return early: look, and wait again."""
        if self._runner.is_cluster:
            await self._block({stream: after})
            return
        one = _Waiting(after, _order(after))
        ones = self._waiting.setdefault(stream, [])
        ones.append(one)
        self._filled.set()
        if self._blocked is not None and (stream not in self._blocked or self._blocked[stream].order > one.order):
            self._outdated.set()
        timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_SECONDS, one.arrived.set)
        try:
            await one.arrived.wait()
        finally:
            timer.cancel()
            if one in ones:
                ones.remove(one)
            if not ones and self._waiting.get(stream) is ones:
                del self._waiting[stream]

    async def run(self) -> None:
        """Wait for all streams of one server together, for ever."""
        renewing = asyncio.get_running_loop().create_task(self._renew())
        try:
            while True:
                await self._filled.wait()
                if not self._waiting:
                    self._filled.clear()
                    continue
                await self._not_too_often()
                await self._wait_once()
        finally:
            await end([renewing])

    async def _wait_once(self) -> None:
        # Whoever waits from the lowest id is told first; the others look, and wait again.
        lowest = {stream: min(ones, key=lambda one: one.order) for stream, ones in self._waiting.items() if ones}
        if not lowest:
            return
        # Who was told of an entry is likely to be back soon, to wait for the next one: most entries come alone. Then
        # this wait need not be ended for that.
        expected, self._expected = self._expected, {}
        for stream, after in expected.items():
            lowest.setdefault(stream, _Waiting(after, _order(after)))
        self._outdated.clear()
        self._blocked = lowest
        try:
            arrived = await self._block({stream: one.after for stream, one in lowest.items()})
        finally:
            self._blocked = None
        for stream, entry_id in arrived.items():
            self._tell(stream, entry_id)
        if arrived:
            # The reads go first: the next wait names every stream again, and so takes longer than they do.
            await asyncio.sleep(_READS_FIRST_SECONDS)

    def _tell(self, stream: str, entry_id: str | None) -> None:
        """Tell who waits for an entry of a stream that there is this one; ``None``: that they have to look."""
        ones = self._waiting.get(stream, [])
        told = [one for one in ones if entry_id is None or one.order < _order(entry_id)]
        for one in told:
            one.arrived.set()
            ones.remove(one)
        if not ones:
            self._waiting.pop(stream, None)
        if told and entry_id is not None:
            self._expected[stream] = entry_id

    async def _renew(self) -> None:
        """End the wait under way when somebody waits for something else."""
        while True:
            await self._outdated.wait()
            await self._not_too_often()
            # It may not have reached Redis yet, and then there is nothing to end: try again.
            while self._outdated.is_set() and self._blocked is not None and not await self._unblock():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            self._outdated.clear()

    async def _not_too_often(self) -> None:
        wait = self._began + _BUSY_SECONDS - self._clock()
        if wait > 0:
            await asyncio.sleep(wait)
        self._began = self._clock()

    async def connect(self) -> None:
        """Connect, and learn how to end a wait. Raises: `CoordError`."""
        if self._connection is None and self._can_unblock and not self._runner.is_cluster:
            self._connection = await self._runner.run(commands.client_id(), retry=False)

    async def _block(self, after: dict[str, str]) -> Mapping[str, str | None]:
        seconds = _BLOCK_SECONDS if self._can_unblock else _BLOCK_SECONDS_WITHOUT_UNBLOCK
        try:
            await self.connect()
            return await self._runner.run(commands.wait(after, block_seconds=seconds), retry=False)
        except CoordError as error:
            # Whoever reads meets the same trouble, and reports it. The connection is another one from now on.
            self._connection = None
            if isinstance(error, PermissionDeniedError):
                self._can_unblock = False
            await asyncio.sleep(0.1)
            return dict.fromkeys(after)

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
