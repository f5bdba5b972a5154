"""Many sessions and one real group, driven by chance: replies get lost, requests come late or twice, processes die."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import attrs

from redis_stream_coord.commands import Fence, HeartbeatReply, HeartbeatRequest
from redis_stream_coord.errors import CoordError, FencedError, RedisUnavailableError
from redis_stream_coord.group_view import GroupView
from redis_stream_coord.models import Held
from redis_stream_coord.session import Action, Claim, Drain, Session, ShardState
from tests.unit.fake import FakeGroup
from tests.unit.judge import Judge

_MEMBERS = ("a", "b", "c", "d", "e")
_WEIGHTS = (0.5, 1.0, 1.0, 2.0)
_STEPS_SECONDS = (0.01, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 14.0, 16.0, 21.0)
_TICK_SECONDS = 0.25


@attrs.define
class Flight:
    """A heartbeat under way."""

    request: HeartbeatRequest
    sent_at: float
    outcome: HeartbeatReply | CoordError | None = None
    restores: int = 0  # at its answer

    def fresh(self, judge: Judge) -> bool:
        """Whether the answer is of the record as it is now, and not as it was before a restore."""
        return self.restores == judge.restores


class Process:
    """One process: a session, and the work that its engine has still to do for it."""

    def __init__(self, member: str, weight: float, draw_nonce: Callable[[], str]) -> None:
        self.session = Session(member, weight=weight, draw_nonce=draw_nonce)
        self.claims: list[Fence] = []
        self.drains: list[Held] = []
        self.flight: Flight | None = None
        self.due = 0.0  # when its engine sends the next heartbeat, if nothing urgent comes first

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Claim):
                self.drop(action.held)
                self.claims.append(self.fence(action.held))
            elif isinstance(action, Drain):
                self.drains += action.held
            else:
                for held in action.held:
                    self.drop(held)

    def fence(self, held: Held) -> Fence:
        session = self.session
        return Fence(held.shard, session.member, session.nonce, session.incarnation, held.token)

    def drop(self, held: Held) -> None:
        self.claims = [fence for fence in self.claims if fence.shard != held.shard]
        self.drains = [drain for drain in self.drains if drain.shard != held.shard]


class World:
    """Everything that can happen, one thing at a time.

    Parameters:
        group: where it happens.
        rng: decides.
    """

    def __init__(self, group: FakeGroup, rng: random.Random) -> None:
        self.group = group
        self.rng = rng
        self.judge = Judge(group)
        self.processes: list[Process] = []
        self.wire: list[HeartbeatRequest | Fence] = []  # sent long ago, not arrived yet
        self.trace: list[str] = []
        self._nonces = 0
        self._things: dict[Callable[[], None], int] = {
            self.start: 6,
            self.beat: 40,
            self.send: 8,
            self.deliver: 8,
            self.receive: 8,
            self.give_up: 4,
            self.arrive_late: 6,
            self.claim: 14,
            self.drain: 10,
            self.read: 4,
            self.get_stuck: 2,
            self.pass_time: 14,
            self.crash: 2,
            self.leave: 3,
            self.change_weight: 2,
            self.lose_keys: 1,
            self.back_up: 1,
            self.restore: 1,
        }
        self._backup: dict[bytes, bytes] | None = None
        self.rolled_back = False

    @property
    def now(self) -> float:
        return self.group.clock.seconds

    def run(self, steps: int) -> None:
        """Do so many things by chance."""
        for thing in self.rng.choices(list(self._things), weights=list(self._things.values()), k=steps):
            thing()
            self.judge.check_believers(process.session for process in self.processes)

    def say(self, text: str) -> None:
        self.trace.append(f"{self.now:9.2f} {text}")

    def _draw_nonce(self) -> str:
        self._nonces += 1
        return f"n{self._nonces}"

    def _pick(self, which: Callable[[Process], object] = bool) -> Process | None:
        found = [process for process in self.processes if which(process)]
        return self.rng.choice(found) if found else None

    def _remove(self, process: Process) -> None:
        self.processes.remove(process)
        if process.flight is not None and process.flight.outcome is None and self.rng.random() < 0.5:
            self.wire.append(process.flight.request)

    # --- things that happen -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A process starts, perhaps under a member id that is in use, or was."""
        if len(self.processes) < 6:
            process = Process(self.rng.choice(_MEMBERS), self.rng.choice(_WEIGHTS), self._draw_nonce)
            self.processes.append(process)
            self.say(f"start {process.session.member} {process.session.nonce}")

    def send(self) -> None:
        process = self._pick(lambda p: p.flight is None)
        if process is not None:
            self._send(process)

    def _send(self, process: Process) -> Flight:
        process.flight = Flight(process.session.request(), self.now)
        self.say(f"send {_short(process.flight.request)}")
        return process.flight

    def deliver(self) -> None:
        process = self._pick(lambda p: p.flight is not None and p.flight.outcome is None)
        if process is not None and process.flight is not None:
            self._deliver(process.flight)

    def _deliver(self, flight: Flight) -> None:
        flight.outcome, flight.restores = self.judge.heartbeat(flight.request, fresh=True), self.judge.restores
        self.say(f"answer to {flight.request.nonce}: {_short(flight.outcome)}")
        if isinstance(flight.outcome, HeartbeatReply) and self.rng.random() < 0.1:
            self.judge.repeat(flight.request, flight.outcome)

    def receive(self) -> None:
        process = self._pick(lambda p: p.flight is not None and p.flight.outcome is not None)
        if process is not None and process.flight is not None:
            self._receive(process, process.flight)

    def _receive(self, process: Process, flight: Flight) -> None:
        process.flight = None
        if isinstance(flight.outcome, HeartbeatReply):
            process.apply(process.session.accepted(flight.request, flight.outcome, sent_at=flight.sent_at))
            if flight.fresh(self.judge):
                self.judge.stale.discard(flight.request.nonce)
        else:
            assert flight.outcome is not None
            process.apply(process.session.refused(flight.outcome, now=self.now))
        process.due = self.now + process.session.delay(self.now)
        if process.session.finished:
            self.say(f"{process.session.nonce} is {process.session.state.value}")
            self.processes.remove(process)

    def beat(self) -> None:
        """A heartbeat without trouble."""
        process = self._pick(lambda p: p.flight is None)
        if process is not None:
            self._beat(process)

    def _beat(self, process: Process) -> None:
        flight = self._send(process)
        self._deliver(flight)
        self._receive(process, flight)

    def give_up(self) -> None:
        """No answer comes in time: the request was lost, the reply was, or the request arrives much later."""
        process = self._pick(lambda p: p.flight is not None)
        if process is not None and process.flight is not None:
            flight, process.flight = process.flight, None
            if flight.outcome is None and self.rng.random() < 0.7:
                self.wire.append(flight.request)
            self.say(f"no answer for {flight.request.nonce}")
            process.apply(process.session.refused(RedisUnavailableError("lost"), now=self.now))
            process.due = self.now + process.session.delay(self.now)

    def arrive_late(self) -> None:
        """Something sent long ago arrives, perhaps not for the last time."""
        if not self.wire:
            return
        late = self.rng.choice(self.wire)
        if self.rng.random() < 0.6:
            self.wire.remove(late)
        self.say(f"late: {_short(late)}")
        if isinstance(late, Fence):
            self._claim_late(late)
        else:
            self.judge.heartbeat(late, fresh=False)

    def _claim_late(self, fence: Fence) -> None:
        with contextlib.suppress(FencedError):
            self.judge.claim(fence)

    def claim(self) -> None:
        process = self._pick(lambda p: p.claims)
        if process is not None:
            self._claim(process, self.rng.choice(process.claims), trouble=self.rng.random() < 0.3)

    def _claim(self, process: Process, fence: Fence, *, trouble: bool) -> None:
        if trouble:
            # Without an answer the worker tries again.
            if self.rng.random() < 0.5:
                self.wire.append(fence)
            else:
                self._claim_late(fence)
            return
        held = Held(fence.shard, fence.token)
        process.claims.remove(fence)
        self.say(f"claim {_short(fence)}")
        try:
            self.judge.claim(fence)
        except FencedError as error:
            process.apply(process.session.claim_refused(held, fence_token=int(error.detail.split()[1])))
        else:
            process.session.claimed(held)

    def drain(self) -> None:
        process = self._pick(lambda p: p.drains)
        if process is not None:
            self._drain(process, self.rng.choice(process.drains))

    def _drain(self, process: Process, held: Held) -> None:
        process.drop(held)
        self.say(f"drained {process.session.nonce} {held.shard}:{held.token}")
        process.session.drained(held)

    def read(self) -> None:
        process = self._pick(lambda p: p.session.held(ShardState.OWNED))
        if process is not None:
            self._read(process)

    def _read(self, process: Process) -> None:
        held = Held(*self.rng.choice(list(process.session.held(ShardState.OWNED).items())))
        if not process.session.reads(held, self.now):
            return
        try:
            self.judge.read(process.fence(held))
        except FencedError:
            process.apply(process.session.unfenced(held))

    def get_stuck(self) -> None:
        """A handler does not return, and its shard is given up without waiting for it."""
        process = self._pick(lambda p: p.session.held(ShardState.OWNED, ShardState.DRAINING))
        if process is not None:
            held = process.session.held(ShardState.OWNED, ShardState.DRAINING)
            shard, token = self.rng.choice(list(held.items()))
            self.say(f"stuck {process.session.nonce} {shard}:{token}")
            process.apply(process.session.surrender(Held(shard, token)))

    def pass_time(self) -> None:
        """Time passes; some processes are asleep meanwhile and do not notice."""
        self.group.clock.advance(self.rng.choice(_STEPS_SECONDS))
        for process in self.processes:
            if self.rng.random() < 0.8:
                process.apply(process.session.tick(self.now))

    def crash(self) -> None:
        process = self._pick()
        if process is not None:
            self.say(f"crash {process.session.nonce}")
            self._remove(process)

    def leave(self) -> None:
        process = self._pick(lambda p: p.flight is None)
        if process is not None:
            hold = self.rng.random() < 0.3
            self.say(f"leave {process.session.nonce} hold={hold}")
            process.apply(process.session.leave(hold=hold))
            if process.session.finished:
                self.processes.remove(process)

    def change_weight(self) -> None:
        process = self._pick()
        if process is not None:
            process.session.weight = self.rng.choice(_WEIGHTS)

    def lose_keys(self) -> None:
        if self.rng.random() < 0.3:
            self.say("leases lost")
            self.judge.lose_leases()
        else:
            shard = self.rng.randrange(len(self.judge.view.shards))
            self.say(f"fence of {shard} lost")
            self.judge.lose_fence(shard)

    def back_up(self) -> None:
        """Somebody, or Redis itself, keeps a copy of everything as it is now."""
        client = self.group.client
        kept = {key: client.dump(key) for key in client.keys("redis-stream:coord:*") if b":published" not in key}
        self._backup = kept

    def restore(self) -> None:
        """The record of the group is as it was at the last copy; perhaps all other keys of the library are, too."""
        if self._backup is None:
            return
        client, whole = self.group.client, self.rng.random() < 0.5
        record = self.group.keys.metadata.encode()
        if whole:
            client.delete(*client.keys("redis-stream:coord:*"))
        for key, value in self._backup.items():
            if whole or key == record:
                client.restore(key, 0, value, replace=True)
        self._backup, self.rolled_back = None, True
        # It takes longer than to grant a shard.
        self.group.clock.advance(1)
        self.say(f"restored: {'everything' if whole else 'the record'}")
        self.judge.went_back({process.session.nonce for process in self.processes}, fences=whole)

    # --- without faults -----------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """From here on nothing goes wrong: everything is owned, by the right member, within the promised time.

        Raises:
            AssertionError: it is not, or the group does not come to rest then.
        """
        for late in self.wire:
            if isinstance(late, HeartbeatRequest):
                self.judge.heartbeat(late, fresh=False)
            else:
                self._claim_late(late)
        self.wire.clear()
        if all(process.session.state.value == "leaving" for process in self.processes):
            self.processes.append(Process("a", 1.0, self._draw_nonce))
        timings = self.judge.view.timings
        promised = timings.lease_seconds + timings.rebalance_seconds + 2 * timings.heartbeat_seconds
        if self.rolled_back:
            # How long a correction round may last: one lease for strangers, or one rebalance timeout.
            promised += max(timings.lease_seconds, timings.rebalance_seconds) + timings.heartbeat_seconds
        began = self.now
        self.say("faults are over")
        self._live(promised, until=self.settled)
        assert self.settled(), f"not settled {promised} s after the last fault: {self.unsettled()}"
        self.say(f"settled after {self.now - began:.2f} s")
        # A member may have to hear of its last change, and a deadline that has become void to pass.
        self._live(timings.heartbeat_seconds, until=lambda: False)
        before = at_rest(self.judge.view)
        self._live(2 * timings.heartbeat_seconds, until=lambda: False)
        assert at_rest(self.judge.view) == before, "nothing happens, and the record changes"

    def _live(self, seconds: float, *, until: Callable[[], bool]) -> None:
        end = self.now + seconds
        while not until() and self.now < end:
            for process in list(self.processes):
                self._work(process)
            self.group.clock.advance(_TICK_SECONDS)
            for process in self.processes:
                process.apply(process.session.tick(self.now))
            self.judge.check_believers(process.session for process in self.processes)

    def _work(self, process: Process) -> None:
        for _ in range(20):
            for fence in list(process.claims):
                self._claim(process, fence, trouble=False)
            for held in list(process.drains):
                self._drain(process, held)
            for shard, token in process.session.held(ShardState.OWNED).items():
                try:
                    self.judge.read(process.fence(Held(shard, token)))
                except FencedError:
                    process.apply(process.session.unfenced(Held(shard, token)))
            if process.flight is not None:
                if process.flight.outcome is None:
                    self._deliver(process.flight)
                self._receive(process, process.flight)
            elif process.session.delay(self.now) == 0 or self.now >= process.due:
                self._beat(process)
            else:
                return
            if process.session.finished:
                return
        raise AssertionError(f"{process.session.nonce} has something to say again and again")

    def unsettled(self) -> list[str]:
        """Return what is not as it should be, in words."""
        view, found = self.judge.view, []
        readers = {p.session.nonce: p for p in self.processes}
        sessions = {member.nonce: member.weight for member in view.members.values()}
        wanted = {nonce: process.session.weight for nonce, process in readers.items()}
        if sessions != wanted:
            # The dead have not expired yet, or of two processes of one id the one that has to go does not know yet.
            found.append(f"members {sessions}, processes {wanted}")
        for shard in view.shards.values():
            holder = view.members.get(shard.holder or "")
            if holder is None or shard.holder != shard.target or shard.state != "assigned":
                found.append(f"{shard}")
                continue
            process = readers.get(holder.nonce)
            if process is None or not process.session.reads(Held(shard.index, shard.token), self.now):
                found.append(f"{holder.id} {holder.nonce} does not read shard {shard.index}")
        return found

    def settled(self) -> bool:
        """Whether every shard is read by the process that it is meant for."""
        return not self.unsettled()


def at_rest(view: GroupView) -> tuple[object, ...]:
    """Return what does not change while nothing happens."""
    epochs = {member.id: member.epoch for member in view.members.values()}
    return view.group_epoch, view.assignment_epoch, view.grant_counter, view.shards, epochs


def _short(what: HeartbeatRequest | HeartbeatReply | CoordError | Fence) -> str:
    if isinstance(what, CoordError):
        return f"{what.word} {what.detail}"
    if isinstance(what, Fence):
        return f"{what.nonce} {what.shard}:{what.token}"
    if isinstance(what, HeartbeatReply):
        lists = "unchanged" if what.holdings is None else f"{what.holdings.assigned} revoking {what.holdings.revoking}"
        return f"{what.status} version {what.version} epoch {what.epoch} of {what.group_epoch}: {lists}"
    owned, revoked = ([f"{held.shard}:{held.token}" for held in some] for some in (what.owned, what.revoked))
    return (
        f"{what.member} {what.nonce} epoch {what.epoch} owned {owned} revoked {revoked} refused {what.refused}"
        f"{' leaving' if what.leaving else ''}{f' replaces {what.replaces}' if what.replaces else ''}"
    )
