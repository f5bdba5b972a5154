"""One member joins sixteen others that share 256 shards: how long until every shard is owned and read again.

Four processes run four members each, a fifth one the joiner. This process publishes to all shards without a pause and
listens to the group's events. A join is over when, on each shard that moves, the joiner has handed out an entry that
was published after its `start` was called. Its parts are the times until

- ``accepted``: Redis knows the member, and has computed who gives up what;
- ``granted``: the metadata says that the joiner holds all its shards (both by the server's clock, from the events);
- ``claimed``: their fences are raised, and `on_assigned` is called;
- ``read``: the above.

The shards that do not move must not notice. For them the time between two entries, and from publishing to handling,
is compared with that of a quiet period just before.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection

import attrs
import redis

from redis_stream_coord import AsyncConsumer, Message
from redis_stream_coord.keys import GroupKeys
from redis_stream_coord.models import Shards
from tests.benchmarks.measuring import GROUP, Bench, Cost, Table, costs, median, percentile, streams
from tests.benchmarks.processes import Child, now_ms, received

_SHARDS = 256
_PROCESSES = 4
_MEMBERS_EACH = 4
_ROUNDS_MINIMUM = 10
_QUIET_MS = 2_000.0
_TAIL_MS = 1_000.0  # of watching the other shards after the join is over
_TICK_MS = 5.0
_TRICKLE_MS = 500.0  # between two entries of a shard
_MOVING_TRICKLE_MS = 25.0  # of one that moves; besides one when it is asked for and one when it is released
_DEADLINE_MS = 30_000.0

Handled = tuple[int, float, float]
"""Shard, when it was published, when it was handled."""


# --- in the processes of the consumers ------------------------------------------------------------------------------


async def _members(pipe: Connection, url: str, stream: str, names: Sequence[str]) -> None:
    """Run members from the beginning to the end, and note what they handle."""
    handled: list[Handled] = []

    async def handler(message: Message) -> None:
        handled.append((message.shard, float(message.fields["at"]), now_ms()))

    consumers = [AsyncConsumer(stream, group=GROUP, redis=url, handler=handler, member=name) for name in names]
    for consumer in consumers:
        await consumer.start()
    while (await received(pipe))[0] == "collect":
        pipe.send((handled.copy(), time.process_time() * 1000))
        handled.clear()
    for consumer in consumers:
        consumer.request_stop()
    for consumer in consumers:
        await consumer.wait()


async def _joiner(pipe: Connection, url: str, stream: str) -> None:
    """Join when told so; say when shards are claimed and when they are first read."""
    consumer: AsyncConsumer | None = None
    read: set[int] = set()
    started = 0.0

    async def handler(message: Message) -> None:
        if message.shard not in read and float(message.fields["at"]) > started:
            read.add(message.shard)
            pipe.send(("read", message.shard, now_ms()))

    async def on_assigned(shards: Shards) -> None:
        at = now_ms()
        for shard in shards:
            pipe.send(("claimed", shard, at))

    while (request := await received(pipe))[0] != "quit":
        if request[0] == "join":
            read.clear()
            consumer = AsyncConsumer(
                stream, group=GROUP, redis=url, handler=handler, on_assigned=on_assigned, member=request[1]
            )
            started, wall = now_ms(), time.time() * 1000
            await consumer.start()
            pipe.send(("started", started, wall))
        else:
            assert consumer is not None
            await consumer.stop()
            pipe.send(("left",))


# --- in this process ------------------------------------------------------------------------------------------------


@attrs.define
class _Join:
    """One join; times in ms since the joiner's `start`."""

    accepted: float = 0.0
    moving: set[int] = attrs.field(factory=set)
    granted: dict[int, float] = attrs.field(factory=dict)
    claimed: dict[int, float] = attrs.field(factory=dict)
    read: dict[int, float] = attrs.field(factory=dict)
    expected: int | None = None
    commands: dict[str, Cost] = attrs.field(factory=dict)

    @property
    def over(self) -> bool:
        return self.expected is not None and len(self.read) == self.expected


class _Source:
    """Publishes to every shard in turn, more often to those that move; and follows the events of the group."""

    def __init__(self, client: redis.Redis, keys: GroupKeys) -> None:
        self.client = client
        self._events = keys.events
        self._names = streams(keys, _SHARDS)
        self._last = client.xrevrange(self._events, count=1)[0][0]
        self._next = 0.0
        self._tick = now_ms()
        self._moving: dict[int, float] = {}  # shard -> when it is due

    def hurry(self, shard: int) -> None:
        """Publish to a shard at the next tick, and more often from then on."""
        self._moving[shard] = 0.0

    def calm(self, shard: int) -> None:
        """Publish to a shard as to the others."""
        self._moving.pop(shard, None)

    def tick(self) -> list[tuple[float, dict[bytes, bytes]]]:
        """Publish what is due. Returns: events since the last time, each with the server's ms."""
        self._tick = max(self._tick + _TICK_MS, now_ms() - _TICK_MS)
        time.sleep(max(0.0, self._tick - now_ms()) / 1000)
        pipe = self.client.pipeline(transaction=False)
        pipe.xread({self._events: self._last}, count=1_000)
        now = now_ms()
        for shard in self._due(now):
            pipe.xadd(self._names[shard], {"at": repr(now)}, maxlen=1_000)
        events = [entry for _, entries in pipe.execute()[0] for entry in entries]
        if events:
            self._last = events[-1][0]
        return [(float(entry_id.split(b"-")[0]), fields) for entry_id, fields in events]

    def _due(self, now: float) -> set[int]:
        begin, self._next = int(self._next), self._next + _SHARDS * _TICK_MS / _TRICKLE_MS
        hurried = {shard for shard, at in self._moving.items() if at <= now}
        self._moving.update(dict.fromkeys(hurried, now + _MOVING_TRICKLE_MS))
        return hurried | {position % _SHARDS for position in range(begin, int(self._next))}

    def run(self, for_ms: float) -> None:
        """Publish for so long."""
        until = now_ms() + for_ms
        while now_ms() < until:
            self.tick()


def run(bench: Bench) -> None:
    """Print percentiles of the joins and the pauses of the other shards."""
    rounds = max(bench.rounds, _ROUNDS_MINIMUM)
    joins: list[_Join] = []
    pauses: dict[str, list[_Pauses]] = {"quiet": [], "join": []}
    busy: list[float] = []
    with bench.group(_SHARDS) as keys, bench.client() as client:
        groups = [[f"member-{p}{m}" for m in range(_MEMBERS_EACH)] for p in range(_PROCESSES)]
        children = [Child(_members, bench.url, keys.stream, names) for names in groups]
        joiner = Child(_joiner, bench.url, keys.stream)
        try:
            _settle(client, keys, _PROCESSES * _MEMBERS_EACH)
            source = _Source(client, keys)
            source.run(_QUIET_MS)
            for number in range(rounds):
                _, cpu_before = _collect(children)
                began = now_ms()
                source.run(_QUIET_MS)
                middle = now_ms()
                join = _join(source, joiner, f"joiner-{number}")
                over = now_ms()
                source.run(_TAIL_MS)
                everything, cpu = _collect(children)
                handled = [one for one in everything if one[0] not in join.moving]
                joins.append(join)
                busy.append((cpu - cpu_before) / (now_ms() - began) / _PROCESSES)
                pauses["quiet"].append(_Pauses.of(handled, began + _TRICKLE_MS, middle - _TRICKLE_MS))
                pauses["join"].append(_Pauses.of(handled, middle, over))
                joiner.ask("leave")
                _settle(client, keys, _PROCESSES * _MEMBERS_EACH)
                source.run(_QUIET_MS)
        finally:
            for child in (joiner, *children):
                child.stop()
    _show(joins, pauses)
    print(f"  CPU of the members' processes: {median(busy):.0%} of a core each.")


def _join(source: _Source, joiner: Child, member: str) -> _Join:
    join = _Join()
    deadline = now_ms() + _DEADLINE_MS
    source.client.config_resetstat()
    joiner.pipe.send(("join", member))
    started = wall = 0.0
    waiting: list[tuple[float, dict[bytes, bytes]]] = []
    while not join.over:
        assert now_ms() < deadline, f"the join did not end: {join}"
        waiting += source.tick()
        while joiner.pipe.poll():
            word, *rest = joiner.pipe.recv()
            if word == "started":
                started, wall = rest
            else:
                getattr(join, word)[rest[0]] = rest[1] - started
        if not wall:
            continue
        for at, fields in waiting:
            _note(join, member, at - wall, fields)
            if fields[b"type"] in (b"shard_revoking", b"shard_released"):
                source.hurry(int(fields[b"shard"]))
        waiting.clear()
        for shard in join.read:
            source.calm(shard)
    join.commands = costs(source.client)
    return join


def _note(join: _Join, member: str, at: float, fields: dict[bytes, bytes]) -> None:
    kind = fields[b"type"]
    if kind == b"shard_revoking":
        join.moving.add(int(fields[b"shard"]))
    elif kind == b"shard_granted" and fields[b"member"] == member.encode():
        join.granted[int(fields[b"shard"])] = at
    elif kind == b"target_changed" and join.expected is None:
        join.accepted, join.expected = at, int(fields[b"moved"])


def _collect(children: Iterable[Child]) -> tuple[list[Handled], float]:
    """What the members handled since the last time, and all the CPU time that their processes ever used, in ms."""
    parts = [child.ask("collect") for child in children]
    return [handled for part, _ in parts for handled in part], sum(cpu for _, cpu in parts)


def _settle(client: redis.Redis, keys: GroupKeys, member_count: int) -> None:
    """Wait until so many members hold all shards between them, evenly."""
    deadline = now_ms() + _DEADLINE_MS
    while True:
        fields = client.hgetall(keys.metadata)
        members = [value for name, value in fields.items() if name.startswith(b"member:")]
        shards = [value for name, value in fields.items() if name.startswith(b"shard:")]
        assigned = sum(b"state=assigned" in value for value in shards)
        if len(members) == member_count and assigned == _SHARDS and all(b"pending=-" in value for value in members):
            return
        assert now_ms() < deadline, f"{len(members)} members, {assigned} shards assigned"
        time.sleep(0.02)


@attrs.frozen
class _Pauses:
    """What the shards that did not move went through in one period, in ms."""

    longest_gap: float
    delay_median: float
    delay_p99: float
    delay_longest: float

    @classmethod
    def of(cls, handled: Iterable[Handled], begin: float, end: float) -> _Pauses:
        """Look at what fell into a period. A gap counts if it touches the period, an entry if its publishing did."""
        by_shard: dict[int, list[float]] = {}
        for shard, _, at in handled:
            by_shard.setdefault(shard, []).append(at)
        gaps = [
            after - before
            for times in map(sorted, by_shard.values())
            for before, after in pairwise(times)
            if after >= begin and before <= end
        ]
        delays = [at - published for _, published, at in handled if begin <= published <= end]
        assert gaps and delays, "no shard got anything"  # noqa: PT018
        return cls(max(gaps), percentile(delays, 50), percentile(delays, 99), max(delays))


def _show(joins: Sequence[_Join], pauses: dict[str, list[_Pauses]]) -> None:
    members = _PROCESSES * _MEMBERS_EACH
    table = Table(
        f"rebalance: 1 joins {members} members x {_SHARDS} shards, ms since start()", "until", "median", "p90", "max"
    )
    parts = {
        "accepted": [join.accepted for join in joins],
        "granted, every shard that moves": [max(join.granted.values()) for join in joins],
        "claimed, every shard that moves": [max(join.claimed.values()) for join in joins],
        "read, first of them": [min(join.read.values()) for join in joins],
        "read, every shard that moves": [max(join.read.values()) for join in joins],
    }
    for name, times in parts.items():
        table.row(name, median(times), percentile(times, 90), max(times))
    moved = "-".join(map(str, sorted({len(join.moving) for join in joins})))
    table.show(f"{len(joins)} joins; {moved} shards move. {_PROCESSES} processes x {_MEMBERS_EACH} members.")
    table = Table("rebalance: what Redis did meanwhile", "command", "calls", "server ms")
    for name in ("evalsha", "xrange", "client|unblock"):
        spent = [join.commands.get(name, Cost(0, 0)) for join in joins]
        table.row(name, f"{median([c.calls for c in spent]):.0f}", median([c.usec / 1000 for c in spent]))
    table.show("The trickle's reads and acknowledgements are among them.")
    table = Table("rebalance: shards that do not move, ms", "what", "quiet median", "max", "join median", "max")
    for name in ("longest_gap", "delay_median", "delay_p99", "delay_longest"):
        quiet, during = ([getattr(p, name) for p in pauses[period]] for period in ("quiet", "join"))
        table.row(name.replace("_", " "), median(quiet), max(quiet), median(during), max(during))
    table.show(
        f"A shard gets an entry every {_TRICKLE_MS:.0f} ms; gap: between two of them handled. "
        "delay: from publishing to handling."
    )
