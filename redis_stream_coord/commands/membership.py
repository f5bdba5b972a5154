"""What a member says to its group, and hears from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

import attrs

from .. import acl
from ..errors import PermissionDeniedError
from ..keys import GroupKeys, StreamKeys
from ..models import Held, Timings
from .base import PROTOCOL, Command, call, format_held, parse_held, parse_set, text, timings_of

Status = Literal["OK", "REVOKE_PENDING", "SYNC_METADATA", "LEFT"]


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
    round: str | None = None
    not_held: Sequence[Held] = ()
    refused: Sequence[tuple[int, int, int]]


@attrs.frozen(kw_only=True)
class HeartbeatReply:
    """An accepted heartbeat.

    Attributes:
        status: ``OK``; ``REVOKE_PENDING``: something has to be drained, nothing new may be read; ``SYNC_METADATA``: the
            record went backwards, take it over as it is; ``LEFT``.
        now_ms: Redis server time.
        last_event: id of the newest event; block on events beyond it.
        round: id of the correction round that is open, or ``None``.
        duty: for the next heartbeat it is this member's to carry on what the whole stream has under way.
        holdings: ``None`` when nothing has changed since the last answer.
    """

    status: Status
    now_ms: int
    incarnation: int
    version: int
    group_epoch: int
    assignment_epoch: int
    epoch: int
    timings: Timings
    last_event: str
    holdings: Holdings | None
    round: str | None = None
    duty: bool = False


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
    return call(
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
            "owned": format_held(request.owned),
            "revoked": format_held(request.revoked),
            "round": request.round or "-",
            "not_held": format_held(request.not_held),
            "refused": [number for refusal in request.refused for number in refusal],
        },
        _heartbeat_reply,
        accept=get_args(Status),
        stream=keys.stream,
        group=keys.group,
        member=request.member,
    )


def _heartbeat_reply(answer: list[Any]) -> HeartbeatReply:
    now, incarnation, version, group_epoch, assignment_epoch, epoch, beat, lease, rebalance = map(int, answer[1:10])
    return HeartbeatReply(
        status=cast(Status, text(answer[0])),
        now_ms=now,
        incarnation=incarnation,
        version=version,
        group_epoch=group_epoch,
        assignment_epoch=assignment_epoch,
        epoch=epoch,
        timings=timings_of(beat, lease, rebalance),
        last_event=text(answer[10]),
        round=None if answer[11] in (b"-", "-") else text(answer[11]),
        duty=bool(answer[12]),
        holdings=None
        if len(answer) == 13
        else Holdings(
            assigned=parse_held(text(answer[13])),
            revoking=parse_held(text(answer[14])),
            pending=parse_set(text(answer[15])),
        ),
    )


def rights(keys: GroupKeys) -> Command[None]:
    """Ask Redis, as far as it can say, whether this user may do all that the scripts of a member may come to do.

    Raises (when run): `PermissionDeniedError`: it may not; nothing was written.
    """
    names = {
        "": "",
        "metadata": keys.metadata,
        "leases": keys.leases,
        "events": keys.events,
        "stream": StreamKeys(keys.stream, keys.prefix).shard(0).stream,
        "route": StreamKeys(keys.stream, keys.prefix).shard(0).route,
        "fence": keys.fence(0),
    }
    asked = [(command, names[key]) for command, key in acl.at_once("MEMBER")]
    words = [acl.spoken(command, key) for command, key in asked]

    def parse(answer: list[Any]) -> None:
        if lacking := [asked[int(position) - 1] for position in answer[1:]]:
            rules = ", ".join(
                " ".join([f"+{command.lower()}", *([f"~{key}"] if key else [])]) for command, key in lacking
            )
            raise PermissionDeniedError(
                f"the Redis user lacks rights that a member needs: {rules}",
                stream=keys.stream,
                group=keys.group,
                hint=f"Nothing was written. The role MEMBER has them all: `redis-stream-coord acl MEMBER --stream "
                f"{keys.stream} --group {keys.group}`.",
            )

    return call(
        "rights",
        {"metadata": keys.metadata},
        {"commands": [word for one in words for word in (str(len(one)), *one)]},
        parse,
        stream=keys.stream,
        group=keys.group,
    )


@attrs.frozen
class Heard:
    """What has happened in a group, as far as it concerns one member.

    Attributes:
        last: id of the last event; its first part is Redis server ms.
        concerned: the member has to come for an answer.
        sought: the group was moved on its shards, or has passed a barrier: whoever waits has to look again.
    """

    last: str
    concerned: bool
    sought: bool


def heard(keys: GroupKeys, member: str, *, after: str) -> Command[Heard]:
    """Look through the events of the group beyond `after`."""
    return call(
        "heard",
        {"events": keys.events},
        {"after": after, "member": member},
        lambda answer: Heard(text(answer[1]), bool(answer[2]), bool(answer[3])),
        stream=keys.stream,
        group=keys.group,
        member=member,
    )
