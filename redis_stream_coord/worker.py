"""One shard of one member: claim it, read it, hand its entries out in order, acknowledge them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Collection, Coroutine
from typing import Any, Protocol

from . import commands, handling, telemetry
from .commands import Entry, Fence, Page
from .errors import CoordError, FencedError
from .handling import Handling, Ledger, WorkConfig
from .keys import GroupKeys
from .lanes import Lane, Lanes
from .logs import Log
from .models import Held
from .runner import AsyncRunner
from .tasks import end

_PAUSE_SECONDS = 1.0  # between tries while the shard's stream is missing
_HELD_SECONDS = 1.0  # between looks whether a barrier is gone; an event says so at once


class Owner(handling.Owner, Protocol):
    """What a worker needs of the engine that runs it."""

    def claimed(self, worker: Worker) -> Awaitable[None]: ...
    def claim_refused(self, worker: Worker, error: CoordError) -> None: ...
    def unfenced(self, worker: Worker) -> None: ...
    def draining(self, worker: Worker) -> Awaitable[None]: ...
    def drained(self, worker: Worker) -> None: ...
    def wait_for_entries(self, shard: int, after: str) -> Coroutine[Any, Any, None]: ...


class Worker:
    """Runs one shard under one token, from the claim to the last acknowledgement.

    Parameters:
        owner: the engine.
        runner: for claim, read and acknowledge.
        keys: of the group.
        fence: the session and token to work under.
        config: what the user chose.
        ledger: of this shard, shared with earlier and later workers of the process.
        log: of the consumer.
    """

    def __init__(
        self,
        owner: Owner,
        runner: AsyncRunner,
        keys: GroupKeys,
        fence: Fence,
        config: WorkConfig,
        *,
        ledger: Ledger,
        log: Log,
    ) -> None:
        self.fence = fence
        self.held = Held(fence.shard, fence.token)
        self._clock = runner.settings.machine.clock
        self._owner = owner
        self._runner = runner
        self._keys = keys
        self._config = config
        self._ledger = ledger
        self._log = log
        self._handling = Handling(owner, runner, keys, fence, config, ledger=ledger, fenced=self.look, log=log)
        self._lanes = Lanes(by_key=config.concurrency > 1)
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._slots: set[asyncio.Task[None]] = set()
        self._starting = 0  # slots that have not taken a lane yet
        self._arrival: asyncio.Task[None] | None = None
        self._after = "0-0"
        self._caught_up = False
        self._doubted = False  # whether the fence has to be looked at before anything more is handed out
        self._in_hand = 0
        self.trouble: CoordError | None = None  # why it could not claim or read the last time
        self.before: Worker | None = None  # an earlier one of the same token, whose handlers may still run
        self.over = asyncio.Event()

    @property
    def last_progress(self) -> float:
        """When an entry was last finished, on the clock of the machine."""
        return self._handling.last_progress

    @property
    def received(self) -> int:
        """Entries that were received and are not acknowledged."""
        return self._lanes.count + self._in_hand + self._handling.acks.queued

    def stop(self) -> None:
        """Hand out nothing more. What is in a handler goes on."""
        self._handling.stop()
        self._woken.set()

    def withdraw(self) -> None:
        """Take back what waits for its handler: the shard is paused."""
        self._handling.withdraw()

    def wake(self) -> None:
        """Look again whether there is something to do: a pause has ended."""
        self._woken.set()

    def look(self) -> None:
        """Read again, whatever was waited for and read ahead: the group may have been moved on the shard."""
        self._doubted = True
        self._woken.set()
        if self._arrival is not None:
            self._arrival.cancel()

    def runs_in(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a task is that of a handler."""
        return task in self._slots

    async def flush(self) -> None:
        """Send the acknowledgements that are queued. Raises: `FencedError`: none of them counted."""
        await self._handling.acks.flush()

    async def run(self) -> None:
        """Work until told to stop or fenced; then wait for the handlers, acknowledge, and say that it is drained."""
        try:
            await self._run()
        finally:
            self.over.set()

    async def _run(self) -> None:
        try:
            try:
                if await self._claim():
                    await self._owner.claimed(self)
                    await self._work()
            finally:
                if self._arrival is not None:
                    await end([self._arrival])
            await self._quiet()
        except FencedError:
            # What was read ahead is somebody else's, or to be read again.
            self.stop()
            await self._quiet()
            await self._alone()
            self._owner.unfenced(self)
            return
        except asyncio.CancelledError:
            self._handling.cancelled = True
            await end(self._slots)
            raise
        finally:
            self._handling.close()
        await self._owner.draining(self)
        with contextlib.suppress(FencedError):
            await self.flush()
        await self._handling.finish(left=self._lanes.count > 0)
        await self._alone()
        self._owner.drained(self)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _claim(self) -> bool:
        while not self._handling.stopping.is_set():
            try:
                await self._runner.run(commands.claim(self._keys, self.fence))
            except CoordError as error:
                if error.word == "FENCED":
                    self._owner.claim_refused(self, error)
                    return False
                # Not to be forced: the shard stays unread until the cause is gone.
                self._log.warning("cannot claim: %s", error, shard=self.fence.shard)
                if error.word == "AHEAD" and (self.trouble is None or self.trouble.word != "AHEAD"):
                    whom = {telemetry.STREAM: self._keys.stream, telemetry.GROUP: self._keys.group}
                    telemetry.metadata_regressions.add(1, {**whom, telemetry.MEMBER: self.fence.member})
                self.trouble = error
                await self._handling.pause(_PAUSE_SECONDS)
            else:
                self.trouble = None
                return True
        return False

    async def _work(self) -> None:
        more = True
        while self._handling.reading():
            self._woken.clear()
            # First of all, so that one that has just ended does not take the place of a new one.
            for slot in [slot for slot in self._slots if slot.done()]:
                self._slots.discard(slot)
                slot.result()
            if not self._owner.paused(self.fence.shard):
                if self._doubted or (more and self._room()):
                    more = await self._read()
                while len(self._slots) < self._config.concurrency and self._lanes.ready > self._starting:
                    self._start_slot()
                # What has just been read does not wait for this.
                if self._caught_up and not self._doubted and self._handling.outstanding.due():
                    more = await self._find_lost() or more
                if more and self._room():
                    continue
            if self._arrival is not None and self._arrival.done():
                self._arrival, more = None, True
                continue
            await self._woken.wait()

    def _room(self) -> int:
        """How many entries may be read now: half of the room has to be free, so that reads are worth their while.

        A batch that is not full is worth a read in any case.
        """
        config = self._config
        enough = config.prefetch // 2
        if config.batch is not None:
            enough = max(enough, config.batch.max_size - 1)
        if self._arrival is not None or self._lanes.count > enough or self._is_heavy():
            return 0
        return config.prefetch - self._lanes.count

    def _is_heavy(self) -> bool:
        return self._lanes.bytes > self._config.prefetch_bytes // 2

    async def _read(self) -> bool:
        """Read once. Returns whether there may be more to read at once."""
        if self._caught_up and not self._lanes.count and not self._in_hand:
            self._ledger.late.clear()
        outstanding = self._handling.outstanding
        again, known = outstanding.reads_again, outstanding.ids if outstanding.reads_again else frozenset()
        command = commands.read(
            self._keys,
            self.fence,
            after=self._after,
            count=max(1, self._room()),
            max_bytes=self._config.prefetch_bytes - self._lanes.bytes,
            each=self._handling.notes_deliveries(),
        )
        try:
            page = await self._runner.run(command)
        except FencedError:
            raise
        except CoordError as error:
            self._doubted, self.trouble = False, error
            # Said once per second and shard, not at every try: the data may be gone for good.
            self._log.warning("cannot read: %s", error, shard=self.fence.shard)
            await self._handling.pause(_PAUSE_SECONDS)
            return True
        self._doubted, self.trouble = False, None
        if page.recreated_at is not None:
            self._log.warning(
                "the consumer group had vanished from the stream; made anew at %s",
                page.recreated_at,
                shard=self.fence.shard,
            )
        if again:
            page, self._after = self._sort(page, known)
        else:
            self._after = page.last or self._after
        for entry_id in page.gone:
            self._handling.gone(entry_id)
        outstanding.received(page.entries)
        if page.entries and not self.received:
            self._handling.last_progress = self._clock()  # it was idle until now, and that is no lack of progress
        if not self._caught_up:
            self._handling.suspects.update(entry.id for entry in page.entries[: page.again])
        for entry in page.entries:
            self._lanes.add(entry)
        if page.caught_up and not self._caught_up:
            self._caught_up = True
            self._ledger.keep({*self._handling.acks.ids, *self._handling.suspects})
        if page.wait_after is None:
            return True
        # At a barrier the stream may well have more, which does not count.
        waiting: Coroutine[Any, Any, None] = (
            asyncio.sleep(_HELD_SECONDS)
            if page.held
            else self._owner.wait_for_entries(self.fence.shard, page.wait_after)
        )
        self._arrival = self._loop.create_task(waiting)
        self._arrival.add_done_callback(lambda _: self._woken.set())
        return False

    async def _find_lost(self) -> bool:
        """Look whether something is pending that had been acknowledged. Returns whether there is: it is read next."""
        outstanding = self._handling.outstanding
        known = outstanding.ids
        after, count = outstanding.begin()
        try:
            command = commands.outstanding(self._keys, self.fence, after=after, count=count)
            pending = await self._runner.run(command, retry=False)
        except FencedError:
            raise
        except CoordError:
            return False  # whoever reads meets the same, and reports it
        self._after = outstanding.look(pending, known, self._after)
        if outstanding.reads_again and self._arrival is not None:
            self._arrival.cancel()
        return outstanding.reads_again

    def _sort(self, page: Page, known: Collection[str]) -> tuple[Page, str]:
        page, after = self._handling.outstanding.sort(page, known)
        if lost := [entry.id for entry in page.entries if entry.id in self._handling.outstanding.lost]:
            self._log.warning(
                "%d acknowledged entries are pending again, from %s to %s: Redis has lost its last writes; "
                "handing them out again",
                len(lost),
                lost[0],
                lost[-1],
                shard=self.fence.shard,
            )
        return page, after

    # --- handing out --------------------------------------------------------------------------------------------------

    def _start_slot(self) -> None:
        self._starting += 1
        slot = self._loop.create_task(self._slot())
        self._slots.add(slot)
        slot.add_done_callback(lambda _: self._woken.set())

    def _handing_out(self) -> bool:
        return self._handling.reading() and not self._doubted and not self._owner.paused(self.fence.shard)

    async def _slot(self) -> None:
        """Hand out one lane after another, until none is ready."""
        self._starting -= 1
        while self._handing_out() and (lane := self._lanes.take()) is not None:
            try:
                entries = await self._gather(lane)
                if entries:
                    self._in_hand += len(entries)
                    try:
                        await self._handling.handle(entries)
                    finally:
                        self._in_hand -= len(entries)
            finally:
                self._lanes.give_back(lane)
            if self._arrival is None and self._room():
                self._woken.set()

    async def _gather(self, lane: Lane) -> list[Entry]:
        """Take what goes to the handler in one call."""
        batch = self._config.batch
        # What may have killed its owner goes alone, so that its count is its own and the others get through.
        if batch is None or lane.entries[0].deliveries > 1:
            return self._lanes.pop(lane, 1)
        deadline = self._clock() + batch.within_seconds
        while len(lane.entries) < batch.max_size and (left := deadline - self._clock()) > 0 and self._handing_out():
            if self._is_heavy():
                break  # nothing more is read until this is handed out
            self._woken.set()
            await self._handling.pause(min(left, 0.005))
        return self._lanes.pop(lane, batch.max_size) if self._handing_out() else []

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def _alone(self) -> None:
        """Wait for an earlier worker: the shard was asked back, kept and asked back again, while one handler runs."""
        if self.before is not None:
            await self.before.over.wait()

    async def _quiet(self) -> None:
        """Wait until nothing is in a handler."""
        if self._slots:
            await asyncio.wait(self._slots)
