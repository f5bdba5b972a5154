"""The soak: consumers work for minutes while signals hit them and Redis restarts. python -m tests.chaos.soak --help

Four consumer processes, two of which live as long as the run and are only suspended (STOP, CONT) while two are also
killed (KILL) and told to leave (TERM), and replaced. Their handlers fail and dawdle at random. Redis, with an
append-only file that is synced before each answer, is ended and started again. One producer publishes with event ids,
and again what failed. A judge looks at what handlers wrote down and at what is in Redis.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples.demo_support.processes import Child
from examples.demo_support.records import Tail, published
from redis_stream_coord import Admin, Timings
from tests import servers
from tests.chaos import samples
from tests.chaos.fleet import Fleet
from tests.chaos.report import Report
from tests.chaos.soak_judge import CONNECTIONS, HANDLERS, SECOND_NS, Evidence, Redis, verdict
from tests.chaos.storm import Storm
from tests.chaos.witness import Witness
from tests.servers import Server

TIMINGS = Timings(heartbeat_seconds=0.5, lease_seconds=3, rebalance_seconds=15)
GROUP = "soak"
_POLL_SECONDS = 0.1
_DRAIN_SECONDS = 180.0  # for everything to be published and handled, after the last fault
_QUIET_SECONDS = 20.0  # for what was in use to be given back
_WARM_UP_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """What to do.

    Attributes:
        seed: of all that is random.
        seconds: events are published, and faults happen, for so long.
        rate: events in a second.
        pace_seconds: between two faults, on average.
        shards, keys: how many.
    """

    seed: int
    seconds: int = 300
    rate: int = 400
    pace_seconds: float = 2.5
    shards: int = 16
    keys: int = 200


def server(name: str) -> Server:
    """Return a server that forgets nothing of what it has answered."""
    return Server(name, appendonly=True, config={"appendfsync": "always"})


def run(plan: Plan, redis: Server, stream: str, directory: Path, say: Callable[[str], None] = print) -> Report:
    """Carry out a plan, and judge it.

    Parameters:
        plan: see `Plan`.
        redis: as `server` makes it, running and empty.
        stream: a name that was not used before.
        directory: for records and logs.
        say: told what happens.
    """
    with Admin(redis.url, requested_by="soak") as admin:
        admin.create(stream, group=GROUP, shards=plan.shards, timings=TIMINGS, reason="soak")
    witness = Witness(redis.url, stream, GROUP, plan.shards)
    soak = _Soak(plan, redis, witness, Fleet(redis.url, stream, GROUP, directory), directory, say)
    try:
        return soak.run(stream)
    finally:
        witness.close()


class _Soak:
    def __init__(
        self, plan: Plan, redis: Server, witness: Witness, fleet: Fleet, directory: Path, say: Callable[[str], None]
    ) -> None:
        self._plan, self._redis, self._witness, self._fleet, self._directory = plan, redis, witness, fleet, directory
        options = ["--trouble", str(plan.seed), "--handler-threads", str(HANDLERS)]
        options += ["--samples", str(directory / "{}.samples")]
        self._storm = Storm(
            plan.seed,
            timings=TIMINGS,
            pace_seconds=plan.pace_seconds,
            server=redis,
            fleet=fleet,
            witness=witness,
            options=options,
            say=say,
        )
        self._receipts = directory / "receipts"

    def run(self, stream: str) -> Report:
        report = Report()
        plan, storm, fleet = self._plan, self._storm, self._fleet
        for face in ("plain", "async"):
            storm.start(face, steady=True)
            storm.start(face)
        numbers = map(str, (plan.seconds * plan.rate, plan.seconds, plan.keys, plan.seed))
        producer = Child(
            "tests.chaos.producer",
            [stream, *numbers, "--receipts", str(self._receipts)],
            log=self._directory / "producer.log",
            url=self._redis.url,
        )
        try:
            report.trouble += self._blow(producer)
            storm.end()
            report.trouble += self._drain(producer)
            live = {name: storm.members[name] for name in fleet.alive}
            quiet = self._settle(lambda seen: self._is_quiet(seen, live))
            time.sleep(2 * samples.EVERY_SECONDS)  # so that each process has looked at itself since
            left_over = self._witness.left_over()
        finally:
            storm.leave()
            producer.end(0)
            report.logs = fleet.logs() + producer.said()
        after = self._settle(lambda seen: not seen.connections and not seen.members)
        evidence = Evidence(
            receipts=Tail(self._receipts, published).new(),
            stored=self._witness.published(),
            handled=fleet.handled,
            kills=storm.kills,
            leaves=storm.leaves,
            suspensions=storm.suspensions,
            outages=storm.outages,
            left_over=left_over,
            quiet=quiet,
            after=after,
            live=live,
            steady=storm.steady,
            samples=[one for path in self._directory.glob("*.samples") for one in Tail(path, samples.sample).new()],
            warm_up_ns=round(_WARM_UP_SECONDS * SECOND_NS),
        )
        report.findings = verdict(evidence)
        report.summary = self._summary(evidence)
        return report

    def _blow(self, producer: Child) -> list[str]:
        """Let faults happen until the time is over; return what went wrong besides."""
        storm, fleet = self._storm, self._fleet
        until = time.monotonic() + self._plan.seconds
        storm.begin()
        while time.monotonic() < until:
            fleet.read()
            storm.step()
            if fallen := storm.fallen() + ([f"the producer ended with {producer.status}"] if producer.status else []):
                return fallen
            time.sleep(_POLL_SECONDS)
        return []

    def _drain(self, producer: Child) -> list[str]:
        """Wait until everything is published and handled; return what went wrong besides."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while time.monotonic() < deadline:
            self._fleet.read()
            if producer.status is not None and not self._witness.left_over():
                return [] if producer.status == 0 else [f"the producer ended with {producer.status}"]
            if fallen := self._storm.fallen():
                return fallen
            time.sleep(_POLL_SECONDS)
        what = "still publishes" if producer.status is None else f"ended with {producer.status}"
        return [f"not everything was handled in time; the producer {what}"]

    def _is_quiet(self, seen: Redis, live: dict[str, str]) -> bool:
        alone = all(names <= {seen.owners[shard]} for shard, names in seen.consumers.items())
        return alone and seen.connections <= CONNECTIONS * len(live) and seen.members == set(live.values())

    def _settle(self, calm: Callable[[Redis], bool]) -> Redis:
        """Return what Redis shows once it is calm, or when the time for that is over."""
        deadline = time.monotonic() + _QUIET_SECONDS
        while not calm(seen := self._witness.look()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return seen

    def _summary(self, evidence: Evidence) -> str:
        away = sum(one.to_ns - one.from_ns for one in evidence.outages) / SECOND_NS
        return (
            f"{self._plan.seconds} s, {len(evidence.stored):,} events, {len(evidence.kills)} SIGKILL, "
            f"{len(evidence.leaves) - len(evidence.live)} SIGTERM, {len(evidence.suspensions)} SIGSTOP, "
            f"{len(evidence.outages)} restarts of {self._redis.name} (away for {away:.1f} s), seed {self._plan.seed}"
        )


def main() -> int:
    default = Plan(seed=0)
    parser = argparse.ArgumentParser(description="Let faults happen to consumers for a while, and judge.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--seconds", type=int, default=default.seconds)
    parser.add_argument("--rate", type=int, default=default.rate, help="events in a second")
    parser.add_argument("--pace-seconds", type=float, default=default.pace_seconds, help="between two faults")
    parser.add_argument("--shards", type=int, default=default.shards)
    parser.add_argument("--keys", type=int, default=default.keys)
    parser.add_argument("--server", choices=list(servers.available()), default="redis7")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="for records and logs, to look at them later")
    given = vars(parser.parse_args())
    name, keep = given.pop("server"), given.pop("keep")
    plan = Plan(**given)
    print(f"{name}, {plan}", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch, server(name) as redis:
        directory = keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        report = run(plan, redis, f"soak-{secrets.token_hex(4)}", directory, say=_say)
    print(report)
    return 0 if report.ok else 1


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
