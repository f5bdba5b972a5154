"""Handing the entries of one shard to the user's handler: tries, delivery counts, poison, acknowledgements."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import attrs
from opentelemetry import propagate, trace

from . import commands, telemetry
from .acks import Acks
from .commands import Entry, Fence
from .errors import CoordError
from .keys import GroupKeys
from .logs import Log
from .models import RESERVED_PREFIX, Held, Message
from .policies import Batch, DeadLetter, Poison, Retry, dead_fields
from .runner import AsyncRunner

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
    """What the handing out needs of the engine."""

    def owns(self, held: Held) -> bool: ...
    def reads(self, held: Held) -> bool: ...
    def paused(self, shard: int) -> bool: ...
    def stuck(self, held: Held, entry_ids: list[str]) -> None: ...


class Handling:
    """Takes entries of one shard under one token from being read to being acknowledged.

    Parameters:
        owner: the engine.
        runner: for acknowledgements, delivery counts and dead letters.
        keys: of the group.
        fence: the session and token to work under.
        config: what the user chose.
        ledger: of this shard, shared with earlier and later ones of the process.
        fenced: is told that another session has the shard.
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
        fenced: Callable[[], None],
        log: Log,
    ) -> None:
        self.held = Held(fence.shard, fence.token)
        self._clock = runner.settings.machine.clock
        self._chance = runner.settings.machine.random
        self.last_progress = self._clock()
        self.stopping = asyncio.Event()
        self.cancelled = False  # its tasks are being ended; told from a cancellation by the user's code
        self.acks = Acks(runner, keys, fence, lambda: owner.owns(self.held), self._acknowledged, fenced, log)
        self._owner = owner
        self._runner = runner
        self._keys = keys
        self._fence = fence
        self._config = config
        self._ledger = ledger
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._untried: dict[str, int] = {}  # read and not yet handed out: id -> deliveries with the one to come

    def reading(self) -> bool:
        """Whether entries may be handed out."""
        return not self.stopping.is_set() and self._owner.reads(self.held)

    def received(self, entry: Entry) -> None:
        """Note an entry that was read and is to be handed out."""
        self._untried[entry.id] = entry.deliveries

    async def handle(self, entries: list[Entry]) -> None:
        """Hand entries out, again after a failure, until each is acknowledged or the shard is given up."""
        ready = []
        since = self._clock()
        for entry in entries:
            while entry.id in self._ledger.busy:
                # The handler of an earlier worker still runs.
                await self.pause(0.01)
                if not self.reading():
                    return
                limit = self._config.max_handler_seconds
                if limit is not None and self._clock() - since > limit:
                    self._owner.stuck(self.held, [entry.id])
            if entry.id in self._ledger.finished or entry.id in self._ledger.late:
                self._acknowledge(entry.id)
            else:
                ready.append(entry)
        messages = [self._message(entry) for entry in ready]
        if len(messages) > 1:
            if not self.reading() or await self._attempt(messages):
                return
            # One of them is bad. One by one, the others get through.
            delays = [message.taken_delay() for message in messages]
            usual = self._config.retry.delay(1, self._chance)
            await self.pause(max((one for one in delays if one is not None), default=usual))
            for message in messages:
                message.deliveries += 1
        for message, entry in zip(messages, ready, strict=True):
            await self._until_handled(message, entry)

    async def _until_handled(self, message: Message, entry: Entry) -> None:
        poison, failures = self._config.poison, 0
        if poison is not None and entry.deliveries > poison.after_deliveries and await self._give_up(message, entry):
            return
        while self.reading():
            if self._owner.paused(self._fence.shard):
                await self.pause(_PAUSED_SECONDS)
                continue
            try:
                if await self._attempt([message]):
                    if message.deliveries > 1:
                        # If the next one kills this process, this one shall not come again and be blamed for it.
                        with contextlib.suppress(CoordError):
                            await self.acks.flush()
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
            await self.pause(self._config.retry.delay(failures, self._chance) if delay is None else delay)
            if self.reading():
                message.deliveries += 1
                await self._note_deliveries(message)
                if not self.reading():
                    self._untried[message.id] = message.deliveries  # counted, and after all not handed out

    async def _attempt(self, messages: list[Message]) -> bool:
        """Call the handler once. Returns whether it succeeded; acknowledges if so. Raises: `Withdrawn`."""
        ids = [message.id for message in messages]
        self._ledger.busy.update(ids)
        untried = {entry_id: self._untried.pop(entry_id) for entry_id in ids if entry_id in self._untried}
        watchdog: asyncio.TimerHandle | None = None
        if self._config.max_handler_seconds is not None:
            watchdog = self._loop.call_later(self._config.max_handler_seconds, self._owner.stuck, self.held, ids)
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
            if isinstance(error, asyncio.CancelledError) and self.cancelled:
                raise
            telemetry.handled.add(len(messages), {telemetry.OUTCOME: "failed"})
            for message in messages:
                message.error = error
            self._log.error(
                "handler failed on entries %s (delivery %d): %r",
                " ".join(ids),
                messages[0].deliveries,
                error,
                shard=self._fence.shard,
                exc_info=error,
            )
            return False
        finally:
            if watchdog is not None:
                watchdog.cancel()
            self._ledger.busy.difference_update(ids)
        telemetry.handled.add(len(messages), {telemetry.OUTCOME: "ok"})
        self.last_progress = self._clock()
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
            self._log.error(
                "could not give up entry %s: %r", message.id, error, shard=self._fence.shard, exc_info=error
            )
            return False
        telemetry.handled.add(1, {telemetry.OUTCOME: "poison"})
        self._log.warning(
            "gave up entry %s after %d deliveries: %r",
            message.id,
            message.deliveries,
            message.error,
            shard=self._fence.shard,
        )
        self._acknowledge(message.id)
        return True

    def _acknowledge_from_anywhere(self, entry_id: str, delete: bool) -> None:
        self.acks.check(entry_id)
        # It is queued before the return of the handler that calls this is noticed, so a drain still sends it.
        self._loop.call_soon_threadsafe(self._acknowledge, entry_id, delete)

    def _acknowledge(self, entry_id: str, delete: bool = False) -> None:
        self._ledger.finished.add(entry_id)
        self._untried.pop(entry_id, None)
        self.acks.add(entry_id, delete)

    def _acknowledged(self, ids: list[str]) -> None:
        self._ledger.finished.difference_update(ids)
        if self.stopping.is_set():
            self._ledger.late.update(ids)

    async def _note_deliveries(self, message: Message) -> None:
        """Write the delivery count down, so that it outlives this process. At worst one count is lost."""
        with contextlib.suppress(CoordError):
            await self._runner.run(commands.note_deliveries(self._keys, self._fence, message.id, message.deliveries))

    async def uncount(self) -> None:
        """If the first entry left was only read ahead, say so: the next owner would count that as a delivery."""
        if not self._untried or not self._owner.owns(self.held) or self._owner.reads(self.held):
            return
        entry_id = min(self._untried, key=lambda one: tuple(map(int, one.split("-"))))
        deliveries = self._untried[entry_id] - 1
        note = commands.note_deliveries(self._keys, self._fence, entry_id, deliveries, if_first=True)
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
            shard=self._fence.shard,
            id=entry.id,
            key=entry.key,
            fields=fields,
            event_id=entry.event_id,
            deliveries=entry.deliveries,
            token=(self._fence.incarnation, self._fence.token),
            trace_context=propagate.extract(carrier) if carrier else None,
            ack=self._acknowledge_from_anywhere,
            owned=lambda: self._owner.owns(self.held),
        )

    async def pause(self, seconds: float) -> None:
        """Wait for so long, or until told to stop."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)
