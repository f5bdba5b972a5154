"""The judge of a soak: from records, what was done to whom and what was seen in Redis, tells whether the promises held.

What is lost, the order of keys and one owner at a time are judged as in `examples.demo_support.judge`. Pure functions.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from examples.demo_support.judge import Entry, Finding, Kill, judge
from examples.demo_support.records import Handled, Published
from tests.chaos.samples import Sample, steady

SECOND_NS = 1_000_000_000
CONNECTIONS = 3  # of a consumer process on one server
HANDLERS = 8  # threads for handlers, as the consumers of a soak are told
_STALL_NS = SECOND_NS  # samples are taken twice a second: so long a gap means that the process did not run
_ACK_NS = SECOND_NS // 2  # acknowledgements are sent after ten milliseconds; this is for a machine with much to do
_GRACE_NS = 3 * SECOND_NS  # until everybody is back after a fault
_MIN_MEMORY_SECONDS = 120  # a shorter look says nothing about memory
_GROWTH_KIB = 4096
_FIRST = 20  # looks that tell how many open files are usual
_FILES = 1
_SLOPE_POINTS = 120


@dataclass(frozen=True)
class Fault:
    """Something that kept a process from working for a while.

    Attributes:
        name: of the process; ``None``: of all, because Redis was away.
        from_ns, to_ns: when, `time.monotonic_ns`.
        pending: what was delivered to the process and unacknowledged, seen while it lasted; ``None``: nobody looked.
        firsts: shard -> the first unacknowledged entry there, if it was this process's.
    """

    name: str | None
    from_ns: int
    to_ns: int
    pending: frozenset[Entry] | None = None
    firsts: Mapping[int, str] = field(default_factory=dict)

    def hits(self, name: str) -> bool:
        """Whether it concerns a process."""
        return self.name is None or self.name == name

    def overlaps(self, from_ns: int, to_ns: int) -> bool:
        return self.from_ns <= to_ns and from_ns <= self.to_ns


@dataclass(frozen=True)
class End:
    """A process was killed (SIGKILL), or told to leave (SIGTERM).

    Attributes:
        name: of the process.
        at_ns: when it was dead; or when it was told.
        ended_ns: when it was seen to have left; ``None``: not in time. 0 for a kill.
        status: of a process that left.
        pending, firsts: see `Fault`; of a kill.
    """

    name: str
    at_ns: int
    ended_ns: int | None = 0
    status: int | None = 0
    pending: frozenset[Entry] = frozenset()
    firsts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Redis:
    """What Redis showed in a quiet moment.

    Attributes:
        connections: of others than the judge.
        consumers: shard -> names in XINFO CONSUMERS.
        owners: shard -> member that the group's record says owns it.
        members: of the record.
    """

    connections: int
    consumers: Mapping[int, frozenset[str]]
    owners: Mapping[int, str | None]
    members: frozenset[str]


@dataclass(frozen=True)
class Evidence:
    """All that the judge looks at.

    Attributes:
        receipts: what the producer was told that Redis accepted.
        stored: what the streams held at the end.
        handled: each run of a handler that succeeded.
        kills: by SIGKILL.
        leaves: by SIGTERM, during the run and at its end.
        suspensions: by SIGSTOP, until SIGCONT.
        outages: of Redis.
        left_over: shard -> what Redis still held for the group.
        quiet: after the faults, with all consumers alive and nothing to do.
        after: when all had left.
        live: process -> member id, at `quiet`.
        steady: processes that were never ended during the run.
        samples: of all processes.
        warm_up_ns: memory counts from so long after the start of a process.
    """

    receipts: Collection[Published]
    stored: Collection[Published]
    handled: Collection[Handled]
    kills: Collection[End]
    leaves: Collection[End]
    suspensions: Collection[Fault]
    outages: Collection[Fault]
    left_over: Mapping[int, str]
    quiet: Redis
    after: Redis
    live: Mapping[str, str]
    steady: Collection[str]
    samples: Collection[Sample]
    warm_up_ns: int


def verdict(evidence: Evidence) -> list[Finding]:
    """Return a finding for each promise."""
    in_time = sorted(evidence.handled, key=lambda run: run.started_ns)
    faults = [*evidence.suspensions, *evidence.outages, *stalls(evidence)]
    late = overtaken(in_time, faults)
    regular = [run for run in in_time if run not in late]
    complete, ordered, alone, _ = judge(evidence.stored, regular, _restarts(evidence, regular), evidence.left_over)
    return [
        _accepted(evidence.receipts, evidence.stored),
        complete,
        ordered,
        Finding(
            alone.promise,
            f"{alone.measured}, {len(late)} overtaken in a fault",
            [*alone.problems, *_zombies(regular)],
        ),
        _repeats(in_time, late, evidence.kills, faults),
        _leaves(evidence, faults),
        _connections(evidence),
        _threads(evidence),
        _entries(evidence),
        _memory(evidence),
    ]


def stalls(evidence: Evidence) -> list[Fault]:
    """Return when a process did not run though nobody had suspended it: the machine had too much to do."""
    found = []
    for name, samples in _by_name(evidence.samples).items():
        for before, after in itertools.pairwise(samples):
            gap = Fault(name, before.at_ns, after.at_ns)
            known = any(one.name == name and one.overlaps(gap.from_ns, gap.to_ns) for one in evidence.suspensions)
            if gap.to_ns - gap.from_ns >= _STALL_NS and not known:
                found.append(gap)
    return found


def overtaken(in_time: Sequence[Handled], faults: Collection[Fault]) -> set[Handled]:
    """Return the runs that a fault let overlap with the next owner's, which is allowed.

    A handler that was running, or about to, when its process was suspended or Redis went away cannot be stopped. It is
    one for each shard and token; whatever else an old owner does is not excused.
    """
    first_run: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)
    for run in in_time:
        first_run[run.shard].setdefault(run.token, run.started_ns)
    found: dict[tuple[int, tuple[int, int]], Handled] = {}
    for run in in_time:
        if any(token > run.token and began < run.ended_ns for token, began in first_run[run.shard].items()) and any(
            fault.hits(run.member) and fault.overlaps(run.started_ns - _GRACE_NS, run.ended_ns) for fault in faults
        ):
            found.setdefault((run.shard, run.token), run)
    return set(found.values())


def _zombies(in_time: Iterable[Handled]) -> list[str]:
    """Return, in words, who was at work under a token after a higher one was."""
    problems = []
    newest: dict[int, Handled] = {}
    for run in in_time:
        before = newest.get(run.shard)
        if before is not None and run.token < before.token:
            problems.append(
                f"{run.member} began entry {run.id} of shard {run.shard} under token {run.token[1]} "
                f"after {before.member} had begun {before.id} under {before.token[1]}"
            )
        if before is None or run.token > before.token:
            newest[run.shard] = run
    return problems


def _restarts(evidence: Evidence, regular: Sequence[Handled]) -> list[Kill]:
    """Return where redelivery has to begin: after kills, and after suspensions that cost the shard."""
    found = [Kill(kill.name, kill.at_ns, frozenset(kill.firsts.items())) for kill in evidence.kills]
    by_shard: dict[int, list[Handled]] = defaultdict(list)
    for run in regular:
        by_shard[run.shard].append(run)
    for fault in evidence.suspensions:
        assert fault.name is not None
        for shard, first in fault.firsts.items():
            here = by_shard[shard]
            mine = [run for run in here if run.member == fault.name and run.started_ns <= fault.from_ns]
            after = next((run for run in here if run.started_ns > fault.from_ns), None)
            # It went on itself, or what was unacknowledged was finished and needed only to be said.
            kept = after is None or (mine and mine[-1].token == after.token)
            finished = any(run.id == first for run in mine)
            if not kept and not finished:
                found.append(Kill(fault.name, fault.from_ns, frozenset({(shard, first)})))
    return found


def _accepted(receipts: Collection[Published], stored: Collection[Published]) -> Finding:
    """The streams hold what was accepted, once, and each key in order."""
    problems = []
    there = {(entry.shard, entry.id): entry for entry in stored}
    problems += [
        f"{receipt.key} number {receipt.sequence} was accepted as {receipt.id} of shard {receipt.shard}, and is gone"
        for receipt in receipts
        if there.get((receipt.shard, receipt.id)) != receipt
    ]
    numbers: dict[str, list[int]] = defaultdict(list)
    for entry in stored:  # by shard and id, and a key has one shard
        numbers[entry.key].append(entry.sequence)
    problems += [
        f"{key} is not stored once and in order: {_first_wrong(found)}"
        for key, found in numbers.items()
        if found != list(range(len(found)))
    ]
    accepted = set(receipts)
    problems += [
        f"{entry.key} number {entry.sequence} is stored as {entry.id} of shard {entry.shard}, and was never accepted"
        for entry in stored
        if entry not in accepted
    ]
    return Finding("what was accepted is stored once, keys in order", f"{len(receipts):,} events", problems)


def _first_wrong(numbers: Sequence[int]) -> str:
    place = next(place for place, number in enumerate(numbers) if number != place)
    return f"number {numbers[place]} in place {place}"


def _repeats(
    in_time: Sequence[Handled], late: Collection[Handled], kills: Collection[End], faults: Collection[Fault]
) -> Finding:
    last: dict[Entry, Handled] = {}
    problems, count = [], 0
    for run in in_time:
        at = (run.shard, run.id)
        before, last[at] = last.get(at), run
        if before is None:
            continue
        count += 1
        killed = any(
            kill.name == before.member and at in kill.pending and run.started_ns >= kill.at_ns for kill in kills
        )
        if not killed and not {before, run} & set(late) and not any(_explains(fault, before, run) for fault in faults):
            problems.append(
                f"{run.key} number {run.sequence} (entry {run.id} of shard {run.shard}) was handled by {before.member} "
                f"and again by {run.member}, and no fault explains it"
            )
    return Finding(
        "only what a fault left unacknowledged was repeated", f"{count:,} of {len(in_time):,} runs", problems
    )


def _explains(fault: Fault, before: Handled, run: Handled) -> bool:
    """Whether a fault may have kept an acknowledgement from being sent."""
    if not fault.hits(before.member) or run.started_ns < fault.from_ns or before.started_ns > fault.to_ns + _GRACE_NS:
        return False
    if fault.pending is not None and (before.shard, before.id) in fault.pending:
        return True
    return before.ended_ns >= fault.from_ns - (0 if fault.pending is not None else _ACK_NS)


def _leaves(evidence: Evidence, faults: Collection[Fault]) -> Finding:
    problems = []
    for leave in evidence.leaves:
        if leave.ended_ns is None:
            problems.append(f"{leave.name} did not end in time after SIGTERM")
            continue
        hindered = any(
            fault.hits(leave.name) and fault.overlaps(leave.at_ns - _GRACE_NS, leave.ended_ns) for fault in faults
        )
        if leave.status != 0 and not hindered:
            problems.append(f"{leave.name} ended with status {leave.status} after SIGTERM, and no fault explains it")
    return Finding("every SIGTERM ended its process in time and in good order", f"{len(evidence.leaves)}", problems)


def _connections(evidence: Evidence) -> Finding:
    quiet, after, live = evidence.quiet.connections, evidence.after.connections, len(evidence.live)
    problems = []
    if quiet > live * CONNECTIONS:
        problems.append(f"{quiet} connections for {live} processes, which need {CONNECTIONS} each")
    if after:
        problems.append(f"{after} connections after all had left")
    growth = []
    for name, samples in _by_name(evidence.samples).items():
        if name in evidence.steady and (later := steady(samples, evidence.warm_up_ns)):
            before = statistics.median_high(one.files for one in later[:_FIRST])  # Redis may be away for some of them
            growth.append(later[-1].files - before)
            if growth[-1] > _FILES:
                problems.append(f"{name} had {before} open files, and {later[-1].files} at the end")
    measured = f"{quiet} for {live} processes, {after} after they left; open files {_signed(growth)}"
    return Finding("no connection leaked", measured, problems)


def _threads(evidence: Evidence) -> Finding:
    problems = []
    looked = stopped = 0
    for name, samples in _by_name(evidence.samples).items():
        for one in samples:
            if one.stopped:
                stopped += 1
                if one.threads:
                    problems.append(f"{name} had {', '.join(one.threads)} after its consumer had ended")
            elif name in evidence.live:
                looked += 1
                problems += [f"{name} had {what}" for what in _unjustified(one.threads)]
    left = {leave.name for leave in evidence.leaves if leave.status == 0}
    said = {one.name for one in evidence.samples if one.stopped}
    problems += [f"{name} left, and did not say with which threads" for name in sorted(left - said)]
    return Finding("no thread leaked", f"{looked:,} looks at live processes, {stopped} at the end of one", problems)


def _unjustified(threads: Iterable[str]) -> list[str]:
    """Return what is there beyond a loop, a thread for callbacks, and those of handlers."""
    counts = Counter(threads)
    handlers = [name for name in threads if re.fullmatch(r"redis-stream-coord-.+-\d+", name)]
    once = {"redis-stream-coord-loop", *handlers}
    found = [f"the thread {name}" for name in sorted(counts.keys() - once)]
    found += [f"{count} threads called {name}" for name, count in counts.items() if name in once and count > 1]
    count = sum(not name.endswith("-callback-0") for name in handlers)
    if count > HANDLERS:
        found.append(f"{count} threads for handlers, of which there may be {HANDLERS}")
    return found


def _entries(evidence: Evidence) -> Finding:
    quiet, live = evidence.quiet, set(evidence.live.values())
    problems = [
        f"{', '.join(sorted(extra))} still among the consumers of shard {shard}, whose owner is {quiet.owners[shard]}"
        for shard, names in quiet.consumers.items()
        if (extra := names - {quiet.owners[shard]})
    ]
    problems += [f"{name} is a member without a process" for name in sorted(quiet.members - live)]
    problems += [f"{name} is alive and no member" for name in sorted(live - quiet.members)]
    problems += [f"{name} is a member after all had left" for name in sorted(evidence.after.members)]
    count = sum(map(len, quiet.consumers.values()))
    measured = f"{count} consumers on {len(quiet.consumers)} shards, {len(quiet.members)} members"
    return Finding("no consumer entry and no member leaked", measured, problems)


def _memory(evidence: Evidence) -> Finding:
    promise = "the memory of long-lived processes is flat"
    problems, measured = [], []
    for name, samples in _by_name(evidence.samples).items():
        later = steady(samples, evidence.warm_up_ns)
        seconds = (later[-1].at_ns - later[0].at_ns) / SECOND_NS if later else 0.0
        if name not in evidence.steady or seconds < _MIN_MEMORY_SECONDS:
            continue
        growth = slope(later) * seconds
        measured.append(f"{name} {later[-1].rss_kib / 1024:.1f} MiB, {growth / 1024:+.2f} MiB in {seconds:.0f} s")
        if growth > _GROWTH_KIB:
            problems.append(f"{name} grew by {growth / 1024:.1f} MiB in {seconds:.0f} s")
    return Finding(promise, "; ".join(measured) or "not judged, the run is too short", problems)


def slope(samples: Sequence[Sample]) -> float:
    """Return by how many KiB memory grew in a second.

    The median over all pairs of samples, which a single jump does not move (Theil, 1950; Sen, 1968).
    """
    few = samples[:: max(1, len(samples) // _SLOPE_POINTS)]
    slopes = [
        (after.rss_kib - before.rss_kib) / (after.at_ns - before.at_ns) * SECOND_NS
        for place, before in enumerate(few)
        for after in few[place + 1 :]
    ]
    return statistics.median(slopes) if slopes else 0.0


def _by_name(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = defaultdict(list)
    for one in sorted(samples, key=lambda one: one.at_ns):
        found[one.name].append(one)
    return found


def _signed(numbers: Iterable[int]) -> str:
    return ", ".join(f"{number:+d}" for number in numbers) or "not looked at"
