"""The resharding checklist of the runbook. Decisions only: what they are made of is handed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ..group_view import GroupView
from ..models import Resharding, Waiting
from ..views import AssignmentView, RouteView, RoutingView, ShardStatus
from .finding import Finding, finding, listed, seconds, walk

_find = partial(finding, "resharding")


def resharding(
    view: GroupView,
    shards: Sequence[ShardStatus],
    routing: RoutingView,
    found: Resharding | None,
    *,
    expected_shards: int | None,
    drain_seconds: float,
) -> list[Finding]:
    """Walk the resharding checklist.

    Parameters:
        view: the record of the group.
        shards: its shards, and those of the stream's layout, read after the record.
        routing: where producers publish to.
        found: the resharding under way, or the last one, or ``None``.
        expected_shards: how many there shall be, or ``None``.
        drain_seconds: how long a drain is expected to take at most.

    Returns:
        Findings by step; each step has at least one.
    """
    active = found if found is not None and found.active else None
    late = active is not None and active.age_seconds > drain_seconds
    fine = (
        f"producers see {routing.layout.shards} shards",
        "the live members have what they should have",
        "no shard of an older layout is in the way",
        "no resharding is under way",
    )
    steps = [
        list(_routing(routing, shards, active, expected_shards)),
        list(_convergence(view, active)),
        list(_old_shards(view, shards, routing, found, late=late)),
    ]
    steps.append(list(_rollback(active, urgent=late or any(one.level == "act" for step in steps for one in step))))
    return walk("resharding", steps, fine)


# --- 1: what do producers see? --------------------------------------------------------------------------------------


def _routing(
    routing: RoutingView, shards: Sequence[ShardStatus], active: Resharding | None, expected: int | None
) -> Iterator[Finding]:
    find = partial(_find, 1)
    count = routing.layout.shards
    if active is not None and active.state in ("PREPARING", "CUTOVER"):
        yield find(
            "wait",
            "NOT_DECIDED",
            f"producers still see {count} shards: the resharding to {active.target} is {active.state}",
            "They see the new number as soon as it is decided.",
        )
    elif expected is not None and count != expected:
        yield find(
            "act",
            "UNEXPECTED_COUNT",
            f"producers see {count} shards, and {expected} are expected",
            f"If {expected} is right: `redis-stream-coord scale ... --shards {expected}`.",
        )
    if active is None:
        for problem in routing.problems:
            yield find("act", "ROUTE", problem, "`redis-stream-coord repair routes` puts the routes right.")
    for status in shards:
        cut = _closed_at(status.reading.route)
        last = status.reading.last_id
        if cut is not None and last is not None and _order(last) > _order(cut):
            yield find(
                "act",
                "STALE_PRODUCER",
                f"entry {last} came to shard {status.shard} after it was closed at {cut}",
                "A producer writes past the fence: fenced=False, or XADD by an old Router. Restart it: it then reads "
                "the new layout. Consumers still get what it wrote, but its order is lost.",
                shard=status.shard,
            )


def _closed_at(route: RouteView) -> str | None:
    """Return the id of the last cut of a closed route, or ``None``."""
    cuts = route.fields.get("cuts", "-")
    if route.state != "closed" or cuts == "-":
        return None
    return cuts.split(",")[-1].split(":")[1]


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))


# --- 2: are the members where they should be? -----------------------------------------------------------------------


def _convergence(view: GroupView, active: Resharding | None) -> Iterator[Finding]:
    assignment = AssignmentView.of(view)
    away = [index for index, target in assignment.target.items() if assignment.current[index] != target]
    if away and view.members:
        yield _find(
            2,
            "wait",
            "NOT_CONVERGED",
            f"shards {listed(away)} are not with their targets yet",
            "Steps 2 and 3 of the rebalance checklist say who is in the way.",
        )
    elif not view.members and active is not None:
        yield _find(
            2,
            "act",
            "NO_MEMBERS",
            f"the group has no members: the resharding waits until it has consumed what there was, for "
            f"{seconds(active.age_seconds * 1000)} now",
            "Start its consumers, or delete the group if nobody needs it.",
        )


# --- 3: what is left of the old layout? -----------------------------------------------------------------------------


def _old_shards(
    view: GroupView,
    shards: Sequence[ShardStatus],
    routing: RoutingView,
    found: Resharding | None,
    *,
    late: bool,
) -> Iterator[Finding]:
    find = partial(_find, 3)
    if found is not None and found.active:
        for waiting in found.waits:
            yield _waits(view, found, waiting, late=late)
        # Draining may take as long as there are entries; every other step is a matter of a heartbeat.
        quick = found.state in ("PREPARING", "REOPENING") or (found.state == "CUTOVER" and not found.quiesce)
        if (quick or not found.waits) and found.state_age_seconds > 2 * view.timings.lease_seconds:
            yield find(
                "act",
                "NO_DRIVER",
                f"the resharding is {found.state} and needs only somebody to carry it on, and nobody has for "
                f"{seconds(found.state_age_seconds * 1000)}",
                "Start a consumer of any group of the stream, or run `redis-stream-coord wait`.",
            )
    elif found is not None and found.state == "FAILED":
        yield find(
            "act",
            "FAILED",
            f"the resharding to {found.target} shards failed: {found.reason}",
            "Put that right, and scale again; nothing has moved.",
        )
    count = routing.layout.shards
    for index, shard in view.shards.items():
        if index >= count and shard.holder is not None and (found is None or not found.active):
            yield find(
                "act",
                "OLD_SHARD",
                f"shard {index} is of an older layout, and member {shard.holder} still has it",
                "`redis-stream-coord verify` says whether the record of the stream went backwards.",
                member=shard.holder,
                shard=index,
            )
    yield from _strangers(shards, routing)


def _waits(view: GroupView, found: Resharding, waiting: Waiting, *, late: bool) -> Finding:
    holder, then = None, "It ends by itself."
    if waiting.group == view.group and waiting.shard is not None and waiting.shard in view.shards:
        holder = view.shards[waiting.shard].holder
        then = (
            f"Member {holder} has that shard: the rebalance checklist says whether its handler is slow or stuck."
            if holder is not None
            else "Nobody has that shard: the rebalance checklist says why."
        )
    elif waiting.group is not None:
        then = f"Look at that group: `redis-stream-coord triage <stream> {waiting.group}`."
    return _find(
        3,
        "act" if late else "wait",
        "WAITS",
        f"the resharding {found.source} -> {found.target} is {found.state} for "
        f"{seconds(found.age_seconds * 1000)} and waits for {waiting}",
        then,
        member=holder,
        shard=waiting.shard,
    )


def _strangers(shards: Sequence[ShardStatus], routing: RoutingView) -> Iterator[Finding]:
    on_shards: dict[str, list[int]] = {}
    for status in shards:
        for name in set(status.reading.groups) - set(routing.layout.groups):
            on_shards.setdefault(name, []).append(status.shard)
    for name, indices in sorted(on_shards.items()):
        gone = [index for index in indices if index >= routing.layout.shards]
        yield _find(
            3,
            "act" if gone else "wait",
            "UNREGISTERED_GROUP",
            f"consumer group {name} is on shards {listed(indices)}, and nobody has registered it",
            "A resharding does not wait for it, but the stream of a shard that goes stays as long as it is there, and "
            "retention waits for it too. Register it with `redis-stream-coord create`, or XGROUP DESTROY it.",
            shard=indices[0],
        )


# --- 4: is it to be taken back? -------------------------------------------------------------------------------------


def _rollback(active: Resharding | None, *, urgent: bool) -> Iterator[Finding]:
    if active is None:
        return
    back = active.state in ("REOPENING", "ROLLING_BACK")
    yield _find(
        4,
        "wait" if urgent else "ok",
        "GOES_BACK" if back else "CAN_GO_BACK",
        f"the resharding {active.source} -> {active.target} is {active.state}"
        + (" already" if back else ", and can be taken back at any moment before its end"),
        "It ends by itself."
        if back
        else f"If it is dangerous: `redis-stream-coord rollback {active.stream}`; nothing is lost by it.",
    )
