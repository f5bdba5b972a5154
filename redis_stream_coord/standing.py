"""How far a resharding is, from the stream's record and from evidence of its shards: what is consumed, what is drained,
what it waits for. Pure functions; `redis_stream_coord.reshard` acts on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from .commands import Barrier, Evidence, Registration, SagaRecord, StreamView
from .models import Resharding, Waiting

Waits = list[Waiting]


@attrs.frozen
class Standing:
    """How far a group is with a resharding that has been decided, or waits for it to consume all.

    Attributes:
        group: its name.
        consumed: barriers whose sources it has consumed up to their cuts, oldest first, and none behind one that it
            has not.
        passed: it has consumed those of all barriers.
        drained: nothing is left for it on the shards that go.
        waits: what is left.
    """

    group: str
    consumed: Sequence[Barrier]
    passed: bool
    drained: bool
    waits: Sequence[Waiting]


def state_of(saga: SagaRecord) -> str:
    """Return the state of a resharding as people are told it."""
    if not saga.back:
        return saga.state
    return "ROLLED_BACK" if saga.state == "COMPLETED" else "ROLLING_BACK"


def describe(stream: str, view: StreamView, waits: Iterable[Waiting] = ()) -> Resharding | None:
    """Return the resharding of a record, as people see it; ``None`` if there never was one."""
    saga = view.saga
    if saga is None:
        return None
    source, target = (saga.target, saga.source) if saga.back else (saga.source, saga.target)
    return Resharding(
        id=saga.id,
        stream=stream,
        state=state_of(saga),
        source=source,
        target=target,
        epoch=saga.epoch,
        ordered=saga.ordered,
        quiesce=saga.quiesce,
        age_seconds=max(0.0, (view.now_ms - saga.began_ms) / 1000),
        state_age_seconds=max(0.0, (view.now_ms - saga.changed_ms) / 1000),
        waits=tuple(waits) if saga.active else (),
        reason=saga.reason,
    )


def unfinished(view: StreamView) -> Mapping[str, Registration]:
    """Return the groups that have yet to pass a barrier or to drain what goes."""
    saga = view.saga
    assert saga is not None
    if saga.state == "CUTOVER":
        return {name: group for name, group in view.groups.items() if group.passed < saga.epoch}
    return {
        name: group
        for name, group in view.groups.items()
        if group.drained < saga.epoch or (view.barriers and group.passed < saga.epoch)
    }


def witnesses(view: StreamView) -> list[int]:
    """Return the shards that have to be looked at: those that keys moved away from, and those that go."""
    saga = view.saga
    assert saga is not None
    if saga.state == "CUTOVER":
        return list(range(saga.source))
    shards = set(saga.removed)
    for barrier in view.barriers:
        shards.update(barrier.sources)
    return sorted(shards)


def standing(view: StreamView, name: str, evidence: Mapping[int, Evidence]) -> Standing:
    """Decide how far a group is.

    Parameters:
        view: the record.
        name: of the group.
        evidence: of the shards of `witnesses`; one that is missing proves nothing.
    """
    saga = view.saga
    assert saga is not None
    group, waits = view.groups[name], Waits()
    consumed: list[Barrier] = []
    passed = True
    barriers = [Barrier(saga.epoch, saga.source, 0)] if saga.state == "CUTOVER" else view.barriers
    for barrier in barriers:
        left = Waits()
        for shard in barrier.sources if saga.state != "CUTOVER" else range(saga.source):
            # One that was created since then never read the shards that went.
            if shard >= view.layout.shards and group.since >= barrier.epoch:
                continue
            # Nothing comes there any more, and the group may have left it; its consumer group may be gone since.
            if shard in saga.removed and saga.state == "DRAINING" and group.drained >= saga.epoch:
                continue
            left += _left(view, name, shard, barrier, evidence.get(shard))
        waits += left
        passed = passed and not left
        if passed:
            consumed.append(barrier)
    drained = True
    for shard in saga.removed if saga.state == "DRAINING" and group.since < saga.epoch else ():
        found = evidence.get(shard)
        if found is None or not found.drained(name, saga.epoch):
            drained = False
            waits.append(_rest(name, shard, found, "to drain the shard, which goes"))
    return Standing(name, consumed, passed, drained, _once(waits))


def _left(view: StreamView, name: str, shard: int, barrier: Barrier, found: Evidence | None) -> Waits:
    cut = view.cut(shard, barrier.epoch)
    if found is None or cut is None or not found.closed_for(barrier.epoch):
        return [Waiting(what="to be looked at", group=name, shard=shard)]
    if found.groups[name].consumed(cut):
        return []
    return [_rest(name, shard, found, "to consume what came before the cut-over")]


def _rest(name: str, shard: int, found: Evidence | None, what: str) -> Waiting:
    if found is None:
        return Waiting(what="to be looked at", group=name, shard=shard)
    progress = found.groups[name]
    if not progress.found:
        return Waiting(what="its consumer group is missing there; a consumer makes it anew", group=name, shard=shard)
    if progress.first is None:
        note = "" if not progress.lag else f" (XINFO says {progress.lag} are left, which is wrong)"
        return Waiting(what=f"its route to be closed again{note}", group=name, shard=shard)
    entries = None if progress.lag is None else progress.lag + progress.pending
    return Waiting(what=what, group=name, shard=shard, entries=entries)


def _once(waits: Waits) -> Waits:
    """Leave one of several about the same group and shard."""
    return list({(waiting.group, waiting.shard): waiting for waiting in waits}.values())
