"""The judge: from what was published, what handlers wrote down and who was killed, tells whether the promises held.

It looks from outside, at nothing that the library says of itself. Pure functions over records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .records import Handled, Published

Entry = tuple[int, str]  # shard and id: ids are unique in a shard only
_SHOWN = 5


@dataclass(frozen=True)
class Kill:
    """A consumer that was killed with SIGKILL.

    Attributes:
        member: its member id.
        at_ns: when, `time.monotonic_ns`.
        pending: the entries that Redis had delivered to it, unacknowledged, once it was dead.
    """

    member: str
    at_ns: int
    pending: frozenset[Entry]


@dataclass(frozen=True)
class Finding:
    """Whether one promise held.

    Attributes:
        promise: what should hold.
        measured: how much was looked at, in words.
        problems: a sentence for each violation; empty if it held.
    """

    promise: str
    measured: str
    problems: Sequence[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def lines(self) -> list[str]:
        """The finding as text: one line, and below it the first few problems."""
        shown = [f"     - {problem}" for problem in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            shown.append(f"     - and {len(self.problems) - _SHOWN:,} more")
        return [f"{'ok  ' if self.ok else 'FAIL'} {self.promise}: {self.measured}", *shown]


def judge(
    published: Collection[Published],
    handled: Collection[Handled],
    kills: Collection[Kill],
    left_over: Mapping[int, str],
) -> list[Finding]:
    """Return a finding for each promise.

    Parameters:
        published: every entry that was published.
        handled: every run of a handler that finished, in any order.
        kills: every SIGKILL.
        left_over: shard -> what Redis still holds for the group there at the end; empty if nothing.
    """
    in_time = sorted(handled, key=lambda run: run.started_ns)
    return [
        _complete(published, in_time, left_over),
        _ordered(in_time, kills),
        _alone(in_time),
        _repeats(in_time, kills),
    ]


def order(entry_id: str) -> tuple[int, ...]:
    """Return what ids of entries sort by."""
    return tuple(map(int, entry_id.split("-")))


def _complete(published: Collection[Published], in_time: Iterable[Handled], left_over: Mapping[int, str]) -> Finding:
    expected = {(entry.shard, entry.id): entry for entry in published}
    runs = {(run.shard, run.id): run for run in in_time}
    problems = [
        f"{entry.key} number {entry.sequence} (entry {entry.id} of shard {entry.shard}) was never handled"
        for at, entry in expected.items()
        if at not in runs
    ]
    for at, run in runs.items():
        entry = expected.get(at)
        if entry is None:
            problems.append(f"{run.member} handled entry {run.id} of shard {run.shard}, which nobody published")
        elif (entry.key, entry.sequence) != (run.key, run.sequence):
            problems.append(
                f"entry {run.id} of shard {run.shard} is {entry.key} number {entry.sequence}, "
                f"but was handled as {run.key} number {run.sequence}"
            )
    problems += [f"Redis still holds {what} on shard {shard}" for shard, what in sorted(left_over.items())]
    done = len(expected.keys() & runs.keys())
    return Finding("every published event was handled", f"{done:,} of {len(expected):,}", problems)


def _ordered(in_time: Sequence[Handled], kills: Iterable[Kill]) -> Finding:
    problems = []
    by_key: dict[str, list[Handled]] = defaultdict(list)
    for run in in_time:
        by_key[run.key].append(run)
    for key, runs in by_key.items():
        newest: Handled | None = None  # highest number so far
        last: Handled | None = None
        for run in runs:
            if newest is None or run.sequence > newest.sequence:
                newest, last = run, run
                continue
            assert last is not None
            seen = any(other.sequence == run.sequence for other in runs if other.started_ns < run.started_ns)
            if not seen:
                problems.append(
                    f"{key} number {run.sequence} was handled by {run.member} for the first time "
                    f"after number {newest.sequence} by {newest.member}"
                )
            elif run.sequence <= last.sequence and run.token == last.token:
                problems.append(
                    f"{key} went back from number {last.sequence} to {run.sequence} although {run.member} "
                    f"owned shard {run.shard} all the time"
                )
            last = run
    problems += _restarts(in_time, kills)
    return Finding("the order of each key held", f"{len(by_key):,} keys", problems)


def _restarts(in_time: Iterable[Handled], kills: Iterable[Kill]) -> list[str]:
    """Redelivery begins at the first entry that the killed consumer left unacknowledged, on each shard."""
    by_shard: dict[int, list[Handled]] = defaultdict(list)
    for run in in_time:
        by_shard[run.shard].append(run)
    problems = []
    for kill in kills:
        firsts: dict[int, str] = {}
        for shard, entry_id in kill.pending:
            firsts[shard] = min(firsts.get(shard, entry_id), entry_id, key=order)
        for shard, first in firsts.items():
            after = next((run for run in by_shard[shard] if run.started_ns > kill.at_ns), None)
            # If there is none, the entry was not handled at all or only before; the other findings tell.
            if after is not None and after.id != first:
                problems.append(
                    f"shard {shard} went on with entry {after.id} after {kill.member} was killed; "
                    f"{first} was the first unacknowledged one"
                )
    return problems


def _alone(in_time: Iterable[Handled]) -> Finding:
    problems = []
    busiest: dict[int, Handled] = {}  # the run that ended last, per shard
    for run in in_time:
        before = busiest.get(run.shard)
        if before is not None and run.started_ns < before.ended_ns:
            problems.append(
                f"{before.member} and {run.member} were at work on shard {run.shard} at once, "
                f"on {before.id} and {run.id}"
            )
        if before is None or run.ended_ns > before.ended_ns:
            busiest[run.shard] = run
    return Finding("one owner at a time, one event at a time", f"{len(busiest):,} shards", problems)


def _repeats(in_time: Sequence[Handled], kills: Iterable[Kill]) -> Finding:
    by_member = {kill.member: kill for kill in kills}
    last: dict[Entry, Handled] = {}
    problems = []
    count = 0
    for run in in_time:
        at = (run.shard, run.id)
        before = last.get(at)
        last[at] = run
        if before is None:
            continue
        count += 1
        what = f"{run.key} number {run.sequence} was handled by {before.member} and again by {run.member}"
        kill = by_member.get(before.member)
        if kill is None:
            problems.append(f"{what}, but {before.member} was never killed")
        elif run.started_ns < kill.at_ns:
            problems.append(f"{what}, before {before.member} was killed")
        elif at not in kill.pending:
            problems.append(f"{what}, though it was acknowledged when {before.member} was killed")
    pending = sum(len(kill.pending) for kill in by_member.values())
    kills_text = f"{len(by_member)} kill{'' if len(by_member) == 1 else 's'}"
    measured = f"{count:,} of {pending:,}, {kills_text}"
    return Finding("only what a SIGKILL left unacknowledged was repeated", measured, problems)
