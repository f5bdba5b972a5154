"""Administration of groups, and reads of their records for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import keys as redis_keys
from ..errors import CoordError, CorruptMetadataError
from ..group_view import GroupView, MemberView, RoundView, ShardView
from ..keys import GroupKeys, StreamKeys
from ..models import Timings
from .base import PROTOCOL, Command, call, flat, parse_held, parse_set, text, timings_of


def create(
    keys: GroupKeys,
    *,
    incarnation: int,
    shards: int,
    epoch: int,
    timings: Timings,
    deleted: str | None = None,
    anew: bool = False,
    request_id: str,
    audit: Mapping[str, str],
) -> Command[int]:
    """Write the record of a new group. Result: its incarnation.

    Parameters:
        incarnation: above those of all fences that were found.
        deleted: the last deletion, as `deletion` gave it before the shards were provisioned.
        anew: in place of a record that is lost, damaged or too old.

    Raises (when run): `AlreadyExistsError`; `ConflictError`: it was deleted meanwhile.
    """
    return call(
        "create",
        {**_group_keys(keys), "limits": keys.limits, "deleted": keys.deleted},
        {
            "stream": keys.stream,
            "group": keys.group,
            "incarnation": incarnation,
            "shards": shards,
            "epoch": epoch,
            "protocol": PROTOCOL,
            "heartbeat_ms": round(timings.heartbeat_seconds * 1000),
            "lease_ms": round(timings.lease_seconds * 1000),
            "rebalance_ms": round(timings.rebalance_seconds * 1000),
            "deleted": deleted or "-",
            "anew": int(anew),
            "request_id": request_id,
            "audit": flat(audit),
        },
        lambda answer: int(answer[1]),
        stream=keys.stream,
        group=keys.group,
    )


def delete(
    keys: GroupKeys, *, force: bool, frozen_ok: bool = False, request_id: str, audit: Mapping[str, str]
) -> Command[int]:
    """Delete the record of a group. Result: the incarnation of what was deleted, now or by this request before.

    Parameters:
        force: even with live members, or damaged.
        frozen_ok: with `force`: even if it is frozen.

    Raises (when run): `ConflictError`: it has live members; `NotFoundError`; `FrozenError`.
    """
    return call(
        "delete",
        {**_group_keys(keys), "limits": keys.limits, "deleted": keys.deleted},
        {
            "force": (2 if frozen_ok else 1) if force else 0,
            "request_id": request_id,
            "audit": flat(audit),
        },
        lambda answer: int(answer[1]),
        stream=keys.stream,
        group=keys.group,
    )


def record(keys: GroupKeys, action: str, detail: str, *, request_id: str, audit: Mapping[str, str]) -> Command[bool]:
    """Record an action on the group that other slots carry out. Result: whether it had been recorded before."""
    return call(
        "record",
        {"metadata": keys.metadata, "audit": keys.audit, "limits": keys.limits},
        {"action": action, "detail": detail, "request_id": request_id, "audit": flat(audit)},
        lambda answer: bool(answer[1]),
        stream=keys.stream,
        group=keys.group,
    )


def begin(
    keys: GroupKeys | StreamKeys, action: str, *, request_id: str, audit: Mapping[str, str]
) -> Command[str | None]:
    """Ask whether a request has been decided already. Result: the recorded detail if it was accepted, else ``None``.

    Raises (when run): what it was refused with; `RateLimitedError`; `ConflictError`: its id was used for another one.
    """
    return call(
        "begin",
        {"audit": keys.audit, "limits": keys.limits},
        {"action": action, "request_id": request_id, "audit": flat(audit)},
        lambda answer: text(answer[2]) if answer[1] else None,
        **whom(keys),
    )


def failed(
    keys: GroupKeys | StreamKeys,
    action: str,
    error: CoordError,
    *,
    final: bool,
    request_id: str,
    audit: Mapping[str, str],
) -> Command[bool]:
    """Record that a request ended with an error that no script of it has recorded. Result: whether that was so."""
    return call(
        "failed",
        {"audit": keys.audit},
        {
            "action": action,
            "word": error.word or "-",
            "detail": error.detail if error.word else f"{type(error).__name__}: {error.message}",
            "final": int(final),
            "request_id": request_id,
            "audit": flat(audit),
        },
        lambda answer: bool(answer[1]),
        **whom(keys),
    )


def freeze(keys: GroupKeys, *, on: bool, request_id: str, audit: Mapping[str, str]) -> Command[int]:
    """Freeze a group, or end that. Result: since when it is frozen, Redis server ms; 0: it is not."""
    return call(
        "freeze",
        {"metadata": keys.metadata, "events": keys.events, "audit": keys.audit, "limits": keys.limits},
        {"action": "freeze" if on else "unfreeze", "request_id": request_id, "audit": flat(audit)},
        lambda answer: int(answer[1]),
        **whom(keys),
    )


def reconcile(keys: GroupKeys, *, request_id: str, audit: Mapping[str, str]) -> Command[tuple[str, ...]]:
    """Do what time has brought about. Result: types of the events that came of it.

    Raises (when run): `FrozenError`, `NotFoundError`, `MetadataError`.
    """
    return call(
        "reconcile",
        {**_group_keys(keys), "limits": keys.limits},
        {"request_id": request_id, "audit": flat(audit)},
        lambda answer: tuple(text(answer[1]).split()),
        stream=keys.stream,
        group=keys.group,
    )


def limit(
    keys: GroupKeys | StreamKeys, principal: str, value: str, *, request_id: str, audit: Mapping[str, str]
) -> Command[None]:
    """Change the rate limit of a principal to ``count/seconds``, or to none of its own: ``-``."""
    return call(
        "limit",
        {"audit": keys.audit, "limits": keys.limits},
        {"principal": principal, "limit": value, "request_id": request_id, "audit": flat(audit)},
        lambda answer: None,
        **whom(keys),
    )


def deletion(keys: GroupKeys) -> Command[str | None]:
    """Ask for the last deletion of the group. Result: ``<incarnation> done`` or ``<incarnation> unfinished``."""

    def parse(answer: Any) -> str | None:
        found = answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))
        fields = {text(name): text(value) for name, value in found.items()}
        return f"{fields.get('incarnation')} {fields.get('state')}" if fields else None

    return Command("HGETALL", None, [keys.deleted], [keys.deleted], parse)


def deleted(keys: GroupKeys, incarnation: int) -> Command[None]:
    """Say that the deletion of this lifecycle is finished on all shards."""
    return call("deleted", {"deleted": keys.deleted}, {"incarnation": incarnation}, lambda answer: None, **whom(keys))


def whom(keys: GroupKeys | StreamKeys) -> dict[str, Any]:
    """Return whom a call concerns, for its errors."""
    return {"stream": keys.stream, "group": keys.group if isinstance(keys, GroupKeys) else None}


def announce(keys: GroupKeys, kind: str, *, wake: str = "*") -> Command[str]:
    """Append an event that wakes every member, or those that `wake` names. One too many does no harm."""
    fields = ["type", kind, "wake", wake]
    return Command("XADD", None, [keys.events], [keys.events, "MAXLEN", "~", "1000", "*", *fields], text)


def _group_keys(keys: GroupKeys) -> dict[str, str]:
    return {"metadata": keys.metadata, "leases": keys.leases, "events": keys.events, "audit": keys.audit}


def enlist(keys: GroupKeys, *, present: bool) -> Command[int]:
    """Add the group to the index of all groups, or remove it."""
    index = redis_keys.index(keys.prefix)
    return Command("SADD" if present else "SREM", None, [index], [index, f"{keys.stream}:{keys.group}"], int)


def exists(keys: GroupKeys) -> Command[bool]:
    """Ask whether the group has a record, be it damaged."""
    return Command("EXISTS", None, [keys.metadata], [keys.metadata], bool)


def groups(prefix: str) -> Command[list[tuple[str, str]]]:
    """List all groups of the index. Result: (stream, group), sorted."""

    def parse(answer: Any) -> list[tuple[str, str]]:
        # The group is what stands after the last colon: it cannot contain one.
        pairs = (text(name).rpartition(":") for name in answer)
        return sorted((stream, group) for stream, _, group in pairs)

    index = redis_keys.index(prefix)
    return Command("SMEMBERS", None, [index], [index], parse)


def describe(keys: GroupKeys) -> Command[GroupView]:
    """Read the whole record of a group. Raises (when run): `NotFoundError`, `MetadataError`."""
    return call(
        "describe",
        {"metadata": keys.metadata, "leases": keys.leases},
        {},
        _group_view,
        stream=keys.stream,
        group=keys.group,
    )


def _group_view(answer: list[Any]) -> GroupView:
    now_ms, flat, leases = int(answer[1]), [text(v) for v in answer[2]], [text(v) for v in answer[3]]
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    deadlines = {m: int(float(score)) for m, score in zip(leases[::2], leases[1::2], strict=True)}
    members: dict[str, MemberView] = {}
    shards: dict[int, ShardView] = {}
    try:
        for name, value in fields.items():
            kind, _, rest = name.partition(":")
            parts = dict(part.partition("=")[::2] for part in value.split()) if rest else {}
            if kind == "member":
                members[rest] = _member_view(rest, parts, deadlines.get(rest), now_ms)
            elif kind == "shard":
                shards[int(rest)] = _shard_view(int(rest), parts)
        return GroupView(
            stream=fields["stream"],
            group=fields["group"],
            incarnation=int(fields["incarnation"]),
            version=int(fields["version"]),
            group_epoch=int(fields["group_epoch"]),
            assignment_epoch=int(fields["assignment_epoch"]),
            grant_counter=int(fields["grant_counter"]),
            timings=timings_of(int(fields["heartbeat_ms"]), int(fields["lease_ms"]), int(fields["rebalance_ms"])),
            now_ms=now_ms,
            members=dict(sorted(members.items())),
            shards=dict(sorted(shards.items())),
            round=_round_view(fields["round"]),
            frozen_ms=None if fields["frozen"] == "-" else int(fields["frozen"]),
            protocol=(int(fields["protocol_min"]), int(fields["protocol_max"])),
        )
    except (KeyError, ValueError) as error:
        raise CorruptMetadataError(f"the metadata cannot be read: {error!r}") from error


def _round_view(value: str) -> RoundView | None:
    kind, _, rest = value.partition(" ")
    if kind != "open":
        return None
    parts = dict(part.partition("=")[::2] for part in rest.split())
    waits = parts["waits"].split(",") if parts["waits"] != "-" else ()
    opened_ms, due_ms = int(parts["opened_ms"]), int(parts["due_ms"])
    return RoundView(parts["id"], opened_ms, due_ms, frozenset(waits), parts["strangers"] == "1")


def _member_view(member: str, parts: Mapping[str, str], deadline_ms: int | None, now_ms: int) -> MemberView:
    return MemberView(
        id=member,
        nonce=parts["nonce"],
        epoch=int(parts["epoch"]),
        weight=int(parts["weight"]) / 1000,
        state=parts["state"],
        joined_ms=int(parts["joined_ms"]),
        lease_remaining_ms=None if deadline_ms is None else deadline_ms - now_ms,
        assigned=parse_held(parts["assigned"]),
        revoking=parse_held(parts["revoking"]),
        pending=parse_set(parts["pending"]),
    )


def _shard_view(index: int, parts: Mapping[str, str]) -> ShardView:
    return ShardView(
        index=index,
        target=None if parts["target"] == "-" else parts["target"],
        holder=None if parts["holder"] == "-" else parts["holder"],
        token=int(parts["token"]),
        state=parts["state"],
        deadline_ms=int(parts["deadline_ms"]),
        hold_until_ms=int(parts["hold_until_ms"]),
        readable=parts["readable"] == "1",
    )
