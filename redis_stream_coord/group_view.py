"""The record of a group as it is stored, and the invariants that it can be held against."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from .models import Shards, Timings


@attrs.frozen
class MemberView:
    """One member as stored.

    Attributes:
        id: member id.
        nonce: of its live session.
        epoch: member epoch.
        weight: share of the shards it asks for; 1.0 is usual.
        state: ``active`` or ``leaving``.
        joined_ms: Redis server time at which the session began.
        lease_remaining_ms: until it expires; negative if overdue, ``None`` if its lease is missing.
        assigned, revoking, pending: shards it owns, has to drain, and waits for.
    """

    id: str
    nonce: str
    epoch: int
    weight: float
    state: str
    joined_ms: int
    lease_remaining_ms: int | None
    assigned: Mapping[int, int]
    revoking: Mapping[int, int]
    pending: Shards


@attrs.frozen
class ShardView:
    """One shard of a group as stored.

    Attributes:
        index: which shard.
        target: member that should own it, or ``None``.
        holder: member that owns it or drains it, or ``None``.
        token: of the latest grant.
        state: ``free``, ``assigned`` or ``revoking``.
        deadline_ms: when a holder that drains it will be fenced, Redis server ms; 0 for none.
        hold_until_ms: not granted before, Redis server ms; 0 for none.
        readable: false once the group has drained it and its stream does not have it any more; it goes when its holder
            has let it go.
    """

    index: int
    target: str | None
    holder: str | None
    token: int
    state: str
    deadline_ms: int
    hold_until_ms: int
    readable: bool = True


@attrs.frozen
class RoundView:
    """An open correction round: the record of a group went backwards, and its members come into step with it.

    Attributes:
        id: of this round.
        opened_ms: since when, Redis server ms.
        due_ms: members that are not in step by then are fenced.
        waits_for: members that are not in step yet.
        strangers: somebody reported who is not in the record; so it lasts one lease at least.
    """

    id: str
    opened_ms: int
    due_ms: int
    waits_for: frozenset[str]
    strangers: bool


@attrs.frozen
class GroupView:
    """The whole record of one group at one moment.

    Attributes:
        stream, group: its names.
        incarnation: lifecycle; grows when the group is deleted and created anew.
        version: of the metadata; grows with every change.
        group_epoch: grows with every change of what the assignment depends on.
        assignment_epoch: the group epoch that the target was computed for.
        grant_counter: token of the latest grant.
        timings: see `Timings`.
        now_ms: Redis server time of this view.
        members: by id.
        shards: by index.
        round: the correction round that is open, or ``None``.
        frozen_ms: since when an operator has frozen the group, Redis server ms, or ``None``.
        protocol: lowest and highest version of the protocol that may take part.
    """

    stream: str
    group: str
    incarnation: int
    version: int
    group_epoch: int
    assignment_epoch: int
    grant_counter: int
    timings: Timings
    now_ms: int
    members: Mapping[str, MemberView]
    shards: Mapping[int, ShardView]
    round: RoundView | None = None
    frozen_ms: int | None = None
    protocol: tuple[int, int] = (1, 1)

    def degraded(self) -> list[str]:
        """Return why the group is not as it should be, a sentence for each reason; empty when all is well."""
        found = self.violations()
        if self.round is not None:
            waits = ", ".join(sorted(self.round.waits_for)) or "the lease of those who are not in the record"
            age = (self.now_ms - self.round.opened_ms) / 1000
            found.append(f"the metadata went backwards: correction round open for {age:.0f} s, waits for {waits}")
        if self.frozen_ms is not None:
            found.append(f"frozen by an operator for {(self.now_ms - self.frozen_ms) / 1000:.0f} s: nothing is granted")
        return found

    @property
    def owners(self) -> Mapping[int, str | None]:
        """Shard index -> member that holds it, or ``None``."""
        return {index: shard.holder for index, shard in self.shards.items()}

    def violations(self) -> list[str]:
        """Check the stored record against the invariants that one view can show.

        Returns:
            A sentence for each violation; empty when all is well.
        """
        found = []
        live = [member for member in self.members.values() if member.state == "active"]
        for shard in self.shards.values():
            if live and shard.readable and shard.target is None and self.assignment_epoch == self.group_epoch:
                found.append(f"shard {shard.index} has no target though there are {len(live)} live members")
            # In a correction round no target is computed.
            if shard.target is not None and shard.target not in self.members and self.round is None:
                found.append(f"shard {shard.index} is meant for {shard.target}, which is no member")
            if shard.token > self.grant_counter:
                found.append(f"shard {shard.index} has token {shard.token} above the counter {self.grant_counter}")
        for index in self.shards:
            holders = [m.id for m in self.members.values() if index in m.assigned or index in m.revoking]
            if len(holders) > 1:
                found.append(f"shard {index} is held by {' and '.join(sorted(holders))}")
        if self.assignment_epoch > self.group_epoch:
            found.append(f"assignment epoch {self.assignment_epoch} above group epoch {self.group_epoch}")
        if live and self.assignment_epoch == self.group_epoch:
            found += self._unbalanced(live)
        return found

    def _unbalanced(self, live: list[MemberView]) -> list[str]:
        """Hold the target against the quotas: the share of each member by its weight, rounded down or up."""
        total = sum(round(member.weight * 1000) for member in live)
        found = []
        for member in live:
            count = sum(shard.target == member.id for shard in self.shards.values())
            floor, rest = divmod(len(self.shards) * round(member.weight * 1000), total)
            if not floor <= count <= floor + (rest > 0):
                found.append(
                    f"the target is not balanced: {count} shards for {member.id}, and its share of weight "
                    f"{member.weight:g} is {len(self.shards) * member.weight * 1000 / total:.2f}"
                )
        return found
