"""Chaos: consumer processes share a stream while one of them after another is killed, and then a judge looks.

The judge is that of the demo. What was published is read from the streams themselves, so nothing depends on what the
library says of itself.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from examples.demo_support.judge import Finding, Kill, judge
from examples.demo_support.observe import Observer
from examples.demo_support.processes import Child
from examples.demo_support.records import Handled, Tail, handled
from redis_stream_coord import Admin, RedisSettings, Timings

TIMINGS = Timings(heartbeat_seconds=0.3, lease_seconds=2, rebalance_seconds=10)
GROUP = "chaos"
_POLL_SECONDS = 0.1
_LEAVE_SECONDS = 20.0
_GRACE_SECONDS = 60.0  # after the last event should have been published


@dataclass(frozen=True)
class Plan:
    """What to do.

    Attributes:
        seed: of all that is random: who is killed and when, and the keys of the events.
        events: how many.
        seconds: publishing them takes so long.
        kill_seconds: between two kills, on average.
        consumers: processes at any time; half of them use `Consumer`, half `AsyncConsumer`.
        shards, keys: how many.
    """

    seed: int
    events: int = 100_000
    seconds: int = 25
    kill_seconds: float = 3.0
    consumers: int = 8
    shards: int = 64
    keys: int = 1_000


@dataclass
class Report:
    """What happened."""

    plan: Plan
    findings: Sequence[Finding] = ()
    kills: list[Kill] = field(default_factory=list)
    published: int = 0
    seconds: float = 0.0
    trouble: list[str] = field(default_factory=list)  # what went wrong in the run itself
    logs: str = ""  # what the processes said

    @property
    def ok(self) -> bool:
        return not self.trouble and all(finding.ok for finding in self.findings)

    def __str__(self) -> str:
        lines = [line for finding in self.findings for line in finding.lines()]
        lines += [f"FAIL {what}" for what in self.trouble]
        rate = self.published / self.seconds if self.seconds else 0
        lines.append(
            f"{self.published:,} events, {len(self.kills)} kills, {self.seconds:.1f} s, {rate:,.0f} events/s, "
            f"seed {self.plan.seed}"
        )
        if not self.ok and self.logs:
            lines += ["what the processes said:", self.logs]
        return "\n".join(lines)


class Fleet:
    """The consumer processes.

    Parameters:
        url: of Redis.
        stream: its name.
        directory: for records and logs.
    """

    def __init__(self, url: str, stream: str, directory: Path) -> None:
        self._url, self._stream, self._directory = url, stream, directory
        self._numbers = itertools.count(1)
        self.alive: dict[str, Child] = {}
        self.dead: dict[str, Child] = {}
        self._tails: list[Tail[Handled]] = []
        self.handled: list[Handled] = []
        self._seen: set[tuple[int, str]] = set()

    def start(self) -> str:
        number = next(self._numbers)
        name = f"consumer-{number}"
        records = self._directory / f"{name}.records"
        face = ("plain", "async")[number % 2]
        arguments = [face, self._stream, GROUP, name, str(records)]
        self.alive[name] = Child("tests.chaos.consumer", arguments, log=self._directory / f"{name}.log", url=self._url)
        self._tails.append(Tail(records, handled))
        return name

    def kill(self, name: str, observer: Observer) -> Kill:
        at_ns = time.monotonic_ns()
        child = self.dead[name] = self.alive.pop(name)
        child.kill()
        return Kill(name, at_ns, observer.pending(name))

    def read(self) -> None:
        """Take in what the handlers wrote down since the last call."""
        for tail in self._tails:
            new = tail.new()
            self.handled += new
            self._seen.update((run.shard, run.id) for run in new)

    @property
    def done_count(self) -> int:
        """How many different events were handled."""
        return len(self._seen)

    def fallen(self) -> list[str]:
        """Return, in words, which processes ended without having been killed."""
        ended = {name: child.status for name, child in self.alive.items()}
        return [f"{name} ended with status {status}" for name, status in ended.items() if status is not None]

    def leave(self) -> list[str]:
        """Let all leave; return, in words, which did not leave in good order."""
        for child in self.alive.values():
            child.terminate()
        for child in [*self.alive.values(), *self.dead.values()]:
            child.end(_LEAVE_SECONDS)
        self.read()
        busy = {run.member for run in self.handled}
        return [
            f"{name} left with status {child.status}"
            for name, child in self.alive.items()
            # A replacement started a moment ago may not have been ready for SIGTERM yet.
            if child.status != 0 and not (child.status == -signal.SIGTERM and name not in busy)
        ]

    def logs(self) -> str:
        children = {**self.dead, **self.alive}
        return "\n".join(f"--- {name}\n{said}" for name, child in children.items() if (said := child.said()))


def run(plan: Plan, url: str, stream: str, directory: Path, say: Callable[[str], None] = print) -> Report:
    """Carry out a plan, and judge it.

    Parameters:
        plan: see `Plan`.
        url: of an empty Redis; what was made there stays.
        stream: a name that was not used before.
        directory: for records and logs.
        say: told what happens.
    """
    report = Report(plan)
    with Admin(url, requested_by="chaos") as admin:
        admin.create(stream, group=GROUP, shards=plan.shards, timings=TIMINGS, reason="chaos")
    observer = Observer(RedisSettings(url), stream, GROUP, plan.shards)
    fleet = Fleet(url, stream, directory)
    for _ in range(plan.consumers):
        fleet.start()
    numbers = (plan.events, plan.seconds, plan.keys, plan.seed)
    producer = Child("tests.chaos.producer", [stream, *map(str, numbers)], log=directory / "producer.log", url=url)
    began = time.monotonic()
    try:
        report.trouble += _rampage(plan, fleet, producer, observer, report, say)
        report.seconds = time.monotonic() - began
    finally:
        report.trouble += fleet.leave()
        producer.end(0)
        report.logs = fleet.logs() + producer.said()
    published = observer.published()
    report.published = len(published)
    report.findings = judge(published, fleet.handled, report.kills, observer.left_over())
    observer.close()
    if len(published) != plan.events:
        report.trouble.append(f"{len(published):,} of {plan.events:,} events were published")
    return report


def _rampage(
    plan: Plan, fleet: Fleet, producer: Child, observer: Observer, report: Report, say: Callable[[str], None]
) -> list[str]:
    """Kill until everything is handled; return what went wrong besides."""
    draw = random.Random(plan.seed)
    began = time.monotonic()
    next_kill = began + plan.kill_seconds
    while True:
        fleet.read()
        done = fleet.done_count
        if producer.status == 0 and done >= plan.events and not observer.left_over():
            return []
        if fallen := fleet.fallen() + ([f"the producer ended with {producer.status}"] if producer.status else []):
            return fallen
        if time.monotonic() > began + plan.seconds + _GRACE_SECONDS:
            return [f"only {done:,} of {plan.events:,} events were handled in time"]
        if time.monotonic() >= next_kill:
            next_kill += plan.kill_seconds * draw.uniform(0.8, 1.2)
            kill = fleet.kill(draw.choice(sorted(fleet.alive)), observer)
            report.kills.append(kill)
            replacement = fleet.start()
            say(
                f"{time.monotonic() - began:5.1f} s  {done:,} handled; killed {kill.member} with "
                f"{len(kill.pending)} unacknowledged; {replacement} starts"
            )
        time.sleep(_POLL_SECONDS)
