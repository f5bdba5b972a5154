"""One run of the demo: its processes, what is known of them at this moment, and the verdict at the end."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from redis_stream_coord import Monitor, RedisSettings

from .judge import Finding, Kill, judge
from .observe import Observer
from .processes import Child
from .records import Handled, Published, Tail, handled, published

_NAMES = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett", "kilo", "lima")
_RATE_WINDOW_SECONDS = 2.0
_LEAVE_SECONDS = 10.0
_ONE_MOVE_SECONDS = 1.0


class DemoError(Exception):
    """The demo cannot go on; the message is for its user."""


@dataclass
class Member:
    """A consumer process as the demo sees it. `state`: starting, running, leaving, left, killed or expired."""

    name: str
    child: Child
    tail: Tail[Handled]
    state: str = "starting"
    shards: frozenset[int] = frozenset()
    handled: int = 0
    lease_remaining_ms: int | None = None


@dataclass
class News:
    """Something that happened, `at` seconds after the start."""

    at: float
    text: str
    moved: tuple[str, str] | None = None  # shards went from this consumer to that one
    shards: list[int] = field(default_factory=list)


@dataclass
class Rates:
    """Events per second over the last moments, by anything."""

    samples: deque[tuple[float, Counter[object]]] = field(default_factory=deque)

    def sample(self, counts: Counter[object]) -> None:
        now = time.monotonic()
        self.samples.append((now, counts.copy()))
        while len(self.samples) > 2 and now - self.samples[1][0] > _RATE_WINDOW_SECONDS:
            self.samples.popleft()

    def of(self, what: object) -> float:
        if len(self.samples) < 2:
            return 0.0
        (first, before), (last, after) = self.samples[0], self.samples[-1]
        return (after[what] - before[what]) / (last - first)


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text, those in a row as ``3-7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


class Run:
    """Parameters:
    settings: how to reach Redis.
    stream, group, shards: as created.
    directory: for records and logs.
    work_ms: how long a handler takes on average.
    """

    def __init__(
        self, settings: RedisSettings, stream: str, group: str, shards: int, directory: Path, work_ms: float
    ) -> None:
        self.settings, self.stream, self.group, self.shards = settings, stream, group, shards
        self.members: dict[str, Member] = {}
        self.owners: Mapping[int, str | None] = dict.fromkeys(range(shards))
        self.published: list[Published] = []
        self.handled: list[Handled] = []
        self.kills: list[Kill] = []
        self.news: list[News] = []
        self.rates = Rates()
        self.counts: Counter[object] = Counter()  # by shard, by member, "published"
        self.behind: Counter[int] = Counter()
        self._seen: set[tuple[int, str]] = set()
        self._work_ms = work_ms
        self._directory = directory
        self._started = time.monotonic()
        self._names: Iterator[str] = itertools.chain(
            _NAMES, (f"consumer-{n}" for n in itertools.count(len(_NAMES) + 1))
        )
        self._monitor = Monitor(settings)
        self.observer = Observer(settings, stream, group, shards)
        self._producer: Child | None = None
        self._published_tail = Tail(directory / "published", published)

    # --- what can be done ---------------------------------------------------------------------------------------------

    def start_producer(self, rate: float, file: tuple[Path, str] | None) -> None:
        arguments = [self.stream, str(self._directory / "published"), str(rate)]
        arguments += [str(file[0].resolve()), file[1]] if file else []
        self._producer = self._child("producer", "producer", arguments)

    def stop_producer(self) -> None:
        if self._producer is not None:
            self._producer.terminate()

    @property
    def publishing(self) -> bool:
        return self._producer is not None and self._producer.status is None

    def start_consumer(self) -> Member:
        name = next(self._names)
        records = self._directory / f"{name}.records"
        child = self._child("consumer", name, [self.stream, self.group, name, str(records), str(self._work_ms)])
        self.members[name] = Member(name, child, Tail(records, handled))
        return self.members[name]

    def leave(self, member: Member) -> None:
        member.state = "leaving"
        member.child.terminate()

    def kill(self, member: Member) -> Kill:
        at_ns = time.monotonic_ns()
        member.child.kill()
        member.state = "killed"
        kill = Kill(member.name, at_ns, self.observer.pending(member.name))
        self.kills.append(kill)
        return kill

    @property
    def balanced(self) -> bool:
        """Whether every consumer that is running has its share of the shards."""
        counts = [len(member.shards) for member in self.running()]
        return bool(counts) and sum(counts) == self.shards and max(counts) - min(counts) <= 1

    def running(self) -> list[Member]:
        return [member for member in self.members.values() if member.state == "running"]

    def _child(self, module: str, name: str, arguments: list[str]) -> Child:
        return Child(module, arguments, log=self._directory / f"{name}.log", url=self.settings.url)

    def end_processes(self) -> None:
        """Let every process finish; kill those that do not."""
        children = [member.child for member in self.members.values()]
        children += [self._producer] if self._producer is not None else []
        for child in children:
            if child.status is None:
                child.terminate()
        for child in children:
            child.end(_LEAVE_SECONDS)

    def disconnect(self) -> None:
        self._monitor.close()
        self.observer.close()

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @property
    def done_count(self) -> int:
        """How many different events were handled."""
        return len(self._seen)

    @property
    def settled(self) -> bool:
        """Whether everything is published and handled, and the group has noticed who died."""
        noticed = all(member.state != "killed" for member in self.members.values())
        return noticed and not self.publishing and self.done_count >= len(self.published)

    def tell(self, text: str) -> None:
        self.news.append(News(self.elapsed, text))

    def poll(self) -> None:
        """Look at everything. Raises: `DemoError` if a process ended that should not have."""
        self._read_records()
        self._read_group()
        for member in self.members.values():
            status = member.child.status
            if member.state == "leaving" and status == 0:
                member.state = "left"
                self.tell(f"{member.name} has left")
            elif status is not None and member.state not in ("left", "killed", "expired"):
                raise DemoError(f"{member.name} ended with status {status}:\n{member.child.said()}")
        if self._producer is not None and self._producer.status not in (None, 0):
            raise DemoError(f"the producer ended with status {self._producer.status}:\n{self._producer.said()}")

    def _read_records(self) -> None:
        for entry in self._published_tail.new():
            self.published.append(entry)
            self.counts["published"] += 1
            self.behind[entry.shard] += 1
        for member in self.members.values():
            for run in member.tail.new():
                self.handled.append(run)
                member.handled += 1
                self.counts.update((run.shard, run.member))
                if (run.shard, run.id) not in self._seen:
                    self._seen.add((run.shard, run.id))
                    self.behind[run.shard] -= 1
        self.rates.sample(self.counts)

    def _read_group(self) -> None:
        view = self._monitor.describe(self.stream, group=self.group)
        for shard, owner in view.owners.items():
            before = self.owners.get(shard)
            if owner != before and owner is not None and before is not None:
                self._moved(shard, before, owner)
        # Between two owners a shard has none for a moment; remember the last one until there is a next.
        self.owners = {shard: owner or self.owners.get(shard) for shard, owner in view.owners.items()}
        for member in self.members.values():
            stored = view.members.get(member.name)
            member.shards = frozenset(shard for shard, owner in view.owners.items() if owner == member.name)
            member.lease_remaining_ms = stored.lease_remaining_ms if stored else None
            if member.state == "starting" and stored is not None:
                member.state = "running"
            elif member.state == "killed" and stored is None:
                member.state = "expired"
                self.tell(f"{member.name}'s lease ran out: its shards go on at its first unacknowledged events")

    def _moved(self, shard: int, before: str, after: str) -> None:
        for news in self.news:
            if news.moved == (before, after) and self.elapsed - news.at < _ONE_MOVE_SECONDS:
                break
        else:
            news = News(self.elapsed, "", (before, after))
            self.news.append(news)
        news.shards = sorted({*news.shards, shard})
        news.text = f"{before} → {after}: shard{'s' if len(news.shards) > 1 else ''} {ranges(news.shards)}"

    # --- the end ------------------------------------------------------------------------------------------------------

    def verdict(self) -> Sequence[Finding]:
        """Judge what was recorded. Call it when everybody has left."""
        self._read_records()
        return judge(self.published, self.handled, self.kills, self.observer.left_over())
