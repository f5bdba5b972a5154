"""Shards that the layout of a stream has no more: what lies there, and trimming it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ..keys import StreamKeys
from .base import Command, call, text
from .resharding import StreamView
from .streams import EVENT_ID_WINDOW_COUNT, EVENT_ID_WINDOW_SECONDS

# So many event ids go in one call: Redis does nothing else meanwhile.
EVENT_IDS_AT_ONCE = 500


@attrs.frozen(kw_only=True)
class RemovedReading:
    """One such shard as it is at a moment.

    Attributes:
        entries: how many there are.
        memory_bytes: of them and of the event ids; ``None``: Redis does not tell.
        event_ids: how many it remembers.
        epoch, state: of its route; ``None`` and ``missing`` without one.
        unfinished: of each consumer group there, the id of the first entry that it has not finished, or ``None``.
    """

    entries: int
    memory_bytes: int | None
    event_ids: int
    epoch: int | None
    state: str
    unfinished: Mapping[str, str | None]


@attrs.frozen
class RemovedTrim:
    """What one call removed.

    Attributes:
        entries: so many entries.
        event_ids: so many event ids; `EVENT_IDS_AT_ONCE`: perhaps more can go.
        absent: registered group that has to be on the shard before any entry may go; ``None``: all are.
    """

    entries: int
    event_ids: int
    absent: str | None


def removed(keys: StreamKeys, shard: int) -> Command[RemovedReading]:
    """Look at a shard that the layout has no more."""
    return call("removed", _where(keys, shard), {}, _reading, stream=keys.stream, shard=shard)


def _reading(answer: list[Any]) -> RemovedReading:
    names = list(map(text, answer[6:]))
    return RemovedReading(
        entries=int(answer[1]),
        memory_bytes=int(answer[2]) if int(answer[2]) >= 0 else None,
        event_ids=int(answer[3]),
        epoch=int(answer[4]) if answer[4] else None,
        state=text(answer[5]) or "missing",
        unfinished={name: first or None for name, first in zip(names[::2], names[1::2], strict=True)},
    )


def trim_removed(keys: StreamKeys, shard: int, view: StreamView, *, keep: int) -> Command[RemovedTrim]:
    """Trim a shard that the layout has no more, no further than every group has finished it.

    Parameters:
        view: the record that says so.
        keep: so many entries stay, roughly, though all groups have finished them.

    Raises (when run): `MetadataRegressionError`: the shard is ahead of the record: it came back, or is about to;
    `ConflictError`: it is not closed; `RoutingUnavailableError`: it has no route.
    """
    return call(
        "trim_removed",
        _where(keys, shard),
        {
            "epoch": view.layout.epoch,
            "keep": keep,
            "window_ms": round(EVENT_ID_WINDOW_SECONDS * 1000),
            "window_count": EVENT_ID_WINDOW_COUNT,
            "most": EVENT_IDS_AT_ONCE,
            "groups": [part for name, group in view.groups.items() for part in (name, str(group.since))],
        },
        lambda answer: RemovedTrim(int(answer[1]), int(answer[2]), text(answer[3]) or None),
        stream=keys.stream,
        shard=shard,
    )


def _where(keys: StreamKeys, shard: int) -> dict[str, str]:
    names = keys.shard(shard)
    return {"stream": names.stream, "route": names.route, "published": names.published}
