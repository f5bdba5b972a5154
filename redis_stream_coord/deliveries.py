"""How often entries of one shard have been delivered, kept right in Redis, so that the counts outlive the process.

Redis has for each pending entry the number of the delivery that comes next. It can be wrong while one is under way:

- Where a shard hands one entry out after another, nothing is written for that. Whoever takes over from an owner that
  did not drain presumes that the first pending entry was in a handler: `lua/read.lua`.
- Where several entries may be with handlers, where entries may be handed out and left unacknowledged, or where handlers
  may have to wait for a thread, each delivery is written down: together, some milliseconds after it began, so that
  quick handlers cost nothing. An entry that was pending at a takeover is written down before it is handed out again:
  it may be what ended the process. So no more than one delivery is ever missed, and none is counted that was not made.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence

from . import commands
from .commands import Fence
from .errors import CoordError, FencedError
from .keys import GroupKeys
from .models import Message
from .runner import AsyncRunner
from .turns import Turn, Withdrawn

NOTE_DELAY_SECONDS = 0.01


class Deliveries:
    """Writes delivery counts of one shard under one token.

    Parameters:
        runner, keys, fence: to write them.
        turns: the calls of handlers that are under way.
        known: what this process knows of entries that it has handed out and that are not acknowledged: id -> number of
            the next delivery. Shared with earlier and later owners of the shard in this process.
        fenced: is told that another session has the shard.
    """

    def __init__(
        self,
        runner: AsyncRunner,
        keys: GroupKeys,
        fence: Fence,
        turns: Iterable[Turn],
        known: MutableMapping[str, int],
        fenced: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._keys = keys
        self._fence = fence
        self._turns = turns
        self._known = known
        self._fenced = fenced
        self._mine: dict[str, None] = {}  # what was handed out under this token, of what is known
        self._written: dict[str, int] = {}  # what Redis has, where it was told something
        self._clock = runner.settings.machine.clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._writing: set[asyncio.Task[None]] = set()

    def ended(self, turn: Turn) -> None:
        """Note that a handler has returned, with whatever outcome."""
        if turn.began is not None:
            for message in turn.messages:
                if message.id not in turn.acknowledged:
                    self._set(message.id, message.deliveries + 1)

    def unused(self, messages: Sequence[Message]) -> None:
        """Note that messages were not handed out after all."""
        for message in messages:
            if message.id in self._written:
                self._set(message.id, message.deliveries)

    def _set(self, entry_id: str, count: int) -> None:
        self._known[entry_id] = count
        self._mine[entry_id] = None

    def forget(self, entry_id: str) -> None:
        """An entry is finished."""
        self._known.pop(entry_id, None)
        self._written.pop(entry_id, None)
        self._mine.pop(entry_id, None)

    async def write(self, counts: Mapping[str, int], *, all_known: bool = False) -> None:
        """Write counts down. At worst one is lost: there is no second try. Raises: `FencedError`."""
        self._written.update(counts)
        try:
            command = commands.note_deliveries(self._keys, self._fence, counts, all_known=all_known)
            await self._runner.run(command, retry=False)
        except FencedError:
            raise
        except CoordError:
            for entry_id in counts:
                self._written.pop(entry_id, None)

    async def before(self, messages: Sequence[Message]) -> None:
        """Write down that messages are about to be handed out. Raises: `Withdrawn`: another session has the shard."""
        try:
            await self.write({message.id: message.deliveries + 1 for message in messages})
        except FencedError:
            self._fenced()
            raise Withdrawn from None

    def soon(self) -> None:
        """Write down, a little later, what is with a handler then, or unacknowledged after it."""
        if self._timer is None:
            self._timer = self._loop.call_later(NOTE_DELAY_SECONDS, self._write_soon)

    def stop(self) -> None:
        """Write nothing more by itself."""
        if self._timer is not None:
            self._timer.cancel()

    def _write_soon(self) -> None:
        self._timer = None
        waiting = False
        long_ago = self._clock() - NOTE_DELAY_SECONDS
        for turn in self._turns:
            if turn.began is None or turn.began > long_ago:
                waiting = True
            else:
                self.ended(turn)  # or will be, at some time
        if waiting:
            self.soon()
        if counts := self._unwritten():
            task = self._loop.create_task(self._write_quietly(counts))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write_quietly(self, counts: Mapping[str, int]) -> None:
        with contextlib.suppress(FencedError):  # whoever reads meets the same
            await self.write(counts)

    def _unwritten(self) -> dict[str, int]:
        counts = {entry_id: self._known.get(entry_id, 0) for entry_id in self._mine}
        return {entry_id: n for entry_id, n in counts.items() if n and self._written.get(entry_id) != n}

    async def finish(self, *, left: bool) -> None:
        """Say before the shard is given up that nothing is with a handler, and how often what is left was delivered.

        Parameters:
            left: whether anything is left that was read ahead.
        """
        self.stop()
        counts = self._unwritten()
        if counts or left:
            with contextlib.suppress(FencedError):
                await self.write(counts, all_known=True)
