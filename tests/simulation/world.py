"""Everything that can happen to a stream and its groups, one thing at a time, and what has to come of it in the end.

A step is one thing that happens: a command carried out by Redis, an answer that reaches whoever waits for it (or the
end of its patience), a handler that begins or ends, a process that starts, dies, freezes or goes on, time that passes,
a loss in Redis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from redis_stream_coord import commands
from redis_stream_coord.commands import Command, Entry, HeartbeatRequest
from redis_stream_coord.errors import CoordError, RedisUnavailableError
from redis_stream_coord.keys import GroupKeys, StreamKeys
from redis_stream_coord.session import State

from .chance import Chance
from .errands import Operator, Publisher
from .healing import Healing
from .judge import Judge
from .member import Process
from .profile import Profile
from .resharding import MOST_SHARDS, Resharder
from .store import BEGIN_MS, Store
from .work import Work

STREAM = "orders"
_WEIGHTS = (0.5, 1.0, 1.0, 1.0, 2.0)
_MOST_PROCESSES = 6
# Commands that do little harm when they come late, and such as do none.
_SMALL = frozenset({"ack", "heard", "note_deliveries", "outstanding", "publish", "read", "trim"})
_HARMLESS = frozenset({"describe", "evidence", "layout", "resharding"})


class Flight:
    """A request under way, of a process."""

    __slots__ = ("about", "command", "done", "executed", "outcome", "process", "sent_ms")

    def __init__(
        self, process: Process, command: Command[Any], about: Any, done: Callable[[Any], None], sent_ms: int
    ) -> None:
        self.process = process
        self.sent_ms = sent_ms
        self.command = command
        self.about = about
        self.done = done
        self.executed = False
        self.outcome: Any = None


class World:
    """A stream, its groups and all who use them.

    Parameters:
        store: where it happens; emptied first.
        profile: what can happen.
    """

    def __init__(self, store: Store, profile: Profile) -> None:
        store.reset()
        self.store = store
        self.profile = profile
        self.keys = [GroupKeys(STREAM, name) for name in ("billing", "shipping")[: profile.groups]]
        self.top = MOST_SHARDS if profile.reshards else profile.shards  # how many shards there may ever be
        self.judge = Judge(store, self.keys, self.top)
        self.processes: list[Process] = []
        self.flights: list[Flight] = []
        self.wire: list[tuple[Command[Any], Any]] = []  # sent long ago, not arrived yet
        self.steps = 0
        self.tried = 0  # things of phase one
        self.trace: list[str] = []
        self.tracing = False
        self.chance = Chance(0)
        self.troubled = False
        self.rolled_back = False
        self._staging = False  # requests stay under way
        self._nonces = 0
        self.publisher = Publisher(self, STREAM)
        self.operator = Operator(self, STREAM)
        self.resharder = Resharder(self, STREAM)
        for keys in self.keys:
            self.operator.create(keys, profile.shards, profile.timings)
            self.operator.finish()
        self._begun = store.calls

    # --- clocks and words ---------------------------------------------------------------------------------------------

    def seconds(self) -> float:
        """Since the beginning: short numbers for the local times of sessions."""
        return (self.store.ms - BEGIN_MS) / 1000

    def say(self, text: str, *parts: object) -> None:
        if self.tracing:
            self.trace.append(f"{self.seconds():9.3f} {text.format(*parts)}")

    def _draw_nonce(self) -> str:
        self._nonces += 1
        return f"n{self._nonces}"

    # --- what is carried ----------------------------------------------------------------------------------------------

    def perform(self, command: Command[Any], about: Any = None, *, fresh: bool = True) -> Any:
        """Redis carries out a command: one step."""
        self.steps += 1
        self.say("{} {}", command.name, about or f"{command.keys[:1]} {command.arguments}")
        outcome = self.judge.perform(command, about, fresh=fresh)
        self.say("      {}", outcome)
        return outcome

    def send(self, process: Process, command: Command[Any], about: Any, done: Callable[[Any], None]) -> None:
        """A process sends a request. Most are answered at once; with others there is trouble, or time passes first."""
        flight = Flight(process, command, about, done, self.store.ms)
        if self.troubled and self.chance.likely(self.profile.duplicates):
            self.delay(command, about)
        if self._staging or process.cut:
            self.flights.append(flight)
        else:
            self._execute(flight)
            self._answer(flight)

    def delay(self, command: Command[Any], about: Any) -> None:
        """Something arrives later than anybody waits for it; more often what moves shards than anything else."""
        if command.name in _HARMLESS:
            return
        small = command.name in _SMALL
        if isinstance(about, HeartbeatRequest):
            small = bool(about.epoch and not about.revoked and not about.refused)
        if small and self.chance.likely(70):
            return
        if len(self.wire) == self.profile.late:
            self.wire[self.chance.below(self.profile.late)] = (command, about)
        else:
            self.wire.append((command, about))

    def _execute(self, flight: Flight) -> None:
        flight.executed = True
        flight.outcome = self.perform(flight.command, flight.about)
        if self.troubled and not isinstance(flight.outcome, CoordError) and self.chance.likely(5):
            self.judge.twice(flight.command, flight.about, flight.outcome)

    def _answer(self, flight: Flight) -> None:
        self.steps += 1
        flight.done(flight.outcome)
        if flight.process.dead:
            self._bury(flight.process)

    def _bury(self, process: Process) -> None:
        """A process is no more; what it sent may still arrive."""
        process.dead = True
        if process in self.processes:
            self.processes.remove(process)
        self.judge.deliveries[process.keys.group].died(process)
        for flight in [flight for flight in self.flights if flight.process is process]:
            self.flights.remove(flight)
            if not flight.executed and self.chance.likely(50):
                self.delay(flight.command, flight.about)

    # --- the record of the handlers -----------------------------------------------------------------------------------

    def started(self, process: Process, work: Work, entry: Entry) -> None:
        self.steps += 1
        self.say("{} hands out {}/{} under {}", process.name, work.held.shard, entry.id, work.held.token)
        self.judge.deliveries[process.keys.group].started(process, work.fence, entry)

    def ended(self, process: Process, work: Work, entry: Entry, *, finished: bool) -> None:
        self.steps += 1
        self.say("{} {} {}/{}", process.name, "finished" if finished else "failed", work.held.shard, entry.id)
        self.judge.deliveries[process.keys.group].ended(process, work.fence, entry, finished=finished)

    def lost(self, process: Process, work: Work) -> None:
        """A process called `on_lost`: what is in a handler may run on beside that of the next owner."""
        held = work.held
        self.judge.deliveries[process.keys.group].surrendered.add((work.fence.nonce, held.shard, held.token))

    # --- phase one ----------------------------------------------------------------------------------------------------

    def run(self, schedule: list[tuple[str, int]]) -> None:
        """Let things happen. Raises: AssertionError: an invariant does not hold."""
        self.troubled = True
        for name, seed in schedule:
            self.tried += 1
            self.chance = Chance(seed)
            getattr(self, name)()

    def _pick(self, which: Callable[[Process], object]) -> Process | None:
        found = [process for process in self.processes if not process.frozen and which(process)]
        return self.chance.pick(found) if found else None

    def start(self) -> None:
        """A process starts, perhaps under a member id that is in use, or was."""
        if len(self.processes) < _MOST_PROCESSES:
            keys = self.chance.pick(self.keys)
            members = "abcde"[: self.profile.members]
            used = {process.session.member for process in self.processes if process.keys is keys}
            unused = [member for member in members if member not in used]
            self.begin(keys, self.chance.pick(unused if unused and self.chance.likely(80) else members))

    def begin(self, keys: GroupKeys, member: str) -> None:
        self.steps += 1
        process = Process(
            keys,
            member,
            weight=self.chance.pick(_WEIGHTS),
            rate=self.chance.pick(self.profile.rates),
            draw_nonce=self._draw_nonce,
            net=self,
            record=self,
            concurrency=self.profile.concurrency,
            prefetch=self.profile.prefetch,
            now=self.seconds,
        )
        process.slow = self.chance.likely(50)
        self.say("start {} in {}", process.name, keys.group)
        self.processes.append(process)

    def beat(self) -> None:
        process = self._pick(lambda p: not p.beating)
        if process is not None:
            process.beat()

    def send_beat(self) -> None:
        """A heartbeat that is not answered at once."""
        process = self._pick(lambda p: not p.beating)
        if process is not None:
            self._staging = True
            process.beat()
            self._staging = False

    def work(self) -> None:
        """A process goes on with one of its shards."""
        process = self._pick(lambda p: p.all_works)
        if process is not None:
            self._staging = self._in_trouble(process)
            for _ in range(3):
                if not process.all_works or self.go_on(process, self.chance.pick(process.all_works)):
                    break
            self._staging = False

    def go_on(self, process: Process, work: Work) -> bool:
        """Let a worker do one thing, if there is one. Returns whether there was."""
        running = [slot for slot in work.slots if slot.running]
        acts: list[Callable[[], None]] = []
        if work.waits and self.troubled and self.chance.likely(40):
            work.waits = False
        if work.may_call():
            acts.append(lambda: process.call(work))
        if work.may_start():
            acts += [work.start] * 2
        if running:
            slot = self.chance.pick(running)
            ok = not (self.troubled and self.chance.likely(self.profile.failing))
            acts.append(lambda: process.finish(work, slot, ok=ok))
        if work.may_send():
            acts.append(lambda: process.send_acks(work))
        if work.notices():
            work.stop()
            acts = []
        if work.stopping and not acts and not work.calling and not work.ended:
            acts.append(work.close)
        if acts:
            self.chance.pick(acts)()
        return bool(acts)

    def _in_trouble(self, process: Process) -> bool:
        return self.chance.likely(self.profile.trouble if process.slow else self.profile.trouble // 5)

    def deliver(self) -> None:
        """Something under way arrives at Redis."""
        waiting = [flight for flight in self.flights if not flight.executed and not flight.process.cut]
        if waiting:
            self._execute(self.chance.pick(waiting))

    def receive(self) -> None:
        """An answer arrives."""
        answered = [
            flight
            for flight in self.flights
            if flight.executed and not flight.process.frozen and not flight.process.cut
        ]
        if answered:
            flight = self.chance.pick(answered)
            self.flights.remove(flight)
            self._answer(flight)
            # A link that has become slow breaks down.
            slow = self.store.ms - flight.sent_ms > 2000 and "cut" in self.profile.things
            if slow and flight.command.name == "heartbeat" and self.chance.likely(40):
                self.say("cut off: {}", flight.process.name)
                flight.process.cut = True

    def give_up(self) -> None:
        """No answer comes in time: the request was lost, the reply was, or the request arrives much later."""
        waiting = [flight for flight in self.flights if not flight.process.frozen]
        if waiting:
            self._give_up(self.chance.pick(waiting))

    def _give_up(self, flight: Flight) -> None:
        self.flights.remove(flight)
        if not flight.executed and self.chance.likely(70):
            self.delay(flight.command, flight.about)
        self.say("no answer for {} {}", flight.command.name, flight.about)
        flight.outcome = RedisUnavailableError("lost")
        self._answer(flight)

    def arrive_late(self) -> None:
        """Something sent long ago arrives, perhaps not for the last time."""
        if self.wire:
            at = self.chance.below(len(self.wire))
            command, about = self.wire[at]
            if self.chance.likely(60):
                del self.wire[at]
            self.perform(command, about, fresh=False)

    def publish(self) -> None:
        self.publisher.step()

    def operate(self) -> None:
        self.operator.step()

    def hear(self) -> None:
        """A process reads the events of its group."""
        process = self._pick(lambda p: p.last_event is not None and not p.hearing)
        if process is not None:
            process.hear()

    def pass_time(self) -> None:
        """Time passes. Most processes do meanwhile what has to be done by then; patience with an answer ends."""
        self.steps += 1
        self.store.ms += self.chance.pick(self.profile.passes_ms)
        for flight in list(self.flights):
            late = self.store.ms - flight.sent_ms > self.profile.patience_ms and not flight.process.frozen
            if late and flight in self.flights and self.chance.likely(90):
                self._give_up(flight)
        for process in list(self.processes):
            if process.frozen:
                continue
            if self.chance.likely(85):
                process.tick()
            if process.beats_now() and self.chance.likely(80):
                self._staging = self._in_trouble(process)
                process.beat()
                self._staging = False

    def get_stuck(self) -> None:
        """A handler does not return, and its shard is given up without waiting for it."""
        process = self._pick(lambda p: p.works)
        if process is None:
            return
        self.steps += 1
        deliveries = self.judge.deliveries[process.keys.group]
        if process.session.state is State.LEAVING:
            # The time for a graceful end is over.
            self.say("{} abandons", process.name)
            deliveries.record.end(process.session.nonce, "abandoned")
            process.session.abandon()
            return
        work = self.chance.pick(list(process.works.values()))
        self.say("{} is stuck on {}", process.name, work.held)
        deliveries.surrendered.add((work.fence.nonce, work.held.shard, work.held.token))
        process.surrender(work)

    def crash(self) -> None:
        process = self._pick(lambda p: True)
        if process is not None:
            self.steps += 1
            self.say("crash {}", process.name)
            self._bury(process)

    def freeze(self) -> None:
        process = self._pick(lambda p: True)
        if process is not None:
            self.steps += 1
            self.say("freeze {}", process.name)
            process.frozen = True

    def thaw(self) -> None:
        frozen = [process for process in self.processes if process.frozen]
        if frozen:
            self.steps += 1
            process = self.chance.pick(frozen)
            self.say("thaw {}", process.name)
            process.frozen = False

    def cut(self) -> None:
        """A process cannot reach Redis."""
        process = self._pick(lambda p: not p.cut)
        if process is not None:
            self.steps += 1
            self.say("cut off: {}", process.name)
            process.cut = True

    def reconnect(self) -> None:
        process = self._pick(lambda p: p.cut)
        if process is not None:
            self.steps += 1
            self.say("reconnected: {}", process.name)
            process.cut = False

    def leave(self) -> None:
        process = self._pick(lambda p: not p.beating)
        if process is not None:
            self.steps += 1
            hold = self.chance.likely(30)
            self.say("leave {} hold={}", process.name, hold)
            process.apply(process.session.leave(hold=hold))
            if process.session.finished:
                self._bury(process)

    def change_weight(self) -> None:
        process = self._pick(lambda p: True)
        if process is not None:
            self.steps += 1
            process.session.weight = self.chance.pick(_WEIGHTS)

    # --- losses in Redis ----------------------------------------------------------------------------------------------

    def _lose(self, key: str, *words: str) -> None:
        self.steps += 1
        self.say("lost: {}", words)
        self.judge.lose(key, *words)

    def lose_leases(self) -> None:
        key = self.chance.pick(self.keys).leases
        self._lose(key, "DEL", key)

    def lose_events(self) -> None:
        key = self.chance.pick(self.keys).events
        self._lose(key, "DEL", key)

    def lose_fence(self) -> None:
        key = self.chance.pick(self.keys).fence(self.chance.below(self.top))
        self._lose(key, "DEL", key)

    def lose_consumer_group(self) -> None:
        stream = StreamKeys(STREAM).shard(self.chance.below(self.top)).stream
        with contextlib.suppress(CoordError):  # a shard that was never there
            self._lose(stream, "XGROUP", "DESTROY", stream, self.chance.pick(self.keys).group)

    def lose_route(self) -> None:
        key = StreamKeys(STREAM).shard(self.chance.below(self.top)).route
        self._lose(key, "DEL", key)

    def rollback(self) -> None:
        """A failover: the latest writes are lost, on all slots or on some."""
        self._roll_back(self.chance.pick((1, 2, 3, 5, 10, 20)))

    def restore(self) -> None:
        """An old snapshot is restored."""
        self._roll_back(self.chance.pick((50, 100, 200)))

    def _roll_back(self, calls: int) -> None:
        self.steps += 1
        slots = None
        if not self.profile.reshards and self.chance.likely(30):
            slots = [f"{STREAM}:{shard}" for shard in range(self.top) if self.chance.likely(50)]
            slots += [f"{STREAM}:{keys.group}" for keys in self.keys if self.chance.likely(50)]
        calls = max(self._begun, self.store.calls - calls)
        self.say("rolled back to call {} on {}", calls, slots or "all slots")
        self.rolled_back = True
        if self.profile.reshards:
            # What was on its way dies with the server that was lost, and drivers read the record again.
            self.wire.clear()
            self.resharder.break_off()
        self.judge.roll_back(calls, slots)
        self.store.ms += 5  # what is lost took at least that long

    # --- reshardings ------------------------------------------------------------------------------------------------

    def reshard(self) -> None:
        self.resharder.step()

    def drive(self) -> None:
        self.resharder.drive()

    def wait(self) -> None:
        """Some time passes while somebody waits for something; whoever carries a resharding on does so."""
        self.store.ms += 100
        for process in self.processes:
            self.resharder.drive_as(process, 8)

    # --- operators ----------------------------------------------------------------------------------------------------

    def seek(self) -> None:
        if not self.operator.busy:
            self.operator.seek(self.chance.pick(self.keys), self._place())

    def _place(self) -> str:
        items = list(self.judge.items.values())
        if items and self.chance.likely(60):
            return self.chance.pick(items).id
        return self.chance.pick(("oldest", "newest"))

    def recreate(self) -> None:
        if not self.operator.busy:
            # A creation that begins at the end, comes late, and meets a shard that has lost its consumer group and what
            # was recorded of it, skips entries: three things at once, which nothing that is stored can tell apart.
            whole = not {"lose_fence", "lose_consumer_group"} & set(self.profile.things)
            start = self.chance.pick(("oldest", "new")) if whole else "oldest"
            self.operator.recreate(self.chance.pick(self.keys), start)

    def trim(self) -> None:
        """The owner of a shard trims it; shards that went are trimmed by whoever has the duty."""
        if self.profile.reshards and self.chance.likely(30):
            self.resharder.trim(self.chance.pick((0, 0, 3)))
            return
        process = self._pick(lambda p: p.works)
        if process is None:
            return
        work = self.chance.pick(list(process.works.values()))
        if process.reads(work.held):
            names = [keys.group for keys in self.keys]
            command = commands.trim(process.keys, work.fence, keep=self.chance.pick((0, 0, 3)), groups=names)
            self.send(process, command, work.fence, lambda outcome: None)

    # --- phase two ----------------------------------------------------------------------------------------------------

    def land(self, flight: Flight) -> None:
        """Something that was under way arrives, and is answered."""
        if not flight.executed:
            self._execute(flight)
        self._answer(flight)

    def heal(self) -> None:
        """See `Healing`."""
        Healing(self).run()
