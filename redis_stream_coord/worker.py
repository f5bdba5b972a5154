"""One shard of one member: claim it, read it, hand its entries out in order, acknowledge them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

import attrs
from opentelemetry import propagate, trace

from . import commands, telemetry
from .acks import Acks
from .commands import Entry, Fence
from .errors import CoordError, FencedError
from .keys import GroupKeys
from .lanes import Lane, Lanes
from .logs import Log
from .models import RESERVED_PREFIX, Held, Message
from .policies import Batch, DeadLetter, Poison, Retry, dead_fields
from .runner import AsyncRunner
from .tasks import end

_PAUSE_SECONDS = 1.0  # between tries while the shard's stream is missing
_PAUSED_SECONDS = 0.05  # between looks whether an entry that failed may be tried again on a paused shard
_RESERVED = RESERVED_PREFIX.encode()
_TRACE_FIELDS = tuple(RESERVED_PREFIX + name for name in ("traceparent", "tracestate"))


class Withdrawn(Exception):  # noqa: N818 - never raised to a user
    """A message went back before anybody had finished it; that is no failure.

    Parameters:
        taken: whether somebody had it already.
    """

    def __init__(self, *, taken: bool) -> None:
        super().__init__()
        self.taken = taken


@attrs.frozen(kw_only=True)
class WorkConfig:
    """How the user wants entries to be handled.

    Attributes:
        handle: takes a list of messages: one, or as many as `batch` allows.
        batch: set if the handler takes lists.
        decode: makes `Message.value` of the fields, or ``None``.
        concurrency: so many partition keys of a shard at the same time.
        auto_ack: acknowledge when the handler has succeeded.
        retry, poison: when it has not.
        poisoned: takes the message that is given up; ``None`` with a `DeadLetter`.
        max_handler_seconds: give the shard up when a handler takes longer; ``None``: never.
        prefetch, prefetch_bytes: read no more than that ahead.
    """

    handle: Callable[[list[Message]], Awaitable[None]]
    batch: Batch | None
    decode: Callable[[dict[str, bytes]], Any] | None
    concurrency: int
    auto_ack: bool
    retry: Retry
    poison: Poison | DeadLetter | None
    poisoned: Callable[[Message], Awaitable[None]] | None
    max_handler_seconds: float | None
    prefetch: int
    prefetch_bytes: int


@attrs.define
class Ledger:
    """What this process did with entries of one shard, kept across tokens: nothing is handed out twice at once, and
    nothing that was finished here is handed out again because its acknowledgement came too late.

    Attributes:
        busy: ids that are in a handler.
        finished: ids that are finished, and not acknowledged yet.
        late: ids that a worker acknowledged after its successor had begun: the successor may have read them before.
    """

    busy: set[str] = attrs.field(factory=set)
    finished: set[str] = attrs.field(factory=set)
    late: set[str] = attrs.field(factory=set)
    incarnation: int = 0

    def enter(self, incarnation: int) -> None:
        """Begin a lifecycle of the group: what was finished in another one may be asked for again."""
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            self.finished.clear()
            self.late.clear()


class Owner(Protocol):
    """What a worker needs of the engine that runs it."""

    def owns(self, held: Held) -> bool: ...
    def reads(self, held: Held) -> bool: ...
    def paused(self, shard: int) -> bool: ...
    def claimed(self, worker: Worker) -> Awaitable[None]: ...
    def claim_refused(self, worker: Worker, error: CoordError) -> None: ...
    def unfenced(self, worker: Worker) -> None: ...
    def stuck(self, worker: Worker, entry_ids: list[str]) -> None: ...
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
        self.last_progress = time.monotonic()
        self._owner = owner
        self._runner = runner
        self._keys = keys
        self._config = config
        self._ledger = ledger
        self._log = log
        self._acks = Acks(runner, keys, fence, lambda: owner.owns(self.held), self._acknowledged, self.look, log)
        self._lanes = Lanes(by_key=config.concurrency > 1)
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._woken = asyncio.Event()
        self._slots: set[asyncio.Task[None]] = set()
        self._starting = 0  # slots that have not taken a lane yet
        self._arrival: asyncio.Task[None] | None = None
        self._after = "0-0"
        self._caught_up = False
        self._doubted = False  # whether the fence has to be looked at before anything more is handed out
        self._in_hand = 0
        self._cancelled = False
        self._untried: dict[str, int] = {}  # read and not yet handed out: id -> deliveries with the one to come

    @property
    def received(self) -> int:
        """Entries that were received and are not acknowledged."""
        return self._lanes.count + self._in_hand + self._acks.queued

    def stop(self) -> None:
        """Hand out nothing more. What is in a handler goes on."""
        self._stopping.set()
        self._woken.set()

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
        await self._acks.flush()

    async def run(self) -> None:
        """Work until told to stop or fenced; then wait for the handlers, acknowledge, and say that it is drained."""
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
            self._owner.unfenced(self)
            return
        except asyncio.CancelledError:
            self._cancelled = True
            await end(self._slots)
            raise
        await self._owner.draining(self)
        with contextlib.suppress(FencedError):
            await self.flush()
        await self._uncount()
        self._owner.drained(self)

    # --- reading ------------------------------------------------------------------------------------------------------

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

    async def _work(self) -> None:
        more = True
        while self._reading():
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
                if more and self._room():
                    continue
            if self._arrival is not None and self._arrival.done():
                self._arrival, more = None, True
                continue
            await self._woken.wait()

    def _room(self) -> int:
        """How many entries may be read now: half of the room has to be free, so that reads are worth their while."""
        config = self._config
        if self._arrival is not None or self._lanes.count > config.prefetch // 2:
            return 0
        if self._lanes.bytes > config.prefetch_bytes // 2:
            return 0
        return config.prefetch - self._lanes.count

    async def _read(self) -> bool:
        """Read once. Returns whether there may be more to read at once."""
        if self._caught_up and not self._lanes.count and not self._in_hand:
            self._ledger.late.clear()
        command = commands.read(
            self._keys,
            self.fence,
            after=self._after,
            count=max(1, self._room()),
            max_bytes=self._config.prefetch_bytes - self._lanes.bytes,
        )
        try:
            page = await self._runner.run(command)
        except FencedError:
            raise
        except CoordError as error:
            self._doubted = False
            # Said once per second and shard, not at every try: the data may be gone for good.
            self._log.warning("cannot read: %s", error, shard=self.fence.shard)
            await self._pause(_PAUSE_SECONDS)
            return True
        self._doubted = False
        if page.recreated_at is not None:
            self._log.warning(
                "the consumer group had vanished from the stream; made anew at %s",
                page.recreated_at,
                shard=self.fence.shard,
            )
        for entry_id in page.gone:
            telemetry.handled.add(1, {telemetry.OUTCOME: "gone"})
            self._log.error("entry %s was deleted or trimmed before it was handled", entry_id, shard=self.fence.shard)
        self._after = page.last or self._after
        for entry in page.entries:
            self._lanes.add(entry)
            self._untried[entry.id] = entry.deliveries
        if page.caught_up and not self._caught_up:
            # What is pending no more needs no remembering.
            self._caught_up = True
            self._ledger.finished.intersection_update([*self._acks.ids, *(entry.id for entry in page.entries)])
        if page.wait_after is None:
            return True
        waiting = self._owner.wait_for_entries(self.fence.shard, page.wait_after)
        self._arrival = self._loop.create_task(waiting)
        self._arrival.add_done_callback(lambda _: self._woken.set())
        return False

    # --- handing out --------------------------------------------------------------------------------------------------

    def _start_slot(self) -> None:
        self._starting += 1
        slot = self._loop.create_task(self._slot())
        self._slots.add(slot)
        slot.add_done_callback(lambda _: self._woken.set())

    def _handing_out(self) -> bool:
        return self._reading() and not self._doubted and not self._owner.paused(self.fence.shard)

    async def _slot(self) -> None:
        """Hand out one lane after another, until none is ready."""
        self._starting -= 1
        while self._handing_out() and (lane := self._lanes.take()) is not None:
            try:
                entries = await self._gather(lane)
                if entries:
                    self._in_hand += len(entries)
                    try:
                        await self._handle(entries)
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
        deadline = time.monotonic() + batch.within_seconds
        while len(lane.entries) < batch.max_size and (left := deadline - time.monotonic()) > 0 and self._handing_out():
            self._woken.set()
            await self._pause(min(left, 0.005))
        return self._lanes.pop(lane, batch.max_size) if self._handing_out() else []

    async def _handle(self, entries: list[Entry]) -> None:
        ready = []
        since = time.monotonic()
        for entry in entries:
            while entry.id in self._ledger.busy:
                # The handler of an earlier worker still runs.
                await self._pause(0.01)
                if not self._reading():
                    return
                limit = self._config.max_handler_seconds
                if limit is not None and time.monotonic() - since > limit:
                    self._owner.stuck(self, [entry.id])
            if entry.id in self._ledger.finished or entry.id in self._ledger.late:
                self._acknowledge(entry.id)
            else:
                ready.append(entry)
        messages = [self._message(entry) for entry in ready]
        if len(messages) > 1:
            if not self._reading() or await self._attempt(messages):
                return
            # One of them is bad. One by one, the others get through.
            delays = [message.taken_delay() for message in messages]
            await self._pause(max((one for one in delays if one is not None), default=self._config.retry.delay(1)))
            for message in messages:
                message.deliveries += 1
        for message, entry in zip(messages, ready, strict=True):
            await self._until_handled(message, entry)

    async def _until_handled(self, message: Message, entry: Entry) -> None:
        poison, failures = self._config.poison, 0
        if poison is not None and entry.deliveries > poison.after_deliveries and await self._give_up(message, entry):
            return
        while self._reading():
            if self._owner.paused(self.fence.shard):
                await self._pause(_PAUSED_SECONDS)
                continue
            try:
                if await self._attempt([message]):
                    if message.deliveries > 1:
                        # If the next one kills this process, this one shall not come again and be blamed for it.
                        with contextlib.suppress(CoordError):
                            await self.flush()
                    return
            except Withdrawn:
                continue
            failures += 1
            if isinstance(poison, Poison):
                hopeless = poison.applies(message.deliveries, message.error)
            else:
                hopeless = poison is not None and (
                    message.deliveries >= poison.after_deliveries or isinstance(message.error, poison.at_once)
                )
            if hopeless and await self._give_up(message, entry):
                return
            delay = message.taken_delay()
            await self._pause(self._config.retry.delay(failures) if delay is None else delay)
            if self._reading():
                message.deliveries += 1
                await self._note_deliveries(message)
                if not self._reading():
                    self._untried[message.id] = message.deliveries  # counted, and after all not handed out

    async def _attempt(self, messages: list[Message]) -> bool:
        """Call the handler once. Returns whether it succeeded; acknowledges if so. Raises: `Withdrawn`."""
        ids = [message.id for message in messages]
        self._ledger.busy.update(ids)
        untried = {entry_id: self._untried.pop(entry_id) for entry_id in ids if entry_id in self._untried}
        watchdog: asyncio.TimerHandle | None = None
        if self._config.max_handler_seconds is not None:
            watchdog = self._loop.call_later(self._config.max_handler_seconds, self._owner.stuck, self, ids)
        try:
            for message in messages:
                if self._config.decode is not None:
                    message.value = self._config.decode(dict(message.fields))
            if len(messages) == 1 and (context := messages[0].trace_context) is not None:
                with telemetry.tracer.start_as_current_span(
                    f"{self._keys.stream} process", context=context, kind=trace.SpanKind.CONSUMER
                ):
                    await self._config.handle(messages)
            else:
                await self._config.handle(messages)
            refused = [message for message in messages if message.was_refused]
            if refused:
                telemetry.handled.add(1, {telemetry.OUTCOME: "refused"})
                return False
        except Withdrawn as withdrawn:
            if not withdrawn.taken:
                self._untried.update(untried)
            raise
        except (Exception, asyncio.CancelledError) as error:
            # Whatever the application raises means "not handled", a cancellation that escapes from it too.
            if isinstance(error, asyncio.CancelledError) and self._cancelled:
                raise
            telemetry.handled.add(len(messages), {telemetry.OUTCOME: "failed"})
            for message in messages:
                message.error = error
            self._log.error(
                "handler failed on entries %s (delivery %d): %r",
                " ".join(ids),
                messages[0].deliveries,
                error,
                shard=self.fence.shard,
                exc_info=error,
            )
            return False
        finally:
            if watchdog is not None:
                watchdog.cancel()
            self._ledger.busy.difference_update(ids)
        telemetry.handled.add(len(messages), {telemetry.OUTCOME: "ok"})
        self.last_progress = time.monotonic()
        if self._config.auto_ack:
            for entry_id in ids:
                self._acknowledge(entry_id)
        return True

    async def _give_up(self, message: Message, entry: Entry) -> bool:
        """Hand a poison entry to the application, or move it to the dead letters. Returns whether that succeeded."""
        poison = self._config.poison
        try:
            if isinstance(poison, DeadLetter):
                fields = dead_fields(message, self._keys.group, list(entry.fields))
                await self._runner.run(commands.append_to(poison.stream, fields))
            elif self._config.poisoned is not None:
                await self._config.poisoned(message)
        except Exception as error:  # noqa: BLE001 - the application's, or Redis is away: the entry is tried again
            self._log.error("could not give up entry %s: %r", message.id, error, shard=self.fence.shard, exc_info=error)
            return False
        telemetry.handled.add(1, {telemetry.OUTCOME: "poison"})
        self._log.warning(
            "gave up entry %s after %d deliveries: %r",
            message.id,
            message.deliveries,
            message.error,
            shard=self.fence.shard,
        )
        self._acknowledge(message.id)
        return True

    def _acknowledge_from_anywhere(self, entry_id: str, delete: bool) -> None:
        self._acks.check(entry_id)
        # It is queued before the return of the handler that calls this is noticed, so a drain still sends it.
        self._loop.call_soon_threadsafe(self._acknowledge, entry_id, delete)

    def _acknowledge(self, entry_id: str, delete: bool = False) -> None:
        self._ledger.finished.add(entry_id)
        self._untried.pop(entry_id, None)
        self._acks.add(entry_id, delete)

    def _acknowledged(self, ids: list[str]) -> None:
        self._ledger.finished.difference_update(ids)
        if self._stopping.is_set():
            self._ledger.late.update(ids)

    async def _note_deliveries(self, message: Message) -> None:
        """Write the delivery count down, so that it outlives this process. At worst one count is lost."""
        with contextlib.suppress(CoordError):
            await self._runner.run(commands.note_deliveries(self._keys, self.fence, message.id, message.deliveries))

    async def _uncount(self) -> None:
        """If the first entry left was only read ahead, say so: the next owner would count that as a delivery."""
        if not self._untried or not self._owner.owns(self.held) or self._owner.reads(self.held):
            return
        entry_id = min(self._untried, key=lambda one: tuple(map(int, one.split("-"))))
        deliveries = self._untried[entry_id] - 1
        note = commands.note_deliveries(self._keys, self.fence, entry_id, deliveries, if_first=True)
        with contextlib.suppress(CoordError):
            await self._runner.run(note, retry=False)

    def _message(self, entry: Entry) -> Message:
        flat = entry.fields
        fields: dict[str, bytes] = {}
        carrier: dict[str, str] = {}
        for name, value in zip(flat[::2], flat[1::2], strict=True):
            if not name.startswith(_RESERVED):
                fields[name.decode("utf-8", "surrogateescape")] = value
            elif (text := name.decode("ascii", "replace")) in _TRACE_FIELDS:
                carrier[text.removeprefix(RESERVED_PREFIX)] = value.decode("ascii", "replace")
        return Message(
            stream=self._keys.stream,
            shard=self.fence.shard,
            id=entry.id,
            key=entry.key,
            fields=fields,
            event_id=entry.event_id,
            deliveries=entry.deliveries,
            token=(self.fence.incarnation, self.fence.token),
            trace_context=propagate.extract(carrier) if carrier else None,
            ack=self._acknowledge_from_anywhere,
            owned=lambda: self._owner.owns(self.held),
        )

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def _quiet(self) -> None:
        """Wait until nothing is in a handler."""
        if self._slots:
            await asyncio.wait(self._slots)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
