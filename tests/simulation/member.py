"""One process of the simulation: a real session, and what its engine does around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from redis_stream_coord import commands
from redis_stream_coord.commands import Command, Entry, Fence, HeartbeatReply, HeartbeatRequest
from redis_stream_coord.errors import CoordError
from redis_stream_coord.keys import GroupKeys
from redis_stream_coord.models import Held
from redis_stream_coord.session import ANOTHER_TOKEN, Action, Claim, Drain, Session

from .work import Ledger, Slot, Work

if TYPE_CHECKING:
    from .errands import Errand


class Record(Protocol):
    """Where it is written down what handlers did: the only thing that the judge knows of a process."""

    def started(self, process: Process, work: Work, entry: Entry) -> None: ...
    def ended(self, process: Process, work: Work, entry: Entry, *, finished: bool) -> None: ...
    def lost(self, process: Process, work: Work) -> None: ...


class Net(Protocol):
    """What carries a process's requests."""

    def send(self, process: Process, command: Command[Any], about: Any, done: Callable[[Any], None]) -> None: ...


class Process:
    """One process.

    Parameters:
        keys: of its group.
        member: member id.
        weight: share of the shards.
        rate: speed of its clock in relation to that of Redis.
        draw_nonce: for its sessions.
        net: carries its requests.
        record: of what handlers did.
        concurrency, prefetch: of its workers.
        now: seconds on the clock of the world.
    """

    def __init__(
        self,
        keys: GroupKeys,
        member: str,
        *,
        weight: float,
        rate: float,
        draw_nonce: Callable[[], str],
        net: Net,
        record: Record,
        concurrency: int,
        prefetch: int,
        now: Callable[[], float],
    ) -> None:
        self.keys = keys
        self.session = Session(member, weight=weight, draw_nonce=draw_nonce)
        self.works: dict[int, Work] = {}
        self.all_works: list[Work] = []  # with those that only wait for their handlers
        self.ledgers: dict[int, Ledger] = {}
        self.frozen = False
        self.cut = False  # cannot reach Redis
        self.slow = False  # its requests are often under way for long
        self.dead = False
        self.due = 0.0  # when its engine sends the next heartbeat, if nothing urgent comes first
        self.beating = False
        self.hearing = False
        self.last_event: str | None = None
        self.duty_until = 0.0  # what the stream has under way is its to carry on
        self.driver: Errand | None = None
        self._rate = rate
        self._now = now
        self._net = net
        self._record = record
        self._concurrency = concurrency
        self._prefetch = prefetch

    @property
    def now(self) -> float:
        """The time on its own clock."""
        return self._now() * self._rate

    @property
    def name(self) -> str:
        return f"{self.session.member}/{self.session.nonce}"

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Send a heartbeat."""
        self.beating = True
        request = self.session.request()
        sent_at = self.now
        self._net.send(
            self,
            commands.heartbeat(self.keys, request),
            request,
            lambda outcome: self._answered(request, outcome, sent_at),
        )

    def _answered(self, request: HeartbeatRequest, outcome: HeartbeatReply | CoordError, sent_at: float) -> None:
        self.beating = False
        session = self.session
        if isinstance(outcome, CoordError):
            self.apply(session.refused(outcome, now=self.now))
        else:
            if self.last_event is None:
                self.last_event = outcome.last_event
            if outcome.duty:
                self.duty_until = sent_at + outcome.timings.heartbeat_seconds
            # The lease may have passed while the answer was on its way: workers have noticed, so the session has to.
            self.apply(session.tick(self.now))
            self.apply(session.accepted(request, outcome, sent_at=sent_at))
        self.due = self.now + session.delay(self.now)
        if session.finished:
            # The end of the engine: handlers are cancelled with it.
            self.dead = True

    def beats_now(self) -> bool:
        """Whether the engine would send a heartbeat by now."""
        return (
            not self.beating
            and not self.session.finished
            and (self.now >= self.due or self.session.delay(self.now) == 0)
        )

    def hear(self) -> None:
        """Read the events of the group."""
        assert self.last_event is not None
        self.hearing = True
        command = commands.heard(self.keys, self.session.member, after=self.last_event)
        self._net.send(self, command, None, self._heard)

    def _heard(self, outcome: Any) -> None:
        self.hearing = False
        if isinstance(outcome, CoordError):
            return
        self.last_event = outcome.last
        if outcome.sought:
            for work in self.works.values():
                work.look()
        if outcome.concerned:
            self.due = 0.0

    def tick(self) -> None:
        """The guard of the lease looks at the clock."""
        self.apply(self.session.tick(self.now))

    # --- what the session decides -------------------------------------------------------------------------------------

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Claim):
                self._claim(action.held)
            elif isinstance(action, Drain):
                for held in action.held:
                    self._stop(held)
            else:
                for held in action.held:
                    for lost in self.all_works:
                        if lost.held == held:
                            self._record.lost(self, lost)  # `on_lost` is called
                    work = self.works.get(held.shard)
                    if work is not None and work.held == held:
                        del self.works[held.shard]
                        work.stop()
                        work.close()

    def _claim(self, held: Held) -> None:
        session = self.session
        fence = Fence(held.shard, session.member, session.nonce, session.incarnation, held.token)
        ledger = self.ledgers.setdefault(held.shard, Ledger())
        ledger.enter(session.incarnation)
        work = Work(self, self.keys, fence, ledger, concurrency=self._concurrency, prefetch=self._prefetch)
        old = self.works.get(held.shard)
        self.works[held.shard] = work
        self.all_works.append(work)
        if old is not None:
            work.before = old if old.held == held else None
            old.stop()
            old.close()

    def _stop(self, held: Held) -> None:
        work = self.works.get(held.shard)
        if work is not None and work.held == held:
            work.stop()
            work.close()
        else:
            # No worker means no handler: there is nothing to wait for.
            self.session.drained(held)

    # --- what a worker needs ------------------------------------------------------------------------------------------

    def owns(self, held: Held) -> bool:
        return self.session.owns(held, self.now)

    def reads(self, held: Held) -> bool:
        return self.session.reads(held, self.now)

    def claimed(self, work: Work) -> None:
        if self.works.get(work.held.shard) is work:
            self.session.claimed(work.held)

    def claim_refused(self, work: Work, error: CoordError) -> None:
        _, token, member = error.detail.split()
        work.ledger.forget()
        fence_token = ANOTHER_TOKEN if member == "-" else int(token)
        self.apply(self.session.claim_refused(work.held, fence_token=fence_token))

    def unfenced(self, work: Work) -> None:
        self._forget(work)
        claims = self.session.unfenced(work.held)
        self.apply(claims)
        if not claims and self.works.get(work.held.shard) is work:
            # It was asked back meanwhile. Nobody else would report it.
            self.drained(work)

    def drained(self, work: Work) -> None:
        self._forget(work)
        present = self.works.get(work.held.shard)
        if present is work:
            del self.works[work.held.shard]
        elif present is not None and present.held == work.held:
            return
        self.session.drained(work.held)

    def _forget(self, work: Work) -> None:
        if work in self.all_works:
            self.all_works.remove(work)
        for later in [later for later in self.all_works if later.before is work]:
            later.close()

    def started(self, work: Work, entry: Entry) -> None:
        self._record.started(self, work, entry)

    def ended(self, work: Work, entry: Entry, *, finished: bool) -> None:
        self._record.ended(self, work, entry, finished=finished)

    def say(self, work: Work, command: Command[None]) -> None:
        self._net.send(self, command, work.fence, lambda _: work.said())

    # --- one thing after another --------------------------------------------------------------------------------------

    def surrender(self, work: Work) -> None:
        """A handler of this worker does not return."""
        self.apply(self.session.surrender(work.held))

    def call(self, work: Work) -> None:
        self._net.send(self, work.call(), work.fence, work.called)

    def send_acks(self, work: Work) -> None:
        command, batch = work.send()
        self._net.send(self, command, work.fence, lambda outcome: work.sent(batch, outcome))

    def finish(self, work: Work, slot: Slot, *, ok: bool) -> None:
        command = work.finish(slot, ok=ok)
        if command is not None:
            self._net.send(self, command, work.fence, lambda outcome: work.noted(slot, outcome))
