"""Chaos: consumer processes share a stream while one of them after another is killed, and then a judge looks.

The judge is that of the demo. What was published is read from the streams themselves, so nothing depends on what the
library says of itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from examples.demo_support.judge import Kill, judge
from examples.demo_support.observe import Observer
from examples.demo_support.processes import Child
from redis_stream_coord import Admin, RedisSettings, Timings
from tests.chaos.fleet import Fleet
from tests.chaos.report import Report

TIMINGS = Timings(heartbeat_seconds=0.3, lease_seconds=2, rebalance_seconds=10)
GROUP = "chaos"
_POLL_SECONDS = 0.1
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
class KillReport(Report):
    """A `Report` that knows who was killed."""

    kills: list[Kill] = field(default_factory=list)


def run(plan: Plan, url: str, stream: str, directory: Path, say: Callable[[str], None] = print) -> KillReport:
    """Carry out a plan, and judge it.

    Parameters:
        plan: see `Plan`.
        url: of an empty Redis; what was made there stays.
        stream: a name that was not used before.
        directory: for records and logs.
        say: told what happens.
    """
    report = KillReport()
    with Admin(url, requested_by="chaos") as admin:
        admin.create(stream, group=GROUP, shards=plan.shards, timings=TIMINGS, reason="chaos")
    observer = Observer(RedisSettings(url), stream, GROUP, plan.shards)
    fleet = Fleet(url, stream, GROUP, directory)
    for _ in range(plan.consumers):
        fleet.start()
    numbers = (plan.events, plan.seconds, plan.keys, plan.seed)
    producer = Child("tests.chaos.producer", [stream, *map(str, numbers)], log=directory / "producer.log", url=url)
    began = time.monotonic()
    try:
        report.trouble += _rampage(plan, fleet, producer, observer, report, say)
    finally:
        seconds = time.monotonic() - began
        report.trouble += fleet.leave()
        producer.end(0)
        report.logs = fleet.logs() + producer.said()
    published = observer.published()
    report.findings = judge(published, fleet.handled, report.kills, observer.left_over())
    observer.close()
    if len(published) != plan.events:
        report.trouble.append(f"{len(published):,} of {plan.events:,} events were published")
    report.summary = (
        f"{len(published):,} events, {len(report.kills)} kills, {seconds:.1f} s, "
        f"{len(published) / seconds:,.0f} events/s, seed {plan.seed}"
    )
    return report


def _rampage(
    plan: Plan, fleet: Fleet, producer: Child, observer: Observer, report: KillReport, say: Callable[[str], None]
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
