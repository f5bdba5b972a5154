"""Phase two: nothing goes wrong any more, and everything has to come of it that was promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from redis_stream_coord.session import State

from .chance import Chance

if TYPE_CHECKING:
    from .member import Process
    from .world import World


class Healing:
    """From here on nothing goes wrong: every shard is owned and every entry handled within the promised time.

    Parameters:
        world: after phase one.

    Raises (from `run`): AssertionError: it is not, or a group does not come to rest then.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def run(self) -> None:
        world = self.world
        world.troubled = False
        world.chance = Chance(7)
        world.say("faults are over")
        self._deliver_everything()
        timings = world.profile.timings
        promised = timings.lease_seconds + timings.rebalance_seconds + 2 * timings.heartbeat_seconds
        if world.rolled_back:
            # How long a correction round may last: one lease for strangers, or one rebalance timeout.
            promised += max(timings.lease_seconds, timings.rebalance_seconds) + timings.heartbeat_seconds
        if world.profile.reshards:
            self._operate()  # it may wait for what operators began
            self._finish_resharding(promised)
        world.operator.contended = False
        self._operate()
        began = world.seconds()
        # A clock that runs slow or fast takes its part of the heartbeats.
        self._live(promised * 1.1, until=self.settled)
        assert self.settled(), f"not settled {promised} s after the last fault: {self.unsettled()}"
        world.say("settled after {} s", world.seconds() - began)
        self._live(2 * timings.heartbeat_seconds, until=lambda: False)
        world.judge.nobody_lost_anything()
        if world.profile.reshards:
            world.judge.layout.check_rest(world.judge.deliveries)
        before = [record.summary() for record in world.judge.records.values()]
        self._live(2 * timings.heartbeat_seconds, until=lambda: False)
        world.judge.nothing_is_pending()
        after = [record.summary() for record in world.judge.records.values()]
        assert after == before, f"nothing happens, and the record changes from {before} to {after}"

    def _deliver_everything(self) -> None:
        world = self.world
        while world.wire:
            command, about = world.wire.pop()
            world.perform(command, about, fresh=False)
        for process in world.processes:
            process.frozen = process.cut = False
        while world.flights:
            world.land(world.flights.pop())
        world.publisher.finish()
        world.operator.finish()
        world.resharder.finish()

    def _operate(self) -> None:
        """Operators finish what was begun, and mend what only they can."""
        world = self.world
        for keys in world.keys:
            behind = world.rolled_back and world.judge.deliveries[keys.group].is_behind()
            if behind or not world.judge.records[keys.group].header:
                # Its record is of an earlier lifecycle than its shards: that is for an operator to mend. Or it was not
                # created anew yet, or deleted by a request that came late, which nobody has finished.
                world.operator.recreate(keys, "oldest")
                world.operator.finish()
            elif "recreate" in world.profile.things:
                world.operator.create(keys, None, world.profile.timings)
                world.operator.finish()
            if all(p.session.state is State.LEAVING for p in world.processes if p.keys is keys):
                world.begin(keys, "a")

    def _finish_resharding(self, promised: float) -> None:
        """Members alone carry it to its end."""
        world, record = self.world, self.world.judge.layout
        world.resharder.waiting.clear()

        def is_over() -> bool:
            return record.saga is None or not record.saga.active

        # Twice shards change hands, to those that come and from those that go; and all is consumed in between.
        self._live(3 * promised, until=is_over)
        assert is_over(), f"{record.saga} does not end; waits for {world.resharder.waits()}"
        if not record.shards:
            world.resharder.scale(2)
            world.resharder.finish()
            self._live(3 * promised, until=is_over)
            assert is_over(), f"{record.saga} does not end; waits for {world.resharder.waits()}"
        if any(not route.fields for route in record.routes[: record.shards]):
            world.operator.repair_routes()
            world.operator.finish()

    def _live(self, seconds: float, *, until: Callable[[], bool]) -> None:
        world = self.world
        end = world.seconds() + seconds
        while not until() and world.seconds() < end:
            for keys in world.keys:
                if not any(process.keys is keys for process in world.processes):
                    world.begin(keys, "a")  # one of two processes of one id gave up, and the other was about to end
            for process in list(world.processes):
                self._let_work(process)
            world.steps += 1
            world.store.ms += 500
            for process in world.processes:
                process.tick()
                for work in process.all_works:
                    work.waits = False

    def _let_work(self, process: Process) -> None:
        world = self.world
        for _ in range(5000):
            if process.dead:
                return
            busy = False
            for work in list(process.all_works):
                busy = world.go_on(process, work) or busy
            if world.profile.reshards:
                busy = world.resharder.drive_as(process, 8) or busy
            if process.beats_now():
                process.beat()
            elif not busy:
                return
        raise AssertionError(f"{process.name} is busy without end")

    def unsettled(self) -> list[str]:
        """Return what is not as it should be, in words."""
        found: list[str] = []
        for keys in self.world.keys:
            record = self.world.judge.records[keys.group]
            readers = {p.session.nonce: p for p in self.world.processes if p.keys is keys}
            sessions = {member.nonce: member.weight for member in record.members.values()}
            wanted = {nonce: round(process.session.weight * 1000) for nonce, process in readers.items()}
            found += [f"{p.name} is about to go" for p in readers.values() if p.session.state is State.LEAVING]
            if sessions != wanted:
                # The dead have not expired yet, or of two processes of one id the one that has to go does not know yet.
                found.append(f"members {sessions}, processes {wanted}")
            if record.header.get(b"group_epoch") != record.header.get(b"assignment_epoch"):
                found.append(f"{keys.group} has yet to compute its target")
            for index, shard in record.shards.items():
                holder = record.members.get(shard.holder or "")
                if holder is None or shard.holder != shard.target or shard.state != b"assigned":
                    found.append(f"shard {index}: {shard.text!r}")
                elif holder.nonce not in readers:
                    found.append(f"shard {index} is held by nobody who lives: {shard.text!r}")
                elif index not in readers[holder.nonce].works or not readers[holder.nonce].works[index].claimed:
                    found.append(f"{holder.nonce} does not read shard {index}")
        return found

    def settled(self) -> bool:
        """Whether every shard is read by the process that it is meant for."""
        return not self.unsettled()
