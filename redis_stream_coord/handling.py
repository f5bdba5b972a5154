"""Handing the entries of one shard to the user's handler: tries, delivery counts, poison, acknowledgements."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import Any, Protocol

import attrs
from opentelemetry import propagate, trace

from . import commands, telemetry
from .acks import Acks
from .commands import Entry, Fence
from .deliveries import Deliveries
from .errors import CoordError, FencedError
from .keys import GroupKeys
from .logs import Log
from .models import RESERVED_PREFIX, Held, Message
from .outstanding import Outstanding
from .policies import Batch, DeadLetter, Poison, Retry, dead_fields
from .runner import AsyncRunner
from .turns import Handle, NotAwaitedError, Turn, Withdrawn

_PAUSED_SECONDS = 0.05  # between looks whether an entry that failed may be tried again on a paused shard
_RESERVED = RESERVED_PREFIX.encode()
_TRACE_FIELDS = tuple(RESERVED_PREFIX + name for name in ("traceparent", "tracestate"))


@attrs.frozen(kw_only=True)
class WorkConfig:
    """How the user wants entries to be handled.

    Attributes:
        handle: runs the handler for a turn.
        batch: set if the handler takes lists.
        decode: makes `Message.value` of the fields, or ``None``.
        concurrency: so many partition keys of a shard at the same time.
        auto_ack: acknowledge when the handler has succeeded.
        retry, poison: when it has not.
        poisoned: runs the handler of a `Poison`.
        handlers: so many calls of handlers may run at once, over all shards; 0: only when somebody asks for one;
            ``None``: any number.
        max_handler_seconds: give the shard up when a handler takes longer; ``None``: never.
        prefetch, prefetch_bytes: read no more than that ahead.
    """

    handle: Handle
    batch: Batch[Any] | None
    decode: Callable[[dict[str, bytes]], Any] | None
    concurrency: int
    auto_ack: bool
    retry: Retry
    poison: Poison[Any] | DeadLetter | None
    poisoned: Handle | None
    handlers: int | None
    max_handler_seconds: float | None
    prefetch: int
    prefetch_bytes: int

    def notes_deliveries(self, shards: int) -> bool:
        """Whether each delivery has to be written down; see `deliveries`. `shards`: how many the member holds."""
        several = self.concurrency > 1 or self.batch is not None or not self.auto_ack
        return several or (self.handlers is not None and self.handlers < shards)


@attrs.define
class Ledger:
    """What this process did with entries of one shard, kept across tokens: nothing is handed out twice at once, and
    nothing that was finished here is handed out again because its acknowledgement came too late.

    Attributes:
        busy: the call of a handler that each entry is in.
        finished: ids that are finished, and not acknowledged yet.
        late: ids that a worker acknowledged after its successor had begun: the successor may have read them before.
        deliveries: of entries that were handed out and are not finished: number of the next delivery.
    """

    busy: dict[str, Turn] = attrs.field(factory=dict)
    finished: set[str] = attrs.field(factory=set)
    late: set[str] = attrs.field(factory=set)
    deliveries: dict[str, int] = attrs.field(factory=dict)
    incarnation: int = 0

    def enter(self, incarnation: int) -> None:
        """Begin a lifecycle of the group: what was finished in another one may be asked for again."""
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            self.forget()

    def forget(self) -> None:
        """Remember only what is in a handler."""
        self.finished.clear()
        self.late.clear()
        self.deliveries.clear()

    def keep(self, pending: Collection[str]) -> None:
        """What is pending no more needs no remembering. `pending`: ids."""
        self.finished.intersection_update(pending)
        for entry_id in self.deliveries.keys() - pending - self.busy.keys():
            del self.deliveries[entry_id]


class Owner(Protocol):
    """What the handing out needs of the engine."""

    def owns(self, held: Held) -> bool: ...
    def reads(self, held: Held) -> bool: ...
    def paused(self, shard: int) -> bool: ...
    def holds(self) -> int: ...
    def patience_seconds(self) -> float: ...
    def stuck(self, held: Held, entry_ids: list[str], seconds: float) -> None: ...
    def failed(self, error: BaseException) -> None: ...


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
        self._machine = runner.settings.machine
        self._clock = self._machine.clock
        self._chance = self._machine.random
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
        self._turns: dict[Turn, None] = {}  # in their order, so that a run can be repeated
        self._deliveries = Deliveries(runner, keys, fence, self._turns, ledger.deliveries, fenced)
        # Handlers of earlier owners in this process that still run. They began before this owner came: none is added.
        self._earlier = list(dict.fromkeys(ledger.busy.values()))
        # Pending when the shard was taken over: one of them may have ended its owner.
        self.suspects: set[str] = set()
        self.outstanding = Outstanding(self._clock)
        self._labels: telemetry.Attributes = {telemetry.STREAM: keys.stream, telemetry.GROUP: keys.group}
        self._ok: telemetry.Attributes = {**self._labels, telemetry.OUTCOME: "ok"}

    def reading(self) -> bool:
        """Whether entries may be handed out."""
        return not self.stopping.is_set() and self._owner.reads(self.held)

    def notes_deliveries(self) -> bool:
        """Whether each delivery has to be written down; see `deliveries`."""
        return self._config.notes_deliveries(self._owner.holds())

    def stop(self) -> None:
        """Hand out nothing more. What is in a handler goes on; what waits for one does not."""
        self.stopping.set()
        self.withdraw()

    def withdraw(self) -> None:
        """Take back what waits for its handler."""
        for turn in list(self._turns):
            turn.withdraw()

    async def handle(self, entries: list[Entry]) -> None:
        """Hand entries out, again after a failure, until each is acknowledged or the shard is given up."""
        ready = []
        for entry in entries:
            if self._earlier and not await self._is_free(entry):
                return
            if entry.id in self._ledger.finished or entry.id in self._ledger.late:
                self._acknowledge(entry.id)
            else:
                ready.append(entry)
        messages = [self._message(entry) for entry in ready]
        if len(messages) > 1 and await self._together(messages):
            return
        for message, entry in zip(messages, ready, strict=True):
            # After a failed batch each is tried alone, however few deliveries are enough: all but one may be good.
            if len(messages) > 1 or not await self._is_worn_out(message, entry):
                await self._until_handled(message, entry)

    async def _is_free(self, entry: Entry) -> bool:
        """Wait until no handler of an earlier owner in this process is in the way. Returns whether it may go on."""
        since = self._clock()
        limit = self._config.max_handler_seconds or self._owner.patience_seconds()
        while (turn := self._in_the_way(entry)) is not None:
            await self.pause(0.01)
            if not self.reading():
                return False
            now = self._clock()
            if turn.began is not None and now - turn.began > limit and (not turn.surrendered or now - since > limit):
                # Somebody else shall have the shard. If there is nobody, it comes back, and its other keys go on.
                self._surrender(turn)
        return True

    def _in_the_way(self, entry: Entry) -> Turn | None:
        self._earlier = [turn for turn in self._earlier if not turn.ended]
        for turn in self._earlier:
            # One handler at a time: of the whole shard, or of a key.
            if self._config.concurrency == 1 or any(message.key == entry.key for message in turn.messages):
                return turn
        return None

    async def _together(self, messages: list[Message]) -> bool:
        """Hand a batch out. Returns whether that was all; after a failure the messages have to be tried one by one."""
        while self.reading():
            if self._owner.paused(self._fence.shard):
                await self.pause(_PAUSED_SECONDS)
                continue
            try:
                if await self._attempt(messages):
                    return True
            except Withdrawn:
                continue
            # One of them is bad. One by one, the others get through.
            delays = [message.taken_delay() for message in messages]
            usual = self._config.retry.delay(1, self._chance)
            await self.pause(max((one for one in delays if one is not None), default=usual))
            for message in messages:
                message.deliveries += 1
            return False
        return True

    async def _is_worn_out(self, message: Message, entry: Entry) -> bool:
        """Whether an entry has had its deliveries, at owners that died on it, and could be given up."""
        poison = self._config.poison
        worn_out = poison is not None and message.deliveries > poison.after_deliveries
        if message.id in self.outstanding.lost:
            return False  # it had been handled, or given up, and this process lives
        return worn_out and self.reading() and await self._give_up(message, entry)

    async def _until_handled(self, message: Message, entry: Entry) -> None:
        failures = 0
        while self.reading():
            if self._owner.paused(self._fence.shard):
                await self.pause(_PAUSED_SECONDS)
                continue
            try:
                if await self._attempt([message]):
                    if message.deliveries > 1 or message.id in self.suspects:
                        # If the next one kills this process, this one shall not come again and be blamed for it.
                        with contextlib.suppress(CoordError):
                            await self.acks.flush()
                    return
            except Withdrawn:
                continue
            failures += 1
            if await self._is_settled(message, entry):
                return
            delay = message.taken_delay()
            await self.pause(self._config.retry.delay(failures, self._chance) if delay is None else delay)
            if self.reading():
                message.deliveries += 1
                if not self.notes_deliveries():
                    with contextlib.suppress(FencedError):
                        await self._deliveries.write({message.id: message.deliveries})

    async def _is_settled(self, message: Message, entry: Entry) -> bool:
        """Decide on an entry whose handler failed. Returns whether it is not to be tried again."""
        poison, error = self._config.poison, message.error
        if isinstance(error, NotAwaitedError):
            self._owner.failed(error)  # says nothing about the entry, and so makes no poison of it
            return True
        fatal = error is not None and self._config.retry.is_fatal(error)
        if poison is None:
            if fatal and error is not None:
                self._owner.failed(error)
            return fatal
        if not fatal:
            return message.deliveries >= poison.after_deliveries and await self._give_up(message, entry)
        failures = 0
        while self.reading() and not await self._give_up(message, entry):
            failures += 1
            await self.pause(self._config.retry.delay(failures, self._chance))
        return True

    async def _attempt(self, messages: list[Message]) -> bool:
        """Call the handler once. Returns whether it succeeded; acknowledges if so. Raises: `Withdrawn`."""
        noted = self.notes_deliveries()
        before = noted and any(message.deliveries > 1 or message.id in self.suspects for message in messages)
        turn = Turn(
            messages,
            as_list=self._config.batch is not None,
            decode=self._config.decode,
            allowed=self._may_begin,
            machine=self._machine,
            note=(lambda: self._deliveries.before(messages)) if before else None,
        )
        if noted:
            self._deliveries.soon()
        try:
            if len(messages) == 1 and (context := messages[0].trace_context) is not None:
                with telemetry.tracer.start_as_current_span(
                    f"{self._keys.stream} process", context=context, kind=trace.SpanKind.CONSUMER
                ):
                    await self._run(turn, self._config.handle)
            else:
                await self._run(turn, self._config.handle)
        except Withdrawn:
            raise
        except (Exception, asyncio.CancelledError) as error:
            # Whatever the application raises means "not handled", a cancellation that escapes from it too.
            if isinstance(error, asyncio.CancelledError) and self.cancelled:
                raise
            self._count("failed", len(messages))
            for message in messages:
                message.error = error
            self._log.error(
                "handler failed on entries %s (delivery %d): %r",
                " ".join(turn.ids),
                messages[0].deliveries,
                error,
                shard=self._fence.shard,
                exc_info=error,
            )
            return False
        if any(message.was_refused for message in messages):
            self._count("refused")
            for message in messages:
                message.error = None
            return False
        for message in messages:
            message.settle()
        telemetry.handled.add(len(messages), self._ok)
        self.last_progress = self._clock()
        if self._config.auto_ack:
            for message in messages:
                self._acknowledge(message.id)
        return True

    def _may_begin(self) -> bool:
        return self.reading() and not self._owner.paused(self._fence.shard)

    async def _run(self, turn: Turn, handle: Handle) -> None:
        """Run a handler, so that others know of it."""
        self._turns[turn] = None
        busy = self._ledger.busy
        for entry_id in turn.ids:
            busy[entry_id] = turn
        if self._config.max_handler_seconds is not None:
            self._watch(turn, self._config.max_handler_seconds)
        try:
            await handle(turn)
        except Withdrawn:
            if turn.began is None:
                self._deliveries.unused(turn.messages)
            raise
        finally:
            if turn.watchdog is not None:
                turn.watchdog.cancel()
            turn.ended = True
            del self._turns[turn]
            for entry_id in turn.ids:
                if busy.get(entry_id) is turn:
                    del busy[entry_id]
            self._deliveries.ended(turn)

    def _watch(self, turn: Turn, limit: float) -> None:
        # What it waited for a thread, or for the loop to ask for it, is not the handler's time.
        left = limit if turn.began is None else turn.began + limit - self._clock()
        if left > 0:
            turn.watchdog = self._loop.call_later(left, self._watch, turn, limit)
        else:
            self._surrender(turn)

    def _surrender(self, turn: Turn) -> None:
        turn.surrendered = True
        self._owner.stuck(self.held, turn.ids, self._clock() - (turn.began or 0.0))

    async def _give_up(self, message: Message, entry: Entry) -> bool:
        """Hand a poison entry to the application, or move it to the dead letters. Returns whether that succeeded."""
        poison = self._config.poison
        try:
            if isinstance(poison, DeadLetter):
                fields = dead_fields(message, self._keys.group, list(entry.fields))
                await self._runner.run(commands.append_to(poison.stream, fields))
            elif self._config.poisoned is not None:
                await self._run(Turn([message], allowed=self.reading, machine=self._machine), self._config.poisoned)
        except Withdrawn:
            return False
        except Exception as error:  # noqa: BLE001 - the application's, or Redis is away: the entry is tried again
            shard = self._fence.shard
            said = error if isinstance(error, CoordError) else repr(error)
            self._log.error("could not give up entry %s: %s", message.id, said, shard=shard, exc_info=error)
            return False
        self._count("poison")
        self._log.warning(
            "gave up entry %s after %d deliveries: %r",
            message.id,
            message.deliveries,
            message.error,
            shard=self._fence.shard,
        )
        self._acknowledge(message.id)
        return True

    def _count(self, outcome: str, entries: int = 1) -> None:
        telemetry.handled.add(entries, {**self._labels, telemetry.OUTCOME: outcome})

    def gone(self, entry_id: str) -> None:
        """Take note of an entry that was deleted or trimmed before it was handled."""
        self._count("gone")
        self._log.error("entry %s was deleted or trimmed before it was handled", entry_id, shard=self._fence.shard)

    def _acknowledge_from_anywhere(self, entry_id: str, delete: bool) -> None:
        self.acks.check(entry_id)
        # It is queued before the return of the handler that calls this is noticed, so a drain still sends it.
        self._loop.call_soon_threadsafe(self._acknowledge, entry_id, delete)

    def _acknowledge(self, entry_id: str, delete: bool = False) -> None:
        if (turn := self._ledger.busy.get(entry_id)) is not None:
            turn.acknowledged.add(entry_id)
        self._ledger.finished.add(entry_id)
        self._deliveries.forget(entry_id)
        self.acks.add(entry_id, delete)

    def _acknowledged(self, ids: list[str]) -> None:
        self._ledger.finished.difference_update(ids)
        self.suspects.difference_update(ids)
        self.outstanding.acknowledged(ids)
        if self.stopping.is_set():
            self._ledger.late.update(ids)

    async def finish(self, *, left: bool) -> None:
        """Write down, before the shard is given up, how often what is left was delivered; see `Deliveries.finish`."""
        if self._owner.owns(self.held) and not self._owner.reads(self.held):
            await self._deliveries.finish(left=left)

    def close(self) -> None:
        """Nothing is written any more."""
        self._deliveries.stop()

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
            # An earlier owner in this process may have handed it out after this one had read it.
            deliveries=max(entry.deliveries, self._ledger.deliveries.get(entry.id, 0)),
            token=(self._fence.incarnation, self._fence.token),
            trace_context=propagate.extract(carrier) if carrier else None,
            ack=self._acknowledge_from_anywhere,
            owned=lambda: self._owner.owns(self.held),
        )

    async def pause(self, seconds: float) -> None:
        """Wait for so long, or until told to stop."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)
