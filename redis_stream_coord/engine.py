"""The engine of a consumer, written once, on asyncio. Both faces in `redis_stream_coord.consumer` run it.

Its tasks: heartbeats, which never wait for a handler; the watch on the event stream, which brings a heartbeat
forward when something concerns this member; the guard of the local lease; the callbacks, one after another; the wait
for new entries; the duties; and a worker for each shard. All decisions are those of `redis_stream_coord.session`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import attrs

from . import commands, telemetry, vitals
from .callbacks import Callbacks
from .commands import Fence
from .duties import Duties
from .errors import CoordError, DrainTimeoutError, FencedError, NotFoundError, PermissionDeniedError
from .handling import Ledger, WorkConfig
from .keys import GroupKeys, StreamKeys
from .links import Links
from .logs import Log
from .models import Health, Held, Layout, Shards
from .pauses import Pauses
from .places import Place
from .session import ANOTHER_TOKEN, Action, Claim, Drain, Lost, Session, ShardState
from .settings import RedisSettings
from .tasks import end
from .worker import Worker

ShardsCallback = Callable[[Shards], Awaitable[None]]

# How often the shards of a stream with a retention are trimmed.
RETENTION_SECONDS = 10.0
# Events that come so soon after others are read together.
_EVENT_PAUSE_SECONDS = 0.005
# At the end, the last word to the group is tried for so long.
_LAST_WORD_SECONDS = 2.0


@attrs.frozen(kw_only=True)
class EngineConfig:
    """Everything that a consumer's user chose. `place`: what the member id comes from, given back at the end."""

    keys: GroupKeys
    settings: RedisSettings
    member: str
    place: Place | None
    weight: float
    work: WorkConfig
    shutdown_seconds: float
    on_assigned: ShardsCallback | None
    on_revoked: ShardsCallback | None
    on_lost: ShardsCallback | None


class Engine:
    """Runs one member of a group on the current event loop.

    Parameters:
        config: see `EngineConfig`.
        pauses: which shards are paused.
    """

    def __init__(self, config: EngineConfig, pauses: Pauses) -> None:
        self.config = config
        self.session = Session(config.member, weight=config.weight, draw_nonce=config.settings.machine.word)
        self.log = Log(config.keys.stream, config.keys.group, config.member)
        self._links: Links | None = None
        self._duties: Duties | None = None
        self._callbacks = Callbacks(config.on_assigned, config.on_revoked, config.on_lost, self._callback_failed)
        self._workers: dict[int, Worker] = {}
        self._worker_tasks: set[asyncio.Task[None]] = set()
        self._ledgers: dict[int, Ledger] = {}
        self._pauses = pauses
        self._drain_began: dict[Held, float] = {}
        self._beat = asyncio.Event()
        self._stop_deadline: float | None = None
        self._joined = asyncio.Event()
        self._may = False
        self._last_event = "0-0"
        self.failure: BaseException | None = None
        self._attributes: telemetry.Attributes = {
            telemetry.STREAM: config.keys.stream,
            telemetry.GROUP: config.keys.group,
            telemetry.MEMBER: config.member,
        }

    def _clock(self) -> float:
        return self.config.settings.machine.clock()

    # --- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Join, work until stopped, drain, leave.

        Raises:
            NotFoundError: the group did not exist when this member first asked.
            DuplicateMemberError: another live process uses the same member id.
            DrainTimeoutError: handlers did not finish within ``shutdown_seconds`` of the stop.
            Exception: what a callback of the user raised.
        """
        self._links = Links.acquire(self.config.settings)
        telemetry.observe(self)
        self._duties = Duties(self.config.keys, self._links.data, self._clock, self.log, self._attributes)
        chores = (self._watch(), self._guard(), self._retain(), self._duties.run())
        tasks = [self._start(chore) for chore in chores]
        callbacks = self._start(self._callbacks.run())
        try:
            await self._heartbeats()
            await self._callbacks.settle(self._left_seconds())
        except asyncio.CancelledError:
            await self._farewell()
            raise
        finally:
            telemetry.forget(self)
            await end([*tasks, callbacks, *self._worker_tasks])
            await self._links.release()
            if self.config.place is not None:
                self.config.place.release()
        if self.failure is not None:
            raise self.failure
        if (failure := self.session.failure) is not None:
            failure.stream, failure.group = self.config.keys.stream, self.config.keys.group
            raise failure

    async def _farewell(self) -> None:
        """Cancelled together with all else, as ``asyncio.run`` does at its end: do not stay in the group as a ghost."""

        async def leave() -> None:
            await end(self._worker_tasks)  # and with them the handlers
            await self.flush()
            self.session.leave(hold=False)
            self.session.abandon()
            while not self.session.finished:
                await self._heartbeat()
                await asyncio.sleep(min(self.session.delay(self._clock()), _LAST_WORD_SECONDS / 10))

        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(leave(), _LAST_WORD_SECONDS)

    def stop(self, *, hold: bool = False) -> None:
        """Begin to stop; returns at once. See `Session.leave`."""
        if self._stop_deadline is None:
            self._stop_deadline = self._clock() + self.config.shutdown_seconds
            self.log.info("stopping")
        self._apply(self.session.leave(hold=hold))
        self._beat.set()

    @property
    def stopping(self) -> bool:
        """Whether it has been told to stop."""
        return self._stop_deadline is not None

    @property
    def links(self) -> Links:
        """The connections; only while it runs."""
        assert self._links is not None
        return self._links

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # A mistake in the library. Without this a dead task would leave a consumer that looks alive.
            self.log.error("unexpected error: %r", error, exc_info=error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self.stop()

    def _callback_failed(self, error: Exception) -> None:
        self.log.error("a callback failed: %r; stopping", error, exc_info=error)
        self._fail(error)

    def _left_seconds(self) -> float:
        if self._stop_deadline is None:
            return self.config.shutdown_seconds
        return max(0.0, self._stop_deadline - self._clock())

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    async def _heartbeats(self) -> None:
        while not self.session.finished:
            self._beat.clear()
            await self._heartbeat()
            if self.session.finished or self._give_up():
                return
            delay = self.session.delay(self._clock())
            if self._stop_deadline is not None and self._stop_deadline > self._clock():
                delay = min(delay, self._stop_deadline - self._clock())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._beat.wait(), delay)

    async def _heartbeat(self) -> None:
        request = self.session.request()
        sent_at = self._clock()
        try:
            if not self._may:
                await self.links.control.run(commands.rights(self.config.keys), retry=False)
                self._may = True
            reply = await self.links.control.run(commands.heartbeat(self.config.keys, request), retry=False)
        except CoordError as error:
            if isinstance(error, PermissionDeniedError):
                # Taken away since. From now on nothing is begun that would be refused in its midst.
                self._may = False
            self._count_refusal(error)
            if not self._joined.is_set() and error.word == "GROUP_NOT_FOUND":
                # Most likely a mistake in a name, or the group has yet to be created: say so rather than wait in
                # silence. Once it has been a member, a consumer goes on trying.
                self.failure = NotFoundError(
                    "there is no such group",
                    stream=error.stream,
                    group=error.group,
                    member=error.member,
                    hint=error.hint,
                )
                self.session.leave(hold=False)
            self._apply(self.session.refused(error, now=self._clock()))
            return
        telemetry.heartbeats.add(1, {**self._attributes, telemetry.STATUS: reply.status})
        if not self._joined.is_set():
            self._last_event = reply.last_event
            self._joined.set()
        # The lease may have passed while the answer was on its way: the workers have noticed, so the session has to.
        self._apply(self.session.tick(self._clock()))
        self._apply(self.session.accepted(request, reply, sent_at=sent_at))
        if reply.duty and self._duties is not None:
            self._duties.take(sent_at + reply.timings.heartbeat_seconds)
        if reply.status == "SYNC_METADATA" and request.round != reply.round:
            telemetry.metadata_regressions.add(1, self._attributes)
            self.log.warning("heartbeat: %s", self.session.trouble)
        elif request.round is not None and reply.round is None:
            self.log.info("correction round %s is over", request.round)

    def _count_refusal(self, error: CoordError) -> None:
        status = error.word or type(error).__name__
        telemetry.heartbeats.add(1, {**self._attributes, telemetry.STATUS: status})
        if error.word == "UNKNOWN_MEMBER_ID":
            telemetry.members_expired.add(1, self._attributes)
        if error.word in ("FENCED_MEMBER_EPOCH", "UNKNOWN_MEMBER_ID"):
            telemetry.state_conflicts.add(1, self._attributes)
        if error.word == "FENCED_MEMBER_EPOCH" and error.detail.startswith("believes to own"):
            telemetry.invariant_violations.add(1, self._attributes)
        if error.word == "METADATA_REGRESSION" or "the metadata went backwards" in error.detail:
            telemetry.metadata_regressions.add(1, self._attributes)
        if self.session.trouble is None or str(self.session.trouble) != str(error):
            self.log.warning("heartbeat: %s", error)

    def _give_up(self) -> bool:
        """Whether the time for a graceful end is over; if so, what is left is abandoned."""
        if self._stop_deadline is None or self._clock() < self._stop_deadline:
            return False
        stuck = {held.shard for held in self.session.abandon()}
        if stuck and self.failure is None:
            self.failure = DrainTimeoutError(
                f"handlers did not finish within {self.config.shutdown_seconds} s",
                stream=self.config.keys.stream,
                group=self.config.keys.group,
                member=self.config.member,
                hint=f"Shards {sorted(stuck)} were abandoned; their entries are delivered again.",
            )
        if self._clock() > self._stop_deadline + _LAST_WORD_SECONDS:
            self.log.warning("could not say good-bye: the group will notice when the lease runs out")
            return True
        return False

    # --- what the session decides -------------------------------------------------------------------------------------

    def _apply(self, actions: Iterable[Action]) -> None:
        changed = False
        for action in actions:
            changed = True
            if isinstance(action, Claim):
                self._claim(action.held)
            elif isinstance(action, Drain):
                for held in action.held:
                    self._drain_began[held] = self._clock()
                    self._stop_worker(held)
            elif isinstance(action, Lost):
                self._lose(action)
        if changed:
            telemetry.rebalances.add(1, self._attributes)
            self._beat_if_urgent()

    def _claim(self, held: Held) -> None:
        fence = Fence(held.shard, self.config.member, self.session.nonce, self.session.incarnation, held.token)
        ledger = self._ledgers.setdefault(held.shard, Ledger())
        ledger.enter(self.session.incarnation)
        worker = Worker(
            self,
            self.links.data,
            self.config.keys,
            fence,
            self.config.work,
            ledger=ledger,
            log=self.log,
        )
        if (old := self._workers.get(held.shard)) is not None:
            old.stop()
            worker.before = old if old.held == held else None
        self._workers[held.shard] = worker
        task = self._start(worker.run())
        self._worker_tasks.add(task)
        task.add_done_callback(self._worker_tasks.discard)

    def _stop_worker(self, held: Held) -> None:
        worker = self._workers.get(held.shard)
        if worker is not None and worker.held == held:
            worker.stop()
        else:
            # No worker means no handler: there is nothing to wait for.
            self.session.drained(held)

    def _lose(self, action: Lost) -> None:
        shards = frozenset(held.shard for held in action.held)
        self.log.warning("lost shards %s: %s", sorted(shards), action.reason)
        for held in action.held:
            worker = self._workers.get(held.shard)
            if worker is not None and worker.held == held:
                worker.stop()
                del self._workers[held.shard]
        self._callbacks.lost(shards)

    # --- what a worker needs (see `worker.Owner`) ---------------------------------------------------------------------

    def owns(self, held: Held) -> bool:
        return self.session.owns(held, self._clock())

    def reads(self, held: Held) -> bool:
        return self.session.reads(held, self._clock())

    async def claimed(self, worker: Worker) -> None:
        if self._workers.get(worker.held.shard) is not worker:
            return  # a later worker claims it under the same token, and may be refused
        self.session.claimed(worker.held)
        if self.session.reads(worker.held, self._clock()):
            self.log.info("owns shard %d under token %d", worker.held.shard, worker.held.token)
            await self._callbacks.assigned(worker.held.shard)

    def claim_refused(self, worker: Worker, error: CoordError) -> None:
        self.log.warning("claim refused: %s", error, shard=worker.held.shard)
        _, token, member = error.detail.split()
        # Without a member it was moved by `Admin.seek`. With one under the same token, a grant was lost.
        fence_token = ANOTHER_TOKEN if member == "-" else int(token)
        # Another session has the shard, or the group was moved on it: what was finished here may come again by right.
        self._ledgers[worker.held.shard].forget()
        self._apply(self.session.claim_refused(worker.held, fence_token=fence_token))
        self._beat_if_urgent()

    def unfenced(self, worker: Worker) -> None:
        telemetry.state_conflicts.add(1, self._attributes)
        claims = self.session.unfenced(worker.held)
        self._apply(claims)
        if not claims and self._workers.get(worker.held.shard) is worker:
            # It was asked back meanwhile. Nobody else would report it, and nothing of it can be acknowledged any more.
            self._callbacks.lost(frozenset({worker.held.shard}))
            self.drained(worker)

    async def draining(self, worker: Worker) -> None:
        """The handler is done, and nothing is acknowledged yet that a callback may still want to add to."""
        # A later worker of the same token means that the shard came back meanwhile: it is not given up.
        if self._workers.get(worker.held.shard) is worker and self.session.owns(worker.held, self._clock()):
            await self._callbacks.revoked(worker.held.shard)

    def drained(self, worker: Worker) -> None:
        present = self._workers.get(worker.held.shard)
        if present is worker:
            del self._workers[worker.held.shard]
        elif present is not None and present.held == worker.held:
            return  # the shard came back under the same token: a later worker has it, and entries in handlers perhaps
        self.session.drained(worker.held)
        began = self._drain_began.pop(worker.held, None)
        if began is not None:
            telemetry.rebalance_duration.record(self._clock() - began, self._attributes)
            self.log.info("drained shard %d", worker.held.shard)
        self._beat_if_urgent()

    def paused(self, shard: int) -> bool:
        return self._pauses.paused(shard)

    def holds(self) -> int:
        return self.session.count

    def patience_seconds(self) -> float:
        # A handler that an earlier owner could not end in time to give its shard up.
        return self.session.timings.rebalance_seconds

    def failed(self, error: BaseException) -> None:
        self.log.error("a handler failed for good: %r; stopping", error, exc_info=error)
        self._fail(error)

    def stuck(self, held: Held, entry_ids: list[str], seconds: float) -> None:
        telemetry.stuck_handlers.add(1, {**self._attributes, telemetry.SHARD: held.shard})
        self.log.error(
            "handler has not returned from entries %s for %.1f s; giving the shard up",
            " ".join(entry_ids),
            seconds,
            shard=held.shard,
        )
        self._apply(self.session.surrender(held))
        self._beat_if_urgent()

    def wait_for_entries(self, shard: int, after: str) -> Coroutine[Any, Any, None]:
        return self.links.waiter.wait(StreamKeys(self.config.keys.stream).shard(shard).stream, after)

    # --- what the user may ask for ------------------------------------------------------------------------------------

    def pauses_changed(self) -> None:
        """Act upon what has been paused or resumed."""
        for worker in self._workers.values():
            if self.paused(worker.held.shard):
                worker.withdraw()
            else:
                worker.wake()

    def runs_in(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a task is that of a handler or callback, which the end of this engine waits for."""
        return self._callbacks.runs_in(task) or any(worker.runs_in(task) for worker in self._workers.values())

    async def flush(self) -> None:
        """Send all acknowledgements that are queued."""
        for worker in list(self._workers.values()):
            with contextlib.suppress(FencedError):
                await worker.flush()

    async def lag(self) -> dict[int, int | None]:
        """Ask Redis how many entries of each owned shard have not been received; ``None``: it cannot tell."""
        return {
            shard: await self.links.data.run(commands.lag(self.config.keys, shard)) for shard in sorted(self.assignment)
        }

    # --- the other tasks ----------------------------------------------------------------------------------------------

    def _beat_if_urgent(self) -> None:
        if self.session.urgent:
            self._beat.set()

    async def _watch(self) -> None:
        """Wake the heartbeat when an event concerns this member."""
        await self._joined.wait()
        while True:
            await self.links.waiter.wait(self.config.keys.events, self._last_event)
            try:
                command = commands.heard(self.config.keys, self.config.member, after=self._last_event)
                heard = await self.links.control.run(command, retry=False)
            except CoordError as error:
                # The interval still brings every change, only later.
                self.log.info("cannot read events: %s", error)
                await asyncio.sleep(min(1.0, self.session.timings.heartbeat_seconds))
                continue
            self._last_event = heard.last
            if heard.sought:
                for worker in self._workers.values():
                    worker.look()
            if heard.concerned:
                self._beat.set()
            # The first event after a quiet time is heard at once. The others of one rebalance come together: each
            # of them wakes every member of the group, though it concerns one or two.
            await asyncio.sleep(_EVENT_PAUSE_SECONDS)

    async def _guard(self) -> None:
        """Give everything up as soon as the lease has passed, even while a heartbeat hangs."""
        while True:
            left = self.session.lease_until - self._clock()
            # The sleep may be on a clock that stops in suspend: look often enough.
            await asyncio.sleep(min(max(left, 0.01), self.session.timings.lease_seconds / 10))
            if lost := self.session.tick(self._clock()):
                self._apply(lost)
                # Perhaps Redis is there, and only this process was not: it need not wait for the interval.
                self._beat.set()

    async def _retain(self) -> None:
        """Trim the shards that this member owns, if the stream wants it. The owner does it: no election is needed."""
        keys = self.config.keys
        while True:
            await asyncio.sleep(RETENTION_SECONDS)
            if not self.assignment:
                continue
            try:
                layout = await self.links.control.run(commands.layout(StreamKeys(keys.stream, keys.prefix)))
                if layout.keep is not None:
                    await self._trim(layout, layout.keep)
            except CoordError as error:
                self.log.info("not trimmed: %s", error)

    async def _trim(self, layout: Layout, keep: int) -> None:
        for worker in list(self._workers.values()):
            # On a shard that goes, groups that came since are not there. It is trimmed once it has gone: see `Duties`.
            if not self.reads(worker.held) or worker.held.shard >= layout.shards:
                continue
            trim = commands.trim(self.config.keys, worker.fence, keep=keep, groups=layout.groups)
            count, missing = await self.links.data.run(trim)
            telemetry.trimmed.add(count, self._attributes)
            if missing:
                self.log.warning("not trimmed: group %s is missing there", missing, shard=worker.held.shard)

    # --- what others may know -----------------------------------------------------------------------------------------

    @property
    def handling(self) -> bool:
        """Whether any entry is in a handler."""
        return any(ledger.busy for ledger in self._ledgers.values())

    @property
    def assignment(self) -> Shards:
        """Shards that this member owns at this moment."""
        if self._clock() >= self.session.lease_until:
            return frozenset()
        return frozenset(self.session.held(ShardState.OWNED))

    @property
    def health(self) -> Health:
        """How the consumer is, and what it waits for."""
        return vitals.health(self.session, list(self._workers.values()), self._ledgers, self._pauses, self._clock())

    def readings(self) -> list[telemetry.Reading]:
        """Return the gauges of this consumer; called by the metrics reader, on a thread of its own."""
        return vitals.readings(self.session, list(self._workers.values()), self._attributes, self._clock())
