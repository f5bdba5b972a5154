"""The rebalance checklist of the runbook. Decisions only: what they are made of is handed in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from ..group_view import GroupView, MemberView, ShardView
from ..views import EventEntry, ShardReading, ShardStatus, member_state
from .finding import Finding, finding, listed, seconds, walk

# Events older than so many leases say nothing about the present.
_RECENT_LEASES = 20
# A session replaced so often within the time of `_RECENT_LEASES` is fought for by two processes.
_REPLACED_OFTEN = 3
# An owner with work in reach looks at its shard at least so often.
_LOOKS_WITHIN_MS = 15_000

_find = partial(finding, "rebalance")


def rebalance(view: GroupView, shards: Sequence[ShardStatus], events: Sequence[EventEntry]) -> list[Finding]:
    """Walk the rebalance checklist.

    Parameters:
        view: the record of the group.
        shards: its shards, read after the record.
        events: its newest events, newest first.

    Returns:
        Findings by step; each step has at least one.
    """
    readings = {status.shard: status.reading for status in shards}
    since = view.now_ms - _RECENT_LEASES * round(view.timings.lease_seconds * 1000)
    recent = [event for event in events if event.at_ms >= since]
    steps = (
        _members(view, recent, readings),
        _assignment(view, recent),
        _drains(view, readings),
        _timeouts(view, recent),
        _fenced(view, recent, readings),
    )
    fine = (
        f"{len(view.members)} members are alive",
        "every shard is with its target",
        "nobody is stuck while draining or handling",
        "nobody was fenced for a slow drain lately",
        "nobody who was fenced is missing",
    )
    return walk("rebalance", steps, fine)


# --- 1: are the members alive? --------------------------------------------------------------------------------------


def _members(view: GroupView, recent: Sequence[EventEntry], readings: Mapping[int, ShardReading]) -> Iterator[Finding]:
    alive = [member for member in view.members.values() if member_state(member) != "overdue"]
    if not view.members:
        waiting = [reading.shard for reading in readings.values() if reading.pending or reading.undelivered]
        what = f"entries wait on shards {listed(waiting)}" if waiting else "nothing waits"
        yield _find(
            1, "act" if waiting else "wait", "NO_MEMBERS", f"the group has no members; {what}", "Start its consumers."
        )
    for member in view.members.values():
        yield from _lease(view, member, len(alive))
    for name, count in _count(event.member for event in recent if event.type == "member_rejoined").items():
        if count >= _REPLACED_OFTEN:
            yield _find(
                1,
                "act",
                "REPLACED_OFTEN",
                f"member {name} was replaced by another session {count} times lately",
                "Two live processes use one member id, or one is restarted again and again: give each its own member=.",
                member=name,
            )
    for event in recent:
        if event.type == "member_expired" and event.member is not None and event.member not in view.members:
            lost = event.fields.get("shards") or "none"
            yield _find(
                1,
                "act",
                "EXPIRED",
                f"member {event.member} expired {seconds(view.now_ms - event.at_ms)} ago, with shards {lost}, and "
                "has not come back",
                "See whether its process died, was suspended, or cannot reach Redis; its shards have gone to others.",
                member=event.member,
            )


def _lease(view: GroupView, member: MemberView, alive: int) -> Iterator[Finding]:
    lease_ms = view.timings.lease_seconds * 1000
    left = member.lease_remaining_ms
    if left is None:
        yield _find(
            1,
            "wait",
            "LEASE_LOST",
            f"member {member.id} has no lease",
            "The next heartbeat of anybody gives it a full one.",
            member=member.id,
        )
    elif left < 0:
        yield _find(
            1,
            "wait" if alive else "act",
            "OVERDUE",
            f"the lease of member {member.id} passed {seconds(-left)} ago",
            "The next heartbeat of another member removes it."
            if alive
            else "No other member is alive to remove it: start a consumer, or run `redis-stream-coord reconcile`.",
            member=member.id,
        )
    elif left < lease_ms / 3:
        yield _find(
            1,
            "act",
            "LATE",
            f"member {member.id} last renewed its lease {seconds(lease_ms - left)} ago; it ends in {seconds(left)}",
            "Look at that instance: is it suspended, out of CPU, or is Redis slow for it?",
            member=member.id,
        )


def _count(names: Iterable[str | None]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        if name is not None:
            found[name] = found.get(name, 0) + 1
    return found


# --- 2: is every shard where it should be? --------------------------------------------------------------------------


def _assignment(view: GroupView, recent: Sequence[EventEntry]) -> Iterator[Finding]:
    for violation in view.violations():
        yield _find(
            2,
            "act",
            "INVARIANT",
            violation,
            "Freeze the group and read 'Metadata' in the runbook before anything else.",
        )
    if view.frozen_ms is not None:
        yield _find(
            2,
            "act",
            "FROZEN",
            f"the group was frozen {seconds(view.now_ms - view.frozen_ms)} ago: nothing is granted",
            "When the repair is done: `redis-stream-coord unfreeze`.",
        )
    if view.round is not None:
        waits = ", ".join(sorted(view.round.waits_for)) or "the lease of those who are not in the record"
        yield _find(
            2,
            "wait" if view.now_ms <= view.round.due_ms else "act",
            "CORRECTION_ROUND",
            f"the metadata went backwards; for {seconds(view.now_ms - view.round.opened_ms)} members have come into "
            f"step with it; it waits for {waits}",
            "It ends by itself. Find out which write Redis lost: read 'Metadata' in the runbook.",
        )
    if view.group_epoch > view.assignment_epoch and view.round is None:
        yield _find(
            2,
            "wait" if view.members else "act",
            "NOT_COMPUTED",
            f"the target is of group epoch {view.assignment_epoch}, and the group is at {view.group_epoch}",
            "The next heartbeat of anybody computes it.",
        )
    for shard in view.shards.values():
        yield from _misplaced(view, shard)
    for event in recent:
        if event.type == "ownership_violation":
            yield _find(
                2,
                "act",
                "OWNERSHIP_VIOLATION",
                f"{seconds(view.now_ms - event.at_ms)} ago member {event.member} believed to own shard {event.shard}, "
                "which it does not hold",
                "It was fenced. If Redis failed over just then, that is why; else report it as a fault of the library.",
                member=event.member,
                shard=event.shard,
            )


def _misplaced(view: GroupView, shard: ShardView) -> Iterator[Finding]:
    if shard.state != "free" or shard.target is None:
        return
    index, target = shard.index, view.members.get(shard.target)
    if shard.hold_until_ms > view.now_ms:
        yield _find(
            2,
            "wait",
            "HELD_BACK",
            f"shard {index} is held back for another {seconds(shard.hold_until_ms - view.now_ms)}",
            "Its fence was ahead of the record; it is granted anew when the fence's holder can have nothing in hand.",
            shard=index,
        )
    elif target is not None and target.revoking:
        yield _find(
            2,
            "wait",
            "WAITS_FOR_DRAIN",
            f"shard {index} is for member {target.id}, which first has to drain shards {listed(target.revoking)}",
            "See step 3 for that drain.",
            member=target.id,
            shard=index,
        )
    elif view.round is None and view.frozen_ms is None:
        yield _find(
            2,
            "wait",
            "NOT_GRANTED",
            f"shard {index} is free for member {shard.target}",
            "The next heartbeat of anybody grants it.",
            member=shard.target,
            shard=index,
        )


# --- 3: who is stuck while draining, or handling? -------------------------------------------------------------------


def _drains(view: GroupView, readings: Mapping[int, ShardReading]) -> Iterator[Finding]:
    for shard in view.shards.values():
        reading = readings.get(shard.index)
        if reading is None or shard.holder is None:
            continue
        if shard.state == "revoking":
            yield _drain(view, shard, reading)
        else:
            yield from _owned(view, shard, reading)


def _drain(view: GroupView, shard: ShardView, reading: ShardReading) -> Finding:
    timeout_ms = view.timings.rebalance_seconds * 1000
    left = shard.deadline_ms - view.now_ms
    waited = timeout_ms - left
    pending = next((one.pending for one in reading.consumers if one.name == shard.holder), 0)
    if pending and reading.oldest is not None:
        work = (
            f"{pending} entries are in its hands, the oldest ({reading.oldest.id}) for "
            f"{seconds(reading.oldest.idle_ms)}, delivered {reading.oldest.deliveries} times"
        )
        then = (
            f"In the instance of {shard.holder} look for a slow handler, a blocked shutdown, work that hangs: its "
            "health.waits_for says which, its threads are named redis-stream-coord-<stream>-<n>."
        )
    else:
        work = "nothing of it is in its hands"
        then = (
            f"The instance of {shard.holder} has not said that it is done: is it alive, are its callbacks "
            "(on_revoked) blocked, does it reach Redis?"
        )
    end = f"it will be fenced in {seconds(left)}" if left >= 0 else f"it should have been fenced {seconds(-left)} ago"
    return _find(
        3,
        "wait" if waited < timeout_ms / 4 else "act",
        "SLOW_DRAIN",
        f"member {shard.holder} has been draining shard {shard.index} for {seconds(waited)}; {work}; {end}",
        then,
        member=shard.holder,
        shard=shard.index,
    )


def _owned(view: GroupView, shard: ShardView, reading: ShardReading) -> Iterator[Finding]:
    fence, holder = reading.fence, shard.holder
    find = partial(_find, 3, member=holder, shard=shard.index)
    stored = (view.incarnation, shard.token)
    claimed = (0, 0) if fence is None else (fence.incarnation, fence.token)
    if not reading.exists:
        yield find(
            "act",
            "STREAM_GONE",
            f"the stream {reading.stream_key} is gone: deleted, evicted or flushed",
            "Its data is lost. `redis-stream-coord create ... --exist-ok` makes it anew, empty.",
        )
    elif claimed > stored:
        yield find(
            "act",
            "FENCE_AHEAD",
            f"the fence of shard {shard.index} is at incarnation and token {claimed}, the record at {stored}",
            "The record went backwards. Read 'Metadata' in the runbook; do not raise numbers by hand.",
        )
    elif claimed < stored:
        yield find(
            "wait" if fence is None or fence.member != holder else "act",
            "NOT_CLAIMED",
            f"member {holder} has shard {shard.index} under token {shard.token}, and has not claimed it",
            "It claims within a heartbeat; if this stays, look at that instance: it may be suspended.",
        )
    elif reading.oldest is not None and reading.oldest.idle_ms > view.timings.rebalance_seconds * 1000:
        yield find(
            "act",
            "HANDLER_STUCK",
            f"entry {reading.oldest.id} of shard {shard.index} has been with {reading.oldest.consumer} for "
            f"{seconds(reading.oldest.idle_ms)}, delivered {reading.oldest.deliveries} times",
            "Its handler hangs or fails again and again: its log says which. Mend the handler, deploy poison=, or skip "
            f"it: `redis-stream-coord seek ... --shard {shard.index} --to {reading.oldest.id}`.",
        )
    elif reading.undelivered and not reading.pending and _silent_ms(reading, holder) > _LOOKS_WITHIN_MS:
        yield find(
            "act",
            "NOT_READ",
            f"entries wait on shard {shard.index}, and member {holder} has not read for "
            f"{seconds(_silent_ms(reading, holder))}",
            "Is the shard paused (Consumer.pause)? Does a resharding hold it back (step 3 there)? Else see its log.",
        )


def _silent_ms(reading: ShardReading, holder: str | None) -> int:
    return next((one.idle_ms for one in reading.consumers if one.name == holder), 0)


# --- 4: did the timeout do its work? --------------------------------------------------------------------------------


def _timeouts(view: GroupView, recent: Sequence[EventEntry]) -> Iterator[Finding]:
    for shard in view.shards.values():
        if shard.state == "revoking" and shard.deadline_ms < view.now_ms:
            yield _find(
                4,
                "act",
                "TIMEOUT_PASSED",
                f"the time of member {shard.holder} to drain shard {shard.index} is over, and it is not fenced",
                "The next heartbeat of anybody fences it; without one run `redis-stream-coord reconcile`.",
                member=shard.holder,
                shard=shard.index,
            )
    for event in recent:
        if event.type == "member_fenced":
            yield _find(
                4,
                "act",
                "FENCED",
                f"{seconds(view.now_ms - event.at_ms)} ago the group fenced member {event.member}, which did not "
                f"drain in time, and gave its shards {event.fields.get('shards') or '-'} to others",
                "A handler of it may have run on beside the new owner's. Make handlers quicker than the rebalance "
                "timeout, or the timeout longer.",
                member=event.member,
            )


# --- 5: did who was fenced come back? -------------------------------------------------------------------------------


def _fenced(view: GroupView, recent: Sequence[EventEntry], readings: Mapping[int, ShardReading]) -> Iterator[Finding]:
    for name in sorted({event.member for event in recent if event.type == "member_fenced" and event.member}):
        if name in view.members:
            member = view.members[name]
            yield Finding(
                checklist="rebalance",
                step=5,
                level="ok",
                code="REJOINED",
                text=f"member {name} was fenced, gave its shards up, and is back with epoch {member.epoch}",
                member=name,
            )
            continue
        left = [reading.shard for reading in readings.values() if any(c.name == name for c in reading.consumers)]
        trace = f"; it was the last to read shards {listed(left)}" if left else ""
        yield _find(
            5,
            "act",
            "NOT_REJOINED",
            f"member {name} was fenced and has not come back{trace}",
            "It gives up its shards and joins again with epoch 0 by itself as soon as it reaches Redis; if it does "
            "not, restart that instance.",
            member=name,
        )
