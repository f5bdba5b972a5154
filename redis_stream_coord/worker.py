"""One shard of one member: claim it, read it, hand its entries to the handler in order, acknowledge them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import attrs

from . import commands, telemetry
from .commands import Entry, Fence
from .errors import CoordError, FencedError
from .keys import GroupKeys
from .logs import Log
from .models import EVENT_ID_FIELD, KEY_FIELD, RESERVED_PREFIX, Held, Message
from .runner import AsyncRunner
from .tasks import end

# Acknowledgements wait so long for company. What a crash can repeat is what was finished in this time, plus one call.
ACK_DELAY_SECONDS = 0.01
ACK_BATCH = 200
_RESERVED = RESERVED_PREFIX.encode()
_PAUSE_SECONDS = 1.0  # between tries while the shard's stream is missing


@attrs.frozen(kw_only=True)
class Retry:
    """Hand a failed entry to its handler again, in place, so that order holds; other shards go on meanwhile.

    Parameters:
        backoff_seconds: before the second try; doubled for each further one, with full jitter.
        max_backoff_seconds: longest wait.
    """

    backoff_seconds: float = 0.1
    max_backoff_seconds: float = 30.0

    def delay(self, failures: int) -> float:
        """Return seconds to wait after so many failures."""
        ceiling = min(self.max_backoff_seconds, self.backoff_seconds * 2.0 ** min(failures - 1, 30))
        return random.uniform(ceiling / 2, ceiling)  # noqa: S311 - jitter, not a secret


@attrs.define
class Ledger:
    """What this process did with entries of one shard, kept across tokens: nothing is handed out twice at once, and
    nothing that was finished here is handed out again because its acknowledgement came too late.

    Attributes:
        busy: ids that are in a handler.
        finished: ids that are finished, and not acknowledged yet.
    """

    busy: set[str] = attrs.field(factory=set)
    finished: set[str] = attrs.field(factory=set)


class Owner(Protocol):
    """What a worker needs of the engine that runs it."""

    def owns(self, held: Held) -> bool: ...
    def reads(self, held: Held) -> bool: ...
    def claimed(self, worker: Worker) -> Awaitable[None]: ...
    def claim_refused(self, worker: Worker, error: CoordError) -> None: ...
    def unfenced(self, worker: Worker) -> None: ...
    def draining(self, worker: Worker) -> Awaitable[None]: ...
    def drained(self, worker: Worker) -> None: ...
    async def wait_for_entries(self, shard: int, after: str) -> None: ...


class Worker:
    """Runs one shard under one token, from the claim to the last acknowledgement.

    Parameters:
        owner: the engine.
        runner: for claim, read and acknowledge.
        keys: of the group.
        fence: the session and token to work under.
        handler: takes one entry; its exceptions mean failure.
        ledger: of this shard, shared with earlier and later workers of the process.
        auto_ack: acknowledge an entry when its handler has succeeded.
        retry: what to do when it has not.
        prefetch: at most so many entries are read at once.
        log: of the consumer.
    """

    def __init__(
        self,
        owner: Owner,
        runner: AsyncRunner,
        keys: GroupKeys,
        fence: Fence,
        handler: Callable[[Message], Awaitable[None]],
        *,
        ledger: Ledger,
        auto_ack: bool,
        retry: Retry,
        prefetch: int,
        log: Log,
    ) -> None:
        self.fence = fence
        self.held = Held(fence.shard, fence.token)
        self.received = 0  # entries received and not acknowledged
        self.last_progress = time.monotonic()
        self._owner = owner
        self._runner = runner
        self._keys = keys
        self._handler = handler
        self._ledger = ledger
        self._auto_ack = auto_ack
        self._retry = retry
        self._prefetch = prefetch
        self._log = log
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._acks: list[str] = []
        self._flushing = asyncio.Lock()
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flushes: set[asyncio.Task[None]] = set()
        self._after = "0-0"
        self._caught_up = False

    def stop(self) -> None:
        """Hand out nothing more. The entry in the handler goes on."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until told to stop or fenced; then wait for the handler, acknowledge, and say that it is drained."""
        try:
            if await self._claim():
                await self._owner.claimed(self)
                while self._reading():
                    await self._read_and_handle()
        except FencedError:
            self._owner.unfenced(self)
            return
        await self._owner.draining(self)
        with contextlib.suppress(FencedError):
            await self.flush()
        self._owner.drained(self)

    def _reading(self) -> bool:
        return not self._stopping.is_set() and self._owner.reads(self.held)

    async def _claim(self) -> bool:
        while not self._stopping.is_set():
            try:
                await self._runner.run(commands.claim(self._keys, self.fence))
            except CoordError as error:
                if error.word == "FENCED":
                    self._owner.claim_refused(self, error)
                    return False
                # Not to be forced: the shard stays unread until the cause is gone.
                self._log.warning("cannot claim: %s", error, shard=self.fence.shard)
                await self._pause(_PAUSE_SECONDS)
            else:
                return True
        return False

    async def _read_and_handle(self) -> None:
        try:
            command = commands.read(self._keys, self.fence, after=self._after, count=self._prefetch)
            page = await self._runner.run(command)
        except FencedError:
            raise
        except CoordError as error:
            # Said once per second and shard, not at every try: the data may be gone for good.
            self._log.warning("cannot read: %s", error, shard=self.fence.shard)
            await self._pause(_PAUSE_SECONDS)
            return
        if page.recreated_at is not None:
            self._log.warning(
                "the consumer group had vanished from the stream; made anew at %s",
                page.recreated_at,
                shard=self.fence.shard,
            )
        for entry_id in page.gone:
            telemetry.handled.add(1, {telemetry.OUTCOME: "gone"})
            self._log.error("entry %s was deleted or trimmed before it was handled", entry_id, shard=self.fence.shard)
        if page.entries:
            self._after = page.entries[-1].id
        if page.gone and (not page.entries or _order(page.gone[-1]) > _order(self._after)):
            self._after = page.gone[-1]
        self.received += len(page.entries)
        if page.caught_up and not self._caught_up:
            # What is pending no more needs no remembering.
            self._caught_up = True
            self._ledger.finished.intersection_update([*self._acks, *(entry.id for entry in page.entries)])
        for position, entry in enumerate(page.entries):
            if not self._reading():
                self.received -= len(page.entries) - position
                return
            await self._handle(entry)
        if page.wait_after is not None and self._reading():
            await self._or_stopped(self._owner.wait_for_entries(self.fence.shard, page.wait_after))

    async def _handle(self, entry: Entry) -> None:
        while entry.id in self._ledger.busy:
            # The handler of an earlier worker still runs.
            await self._pause(0.01)
            if not self._reading():
                return
        if entry.id in self._ledger.finished:
            self.queue_ack(entry.id)
            return
        message = self._message(entry)
        failures = 0
        while self._reading():
            self._ledger.busy.add(entry.id)
            try:
                await self._handler(message)
            except Exception as error:  # noqa: BLE001 - whatever the application raises means "not handled"
                failures += 1
                telemetry.handled.add(1, {telemetry.OUTCOME: "failed"})
                self._log.error(
                    "handler failed on entry %s (delivery %d, failure %d): %r",
                    entry.id,
                    entry.deliveries,
                    failures,
                    error,
                    shard=self.fence.shard,
                    exc_info=error,
                )
            else:
                telemetry.handled.add(1, {telemetry.OUTCOME: "ok"})
                self.last_progress = time.monotonic()
                if self._auto_ack:
                    self.queue_ack(entry.id)
                return
            finally:
                self._ledger.busy.discard(entry.id)
            await self._pause(self._retry.delay(failures))

    def _message(self, entry: Entry) -> Message:
        flat = entry.fields
        key: bytes | None = None
        event_id: str | None = None
        fields: dict[str, bytes] = {}
        for name, value in zip(flat[::2], flat[1::2], strict=True):
            if not name.startswith(_RESERVED):
                fields[name.decode("utf-8", "surrogateescape")] = value
            elif name == KEY_FIELD:
                key = value
            elif name == EVENT_ID_FIELD:
                event_id = value.decode("utf-8", "replace")
        return Message(
            stream=self._keys.stream,
            shard=self.fence.shard,
            id=entry.id,
            key=key,
            fields=fields,
            event_id=event_id,
            deliveries=entry.deliveries,
            token=(self.fence.incarnation, self.fence.token),
            ack=self._ack_message,
            owned=lambda _message: self._owner.owns(self.held),
        )

    # --- acknowledgements ---------------------------------------------------------------------------------------------

    def _ack_message(self, message: Message) -> None:
        if not self._owner.owns(self.held):
            raise FencedError(
                f"entry {message.id} cannot be acknowledged: the shard is lost",
                stream=message.stream,
                group=self._keys.group,
                member=self.fence.member,
                shard=message.shard,
                hint="Another member owns it by now, and the entry is delivered there.",
            )
        # From whatever thread. It is queued before the handler's return is noticed, so a drain still sends it.
        self._loop.call_soon_threadsafe(self.queue_ack, message.id)

    def queue_ack(self, entry_id: str) -> None:
        """Note an acknowledgement; it is sent soon, together with others. On the event loop only."""
        self._ledger.finished.add(entry_id)
        self._acks.append(entry_id)
        if len(self._acks) >= ACK_BATCH:
            self._flush_soon()
        elif self._flush_timer is None:
            self._flush_timer = self._loop.call_later(ACK_DELAY_SECONDS, self._flush_soon)

    def _flush_soon(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if not self._flushing.locked():
            task = self._loop.create_task(self._flush_in_background())
            self._flushes.add(task)
            task.add_done_callback(self._flushes.discard)

    async def _flush_in_background(self) -> None:
        try:
            await self.flush()
        except FencedError:
            # The reading side meets the same fence, and reports it.
            self._log.info("acknowledgement refused: fenced", shard=self.fence.shard)
        except CoordError as error:
            self._log.warning("acknowledgement not sent yet: %s", error, shard=self.fence.shard)

    async def flush(self) -> None:
        """Send what is queued. Gives up when the shard is lost: its entries are delivered to the new owner.

        Raises:
            FencedError: nothing of it was acknowledged.
        """
        async with self._flushing:
            while self._acks and self._owner.owns(self.held):
                batch = self._acks[:ACK_BATCH]
                try:
                    await self._runner.run(commands.ack(self._keys, self.fence, batch))
                except CoordError as error:
                    if not error.retriable:
                        raise
                    await asyncio.sleep(0.05)
                    continue
                del self._acks[: len(batch)]
                self._ledger.finished.difference_update(batch)
                self.received = max(0, self.received - len(batch))
                telemetry.acknowledged.add(len(batch))

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _or_stopped(self, waiting: Awaitable[None]) -> None:
        """Wait, but not beyond being told to stop."""
        tasks = [asyncio.ensure_future(waiting), asyncio.ensure_future(self._stopping.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(tasks)


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
