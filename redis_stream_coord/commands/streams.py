"""Logical streams: their layout, and publishing to their shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ..keys import GroupKeys, StreamKeys
from ..models import Layout
from .base import PROTOCOL, Command, call, flat, text

# Event ids are remembered by each shard for this long, and so many of them; beyond it a duplicate is possible. A
# producer remembers its own sends without an answer within the same bounds.
EVENT_ID_WINDOW_SECONDS = 3600.0
EVENT_ID_WINDOW_COUNT = 100_000


@attrs.frozen
class Published:
    """What became of one entry.

    Attributes:
        word: ``OK``, ``DUPLICATE``, or an error word.
        detail: id of the entry; of ``CLOSED`` and ``STALE_ROUTE``: epoch of the route's phase, and its layout.
    """

    word: str
    detail: str

    @property
    def is_there(self) -> bool:
        """Whether the entry is in the stream."""
        return self.word in ("OK", "DUPLICATE")


def publish(
    keys: StreamKeys,
    shard: int,
    entries: Sequence[tuple[str | None, Sequence[str | bytes]]],
    *,
    layout: str,
    window_ms: int,
    window_count: int,
) -> Command[list[Published]]:
    """Append entries, each an event id (or ``None``) and its flat fields, to one shard. Result: one outcome each.

    It is idempotent if every entry has an event id.
    """
    names = keys.shard(shard)
    flat: list[str | bytes] = []
    for event_id, fields in entries:
        flat += [event_id or "", str(len(fields)), *fields]
    return call(
        "publish",
        {"stream": names.stream, "route": names.route, "published": names.published},
        {"layout": layout, "window_ms": window_ms, "window_count": window_count, "entries": flat},
        lambda answer: [Published(text(answer[i]), text(answer[i + 1])) for i in range(1, len(answer), 2)],
        idempotent=all(event_id is not None for event_id, _ in entries),
        stream=keys.stream,
        shard=shard,
    )


def append(keys: StreamKeys, shard: int, fields: Sequence[str | bytes]) -> Command[list[Published]]:
    """Plain XADD that makes no stream: no route check, no duplicate detection. Result: one outcome."""
    stream = f"{keys.stream}:{shard}"
    return Command("XADD", None, [stream], [stream, "NOMKSTREAM", "*", *fields], _appended, idempotent=False)


def _appended(answer: Any) -> list[Published]:
    return [Published("STREAM_MISSING", "") if answer is None else Published("OK", text(answer))]


def layout(keys: StreamKeys, *, window_ms: int = 0) -> Command[Layout]:
    """Read the present layout, with those that ended within the window.

    Raises (when run): `NotFoundError`, `MetadataError`.
    """
    arguments = {"protocol": PROTOCOL, "window_ms": window_ms}
    return call("layout", {"record": keys.record}, arguments, _layout, stream=keys.stream)


def _layout(answer: list[Any]) -> Layout:
    version, incarnation, epoch, shards = map(int, answer[1:5])
    routing, layout_id, state, retention = map(text, answer[5:9])
    groups, resharding = tuple(map(text, answer[9])), text(answer[10])
    earlier = tuple(map(text, answer[11] if len(answer) > 11 else ()))
    return Layout(
        version, incarnation, epoch, shards, routing, layout_id, state, retention, groups, earlier, resharding
    )


def register(keys: GroupKeys, *, shards: int | None, routing: str, retention: str = "all") -> Command[Layout]:
    """Make the group known to its stream, and make the stream's record if there is none.

    Raises (when run): `ConflictError`: another number of shards, or, retriable, a resharding is at its cut-over;
    `ConfigError`: none given for a new stream.
    """
    return call(
        "register",
        {"record": StreamKeys(keys.stream, keys.prefix).record},
        {
            "stream": keys.stream,
            "group": keys.group,
            "shards": -1 if shards is None else shards,
            "routing": routing,
            "retention": retention,
            "protocol": PROTOCOL,
        },
        _layout,
        stream=keys.stream,
        group=keys.group,
    )


def activate(keys: GroupKeys, layout_id: str, *, incarnation: int) -> Command[Layout]:
    """Say that the group is created, and every shard of that layout provisioned.

    Raises (when run): `ConflictError`, retriable: a resharding is at its cut-over.
    """
    return call(
        "activate",
        {"record": StreamKeys(keys.stream, keys.prefix).record},
        {"protocol": PROTOCOL, "layout": layout_id, "group": keys.group, "incarnation": incarnation},
        _layout,
        stream=keys.stream,
        group=keys.group,
    )


def unregister(keys: GroupKeys, *, registered: int) -> Command[bool]:
    """Make the stream forget a group, if it is registered under that number still. Result: whether that was so."""
    return call(
        "unregister",
        {"record": StreamKeys(keys.stream, keys.prefix).record},
        {"group": keys.group, "registered": registered, "protocol": PROTOCOL},
        lambda answer: bool(answer[1]),
        stream=keys.stream,
        group=keys.group,
    )


def provision(keys: GroupKeys, shard: int, *, start: str, layout: Layout, resharding: int = 0) -> Command[int]:
    """Make one shard ready for the group. Result: incarnation found in its fence.

    Parameters:
        start: ``0`` or ``$``: where a consumer group begins that is new on the shard.
        layout: of the stream.
        resharding: epoch of the resharding that adds the shard; 0: none does.

    Raises (when run): `ConflictError`: too late, the shard is closed for that resharding already.
    """
    names = StreamKeys(keys.stream, keys.prefix).shard(shard)
    return call(
        "provision",
        {"stream": names.stream, "fence": keys.fence(shard), "route": names.route},
        {
            "group": keys.group,
            "start": start,
            "epoch": layout.epoch,
            "layout": layout.layout,
            "creating": int(layout.state == "creating"),
            "resharding": resharding,
        },
        lambda answer: int(answer[1]),
        stream=keys.stream,
        group=keys.group,
        shard=shard,
    )


def retire(keys: GroupKeys, shard: int, *, incarnation: int) -> Command[int]:
    """Remove a deleted lifecycle of a group from one shard and leave a tombstone. Result: incarnation of the fence."""
    return call(
        "retire",
        {"stream": StreamKeys(keys.stream).shard(shard).stream, "fence": keys.fence(shard)},
        {"group": keys.group, "incarnation": incarnation},
        lambda answer: int(answer[1]),
        stream=keys.stream,
        group=keys.group,
        shard=shard,
    )


def retain(keys: StreamKeys, retention: str, *, request_id: str, audit: Mapping[str, str]) -> Command[Layout]:
    """Change how long entries of the stream are kept. Raises (when run): `NotFoundError`, `MetadataError`."""
    return call(
        "retain",
        {"record": keys.record, "audit": keys.audit, "limits": keys.limits},
        {"protocol": PROTOCOL, "retention": retention, "request_id": request_id, "audit": flat(audit)},
        _layout,
        stream=keys.stream,
    )


def revise(keys: StreamKeys, *, expected: int, request_id: str, audit: Mapping[str, str]) -> Command[int]:
    """Move the version of a stream's record on, if it is the one that a plan was made of. Result: the next one.

    Raises (when run): `ConflictError`, which names both.
    """
    return call(
        "revise",
        {"record": keys.record, "audit": keys.audit, "limits": keys.limits},
        {"protocol": PROTOCOL, "expected": expected, "request_id": request_id, "audit": flat(audit)},
        lambda answer: int(answer[1]),
        stream=keys.stream,
    )
