"""The data plane of one shard: claim, read, acknowledge, all under its fence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ..keys import GroupKeys, StreamKeys
from ..models import EVENT_ID_FIELD, KEY_FIELD
from .base import Command, call, text


@attrs.frozen
class Fence:
    """The session in whose name a shard is claimed, read and acknowledged."""

    shard: int
    member: str
    nonce: str
    incarnation: int
    token: int


@attrs.frozen
class Entry:
    """One entry as read.

    Attributes:
        id: its id.
        deliveries: how often it has been delivered, this time included.
        fields: names and values as a flat list.
        key, event_id: from the reserved fields.
        size: bytes of all names and values.
    """

    id: str
    deliveries: int
    fields: Sequence[bytes]
    key: bytes | None
    event_id: str | None
    size: int


@attrs.frozen
class Page:
    """What one read brought.

    Attributes:
        entries: in id order.
        last: the highest id seen, to go on from; ``None`` if there was nothing.
        caught_up: nothing older is pending beyond these.
        wait_after: nothing more was there; wait for entries beyond this id. ``None``: read on at once.
        held: a barrier is reached: what comes after it waits until the group has passed a resharding.
        recreated_at: the consumer group had vanished and was made anew at this position.
        gone: ids that were pending but exist no more (deleted or trimmed); they have been acknowledged.
        again: so many of the entries, the first ones, were pending before.
    """

    entries: Sequence[Entry]
    last: str | None
    caught_up: bool
    wait_after: str | None
    held: bool
    recreated_at: str | None
    gone: Sequence[str]
    again: int


def claim(keys: GroupKeys, fence: Fence) -> Command[str]:
    """Raise the fence of a shard. Result: the recorded position.

    Raises (when run):
        FencedError: another session has claimed it under a higher token; ``detail`` begins with that fence's
            incarnation and token.
        MetadataRegressionError: the fence is of a later lifecycle of the group.
    """
    return call(
        "claim",
        {"stream": StreamKeys(keys.stream).shard(fence.shard).stream, "fence": keys.fence(fence.shard)},
        {
            "incarnation": fence.incarnation,
            "token": fence.token,
            "member": fence.member,
            "nonce": fence.nonce,
        },
        lambda answer: text(answer[1]),
        accept=("OK",),
        **_whom(keys, fence),
    )


def read(
    keys: GroupKeys, fence: Fence, *, after: str, count: int, max_bytes: int = 16 << 20, each: bool = False
) -> Command[Page]:
    """Read up to `count` entries beyond `after`, the last id received under this claim.

    The entries together have at most `max_bytes`, unless the first alone has more. `each`: this owner writes down each
    delivery; without it a takeover presumes that the first pending entry was in a handler.

    Raises (when run): `FencedError`; `NotFoundError` if the shard's stream does not exist; `RoutingUnavailableError`
    if its route does not.
    """
    names = StreamKeys(keys.stream, keys.prefix).shard(fence.shard)
    return call(
        "read",
        {"stream": names.stream, "fence": keys.fence(fence.shard), "route": names.route},
        {
            "group": keys.group,
            "member": fence.member,
            "incarnation": fence.incarnation,
            "token": fence.token,
            "nonce": fence.nonce,
            "after": after,
            "count": count,
            "max_bytes": max(1, max_bytes),
            "each": int(each),
        },
        _page,
        **_whom(keys, fence),
    )


def _page(answer: list[Any]) -> Page:
    rest = answer[8:]
    return Page(
        entries=[_entry(text(rest[i]), int(rest[i + 1]), rest[i + 2]) for i in range(0, len(rest), 3)],
        last=text(answer[1]) or None,
        caught_up=bool(answer[2]),
        wait_after=text(answer[3]) or None,
        recreated_at=text(answer[4]) or None,
        gone=[text(entry_id) for entry_id in answer[5]],
        held=bool(answer[6]),
        again=int(answer[7]),
    )


def _entry(entry_id: str, deliveries: int, flat: Sequence[bytes]) -> Entry:
    key: bytes | None = None
    event_id: str | None = None
    for position in range(0, len(flat), 2):
        name = flat[position]
        if name == KEY_FIELD:
            key = flat[position + 1]
        elif name == EVENT_ID_FIELD:
            event_id = flat[position + 1].decode("utf-8", "replace")
    return Entry(entry_id, deliveries, flat, key, event_id, sum(map(len, flat)))


def ack(keys: GroupKeys, fence: Fence, ids: Sequence[str], *, delete: bool = False) -> Command[int]:
    """Acknowledge entries. Result: how many of them were pending until now.

    `delete` also deletes those that no consumer group of the stream has yet to receive or to acknowledge.

    Raises (when run): `FencedError`: nothing was acknowledged.
    """
    return call(
        "ack",
        {"stream": StreamKeys(keys.stream).shard(fence.shard).stream, "fence": keys.fence(fence.shard)},
        {
            "group": keys.group,
            "incarnation": fence.incarnation,
            "token": fence.token,
            "nonce": fence.nonce,
            "delete": int(delete),
            "ids": ids,
        },
        lambda answer: int(answer[1]),
        **_whom(keys, fence),
    )


def outstanding(keys: GroupKeys, fence: Fence, *, after: str, count: int) -> Command[list[str]]:
    """Ask what is pending on a shard, whoever has it. Result: up to `count` ids beyond `after`, in order.

    Raises (when run): `FencedError`.
    """
    return call(
        "outstanding",
        {"stream": StreamKeys(keys.stream).shard(fence.shard).stream, "fence": keys.fence(fence.shard)},
        {
            "group": keys.group,
            "incarnation": fence.incarnation,
            "token": fence.token,
            "nonce": fence.nonce,
            "after": after,
            "count": count,
        },
        lambda answer: [text(entry_id) for entry_id in answer[1:]],
        **_whom(keys, fence),
    )


def note_deliveries(
    keys: GroupKeys, fence: Fence, counts: Mapping[str, int], *, all_known: bool = False
) -> Command[None]:
    """Record for pending entries the number of the delivery that comes next.

    `all_known`: the counts of all that is pending are right now; a takeover need not presume a delivery.

    Raises (when run): `FencedError`.
    """
    return call(
        "note_deliveries",
        {"stream": StreamKeys(keys.stream).shard(fence.shard).stream, "fence": keys.fence(fence.shard)},
        {
            "group": keys.group,
            "member": fence.member,
            "incarnation": fence.incarnation,
            "token": fence.token,
            "nonce": fence.nonce,
            "all_known": int(all_known),
            "counts": [part for pair in counts.items() for part in pair],
        },
        lambda answer: None,
        **_whom(keys, fence),
    )


def trim(keys: GroupKeys, fence: Fence, *, keep: int, groups: Sequence[str]) -> Command[tuple[int, str]]:
    """Trim a shard no further than every group has acknowledged.

    Result: how many entries went, and the registered group that is missing on the shard, if any. Raises (when run):
    `FencedError`.
    """
    return call(
        "trim",
        {"stream": StreamKeys(keys.stream).shard(fence.shard).stream, "fence": keys.fence(fence.shard)},
        {
            "incarnation": fence.incarnation,
            "token": fence.token,
            "nonce": fence.nonce,
            "keep": keep,
            "groups": groups,
        },
        lambda answer: (int(answer[1]), text(answer[2])),
        **_whom(keys, fence),
    )


def seek(keys: GroupKeys, shard: int, entry_id: str, *, incarnation: int) -> Command[str]:
    """Move the group on one shard; the next entry is the first beyond `entry_id`. Result: the id.

    Raises (when run): `NotFoundError`: the shard is missing, or that lifecycle of the group is over.
    """
    return call(
        "seek",
        {"stream": StreamKeys(keys.stream).shard(shard).stream, "fence": keys.fence(shard)},
        {"group": keys.group, "incarnation": incarnation, "id": entry_id},
        lambda answer: text(answer[1]),
        stream=keys.stream,
        group=keys.group,
        shard=shard,
    )


def lag(keys: GroupKeys, shard: int) -> Command[int | None]:
    """Ask how many entries of a shard the group has not received yet. Result: ``None`` if Redis cannot tell."""
    name = StreamKeys(keys.stream).shard(shard).stream

    def parse(answer: Any) -> int | None:
        for info in answer:
            pairs = info.items() if isinstance(info, dict) else zip(info[::2], info[1::2], strict=True)
            fields = {text(field): value for field, value in pairs}
            if text(fields["name"]) == keys.group:
                value = fields.get("lag")
                return None if value is None else int(value)
        return None

    return Command("XINFO GROUPS", None, [name], [name], parse)


def _whom(keys: GroupKeys, fence: Fence) -> dict[str, Any]:
    return {"stream": keys.stream, "group": keys.group, "member": fence.member, "shard": fence.shard}
