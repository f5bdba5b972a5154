"""Shards that the layout of a stream has no more: nobody owns them, so nobody trims them by the way. Decisions without
any input or output: members with the duty do it by the stream's retention, an administrator when asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from . import commands
from .commands import RemovedReading, Saga, StreamView, Together
from .errors import CoordError, PermissionDeniedError
from .keys import StreamKeys
from .models import Waiting
from .views import RemovedShard, Trimmed

# In one round trip: other commands of the same connection wait meanwhile.
_AT_ONCE = 32


def look(keys: StreamKeys, view: StreamView) -> Saga[list[RemovedShard]]:
    """Say what lies on each shard that the layout has no more. Parameters: view: the record."""
    found = []
    for some in _parts(_shards(view)):
        answers = yield Together([commands.removed(keys, shard) for shard in some])
        for shard, answer in zip(some, answers, strict=True):
            if isinstance(answer, CoordError):
                raise answer
            if answer.epoch is None and not answer.entries:
                continue  # a resharding was given up before it had made the shard
            found.append(
                RemovedShard(
                    shard=shard,
                    stream_key=keys.shard(shard).stream,
                    entries=answer.entries,
                    memory_bytes=answer.memory_bytes,
                    event_ids=answer.event_ids,
                    route=answer.state,
                    epoch=answer.epoch,
                    waits=tuple(_waits(shard, view, answer)),
                )
            )
    return found


def _waits(shard: int, view: StreamView, reading: RemovedReading) -> Iterable[Waiting]:
    """Say what keeps entries there."""
    if reading.epoch is None:
        yield Waiting(what="its route is missing", shard=shard)
    elif reading.state != "closed" or reading.epoch > view.layout.epoch:
        yield Waiting(what=f"its route is {reading.state} at epoch {reading.epoch}", shard=shard)
    for name, group in view.groups.items():
        if reading.entries and name not in reading.unfinished and group.since < (reading.epoch or 0):
            yield Waiting(what="its consumer group is missing there", group=name, shard=shard)
    for name, first in reading.unfinished.items():
        if first is not None:
            known = "" if name in view.groups else ", which nobody registered,"
            yield Waiting(what=f"the group{known} has yet to finish {first}", group=name, shard=shard)


def retain(keys: StreamKeys, goes_on: Callable[[], bool]) -> Saga[Trimmed]:
    """Trim by the retention of the stream, unless a resharding is under way, which may bring the shards back.

    Parameters:
        keys: of the stream.
        goes_on: asked before each round; the answer no ends it where it is.
    """
    view: StreamView = yield commands.resharding(keys)
    keep = view.layout.keep
    if keep is None or (view.saga is not None and view.saga.active):
        return Trimmed()
    return (yield from trim(keys, view, keep=keep, goes_on=goes_on))


def trim(keys: StreamKeys, view: StreamView, *, keep: int, goes_on: Callable[[], bool] = lambda: True) -> Saga[Trimmed]:
    """Remove what no group needs any more, and event ids that nobody asks for any more.

    Parameters:
        keys, view: of the stream.
        keep: so many entries of each shard stay, roughly, though all groups have finished them.
        goes_on: see `retain`.

    Returns:
        What went. A shard that could not be trimmed is named, and does not keep the others from it.

    Raises:
        PermissionDeniedError: the user may not do it.
    """
    entries, event_ids = 0, 0
    kept: dict[int, Waiting] = {}
    for some in _parts(_shards(view)):
        left = some
        while left and goes_on():
            answers = yield Together([commands.trim_removed(keys, shard, view, keep=keep) for shard in left])
            more = []
            for shard, answer in zip(left, answers, strict=True):
                if isinstance(answer, PermissionDeniedError):
                    raise answer
                if isinstance(answer, CoordError):
                    kept[shard] = Waiting(what=answer.message, shard=shard)
                    continue
                entries, event_ids = entries + answer.entries, event_ids + answer.event_ids
                if answer.absent is not None:
                    what = "its consumer group is missing there"
                    kept[shard] = Waiting(what=what, group=answer.absent, shard=shard)
                if answer.event_ids == commands.EVENT_IDS_AT_ONCE:
                    more.append(shard)
            left = more
    return Trimmed(entries=entries, event_ids=event_ids, waits=tuple(kept.values()))


def _shards(view: StreamView) -> range:
    return range(view.layout.shards, view.top)


def _parts(shards: range) -> list[Sequence[int]]:
    return [shards[first : first + _AT_ONCE] for first in range(0, len(shards), _AT_ONCE)]
