"""Backup, restore and repair of records: raw reads and deciding writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..keys import GroupKeys, StreamKeys
from .base import Command, call, flat, text
from .records import whom


def fields_of(key: str) -> Command[dict[str, str]]:
    """Read a whole hash as it is. Result: field -> value; empty if it is not there."""

    def parse(answer: Any) -> dict[str, str]:
        found = answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))
        return {text(name): text(value) for name, value in found.items()}

    return Command("HGETALL", None, [key], [key], parse)


def last_event(keys: GroupKeys) -> Command[str]:
    """Ask for the id of the newest event of a group. Result: ``0-0`` if there is none."""

    def parse(answer: Any) -> str:
        return text(answer[0][0]) if answer else "0-0"

    return Command("XREVRANGE", None, [keys.events], [keys.events, "+", "-", "COUNT", "1"], parse)


def restore(
    keys: GroupKeys, record: Mapping[str, str], last_event: str, *, request_id: str, audit: Mapping[str, str]
) -> Command[int]:
    """Put the record of a group back. Result: its version. Raises (when run): `MetadataRegressionError`."""
    where = {
        "metadata": keys.metadata,
        "leases": keys.leases,
        "events": keys.events,
        "audit": keys.audit,
        "limits": keys.limits,
        "deleted": keys.deleted,
    }
    more = {"last_event": last_event}
    return _restore("restore", keys, where, record, more, request_id=request_id, audit=audit)


def restore_stream(
    keys: StreamKeys, record: Mapping[str, str], *, request_id: str, audit: Mapping[str, str]
) -> Command[int]:
    """Put the record of a stream back. Result: its version. Raises (when run): `MetadataRegressionError`."""
    where = {"record": keys.record, "audit": keys.audit, "limits": keys.limits}
    return _restore("restore_stream", keys, where, record, {}, request_id=request_id, audit=audit)


def _restore(
    name: str,
    keys: GroupKeys | StreamKeys,
    where: Mapping[str, str],
    record: Mapping[str, str],
    more: Mapping[str, str],
    *,
    request_id: str,
    audit: Mapping[str, str],
) -> Command[int]:
    fields = flat(record)
    return call(
        name,
        where,
        {
            "incarnation": int(record["incarnation"]),
            "version": int(record["version"]),
            **more,
            "request_id": request_id,
            "fields": len(fields),
            "audit": [*fields, *flat(audit)],
        },
        lambda answer: int(answer[1]),
        **whom(keys),
    )


def forget_leases(keys: GroupKeys, *, request_id: str, audit: Mapping[str, str]) -> Command[None]:
    """Forget all leases of a group, so that each member gets a full one."""
    return call(
        "forget_leases",
        {"metadata": keys.metadata, "leases": keys.leases, "audit": keys.audit, "limits": keys.limits},
        {"request_id": request_id, "audit": flat(audit)},
        lambda answer: None,
        **whom(keys),
    )


def note_repair(
    keys: GroupKeys | StreamKeys, detail: str, *, request_id: str, audit: Mapping[str, str]
) -> Command[None]:
    """Record what is repaired on other slots next."""
    return _note("repair", keys, detail, request_id, audit)


def note_trim(keys: StreamKeys, detail: str, *, request_id: str, audit: Mapping[str, str]) -> Command[None]:
    """Record that shards which the layout has no more are trimmed next, on their own slots."""
    return _note("trim", keys, detail, request_id, audit)


def _note(
    action: str, keys: GroupKeys | StreamKeys, detail: str, request_id: str, audit: Mapping[str, str]
) -> Command[None]:
    return call(
        "note",
        {"audit": keys.audit, "limits": keys.limits},
        {"action": action, "detail": detail, "request_id": request_id, "audit": flat(audit)},
        lambda answer: None,
        **whom(keys),
    )
