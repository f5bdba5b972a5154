"""What a heartbeat costs Redis: a steady one by group size, and the few that compute or change an assignment.

Sessions are driven in one thread, without workers: claims and drains count as done at once. So all that Redis runs
meanwhile is the heartbeat script, and INFO commandstats tells what it cost.
"""

from __future__ import annotations

import itertools

import attrs
import redis

from redis_stream_coord import Timings, commands
from redis_stream_coord.keys import GroupKeys
from redis_stream_coord.runner import SyncRunner
from redis_stream_coord.session import Claim, Drain, Session
from tests.benchmarks.measuring import Bench, Cost, Table, cost, median, percentile

_SIZES = ((1, 8), (4, 64), (16, 256), (64, 256), (64, 1024), (1, 1024))
_CHANGED = ((16, 256), (64, 1024))
_BEATS = 2_000
# Long enough that nobody expires, whatever else the machine does.
_TIMINGS = Timings(heartbeat_seconds=3.0, lease_seconds=600.0, rebalance_seconds=600.0)


class Members:
    """The members of one group."""

    def __init__(self, runner: SyncRunner, keys: GroupKeys) -> None:
        self._runner = runner
        self._keys = keys
        self._nonces = itertools.count(1)
        self.sessions: dict[str, Session] = {}

    def add(self, member: str) -> None:
        """Make a session; it joins at its first beat."""
        self.sessions[member] = Session(member, weight=1.0, draw_nonce=lambda: f"n{next(self._nonces)}")

    def beat(self, member: str) -> None:
        """Send one heartbeat, and do at once what its answer asks for."""
        session = self.sessions[member]
        request = session.request()
        reply = self._runner.run(commands.heartbeat(self._keys, request))
        for action in session.accepted(request, reply, sent_at=0.0):
            if isinstance(action, Claim):
                session.claimed(action.held)
            elif isinstance(action, Drain):
                for held in action.held:
                    session.drained(held)
        if session.finished:
            del self.sessions[member]

    def settle(self) -> None:
        """Beat until nobody's shards change any more."""
        before = None
        while before != (now := {m: s.held() for m, s in self.sessions.items()}) or self._urgent():
            before = now
            for member in list(self.sessions):
                self.beat(member)

    def _urgent(self) -> bool:
        return any(session.urgent for session in self.sessions.values())


def run(bench: Bench) -> None:
    """Print the costs."""
    _steady(bench)
    _changes(bench)


def _steady(bench: Bench) -> None:
    table = Table("heartbeat: nothing changes", "members x shards", "server us/call", "vs smallest group", "p99 us")
    smallest = 0.0
    for member_count, shards in _SIZES:
        with bench.group(shards, _TIMINGS) as keys, bench.runner() as runner, bench.client() as client:
            members = _joined(runner, keys, member_count)
            turn = itertools.cycle(list(members.sessions))
            blocks = [_beats(client, members, turn) for _ in range(bench.rounds)]
            usec = median([block.per_call for block in blocks])
            smallest = smallest or usec
            slow = _slowest(client, members, turn)
            table.row(f"{member_count} x {shards}", usec, f"{usec / smallest:.2f}", slow)
    table.show("server us/call: INFO commandstats of EVALSHA, the nested commands included; p99: from SLOWLOG.")


def _beats(client: redis.Redis, members: Members, turn: itertools.cycle[str]) -> Cost:
    return cost(client, "evalsha", lambda: [members.beat(next(turn)) for _ in range(_BEATS)])


def _slowest(client: redis.Redis, members: Members, turn: itertools.cycle[str]) -> float:
    client.config_set("slowlog-log-slower-than", 0)
    client.config_set("slowlog-max-len", 1_000)
    client.slowlog_reset()
    for _ in range(500):
        members.beat(next(turn))
    entries = client.slowlog_get(1_000)
    client.config_set("slowlog-log-slower-than", 10_000)
    return percentile([e["duration"] for e in entries if e["command"].upper().startswith(b"EVALSHA")], 99)


@attrs.define
class _Change:
    """What joins and leaves of one group size cost, in ms of the server."""

    join: list[float] = attrs.field(factory=list)
    calls: list[int] = attrs.field(factory=list)
    handoff: list[float] = attrs.field(factory=list)
    longest: list[float] = attrs.field(factory=list)
    leave: list[float] = attrs.field(factory=list)


def _changes(bench: Bench) -> None:
    table = Table("heartbeat: a member joins, then leaves", "members x shards", "what", "calls", "server ms", "longest")
    for member_count, shards in _CHANGED:
        with bench.group(shards, _TIMINGS) as keys, bench.runner() as runner, bench.client() as client:
            members = _joined(runner, keys, member_count)
            change = _Change()
            for number in range(bench.rounds):
                _change(client, members, f"joiner-{number}", change)
        size = f"{member_count} x {shards}"
        table.row(size, "the join itself", 1, median(change.join), max(change.join))
        table.row(size, "all until settled", f"{median(change.calls):.0f}", median(change.handoff), max(change.longest))
        table.row(size, "the leave itself", 1, median(change.leave), max(change.leave))
    table.show("Redis serves nobody else during one call: 'longest' (ms) is what another client can see of it.")


def _change(client: redis.Redis, members: Members, joiner: str, change: _Change) -> None:
    members.add(joiner)
    change.join.append(cost(client, "evalsha", lambda: members.beat(joiner)).usec / 1000)
    total, longest = _handoff(client, members)
    change.calls.append(total.calls)
    change.handoff.append(total.usec / 1000)
    change.longest.append(longest)
    members.sessions[joiner].leave(hold=False)
    change.leave.append(cost(client, "evalsha", lambda: members.beat(joiner)).usec / 1000)
    members.settle()


def _handoff(client: redis.Redis, members: Members) -> tuple[Cost, float]:
    client.config_set("slowlog-log-slower-than", 0)
    client.config_set("slowlog-max-len", 10_000)
    client.slowlog_reset()
    total = cost(client, "evalsha", members.settle)
    entries = client.slowlog_get(10_000)
    client.config_set("slowlog-log-slower-than", 10_000)
    return total, max(entry["duration"] for entry in entries) / 1000


def _joined(runner: SyncRunner, keys: GroupKeys, member_count: int) -> Members:
    members = Members(runner, keys)
    for number in range(member_count):
        members.add(f"member-{number:02}")
        members.beat(f"member-{number:02}")
    members.settle()
    return members
