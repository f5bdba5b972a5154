"""The faults of a soak: signals to consumers and restarts of Redis, at random times drawn from a seed."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from redis_stream_coord import Timings
from tests.chaos.fleet import LEAVE_SECONDS, Fleet
from tests.chaos.soak_judge import End, Fault
from tests.chaos.witness import Witness
from tests.servers import Server
from tests.waiting import eventually

# Each comes so often in a shuffled deck; when it is empty, it is shuffled anew. So a short run has all of them too.
_DECK = ("kill", "kill", "terminate", "terminate", "nap", "nap", "sleep", "redis-term", "redis-kill")
_NAP_LEASES = (0.05, 0.6)  # length of a suspension, in leases: the lease goes on
_SLEEP_LEASES = (1.3, 2.2)  # and it ends
_OUTAGE_LEASES = (0.0, 0.7)
_LONG_OUTAGE_LEASES = (1.1, 1.6)  # one in three
_AWAY_LEASES = (0.0, 1.0)  # until a process that was killed is replaced
_STOP_SECONDS = 5.0


class Storm:
    """Does to processes and to Redis what a seed says, and keeps a record of it.

    Parameters:
        seed: of all that is random.
        timings: of the group.
        pace_seconds: between two faults, on average.
        server: Redis.
        fleet: the processes.
        witness: looks at Redis.
        options: of each consumer, see `Fleet.start`.
        say: told what happens.
    """

    def __init__(
        self,
        seed: int,
        *,
        timings: Timings,
        pace_seconds: float,
        server: Server,
        fleet: Fleet,
        witness: Witness,
        options: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self._draw = random.Random(seed)
        self._lease = timings.lease_seconds
        self._pace = pace_seconds
        self._server, self._fleet, self._witness, self._options = server, fleet, witness, options
        self._began = time.monotonic()
        self._say = lambda text: say(f"{time.monotonic() - self._began:6.1f} s  {text}")
        self._deck: list[str] = []
        self._ids = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._faces: dict[str, str] = {}
        self._down_ns = 0  # since when Redis is away; 0: it is there
        self._asleep: dict[str, int] = {}  # process -> since when
        self._seen: dict[str, tuple[frozenset[tuple[int, str]], dict[int, str]]] = {}  # what a sleeping one left
        self._leaving: dict[str, int] = {}
        self._unseen: list[Callable[[], None]] = []  # to be looked at when Redis is back
        self.members: dict[str, str] = {}
        self.steady: set[str] = set()
        self.kills: list[End] = []
        self.leaves: list[End] = []
        self.suspensions: list[Fault] = []
        self.outages: list[Fault] = []

    # --- time ---------------------------------------------------------------------------------------------------------

    def start(self, face: str, *, steady: bool = False, member: str | None = None) -> None:
        """Start a process.

        Parameters:
            face: see `Fleet.start`.
            steady: it is only ever suspended.
            member: its member id, if not its name.
        """
        options = [*self._options, *(("--member", member) if member else ())]
        name = self._fleet.start(face, options)
        self.members[name] = member or name
        self._faces[name] = face
        if steady:
            self.steady.add(name)

    def begin(self) -> None:
        """From now on there are faults."""
        self._began = time.monotonic()
        self._after(self._pace, self._next)

    def step(self) -> None:
        """Do what is due."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        for name in [name for name in self._leaving if self._fleet.alive[name].status is not None]:
            self._left(name)

    def end(self) -> None:
        """No more faults: everybody is woken, Redis comes back, and whoever is away is replaced."""
        self._pace = 0
        for name in list(self._asleep):
            self._wake(name)
        if self._down_ns:
            self._back()
        deadline = time.monotonic() + LEAVE_SECONDS
        while self._leaving and time.monotonic() < deadline:
            self.step()
            time.sleep(0.05)
        for name in list(self._leaving):
            self._left(name)
        while self._due:
            heapq.heappop(self._due)[2]()

    def fallen(self) -> list[str]:
        """Return, in words, which processes ended without having been told to."""
        return [text for text in self._fleet.fallen() if text.split()[0] not in self._leaving]

    def leave(self) -> None:
        """Let all leave, and note how they did."""
        at_ns = time.monotonic_ns()
        names = list(self._fleet.alive)
        self._fleet.leave()
        for name in names:
            status = self._fleet.alive[name].status
            late = status == -signal.SIGKILL
            self.leaves.append(End(name, at_ns, None if late else time.monotonic_ns(), status))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._ids), act))

    def _next(self) -> None:
        if not self._pace:
            return
        if not self._deck:
            self._deck = list(_DECK)
            self._draw.shuffle(self._deck)
        what = self._deck.pop()
        if not self._do(what):
            self._deck.insert(0, what)  # nobody to do it to at the moment: later
        self._after(self._pace * self._draw.uniform(0.3, 1.7), self._next)

    def _do(self, what: str) -> bool:
        """Let something happen. Returns whether it did."""
        if what.startswith("redis"):
            return self._restart(signal.SIGTERM if what == "redis-term" else signal.SIGKILL)
        name = self._choose(mortal=what in ("kill", "terminate"))
        if name is None:
            return False
        if what == "kill":
            self._kill(name)
        elif what == "terminate":
            self._terminate(name)
        else:
            self._suspend(name, _NAP_LEASES if what == "nap" else _SLEEP_LEASES)
        return True

    def _choose(self, *, mortal: bool) -> str | None:
        """Draw a process that has handled something, and nobody is ending or keeps asleep."""
        able = [
            name
            for name in sorted(self._fleet.alive)
            if self._fleet.has_handled(name)
            and name not in self._leaving
            and name not in self._asleep
            and not (mortal and name in self.steady)
        ]
        return self._draw.choice(able) if able else None

    def _lasting(self, leases: tuple[float, float]) -> float:
        return self._draw.uniform(*leases) * self._lease

    # --- consumers ----------------------------------------------------------------------------------------------------

    def _kill(self, name: str) -> None:
        at_ns = self._fleet.sigkill(name)
        member = self.members.pop(name)
        self._say(f"SIGKILL {name}")
        # Under the same id it comes back to its shards at once, so not before somebody has seen what is pending there.
        again = member if self._draw.random() < 0.5 else None
        delay, face = self._lasting(_AWAY_LEASES), self._faces[name]

        def look() -> None:
            pending, firsts = self._witness.left_by(member)
            self.kills.append(End(name, at_ns, pending=pending, firsts=firsts))
            self._after(delay, lambda: self.start(face, member=again))

        self._when_there(look)

    def _terminate(self, name: str) -> None:
        self._say(f"SIGTERM {name}")
        self._leaving[name] = time.monotonic_ns()
        self._fleet.alive[name].terminate()
        self._after(LEAVE_SECONDS, lambda: self._left(name) if name in self._leaving else None)

    def _left(self, name: str) -> None:
        child = self._fleet.dead[name] = self._fleet.alive.pop(name)
        ended_ns = None if child.status is None else time.monotonic_ns()
        self.leaves.append(End(name, self._leaving.pop(name), ended_ns, child.status))
        child.end(0)
        member = self.members.pop(name)
        self._say(f"{name} has left with status {child.status}")
        face, again = self._faces[name], member if self._draw.random() < 0.5 else None
        self._after(self._lasting(_AWAY_LEASES), lambda: self.start(face, member=again))

    def _suspend(self, name: str, leases: tuple[float, float]) -> None:
        pid = self._fleet.alive[name].pid
        from_ns = time.monotonic_ns()
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: _is_stopped(pid), what=f"{name} is stopped")
        seconds = self._lasting(leases)
        self._say(f"SIGSTOP {name} for {seconds:.1f} s")
        self._asleep[name] = from_ns

        def look() -> None:
            if name in self._asleep:
                self._seen[name] = self._witness.left_by(self.members[name])

        self._when_there(look)
        self._after(seconds, lambda: self._wake(name) if name in self._asleep else None)

    def _wake(self, name: str) -> None:
        from_ns = self._asleep.pop(name)
        pending, firsts = self._seen.pop(name, (None, {}))
        os.kill(self._fleet.alive[name].pid, signal.SIGCONT)
        self._say(f"SIGCONT {name}")
        self.suspensions.append(Fault(name, from_ns, time.monotonic_ns(), pending, firsts))

    # --- Redis --------------------------------------------------------------------------------------------------------

    def _restart(self, number: signal.Signals) -> bool:
        if self._down_ns:
            return False
        self._down_ns = time.monotonic_ns()
        os.kill(self._server.pid, number)
        eventually(lambda: not self._server.running, within_seconds=_STOP_SECONDS, what="Redis has ended")
        leases = _LONG_OUTAGE_LEASES if self._draw.random() < 1 / 3 else _OUTAGE_LEASES
        seconds = self._lasting(leases)
        self._say(f"{number.name} Redis, away for {seconds:.1f} s")
        self._after(seconds, lambda: self._back() if self._down_ns else None)
        return True

    def _back(self) -> None:
        self._server.start()
        # First of all: nobody has been expired yet, and what is pending is what they left.
        unseen, self._unseen = self._unseen, []
        for look in unseen:
            look()
        self.outages.append(Fault(None, self._down_ns, time.monotonic_ns()))
        self._down_ns = 0
        self._say("Redis is back")

    def _when_there(self, look: Callable[[], None]) -> None:
        if self._down_ns:
            self._unseen.append(look)
        else:
            look()


def _is_stopped(pid: int) -> bool:
    # The name in parentheses may hold blanks.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
