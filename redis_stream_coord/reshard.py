"""The decisions of a resharding, without any input or output: the stream's record in, commands out.

A resharding is a saga on the record of its stream. Whoever drives it reads the record, takes the round of its state,
and reads the record again. Everything that a round does may be repeated, and is refused by a key that has seen a later
step; so drivers may die anywhere, and several may drive at once. `Admin` drives, and so does each group's member that
has the duty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import commands
from .commands import Command, Evidence, Pause, Saga, SagaRecord, StreamView, Together
from .errors import CoordError, CorruptMetadataError, RedisUnavailableError
from .keys import GroupKeys, StreamKeys
from .models import Resharding, Waiting
from .standing import Standing, Waits, describe, standing, unfinished, witnesses

# Words of a key or a record that has seen a later step: another driver is ahead.
_OVERTAKEN = frozenset({"AHEAD", "LATE", "MOVED_ON", "NOT_READY", "STALE_RECORD"})
# Between two rounds that brought nothing new.
_POLL_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.4)
# So many rounds in a row may find Redis away before a driver gives up.
_AWAY_LIMIT = 60
_AWAY_PAUSE_SECONDS = 0.5


# --- driving ----------------------------------------------------------------------------------------------------------


def drive(
    keys: StreamKeys,
    *,
    saga_id: str | None = None,
    goes_on: Callable[[], bool] = lambda: True,
    progress: Callable[[Resharding], None] | None = None,
) -> Saga[Resharding | None]:
    """Carry a resharding on to its end.

    Parameters:
        keys: of the stream.
        saga_id: which; ``None``: the one that is under way.
        goes_on: asked before each round; the answer no ends the drive where it is.
        progress: is told after each round how far it is.

    Returns:
        How it ended, or how far it is; ``None`` if there is none, or a later one has taken its place.

    Raises:
        CoordError: Redis stayed away, or the record cannot be used.
    """
    idle, away, last = 0, 0, None
    waits: Waits = []
    while True:
        try:
            view: StreamView = yield commands.resharding(keys)
            saga = view.saga
            if saga is None or (saga_id is not None and saga.id != saga_id):
                return last
            moved = False
            if saga.active and goes_on():
                moved, waits = yield from carry_on(keys, view)
            away = 0
        except RedisUnavailableError:
            away += 1
            if away > _AWAY_LIMIT or not goes_on():
                raise
            yield Pause(_AWAY_PAUSE_SECONDS)
            continue
        last = describe(keys.stream, view, waits)
        if progress is not None and last is not None:
            progress(last)
        if not saga.active or not goes_on():
            return last
        idle = 0 if moved else idle + 1
        if idle:
            yield Pause(_POLL_SECONDS[min(idle, len(_POLL_SECONDS)) - 1])


def leave_cut_over(keys: StreamKeys, *, goes_on: Callable[[], bool]) -> Saga[None]:
    """Carry a resharding on for as long as it is at its cut-over: what waits for that may be needed to end it."""
    at_cut_over = True

    def see(found: Resharding) -> None:
        nonlocal at_cut_over
        at_cut_over = found.state == "CUTOVER"

    yield from drive(keys, goes_on=lambda: at_cut_over and goes_on(), progress=see)


def look(keys: StreamKeys) -> Saga[Resharding | None]:
    """Find out how far the resharding of a stream is, without doing anything for it."""
    view: StreamView = yield commands.resharding(keys)
    saga, waits = view.saga, Waits()
    if saga is not None and saga.active:
        if saga.state == "PREPARING":
            waits = [
                Waiting(what="to be prepared", group=name)
                for name, group in view.groups.items()
                if group.prepared < saga.epoch
            ]
        elif saga.state == "DRAINING" or (saga.state == "CUTOVER" and saga.quiesce):
            groups = sorted(unfinished(view))
            evidence, _ = yield from _gather(keys, view, groups)
            waits = [waiting for name in groups for waiting in standing(view, name, evidence).waits]
    return describe(keys.stream, view, waits)


def mend_routes(keys: StreamKeys) -> Saga[dict[int, CoordError | None]]:
    """Make routes that were lost, and open them, while no resharding is under way; its drivers do it otherwise. Whoever
    made one may have died before it was open.

    Returns:
        The shards that had none, or a closed one; each with what stood in the way, or ``None``.
    """
    view: StreamView = yield commands.resharding(keys)
    if view.layout.state != "active" or (view.saga is not None and view.saga.active):
        return {}
    found, _ = yield from _all((shard, commands.route(keys, shard)) for shard in range(view.layout.shards))
    shut = [shard for shard, route in found.items() if route.state != "open"]
    if not shut:
        return {}
    _, errors = yield from _all((shard, commands.rebuild(keys, shard, view)) for shard in shut)
    # Read again: only a record that was read after the route was made may open it.
    view = yield commands.resharding(keys)
    if view.saga is None or not view.saga.active:
        there = [shard for shard in shut if shard not in errors and shard < view.layout.shards]
        errors |= (yield from _all(_opening(keys, view, there)))[1]
    return {shard: errors.get(shard) for shard in shut}


def carry_on(keys: StreamKeys, view: StreamView) -> Saga[tuple[bool, Waits]]:
    """Do for an active resharding what its state asks for.

    Returns:
        Whether anything has changed, so that it is worth while to go on at once; and what it waits for.

    Raises:
        RedisUnavailableError: the record got no answer.
    """
    saga = view.saga
    assert saga is not None
    rounds = {"PREPARING": _prepare, "CUTOVER": _cut_over, "DRAINING": _drain, "REOPENING": _reopen}
    try:
        result: tuple[bool, Waits] = yield from rounds[saga.state](keys, view, saga)
    except CoordError as error:
        if error.word in _OVERTAKEN:
            return error.word == "MOVED_ON", [Waiting(what=str(error), shard=error.shard, group=error.group)]
        if isinstance(error, RedisUnavailableError) or not (error.group or error.shard is not None):
            raise
        return False, [_blocked(error)]
    return result


def _blocked(error: CoordError) -> Waiting:
    return Waiting(what=error.message, group=error.group, shard=error.shard)


def _all(together: Iterable[tuple[Any, Command[Any]]]) -> Saga[tuple[dict[Any, Any], dict[Any, CoordError]]]:
    """Send commands together. Returns results and errors, by name: a node that is away holds up only what is on it."""
    named = list(together)
    if not named:
        return {}, {}
    found = yield Together([command for _, command in named])
    results: dict[Any, Any] = {}
    errors: dict[Any, CoordError] = {}
    for (name, _), result in zip(named, found, strict=True):
        if isinstance(result, CoordError):
            errors[name] = result
        else:
            results[name] = result
    return results, errors


def _gather(
    keys: StreamKeys, view: StreamView, groups: Sequence[str]
) -> Saga[tuple[dict[int, Evidence], dict[int, CoordError]]]:
    result: tuple[dict[int, Evidence], dict[int, CoordError]] = yield from _all(
        (shard, commands.evidence(keys, shard, groups)) for shard in witnesses(view)
    )
    return result


def _keys_of(keys: StreamKeys, group: str) -> GroupKeys:
    return GroupKeys(keys.stream, group, keys.prefix)


# --- PREPARING --------------------------------------------------------------------------------------------------------


def _prepare(keys: StreamKeys, view: StreamView, saga: SagaRecord) -> Saga[tuple[bool, Waits]]:
    """Every registered group gets its consumer group on the added shards, and may read the shards of both layouts.

    It begins at the end of what is there: that is history, which it has drained. But on the way back it had these
    shards before, and where Redis has lost how far it got, everything comes again rather than never.
    """
    if not saga.opened:
        # Taken back before all routes of the layout that was decided were open: producers wait there.
        return (yield from _open(keys, view, saga, range(view.layout.shards)))
    groups = {name: group for name, group in view.groups.items() if group.prepared < saga.epoch}
    _, errors = yield from _all((shard, commands.rebuild(keys, shard, view)) for shard in saga.added if groups)
    if not errors:
        _, errors = yield from _all(
            (
                (name, shard),
                commands.provision(
                    _keys_of(keys, name),
                    shard,
                    start="0" if saga.back and group.since < view.layout.epoch else "$",
                    layout=view.layout,
                    resharding=saga.epoch,
                ),
            )
            for name, group in groups.items()
            for shard in saga.added
        )
    for error in errors.values():
        if isinstance(error, CorruptMetadataError) and not saga.back:
            yield commands.abandon(keys, saga, " ".join(error.message.split()))
            return True, []
    if errors:
        return False, [_blocked(error) for error in errors.values()]
    incarnations, errors = yield from _all(
        (name, commands.readable(_keys_of(keys, name), epoch=saga.epoch, step=1, shards=len(saga.union)))
        for name in groups
    )
    for name, incarnation in incarnations.items():
        registered = groups[name].registered
        yield commands.mark(keys, saga, name, "prepared", registered=registered, incarnation=incarnation)
    if errors:
        return bool(incarnations), [_not_there(name, error) for name, error in errors.items()]
    yield commands.advance(keys, saga, "CUTOVER")
    return True, []


def _not_there(name: str, error: CoordError) -> Waiting:
    if error.word == "GROUP_NOT_FOUND":
        return Waiting(what="registered, but its creation or deletion was interrupted: call it again", group=name)
    return Waiting(what=error.message, group=name)


# --- CUTOVER ----------------------------------------------------------------------------------------------------------


def _cut_over(keys: StreamKeys, view: StreamView, saga: SagaRecord) -> Saga[tuple[bool, Waits]]:
    """Close every shard of either layout, note the cuts, decide. Producers wait meanwhile."""
    missing = [shard for shard in saga.union if view.cut(shard, saga.epoch) is None]
    if missing:
        errors = yield from _close(keys, view, saga, missing)
        if errors:
            return False, [_blocked(error) for error in errors.values()]
    if saga.quiesce and (groups := sorted(unfinished(view))):
        # The record that was read has none of the cuts noted just now: they are looked at in the next round.
        if missing:
            return True, []
        return (yield from _consume(keys, view, saga, groups))
    yield commands.decide(keys, saga)
    return True, []


def _consume(keys: StreamKeys, view: StreamView, saga: SagaRecord, groups: list[str]) -> Saga[tuple[bool, Waits]]:
    evidence, errors = yield from _gather(keys, view, groups)
    if lost := _lost(saga, evidence, errors):
        failed = yield from _close(keys, view, saga, lost)
        return len(failed) < len(lost), [_blocked(error) for error in failed.values()]
    waits, moved = [_blocked(error) for error in errors.values()], False
    for name in groups:
        found = standing(view, name, evidence)
        waits += found.waits
        if found.passed and not errors:
            moved = yield from _mark(keys, view, saga, name, "passed")
    return moved, waits


def _mark(keys: StreamKeys, view: StreamView, saga: SagaRecord, name: str, what: str) -> Saga[bool]:
    group = view.groups[name]
    counts: bool = yield commands.mark(
        keys, saga, name, what, registered=group.registered, incarnation=group.incarnation
    )
    return counts


def _close(keys: StreamKeys, view: StreamView, saga: SagaRecord, shards: Sequence[int]) -> Saga[dict[int, CoordError]]:
    """Close shards and note their cuts. A route that is not there is made first. Returns what stood in the way."""
    cuts, errors = yield from _all((shard, commands.close(keys, shard, saga)) for shard in shards)
    missing = [shard for shard, error in errors.items() if error.word == "ROUTE_MISSING"]
    if missing:
        made, failed = yield from _all((shard, commands.rebuild(keys, shard, view)) for shard in missing)
        again, still = yield from _all((shard, commands.close(keys, shard, saga)) for shard in made)
        cuts.update(again)
        errors = {shard: error for shard, error in errors.items() if shard not in missing} | failed | still
    if saga.state != "REOPENING":
        noted = sorted(cuts.items())
        for first in range(0, len(noted), commands.CUTS_AT_ONCE):
            yield commands.note_cuts(keys, saga, dict(noted[first : first + commands.CUTS_AT_ONCE]))
    return errors


# --- DRAINING ---------------------------------------------------------------------------------------------------------


def _open(keys: StreamKeys, view: StreamView, saga: SagaRecord, shards: Iterable[int]) -> Saga[tuple[bool, Waits]]:
    """Open the shards of the layout that was decided, and note that they are."""
    errors = yield from _open_all(keys, view, saga, shards)
    if errors:
        return False, [_blocked(error) for error in errors.values()]
    yield commands.advance(keys, saga, "OPENED")
    return True, []


def _open_all(
    keys: StreamKeys, view: StreamView, saga: SagaRecord, shards: Iterable[int]
) -> Saga[dict[int, CoordError]]:
    """Open shards. One whose route lost its close is closed again first. Returns what stood in the way."""
    _, errors = yield from _all(_opening(keys, view, shards))
    lost = [shard for shard, error in errors.items() if error.word in ("NOT_CLOSED", "ROUTE_MISSING")]
    # While it is prepared to go back, the epoch is that of the way back already: the shard waits for its cut-over.
    if lost and saga.epoch == view.layout.epoch:
        failed = yield from _close(keys, view, saga, lost)
        _, still = yield from _all(_opening(keys, view, (shard for shard in lost if shard not in failed)))
        errors = {shard: error for shard, error in errors.items() if shard not in lost} | failed | still
    elif lost:
        errors = {shard: error for shard, error in errors.items() if shard not in lost}
    return errors


def _opening(keys: StreamKeys, view: StreamView, shards: Iterable[int]) -> list[tuple[int, Command[None]]]:
    layout = view.layout
    return [(shard, commands.open_route(keys, shard, epoch=layout.epoch, layout=layout.layout)) for shard in shards]


def _drain(keys: StreamKeys, view: StreamView, saga: SagaRecord) -> Saga[tuple[bool, Waits]]:
    """Open the new layout, gather evidence of each group, let it pass, and take the removed shards from it."""
    if not saga.opened:
        return (yield from _open(keys, view, saga, range(saga.target)))
    groups = sorted(unfinished(view))
    if not groups:
        return (yield from _complete(keys, view, saga))
    evidence, errors = yield from _gather(keys, view, groups)
    reopened = yield from _mend(keys, view, saga, evidence, errors)
    if reopened:
        return True, []
    waits, moved = [_blocked(error) for error in errors.values()], False
    for name in groups:
        found = standing(view, name, evidence)
        waits += found.waits
        if view.groups[name].passed < saga.epoch and view.barriers:
            moved = (yield from _pass(keys, view, saga, found)) or moved
        if view.groups[name].drained < saga.epoch and (found.drained or (yield from _has_left(keys, saga, name))):
            last = commands.readable(_keys_of(keys, name), epoch=saga.epoch, step=2, shards=saga.target)
            _, failed = yield from _all([(name, last)])
            waits += [_not_there(name, error) for error in failed.values()]
            if not failed:
                moved = (yield from _mark(keys, view, saga, name, "drained")) or moved
    return moved, waits


def _has_left(keys: StreamKeys, saga: SagaRecord, name: str) -> Saga[bool]:
    """Whether the shards that go were taken from a group already, which was not noted: its driver died in between. If
    its consumer group there is lost or moved then, no consumer sees to it, and the shard proves nothing any more.
    """
    words, _ = yield from _all([(name, commands.last_word(_keys_of(keys, name)))])
    return words.get(name) == (saga.epoch, 2)


def _lost(saga: SagaRecord, evidence: Mapping[int, Evidence], errors: Mapping[int, CoordError]) -> list[int]:
    """Return the shards that were closed, and whose routes do not say so any more."""
    lost = [shard for shard, found in evidence.items() if not found.closed_for(saga.epoch)]
    return lost + [shard for shard, error in errors.items() if error.word == "ROUTE_MISSING"]


def _mend(
    keys: StreamKeys,
    view: StreamView,
    saga: SagaRecord,
    evidence: Mapping[int, Evidence],
    errors: Mapping[int, CoordError],
) -> Saga[bool]:
    """Close again what Redis forgot to have closed, in a failover or because the route key was lost, and note the
    larger cuts; open it if the layout has it, also where another driver died in between. Returns whether anything was
    mended.
    """
    lost = _lost(saga, evidence, errors)
    failed = (yield from _close(keys, view, saga, lost)) if lost else {}
    shut = [shard for shard, found in evidence.items() if found.closed_for(saga.epoch) and found.state == "closed"]
    wanted = [shard for shard in lost + shut if shard < view.layout.shards and shard not in failed]
    opened, _ = yield from _all(_opening(keys, view, wanted))
    return bool(opened) or len(failed) < len(lost)


def _pass(keys: StreamKeys, view: StreamView, saga: SagaRecord, found: Standing) -> Saga[bool]:
    """Let a group read beyond the barriers whose sources it has consumed."""
    group = _keys_of(keys, found.group)
    incarnation = view.groups[found.group].incarnation
    held = {shard: barrier.epoch for barrier in found.consumed for shard in barrier.held}
    if not held:
        return (yield from _mark(keys, view, saga, found.group, "passed")) if found.passed else False
    fresh, errors = yield from _all(
        (shard, commands.pass_barrier(group, shard, epoch=epoch, incarnation=incarnation))
        for shard, epoch in held.items()
    )
    for error in errors.values():
        raise error
    moved = False
    if found.passed:
        moved = yield from _mark(keys, view, saga, found.group, "passed")
    if any(fresh.values()):
        # Its consumers may read on: those that wait at the barrier look once a second by themselves.
        yield commands.announce(group, "passed", wake="")
    return moved


def _complete(keys: StreamKeys, view: StreamView, saga: SagaRecord) -> Saga[tuple[bool, Waits]]:
    """Leave nothing behind: every route of the layout is open, and no cut holds anybody."""
    errors = yield from _open_all(keys, view, saga, range(view.layout.shards))
    if errors:
        return False, [_blocked(error) for error in errors.values()]
    _, errors = yield from _all((shard, commands.settle(keys, shard, saga.epoch)) for shard in saga.union)
    missing = {shard: error for shard, error in errors.items() if error.word == "ROUTE_MISSING"}
    if missing and (yield from _mend(keys, view, saga, {}, missing)):
        return True, []
    if errors:
        return False, [_blocked(error) for error in errors.values()]
    yield commands.advance(keys, saga, "COMPLETED")
    return True, []


# --- REOPENING --------------------------------------------------------------------------------------------------------


def _reopen(keys: StreamKeys, view: StreamView, saga: SagaRecord) -> Saga[tuple[bool, Waits]]:
    """It was given up before the decision: open the old shards under a fresh epoch, take the added ones away again."""
    if not saga.opened:
        # The added ones too: a cut that holds entries there must hold nobody any more.
        errors = yield from _close(keys, view, saga, saga.union)
        late = {shard: error for shard, error in errors.items() if error.word != "AHEAD"}
        if not late:
            return (yield from _open(keys, view, saga, range(saga.source)))
        # Each shard may open as soon as it is closed for this epoch: producers need not wait for the others.
        yield from _all(_opening(keys, view, (shard for shard in range(saga.source) if shard not in late)))
        return False, [_blocked(error) for error in late.values()]
    groups = [name for name, group in view.groups.items() if group.drained < saga.epoch]
    _, missing = yield from _all(
        (name, commands.readable(_keys_of(keys, name), epoch=saga.epoch, step=2, shards=saga.source)) for name in groups
    )
    for name in groups:
        if name not in missing:
            yield from _mark(keys, view, saga, name, "drained")
    if missing:
        return len(missing) < len(groups), [_not_there(name, error) for name, error in missing.items()]
    errors = yield from _open_all(keys, view, saga, range(saga.source))  # as at the other end, see `_complete`
    if errors:
        return False, [_blocked(error) for error in errors.values()]
    yield commands.advance(keys, saga, "ABANDONED")
    return True, []
