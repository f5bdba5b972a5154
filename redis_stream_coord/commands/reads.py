"""Reads for people: shards, entries and histories. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import keys as redis_keys
from ..errors import CorruptMetadataError
from ..keys import GroupKeys, StreamKeys
from ..models import EVENT_ID_FIELD, KEY_FIELD, RESERVED_PREFIX
from ..views import (
    AuditEntry,
    ConsumerView,
    EventEntry,
    FenceView,
    PendingView,
    RouteView,
    ShardReading,
    StoredEntry,
)
from .base import Command, call, text

NEWEST, OLDEST = "+", "-"


def ping() -> Command[None]:
    """Ask whether Redis is there."""
    return Command("PING", None, [], [], lambda answer: None)


def inspect(keys: GroupKeys, shard: int) -> Command[ShardReading]:
    """Look at one shard of a group in its own slot."""
    names = StreamKeys(keys.stream, keys.prefix).shard(shard)

    def parse(answer: list[Any]) -> ShardReading:
        try:
            return _reading(keys, shard, names.stream, answer)
        except (KeyError, ValueError) as error:
            raise CorruptMetadataError(
                f"the keys of the shard cannot be read: {error!r}", stream=keys.stream, group=keys.group, shard=shard
            ) from error

    return call(
        "inspect",
        {"stream": names.stream, "fence": keys.fence(shard), "route": names.route},
        {"group": keys.group},
        parse,
        stream=keys.stream,
        group=keys.group,
        shard=shard,
    )


def _reading(keys: GroupKeys, shard: int, stream_key: str, answer: list[Any]) -> ShardReading:
    length, memory, more = int(answer[2]), int(answer[3]), bool(answer[8])
    info, groups = _pairs(answer[4]), [_pairs(one) for one in answer[5]]
    mine = next((one for one in groups if text(one["name"]) == keys.group), None)
    fence = {name: text(value) for name, value in _pairs(answer[9]).items()}
    return ShardReading(
        shard=shard,
        stream_key=stream_key,
        slot=redis_keys.slot(stream_key),
        now_ms=int(answer[1]),
        exists=length >= 0,
        length=max(0, length),
        memory_bytes=memory if memory >= 0 else None,
        last_id=text(info["last-generated-id"]) if length >= 0 else None,
        has_group=mine is not None,
        pending=None if mine is None else int(mine["pending"]),
        lag=None if mine is None or mine.get("lag") is None else int(mine["lag"]),
        undelivered=None if mine is None else more,
        delivered_id=None if mine is None else text(mine["last-delivered-id"]),
        oldest=_pending(answer[7][0]) if answer[7] else None,
        consumers=tuple(_consumer(_pairs(one)) for one in answer[6]),
        groups=tuple(sorted(text(one["name"]) for one in groups)),
        fence=_fence(fence) if "token" in fence else None,
        route=route_view(shard, {name: text(value) for name, value in _pairs(answer[10]).items()}),
    )


def _pairs(flat: Sequence[Any] | Mapping[Any, Any]) -> dict[str, Any]:
    if isinstance(flat, Mapping):
        return {text(name): value for name, value in flat.items()}
    return {text(name): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def _fence(fields: Mapping[str, str]) -> FenceView:
    return FenceView(
        incarnation=int(fields.get("incarnation", "0")),
        token=int(fields.get("token", "0")),
        member=fields.get("member", ""),
        nonce=fields.get("nonce", ""),
        position=fields.get("position"),
    )


def route_view(shard: int, fields: Mapping[str, str]) -> RouteView:
    """Make a view of the hash of a route; it may be empty."""
    return RouteView(
        shard=shard,
        state=fields.get("state", "missing"),
        epoch=int(fields["epoch"]) if "epoch" in fields else None,
        layout=fields.get("layout"),
        fields=fields,
    )


def _consumer(fields: Mapping[str, Any]) -> ConsumerView:
    return ConsumerView(name=text(fields["name"]), pending=int(fields["pending"]), idle_ms=int(fields["idle"]))


def _pending(row: Sequence[Any]) -> PendingView:
    return PendingView(id=text(row[0]), consumer=text(row[1]), idle_ms=int(row[2]), deliveries=int(row[3]))


def route(keys: StreamKeys, shard: int) -> Command[RouteView]:
    """Read the route of one shard."""
    key = keys.shard(shard).route

    def parse(answer: Any) -> RouteView:
        return route_view(shard, {name: text(value) for name, value in _pairs(answer).items()})

    return Command("HGETALL", None, [key], [key], parse)


def entries(
    keys: StreamKeys, shard: int, *, first: str = OLDEST, last: str = NEWEST, count: int, newest: bool = False
) -> Command[list[StoredEntry]]:
    """Read entries of a shard as they lie there, from `first` to `last`, both included; `newest` reads backwards."""
    name = keys.shard(shard).stream
    ends = [last, first] if newest else [first, last]
    return Command(
        "XREVRANGE" if newest else "XRANGE",
        None,
        [name],
        [name, *ends, "COUNT", str(count)],
        lambda answer: [_entry(shard, text(row[0]), row[1] or ()) for row in answer or ()],
    )


def _entry(shard: int, entry_id: str, flat: Sequence[Any] | Mapping[Any, Any]) -> StoredEntry:
    fields: dict[str, bytes] = {
        name if isinstance(name, str) else name.decode("utf-8", "backslashreplace"): value
        for name, value in (flat.items() if isinstance(flat, Mapping) else zip(flat[::2], flat[1::2], strict=True))
    }
    event_id = fields.get(EVENT_ID_FIELD.decode())
    return StoredEntry(
        shard=shard,
        id=entry_id,
        at_ms=int(entry_id.partition("-")[0]),
        key=fields.get(KEY_FIELD.decode()),
        event_id=None if event_id is None else event_id.decode("utf-8", "replace"),
        fields={name: value for name, value in fields.items() if not name.startswith(RESERVED_PREFIX)},
    )


def pending_of(keys: GroupKeys, shard: int, ids: Sequence[str]) -> Command[list[PendingView]]:
    """Ask to whom entries of a shard are delivered. Result: those of them that are pending."""
    return call(
        "pending",
        {"stream": StreamKeys(keys.stream).shard(shard).stream},
        {"group": keys.group, "ids": ids},
        lambda answer: [_pending(row) for row in answer[1:]],
        stream=keys.stream,
        group=keys.group,
        shard=shard,
    )


def published(keys: StreamKeys, shard: int, event_id: str) -> Command[str | None]:
    """Ask which entry of a shard has an event id, as far as the shard remembers. Result: its id."""
    key = keys.shard(shard).published
    return Command("HGET", None, [key], [key, f"e:{event_id}"], lambda answer: None if answer is None else text(answer))


def audit_log(key: str, *, count: int) -> Command[list[AuditEntry]]:
    """Read the newest administrative mutations, newest first."""
    return Command(
        "XREVRANGE",
        None,
        [key],
        [key, NEWEST, OLDEST, "COUNT", str(count)],
        lambda answer: [_audit_entry(entry_id, fields) for entry_id, fields in _log(answer)],
    )


def event_log(keys: GroupKeys, *, count: int) -> Command[list[EventEntry]]:
    """Read the newest transitions, newest first."""
    return Command(
        "XREVRANGE",
        None,
        [keys.events],
        [keys.events, NEWEST, OLDEST, "COUNT", str(count)],
        lambda answer: [_event(entry_id, fields) for entry_id, fields in _log(answer)],
    )


def _log(answer: Any) -> list[tuple[str, dict[str, str]]]:
    return [(text(row[0]), {name: text(value) for name, value in _pairs(row[1] or ()).items()}) for row in answer or ()]


def _audit_entry(entry_id: str, fields: Mapping[str, str]) -> AuditEntry:
    duration = fields.get("duration_ms")
    named = ("action", "outcome", "word", "detail", "request_id", "requested_by", "reason", "principal")
    return AuditEntry(
        id=entry_id,
        at_ms=int(entry_id.partition("-")[0]),
        **{name: fields.get(name, "") for name in named},
        client_address=fields.get("client_address", ""),
        duration_ms=None if duration is None else float(duration),
        fingerprint=fields.get("fingerprint", ""),
        fields=fields,
    )


def _event(entry_id: str, fields: Mapping[str, str]) -> EventEntry:
    shard = fields.get("shard", "")
    return EventEntry(
        id=entry_id,
        at_ms=int(entry_id.partition("-")[0]),
        type=fields.get("type", ""),
        member=fields.get("member"),
        shard=int(shard) if shard.isdigit() else None,
        fields={name: value for name, value in fields.items() if name not in ("type", "wake", "member", "shard")},
    )
