"""What `Monitor` returns beside the records themselves: frozen values, made for people, dashboards and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from .group_view import GroupView, MemberView, ShardView
from .models import Layout, Waiting

Status = Literal["OK", "EMPTY", "DEGRADED", "UNAVAILABLE"]


@attrs.frozen(kw_only=True)
class GroupHealth:
    """How one group is.

    Attributes:
        stream, group: its names.
        status: ``OK``; ``EMPTY``: nothing is wrong, but it has no members, so nothing is read; or ``DEGRADED``.
        problems: what is wrong, a sentence each; empty unless it is ``DEGRADED``.
        members: how many; ``None`` if the record cannot be read.
        shards: how many; ``None`` if the record cannot be read.
        unowned: shards that nobody holds at present.
        version: of the metadata; ``None`` if the record cannot be read.
    """

    stream: str
    group: str
    status: Status
    problems: tuple[str, ...]
    members: int | None
    shards: int | None
    unowned: frozenset[int]
    version: int | None


@attrs.frozen(kw_only=True)
class SystemHealth:
    """How everything under one key prefix is.

    Attributes:
        status: ``OK``, ``DEGRADED`` if any group is, ``UNAVAILABLE`` if Redis does not answer.
        problems: what is wrong with Redis itself; what is wrong with a group stands there.
        latency_ms: of one PING; ``None`` if Redis does not answer.
        groups: each group of the index, sorted.
    """

    status: Status
    problems: tuple[str, ...]
    latency_ms: float | None
    groups: tuple[GroupHealth, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.status == "OK"


@attrs.frozen(kw_only=True)
class RevokeProgress:
    """One shard on its way from its holder to somebody else.

    Attributes:
        shard: its index.
        holder: member that has to drain it.
        target: member that waits for it, or ``None``.
        token: of the holder's grant.
        waited_ms: since the holder was asked to drain it.
        remaining_ms: until the holder is fenced; negative if that is overdue.
    """

    shard: int
    holder: str
    target: str | None
    token: int
    waited_ms: int
    remaining_ms: int


@attrs.frozen(kw_only=True)
class AssignmentView:
    """Who should have what, who has it, and what is on its way.

    Attributes:
        stream, group: its names.
        version: of the metadata.
        group_epoch: of the inputs of the assignment.
        assignment_epoch: the group epoch that the target was computed for.
        now_ms: Redis server time of this view.
        target: shard index -> member that should own it, or ``None``.
        current: shard index -> member that holds it, or ``None``.
        revokes: shards that are being drained, by index.
        waiting: shards that are free although they have a target, by index.
        violations: invariants that the record violates, a sentence each.
    """

    stream: str
    group: str
    version: int
    group_epoch: int
    assignment_epoch: int
    now_ms: int
    target: Mapping[int, str | None]
    current: Mapping[int, str | None]
    revokes: tuple[RevokeProgress, ...]
    waiting: tuple[int, ...]
    violations: tuple[str, ...]

    @property
    def converged(self) -> bool:
        """Whether every shard is where it should be, and the target is that of the newest members."""
        return self.group_epoch == self.assignment_epoch and self.target == self.current and not self.revokes

    @classmethod
    def of(cls, view: GroupView) -> AssignmentView:
        """Make it of a `view` of the whole record."""
        rebalance_ms = round(view.timings.rebalance_seconds * 1000)
        revokes = [
            RevokeProgress(
                shard=shard.index,
                holder=shard.holder or "",
                target=shard.target,
                token=shard.token,
                waited_ms=max(0, view.now_ms - shard.deadline_ms + rebalance_ms),
                remaining_ms=shard.deadline_ms - view.now_ms,
            )
            for shard in view.shards.values()
            if shard.state == "revoking"
        ]
        return cls(
            stream=view.stream,
            group=view.group,
            version=view.version,
            group_epoch=view.group_epoch,
            assignment_epoch=view.assignment_epoch,
            now_ms=view.now_ms,
            target={index: shard.target for index, shard in view.shards.items()},
            current={index: shard.holder for index, shard in view.shards.items()},
            revokes=tuple(revokes),
            waiting=tuple(i for i, s in view.shards.items() if s.state == "free" and s.target is not None),
            violations=tuple(view.violations()),
        )


@attrs.frozen(kw_only=True)
class FenceView:
    """The fence of one shard for one group as stored.

    Attributes:
        incarnation: lifecycle of the group that claimed it.
        token: of the grant that claimed it.
        member: that claimed it; ``-`` where nobody has since it was moved or retired.
        nonce: of the session that claimed it.
        position: everything up to this id is acknowledged; ``None`` if nothing was ever.
    """

    incarnation: int
    token: int
    member: str
    nonce: str
    position: str | None


@attrs.frozen(kw_only=True)
class RouteView:
    """The route of one shard as stored: which layout it accepts entries for.

    Attributes:
        shard: its index.
        state: ``open`` or ``closed``; ``missing`` if the key is not there.
        epoch: routing epoch; ``None`` if the key is not there.
        layout: identity of the layout; ``None`` if the key is not there.
        fields: the whole hash, for people.
    """

    shard: int
    state: str
    epoch: int | None
    layout: str | None
    fields: Mapping[str, str]


@attrs.frozen(kw_only=True)
class RoutingView:
    """Where producers publish to.

    Attributes:
        layout: the stream's record.
        routes: of each shard, by index.
        problems: where a route does not fit the record, a sentence each.
    """

    layout: Layout
    routes: tuple[RouteView, ...]
    problems: tuple[str, ...]


@attrs.frozen(kw_only=True)
class ConsumerView:
    """One Redis consumer of a consumer group on a shard: a member, or one that was left behind.

    Attributes:
        name: member id.
        pending: entries delivered to it and not acknowledged.
        idle_ms: since it last asked Redis for anything on this shard.
    """

    name: str
    pending: int
    idle_ms: int


@attrs.frozen(kw_only=True)
class PendingView:
    """One entry that is delivered and not acknowledged.

    Attributes:
        id: of the entry.
        consumer: that it was delivered to.
        idle_ms: since then.
        deliveries: how often.
    """

    id: str
    consumer: str
    idle_ms: int
    deliveries: int


@attrs.frozen(kw_only=True)
class ShardReading:
    """One shard of a group as it is in its own slot, all at one moment.

    Attributes:
        shard: its index.
        stream_key: Redis key of its stream.
        slot: Cluster slot of all its keys.
        now_ms: Redis server time.
        exists: whether the stream is there.
        length: entries in the stream.
        memory_bytes: estimated by Redis; ``None`` if it cannot tell.
        last_id: of the newest entry ever added; ``None`` without a stream.
        has_group: whether the consumer group is there.
        pending: delivered and not acknowledged; ``None`` if the consumer group is not there.
        lag: not yet delivered; ``None`` if Redis cannot tell, which is not zero (always before Redis 7).
        undelivered: whether there is an entry that the group has not received; ``None`` without group or stream.
        delivered_id: of the last entry delivered to the group; ``None`` if the consumer group is not there.
        oldest: the first pending entry, or ``None``.
        consumers: of this group, by name.
        groups: all consumer groups of the stream, whoever made them.
        fence: ``None`` if it was never claimed.
        route: of the shard.
    """

    shard: int
    stream_key: str
    slot: int
    now_ms: int
    exists: bool
    length: int
    memory_bytes: int | None
    last_id: str | None
    has_group: bool
    pending: int | None
    lag: int | None
    undelivered: bool | None
    delivered_id: str | None
    oldest: PendingView | None
    consumers: tuple[ConsumerView, ...]
    groups: tuple[str, ...]
    fence: FenceView | None
    route: RouteView


@attrs.frozen(kw_only=True)
class ShardStatus:
    """One shard of a group: what the group's record says of it, and what is in its own slot.

    Attributes:
        record: as in the group's metadata; ``None`` for a shard that this group does not read.
        reading: what is in the shard's slot, a moment later.
    """

    record: ShardView | None
    reading: ShardReading

    @property
    def shard(self) -> int:
        """Its index."""
        return self.reading.shard

    @property
    def owner(self) -> str | None:
        """Member that holds it, or ``None``."""
        return None if self.record is None else self.record.holder


@attrs.frozen(kw_only=True)
class RemovedShard:
    """What lies on a shard that the layout of its stream has no more.

    Attributes:
        shard: its index.
        stream_key: Redis key of its stream, which stays: ids have to go on where they were if the shard comes back.
        entries: how many there are.
        memory_bytes: of them and of the event ids; ``None``: Redis does not tell.
        event_ids: how many it remembers.
        route: ``closed``, or what it should not be: ``open``, ``missing``.
        epoch: routing epoch since which it is; ``None`` without a route.
        waits: what keeps entries there; empty: all but the last may go.
    """

    shard: int
    stream_key: str
    entries: int
    memory_bytes: int | None
    event_ids: int
    route: str
    epoch: int | None
    waits: tuple[Waiting, ...]


@attrs.frozen(kw_only=True)
class Trimmed:
    """What was removed from shards that the layout of a stream has no more.

    Attributes:
        entries: so many entries.
        event_ids: so many event ids that were out of their window.
        waits: what kept a shard from being trimmed at all, one for each such shard.
    """

    entries: int = 0
    event_ids: int = 0
    waits: tuple[Waiting, ...] = ()


@attrs.frozen(kw_only=True)
class StoredEntry:
    """One entry of a shard as it lies there. Looking does not deliver it.

    Attributes:
        shard: index of the shard.
        id: of the entry.
        at_ms: when it was added, by the clock of Redis.
        key: partition key, or ``None``.
        event_id: or ``None``.
        fields: all fields but the reserved ones.
        pending: to whom it is delivered; ``None`` if to nobody, or no group was asked for.
    """

    shard: int
    id: str
    at_ms: int
    key: bytes | None
    event_id: str | None
    fields: Mapping[str, bytes]
    pending: PendingView | None = None


@attrs.frozen(kw_only=True)
class AuditEntry:
    """One administrative mutation, accepted, refused or failed.

    Attributes:
        id: of the entry in the audit stream.
        at_ms: Redis server time.
        action: such as ``create``.
        outcome: ``accepted``, ``refused`` or ``failed``.
        word: ``OK`` or the error word.
        detail: what came with it.
        request_id: given by who asked.
        requested_by: who asked, in their own words.
        reason: why.
        principal: Redis user that sent it.
        client_address: it came from.
        duration_ms: as written down; ``None`` where it was not.
        fingerprint: SHA-256 of the request.
        fields: the whole entry, with whatever else was written down.
    """

    id: str
    at_ms: int
    action: str
    outcome: str
    word: str
    detail: str
    request_id: str
    requested_by: str
    reason: str
    principal: str
    client_address: str
    duration_ms: float | None
    fingerprint: str
    fields: Mapping[str, str]


@attrs.frozen(kw_only=True)
class EventEntry:
    """One transition of a group.

    Attributes:
        id: of the entry in the event stream.
        at_ms: Redis server time.
        type: such as ``member_joined``.
        member: whom it concerns, or ``None``.
        shard: which it concerns, or ``None``.
        fields: the rest of what was written down.
    """

    id: str
    at_ms: int
    type: str
    member: str | None
    shard: int | None
    fields: Mapping[str, str]


@attrs.frozen(kw_only=True)
class RecordCompatibility:
    """Whether this release can work with one record.

    Attributes:
        stream: its name.
        group: of a group's record; ``None`` for the record of the stream itself.
        protocol: lowest and highest version that may take part; ``None`` where that cannot be read.
        problem: why this release cannot; ``None``: it can.
    """

    stream: str
    group: str | None
    protocol: tuple[int, int] | None
    problem: str | None


@attrs.frozen(kw_only=True)
class Compatibility:
    """What this release speaks, and what the records that are there accept.

    Attributes:
        release: version of the package.
        protocol: version of the coordination protocol that it speaks.
        schema: of the records that it reads and writes.
        records: of each stream and group of the index.
    """

    release: str
    protocol: int
    schema: int
    records: tuple[RecordCompatibility, ...]

    @property
    def ok(self) -> bool:
        """Whether this release can work with every record."""
        return all(record.problem is None for record in self.records)


def member_state(member: MemberView) -> str:
    """Return ``active``, ``leaving``, or ``overdue`` if its lease has passed and nobody has removed it yet."""
    overdue = member.lease_remaining_ms is not None and member.lease_remaining_ms < 0
    return "overdue" if overdue else member.state
