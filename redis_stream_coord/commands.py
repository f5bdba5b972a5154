"""One builder for each call to Redis: keys, arguments, and what to make of the answer.

A `Command` is a value. The runners of `redis_stream_coord.runner` send it, synchronously or not; nothing here does
any I/O. Work that takes several commands is a *saga*: a generator that yields commands and is sent their results.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, cast

import attrs

from . import keys as redis_keys
from .errors import CorruptMetadataError, refused
from .keys import GroupKeys, StreamKeys
from .models import EVENT_ID_FIELD, KEY_FIELD, GroupView, Held, Layout, MemberView, ShardView, Timings
from .scripts import Argument, Script, catalogue

# What the stored records and this release speak. A stored range that excludes it is refused by every script.
PROTOCOL = 1

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Saga = Generator["Command[Any] | Pause", Any, T]


@attrs.frozen
class Pause:
    """What a saga yields to wait for so many seconds."""

    seconds: float


@attrs.frozen
class Command(Generic[T_co]):
    """One call to Redis.

    Attributes:
        name: of the script, or the plain Redis command.
        script: ``None`` for a plain command.
        keys: KEYS of the script; of a plain command the keys that name its slot.
        arguments: ARGV of the script; of a plain command everything after its name.
        parse: makes the result of the raw RESP2 answer; raises the exception of a refusal.
        idempotent: whether it may be sent again when its reply was lost.
    """

    name: str
    script: Script | None
    keys: Sequence[str]
    arguments: Sequence[str | bytes]
    parse: Callable[[Any], T_co]
    idempotent: bool = True


def _call(
    name: str,
    keys: Mapping[str, str],
    arguments: Mapping[str, Argument],
    parse: Callable[[list[Any]], T],
    *,
    accept: Sequence[str] = ("OK",),
    idempotent: bool = True,
    stream: str | None = None,
    group: str | None = None,
    member: str | None = None,
    shard: int | None = None,
) -> Command[T]:
    script = catalogue()[name]
    bound, argv = script.bind(keys, arguments)

    def checked(answer: list[Any]) -> T:
        word = text(answer[0])
        if word not in accept:
            detail = " ".join(text(part) for part in answer[1:])
            raise refused(word, detail, stream=stream, group=group, member=member, shard=shard)
        return parse(answer)

    return Command(name, script, bound, argv, checked, idempotent)


def text(value: Any) -> str:
    """Return an element of an answer as text."""
    return value.decode() if isinstance(value, bytes) else str(value)


# --- membership -----------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class HeartbeatRequest:
    """What a member says in a heartbeat; see ``lua/heartbeat.lua`` for each field."""

    member: str
    nonce: str
    epoch: int
    incarnation: int
    version: int
    assignment_epoch: int
    weight: float
    replaces: str | None
    leaving: bool
    owned: Sequence[Held]
    revoked: Sequence[Held]
    refused: Sequence[tuple[int, int, int]]


@attrs.frozen(kw_only=True)
class HeartbeatReply:
    """An accepted heartbeat.

    Attributes:
        status: ``OK``; ``REVOKE_PENDING``: something has to be drained, nothing new may be read; ``LEFT``.
        now_ms: Redis server time.
        last_event: id of the newest event; block on events beyond it.
        holdings: ``None`` when nothing has changed since the last answer.
    """

    status: Literal["OK", "REVOKE_PENDING", "LEFT"]
    now_ms: int
    incarnation: int
    version: int
    group_epoch: int
    assignment_epoch: int
    epoch: int
    timings: Timings
    last_event: str
    holdings: Holdings | None


@attrs.frozen(kw_only=True)
class Holdings:
    """What a member has: assigned and revoking shards with tokens, and shards that are meant for it."""

    assigned: Mapping[int, int]
    revoking: Mapping[int, int]
    pending: frozenset[int]


def heartbeat(keys: GroupKeys, request: HeartbeatRequest) -> Command[HeartbeatReply]:
    """Join, renew the lease, report, leave.

    Raises (when run): the exceptions of `errors.REFUSALS` that ``heartbeat.lua`` can answer with.
    """
    return _call(
        "heartbeat",
        {"metadata": keys.metadata, "leases": keys.leases, "events": keys.events},
        {
            "member": request.member,
            "nonce": request.nonce,
            "epoch": request.epoch,
            "incarnation": request.incarnation,
            "version": request.version,
            "assignment_epoch": request.assignment_epoch,
            "protocol": PROTOCOL,
            "weight": round(request.weight * 1000),
            "replaces": request.replaces or "-",
            "leaving": int(request.leaving),
            "owned": _format_held(request.owned),
            "revoked": _format_held(request.revoked),
            "refused": [number for refusal in request.refused for number in refusal],
        },
        _heartbeat_reply,
        accept=("OK", "REVOKE_PENDING", "LEFT"),
        stream=keys.stream,
        group=keys.group,
        member=request.member,
    )


def _heartbeat_reply(answer: list[Any]) -> HeartbeatReply:
    now, incarnation, version, group_epoch, assignment_epoch, epoch, beat, lease, rebalance = map(int, answer[1:10])
    return HeartbeatReply(
        status=cast(Literal["OK", "REVOKE_PENDING", "LEFT"], text(answer[0])),
        now_ms=now,
        incarnation=incarnation,
        version=version,
        group_epoch=group_epoch,
        assignment_epoch=assignment_epoch,
        epoch=epoch,
        timings=_timings(beat, lease, rebalance),
        last_event=text(answer[10]),
        holdings=None
        if len(answer) == 11
        else Holdings(
            assigned=_parse_held(text(answer[11])),
            revoking=_parse_held(text(answer[12])),
            pending=_parse_set(text(answer[13])),
        ),
    )


def _timings(heartbeat_ms: int, lease_ms: int, rebalance_ms: int) -> Timings:
    return Timings(
        heartbeat_seconds=heartbeat_ms / 1000,
        lease_seconds=lease_ms / 1000,
        rebalance_seconds=rebalance_ms / 1000,
    )


def _format_held(held: Sequence[Held]) -> str:
    # Ascending, as the stored record is: an unchanged member is recognised by comparing the text.
    return ",".join(f"{h.shard}:{h.token}" for h in sorted(held, key=lambda h: h.shard)) or "-"


def _parse_held(held: str) -> dict[int, int]:
    pairs = (part.split(":") for part in held.split(",") if held != "-")
    return {int(shard): int(token) for shard, token in pairs}


def _parse_set(shards: str) -> frozenset[int]:
    return frozenset(int(part) for part in shards.split(",") if shards != "-")


# --- the data plane of one shard ------------------------------------------------------------------------------------


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
        recreated_at: the consumer group had vanished and was made anew at this position.
        gone: ids that were pending but exist no more (deleted or trimmed); they have been acknowledged.
    """

    entries: Sequence[Entry]
    last: str | None
    caught_up: bool
    wait_after: str | None
    recreated_at: str | None
    gone: Sequence[str]


def claim(keys: GroupKeys, fence: Fence) -> Command[str]:
    """Raise the fence of a shard. Result: the recorded position.

    Raises (when run):
        FencedError: another session has claimed it under a higher token; ``detail`` begins with that fence's
            incarnation and token.
        MetadataRegressionError: the fence is of a later lifecycle of the group.
    """
    return _call(
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


def read(keys: GroupKeys, fence: Fence, *, after: str, count: int, max_bytes: int = 16 << 20) -> Command[Page]:
    """Read up to `count` entries beyond `after`, the last id received under this claim.

    The entries together have at most `max_bytes`, unless the first alone has more.

    Raises (when run): `FencedError`; `NotFoundError` if the shard's stream does not exist.
    """
    return _call(
        "read",
        {"stream": StreamKeys(keys.stream).shard(fence.shard).stream, "fence": keys.fence(fence.shard)},
        {
            "group": keys.group,
            "member": fence.member,
            "incarnation": fence.incarnation,
            "token": fence.token,
            "nonce": fence.nonce,
            "after": after,
            "count": count,
            "max_bytes": max(1, max_bytes),
        },
        _page,
        **_whom(keys, fence),
    )


def _page(answer: list[Any]) -> Page:
    rest = answer[6:]
    return Page(
        entries=[_entry(text(rest[i]), int(rest[i + 1]), rest[i + 2]) for i in range(0, len(rest), 3)],
        last=text(answer[1]) or None,
        caught_up=bool(answer[2]),
        wait_after=text(answer[3]) or None,
        recreated_at=text(answer[4]) or None,
        gone=[text(entry_id) for entry_id in answer[5]],
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
    return _call(
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


def note_deliveries(
    keys: GroupKeys, fence: Fence, entry_id: str, deliveries: int, *, if_first: bool = False
) -> Command[None]:
    """Record how often a pending entry has been delivered; `if_first`: unless another is pending before it.

    Raises (when run): `FencedError`.
    """
    return _call(
        "note_deliveries",
        {"stream": StreamKeys(keys.stream).shard(fence.shard).stream, "fence": keys.fence(fence.shard)},
        {
            "group": keys.group,
            "member": fence.member,
            "incarnation": fence.incarnation,
            "token": fence.token,
            "nonce": fence.nonce,
            "id": entry_id,
            "deliveries": deliveries,
            "if_first": int(if_first),
        },
        lambda answer: None,
        **_whom(keys, fence),
    )


def append_to(stream: str, fields: Sequence[str | bytes]) -> Command[str]:
    """Plain XADD to any stream, which it makes if need be. Result: the id."""
    return Command("XADD", None, [stream], [stream, "*", *fields], text, idempotent=False)


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


# --- waiting: blocking commands that consume nothing ----------------------------------------------------------------


@attrs.frozen
class Heard:
    """What has happened in a group, as far as it concerns one member.

    Attributes:
        last: id of the last event; its first part is Redis server ms.
        concerned: the member has to come for an answer.
        sought: the group was moved on its shards: whoever waits for entries has to look again.
    """

    last: str
    concerned: bool
    sought: bool


def wait(after: Mapping[str, str], *, block_seconds: float) -> Command[dict[str, str]]:
    """Wait until one of the given streams has an entry beyond its id. Result: those streams, each with the id of the
    first such entry; empty if none in time.

    On Cluster all of them have to be of one slot, so it takes one call per stream there.
    """
    block_ms = max(1, round(block_seconds * 1000))  # 0 would block for ever
    arguments = ["COUNT", "1", "BLOCK", str(block_ms), "STREAMS", *after, *after.values()]

    def parse(answer: Any) -> dict[str, str]:
        return {text(name): text(entries[0][0]) for name, entries in _streams(answer)}

    return Command("XREAD", None, list(after), arguments, parse)


def heard(keys: GroupKeys, member: str, *, after: str) -> Command[Heard]:
    """Look through the events of the group beyond `after`."""
    return _call(
        "heard",
        {"events": keys.events},
        {"after": after, "member": member},
        lambda answer: Heard(text(answer[1]), bool(answer[2]), bool(answer[3])),
        stream=keys.stream,
        group=keys.group,
        member=member,
    )


def _streams(answer: Any) -> list[Any]:
    """Make a list of (name, entries) of the answer to XREAD, whichever way redis-py gives it."""
    return list(answer.items()) if isinstance(answer, dict) else list(answer or ())


def client_id() -> Command[int]:
    """Ask for the number of the connection that this is sent over."""
    return Command("CLIENT ID", None, [], [], int)


def unblock(connection: int) -> Command[int]:
    """End the blocking command of a connection as if its time were up. Result: 1 if it was blocked."""
    return Command("CLIENT UNBLOCK", None, [], [str(connection), "TIMEOUT"], int)


# --- producers ------------------------------------------------------------------------------------------------------


@attrs.frozen
class Published:
    """What became of one entry: ``OK`` or ``DUPLICATE`` with its id, or an error word with a detail."""

    word: str
    detail: str


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

    It is idempotent, and so sent again after a lost reply, if every entry has an event id.
    """
    names = keys.shard(shard)
    flat: list[str | bytes | int] = []
    for event_id, fields in entries:
        flat += [event_id or "", len(fields), *fields]
    return _call(
        "publish",
        {"stream": names.stream, "route": names.route, "published": names.published},
        {"layout": layout, "window_ms": window_ms, "window_count": window_count, "entries": flat},
        lambda answer: [Published(text(answer[i]), text(answer[i + 1])) for i in range(1, len(answer), 2)],
        idempotent=all(event_id is not None for event_id, _ in entries),
        stream=keys.stream,
        shard=shard,
    )


def append(keys: StreamKeys, shard: int, fields: Sequence[str | bytes]) -> Command[str | None]:
    """Plain XADD that makes no stream: no route check, no duplicate detection. Result: the id; ``None``: no stream."""
    return Command(
        "XADD",
        None,
        [keys.shard(shard).stream],
        [keys.shard(shard).stream, "NOMKSTREAM", "*", *fields],
        lambda answer: None if answer is None else text(answer),
        idempotent=False,
    )


def layout(keys: StreamKeys) -> Command[Layout]:
    """Read the present layout. Raises (when run): `NotFoundError`, `MetadataError`."""
    return _call("layout", {"record": keys.record}, {"protocol": PROTOCOL}, _layout, stream=keys.stream)


def _layout(answer: list[Any]) -> Layout:
    version, incarnation, epoch, shards = map(int, answer[1:5])
    routing, layout_id, state, retention = map(text, answer[5:9])
    groups = tuple(map(text, answer[9]))
    return Layout(version, incarnation, epoch, shards, routing, layout_id, state, retention, groups)


# --- administration -------------------------------------------------------------------------------------------------


def register(keys: GroupKeys, *, shards: int | None, routing: str, retention: str = "all") -> Command[Layout]:
    """Make the group known to its stream, and make the stream's record if there is none.

    Raises (when run): `ConflictError`: another number of shards; `ConfigError`: none given for a new stream.
    """
    return _call(
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


def activate(keys: StreamKeys, layout_id: str) -> Command[Layout]:
    """Say that every shard of a new stream is provisioned."""
    return _call(
        "activate",
        {"record": keys.record},
        {"protocol": PROTOCOL, "layout": layout_id},
        _layout,
        stream=keys.stream,
    )


def unregister(keys: GroupKeys) -> Command[bool]:
    """Make the stream forget a group. Result: whether it knew it."""
    return _call(
        "unregister",
        {"record": StreamKeys(keys.stream, keys.prefix).record},
        {"group": keys.group, "protocol": PROTOCOL},
        lambda answer: bool(answer[1]),
        stream=keys.stream,
        group=keys.group,
    )


def provision(keys: GroupKeys, shard: int, *, start: str, layout: Layout) -> Command[int]:
    """Make one shard ready for the group. Result: incarnation found in its fence."""
    names = StreamKeys(keys.stream, keys.prefix).shard(shard)
    return _call(
        "provision",
        {"stream": names.stream, "fence": keys.fence(shard), "route": names.route},
        {
            "group": keys.group,
            "start": start,
            "epoch": layout.epoch,
            "layout": layout.layout,
            "creating": int(layout.state == "creating"),
        },
        lambda answer: int(answer[1]),
        stream=keys.stream,
        group=keys.group,
        shard=shard,
    )


def retire(keys: GroupKeys, shard: int) -> Command[int]:
    """Remove the group from one shard and leave a tombstone. Result: incarnation of the tombstone."""
    return _call(
        "retire",
        {"stream": StreamKeys(keys.stream).shard(shard).stream, "fence": keys.fence(shard)},
        {"group": keys.group},
        lambda answer: int(answer[1]),
        stream=keys.stream,
        group=keys.group,
        shard=shard,
    )


def create(
    keys: GroupKeys,
    *,
    incarnation: int,
    shards: int,
    timings: Timings,
    request_id: str,
    audit: Mapping[str, str],
) -> Command[int]:
    """Write the record of a new group. Result: its incarnation. Raises (when run): `AlreadyExistsError`."""
    return _call(
        "create",
        _group_keys(keys),
        {
            "stream": keys.stream,
            "group": keys.group,
            "incarnation": incarnation,
            "shards": shards,
            "protocol": PROTOCOL,
            "heartbeat_ms": round(timings.heartbeat_seconds * 1000),
            "lease_ms": round(timings.lease_seconds * 1000),
            "rebalance_ms": round(timings.rebalance_seconds * 1000),
            "request_id": request_id,
            "audit": _flat(audit),
        },
        lambda answer: int(answer[1]),
        stream=keys.stream,
        group=keys.group,
    )


def delete(keys: GroupKeys, *, force: bool, request_id: str, audit: Mapping[str, str]) -> Command[None]:
    """Delete the record of a group.

    Raises (when run): `ConflictError`: it has live members; `NotFoundError`.
    """
    return _call(
        "delete",
        _group_keys(keys),
        {
            "force": int(force),
            "request_id": request_id,
            "audit": _flat(audit),
        },
        lambda answer: None,
        stream=keys.stream,
        group=keys.group,
    )


def retain(keys: StreamKeys, retention: str, *, request_id: str, audit: Mapping[str, str]) -> Command[Layout]:
    """Change how long entries of the stream are kept. Raises (when run): `NotFoundError`, `MetadataError`."""
    return _call(
        "retain",
        {"record": keys.record, "audit": keys.audit},
        {"protocol": PROTOCOL, "retention": retention, "request_id": request_id, "audit": _flat(audit)},
        _layout,
        stream=keys.stream,
    )


def trim(keys: GroupKeys, fence: Fence, *, keep: int, groups: Sequence[str]) -> Command[tuple[int, str]]:
    """Trim a shard no further than every group has acknowledged.

    Result: how many entries went, and the registered group that is missing on the shard, if any. Raises (when run):
    `FencedError`.
    """
    return _call(
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


def record(keys: GroupKeys, action: str, detail: str, *, request_id: str, audit: Mapping[str, str]) -> Command[bool]:
    """Record an action on the group that other slots carry out. Result: whether it had been recorded before."""
    return _call(
        "record",
        {"metadata": keys.metadata, "audit": keys.audit},
        {"action": action, "detail": detail, "request_id": request_id, "audit": _flat(audit)},
        lambda answer: bool(answer[1]),
        stream=keys.stream,
        group=keys.group,
    )


def seek(keys: GroupKeys, shard: int, entry_id: str) -> Command[str]:
    """Move the group on one shard; the next entry is the first beyond `entry_id`. Result: the id."""
    return _call(
        "seek",
        {"stream": StreamKeys(keys.stream).shard(shard).stream, "fence": keys.fence(shard)},
        {"group": keys.group, "id": entry_id},
        lambda answer: text(answer[1]),
        stream=keys.stream,
        group=keys.group,
        shard=shard,
    )


def announce(keys: GroupKeys, kind: str) -> Command[str]:
    """Append an event that wakes every member. One too many does no harm."""
    fields = ["type", kind, "wake", "*"]
    return Command("XADD", None, [keys.events], [keys.events, "MAXLEN", "~", "1000", "*", *fields], text)


def _flat(pairs: Mapping[str, str]) -> list[str]:
    return [part for pair in pairs.items() for part in pair]


def _group_keys(keys: GroupKeys) -> dict[str, str]:
    return {"metadata": keys.metadata, "leases": keys.leases, "events": keys.events, "audit": keys.audit}


def enlist(keys: GroupKeys, *, present: bool) -> Command[int]:
    """Add the group to the index of all groups, or remove it."""
    index = redis_keys.index(keys.prefix)
    return Command("SADD" if present else "SREM", None, [index], [index, f"{keys.stream}:{keys.group}"], int)


def groups(prefix: str) -> Command[list[tuple[str, str]]]:
    """List all groups of the index. Result: (stream, group), sorted."""

    def parse(answer: Any) -> list[tuple[str, str]]:
        # The group is what stands after the last colon: it cannot contain one.
        pairs = (text(name).rpartition(":") for name in answer)
        return sorted((stream, group) for stream, _, group in pairs)

    index = redis_keys.index(prefix)
    return Command("SMEMBERS", None, [index], [index], parse)


def client_info() -> Command[Mapping[str, str]]:
    """Ask Redis who we are. Result: the fields of CLIENT INFO, among them ``addr`` and ``user``."""

    def parse(answer: Any) -> Mapping[str, str]:
        if isinstance(answer, dict):  # redis-py parses it in some versions
            return {text(name): text(value) for name, value in answer.items()}
        return dict(part.partition("=")[::2] for part in text(answer).split())

    return Command("CLIENT INFO", None, [], [], parse)


# --- reads for people -----------------------------------------------------------------------------------------------


def describe(keys: GroupKeys) -> Command[GroupView]:
    """Read the whole record of a group. Raises (when run): `NotFoundError`, `MetadataError`."""
    return _call(
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
            timings=_timings(int(fields["heartbeat_ms"]), int(fields["lease_ms"]), int(fields["rebalance_ms"])),
            now_ms=now_ms,
            members=dict(sorted(members.items())),
            shards=dict(sorted(shards.items())),
        )
    except (KeyError, ValueError) as error:
        raise CorruptMetadataError(f"the metadata cannot be read: {error!r}") from error


def _member_view(member: str, parts: Mapping[str, str], deadline_ms: int | None, now_ms: int) -> MemberView:
    return MemberView(
        id=member,
        nonce=parts["nonce"],
        epoch=int(parts["epoch"]),
        weight=int(parts["weight"]) / 1000,
        state=parts["state"],
        joined_ms=int(parts["joined_ms"]),
        lease_remaining_ms=None if deadline_ms is None else deadline_ms - now_ms,
        assigned=_parse_held(parts["assigned"]),
        revoking=_parse_held(parts["revoking"]),
        pending=_parse_set(parts["pending"]),
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
    )
