"""What `Monitor` does, as sagas that change nothing. No input or output here; a runner drives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import attrs

from . import commands, removed, reshard, triage
from .commands import Command, Saga, StreamView, Together
from .errors import ConfigError, CoordError, NotFoundError, RedisUnavailableError
from .group_view import GroupView
from .keys import GroupKeys, StreamKeys
from .models import Layout
from .settings import RedisSettings
from .triage import Finding
from .views import (
    AuditEntry,
    Compatibility,
    EventEntry,
    GroupHealth,
    RecordCompatibility,
    RemovedShard,
    RouteView,
    RoutingView,
    ShardReading,
    ShardStatus,
    Status,
    StoredEntry,
    SystemHealth,
    member_state,
)

# States of a resharding in which routes are on their way.
_MOVING = ("CUTOVER", "DRAINING", "REOPENING")


def assess(view: GroupView) -> tuple[str, ...]:
    """Say what is wrong with a group, as far as its record shows it.

    Returns:
        A sentence for each problem; empty when all is well, also while shards move as they should.
    """
    problems = view.degraded()
    for member in view.members.values():
        if member_state(member) == "overdue":
            problems.append(f"member {member.id} is overdue by {-(member.lease_remaining_ms or 0)} ms")
        elif member.lease_remaining_ms is None:
            problems.append(f"member {member.id} has no lease")
    draining = {shard.holder for shard in view.shards.values() if shard.state == "revoking"}
    for shard in view.shards.values():
        if shard.state == "revoking" and shard.deadline_ms < view.now_ms:
            problems.append(f"shard {shard.index} should have been drained by {shard.holder}")
        waits = shard.target in draining or shard.hold_until_ms > view.now_ms
        if view.members and shard.holder is None and not waits:
            problems.append(f"shard {shard.index} has no owner")
    return tuple(problems)


def disagreements(layout: Layout, routes: Iterable[RouteView]) -> tuple[str, ...]:
    """Say where routes do not fit the record of their stream; a sentence for each."""
    found = []
    for route in routes:
        if route.state == "missing":
            found.append(f"shard {route.shard} has no route: nothing can be published to it")
        elif layout.resharding in _MOVING:
            # Routes are closed and opened one after another.
            continue
        elif route.layout != layout.layout:
            found.append(f"shard {route.shard} accepts entries for layout {route.layout}, not {layout.layout}")
        elif route.state != "open" and layout.state == "active":
            found.append(f"shard {route.shard} is {route.state}")
    return tuple(found)


class Reads:
    """The reads, for both faces of `redis_stream_coord.monitor`."""

    def __init__(self, redis: str | RedisSettings) -> None:
        self.settings = RedisSettings.of(redis)

    def group_keys(self, stream: str, group: str) -> GroupKeys:
        return GroupKeys(stream, group, self.settings.key_prefix)

    def stream_keys(self, stream: str) -> StreamKeys:
        return StreamKeys(stream, self.settings.key_prefix)

    def health(self) -> Saga[SystemHealth]:
        began = self.settings.machine.clock()
        try:
            yield commands.ping()
            latency_ms = (self.settings.machine.clock() - began) * 1000
            names: list[tuple[str, str]] = yield commands.groups(self.settings.key_prefix)
        except RedisUnavailableError as error:
            return SystemHealth(status="UNAVAILABLE", problems=(str(error),), latency_ms=None, groups=())
        answers = yield Together([commands.describe(self.group_keys(*name)) for name in names])
        groups = tuple(_group_health(*name, answer) for name, answer in zip(names, answers, strict=True))
        degraded = any(group.status == "DEGRADED" for group in groups)
        return SystemHealth(
            status="DEGRADED" if degraded else "OK", problems=(), latency_ms=round(latency_ms, 3), groups=groups
        )

    def routing(self, stream: str) -> Saga[RoutingView]:
        keys = self.stream_keys(stream)
        layout: Layout = yield commands.layout(keys)
        routes = tuple((yield from together([commands.route(keys, shard) for shard in range(layout.shards)])))
        return RoutingView(layout=layout, routes=routes, problems=disagreements(layout, routes))

    def shards(self, stream: str, group: str, also: Sequence[int] = ()) -> Saga[list[ShardStatus]]:
        keys = self.group_keys(stream, group)
        view: GroupView = yield commands.describe(keys)
        layout: Layout = yield commands.layout(self.stream_keys(stream))
        # `also`: numbers of shards of other layouts, whose shards may be left over.
        indices = sorted(set(view.shards) | set(range(max([layout.shards, *also]))))
        readings: list[ShardReading] = yield from together([commands.inspect(keys, index) for index in indices])
        return [ShardStatus(record=view.shards.get(reading.shard), reading=reading) for reading in readings]

    def removed(self, stream: str) -> Saga[list[RemovedShard]]:
        keys = self.stream_keys(stream)
        view: StreamView = yield commands.resharding(keys)
        return (yield from removed.look(keys, view))

    def messages(
        self,
        stream: str,
        group: str | None,
        shard: int | None,
        entry_id: str | None,
        event_id: str | None,
        after: str | None,
        count: int,
        newest: bool,
    ) -> Saga[list[StoredEntry]]:
        keys = self.stream_keys(stream)
        if count < 1:
            raise ConfigError(f"count={count} must be positive", stream=stream)
        layout: Layout = yield commands.layout(keys)
        known = set(range(layout.shards))
        if group is not None:
            view: GroupView = yield commands.describe(self.group_keys(stream, group))
            known |= set(view.shards)
        if shard is not None and shard not in known:
            raise NotFoundError("there is no such shard", stream=stream, shard=shard)
        chosen = sorted(known) if shard is None else [shard]
        if event_id is not None:
            ids = yield from together([commands.published(keys, index, event_id) for index in chosen])
            found = yield from self._by_id(keys, zip(chosen, ids, strict=True))
        elif entry_id is not None:
            found = yield from self._by_id(keys, [(index, entry_id) for index in chosen])
        else:
            ends = {} if after is None else {"last" if newest else "first": f"({after}"}
            pages = yield from together(
                [commands.entries(keys, index, count=count, newest=newest, **ends) for index in chosen]
            )
            found = [entry for page in pages for entry in page]
        if group is None:
            return found
        return (yield from self._with_pending(self.group_keys(stream, group), found))

    def _by_id(self, keys: StreamKeys, wanted: Iterable[tuple[int, str | None]]) -> Saga[list[StoredEntry]]:
        pages = yield from together(
            [
                commands.entries(keys, shard, first=entry_id, last=entry_id, count=1)
                for shard, entry_id in wanted
                if entry_id is not None
            ]
        )
        return [entry for page in pages for entry in page]

    def _with_pending(self, keys: GroupKeys, entries: Sequence[StoredEntry]) -> Saga[list[StoredEntry]]:
        by_shard: dict[int, list[str]] = {}
        for entry in entries:
            by_shard.setdefault(entry.shard, []).append(entry.id)
        pages = yield from together([commands.pending_of(keys, shard, ids) for shard, ids in by_shard.items()])
        pending = {(s, one.id): one for s, page in zip(by_shard, pages, strict=True) for one in page}
        return [attrs.evolve(entry, pending=pending.get((entry.shard, entry.id))) for entry in entries]

    def triage(self, stream: str, group: str, expected_shards: int | None, drain_seconds: float) -> Saga[list[Finding]]:
        keys = self.group_keys(stream, group)
        view: GroupView = yield commands.describe(keys)
        found = yield from reshard.look(self.stream_keys(stream))
        routing = yield from self.routing(stream)
        shards = yield from self.shards(stream, group, also=() if found is None else (found.source, found.target))
        events: list[EventEntry] = yield commands.event_log(keys, count=1000)
        return [
            *triage.rebalance(view, shards, events),
            *triage.resharding(
                view, shards, routing, found, expected_shards=expected_shards, drain_seconds=drain_seconds
            ),
        ]

    def compatibility(self) -> Saga[Compatibility]:
        names: list[tuple[str, str]] = yield commands.groups(self.settings.key_prefix)
        streams = sorted({stream for stream, _ in names})
        layouts = yield Together([commands.layout(self.stream_keys(stream)) for stream in streams])
        groups = yield Together([commands.describe(self.group_keys(*name)) for name in names])
        records = [
            RecordCompatibility(stream=stream, group=None, protocol=None, problem=_problem(answer))
            for stream, answer in zip(streams, layouts, strict=True)
        ]
        for (stream, group), answer in zip(names, groups, strict=True):
            accepted = answer.protocol if isinstance(answer, GroupView) else None
            problem = _problem(answer)
            if accepted is not None and not accepted[0] <= commands.PROTOCOL <= accepted[1]:
                problem = (
                    f"it accepts protocol {accepted[0]} to {accepted[1]}, and this release speaks {commands.PROTOCOL}"
                )
            records.append(RecordCompatibility(stream=stream, group=group, protocol=accepted, problem=problem))
        return Compatibility(
            release=_release(),
            protocol=commands.PROTOCOL,
            schema=commands.SCHEMA,
            records=tuple(records),
        )

    def audit(self, stream: str, group: str | None, count: int) -> Saga[list[AuditEntry]]:
        key = self.stream_keys(stream).audit if group is None else self.group_keys(stream, group).audit
        found: list[AuditEntry] = yield commands.audit_log(key, count=count)
        return found

    def events(self, stream: str, group: str, count: int) -> Saga[list[EventEntry]]:
        found: list[EventEntry] = yield commands.event_log(self.group_keys(stream, group), count=count)
        return found


def _group_health(stream: str, group: str, answer: GroupView | CoordError) -> GroupHealth:
    if isinstance(answer, CoordError):
        return GroupHealth(
            stream=stream,
            group=group,
            status="DEGRADED",
            problems=(str(answer),),
            members=None,
            shards=None,
            unowned=frozenset(),
            version=None,
        )
    problems = assess(answer)
    status: Status = "DEGRADED" if problems else "OK" if answer.members else "EMPTY"
    return GroupHealth(
        stream=stream,
        group=group,
        status=status,
        problems=problems,
        members=len(answer.members),
        shards=len(answer.shards),
        unowned=frozenset(index for index, owner in answer.owners.items() if owner is None),
        version=answer.version,
    )


def _release() -> str:
    try:
        return version("redis-stream-coord")
    except PackageNotFoundError:  # run from a checkout, without an installation
        return "unknown"


def _problem(answer: object) -> str | None:
    return str(answer) if isinstance(answer, CoordError) else None


def together(asked: Sequence[Command[Any]]) -> Saga[list[Any]]:
    """Send commands in as few round trips as there can be; raise the first error."""
    answers = yield Together(asked)
    for answer in answers:
        if isinstance(answer, CoordError):
            raise answer
    return list(answers)
