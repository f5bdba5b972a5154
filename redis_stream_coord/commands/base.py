"""What a call to Redis is, as a value, and what all builders share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import attrs

from ..errors import refused
from ..models import Held, Timings
from ..scripts import Argument, Script, catalogue

# What the stored records and this release speak. A stored range that excludes it is refused by every script.
PROTOCOL = 1
# How records are stored; that of ``lua/lib/header.lua``, which checks it.
SCHEMA = 1

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Saga = Generator["Command[Any] | Pause | Scan | Together", Any, T]


@attrs.frozen
class Pause:
    """What a saga yields to wait for so many seconds."""

    seconds: float


@attrs.frozen
class Scan:
    """What a saga yields to look for keys, on every node of a Cluster. It is sent back a sorted list of them."""

    pattern: str


@attrs.frozen
class Together:
    """What a saga yields to send several commands in one round trip, where one server has all keys.

    It is sent back a list: for each its result, or the `CoordError` that it ended with. None is sent again.
    """

    commands: Sequence[Command[Any]]


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
        whom: stream, group, member and shard that it concerns, as `CoordError` takes them.
    """

    name: str
    script: Script | None
    keys: Sequence[str]
    arguments: Sequence[str | bytes]
    parse: Callable[[Any], T_co]
    idempotent: bool = True
    whom: Mapping[str, Any] = MappingProxyType({})


def call(
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
    whom: dict[str, Any] = {"stream": stream, "group": group, "member": member, "shard": shard}
    script = catalogue()[name]
    bound, argv = script.bind(keys, arguments)

    def checked(answer: list[Any]) -> T:
        word = text(answer[0])
        if word not in accept:
            detail = " ".join(text(part) for part in answer[1:])
            raise refused(word, detail, **whom)
        return parse(answer)

    return Command(name, script, bound, argv, checked, idempotent, whom)


def text(value: Any) -> str:
    """Return an element of an answer as text."""
    return value.decode() if isinstance(value, bytes) else str(value)


def flat(pairs: Mapping[str, str]) -> list[str]:
    return [part for pair in pairs.items() for part in pair]


def timings_of(heartbeat_ms: int, lease_ms: int, rebalance_ms: int) -> Timings:
    return Timings(
        heartbeat_seconds=heartbeat_ms / 1000,
        lease_seconds=lease_ms / 1000,
        rebalance_seconds=rebalance_ms / 1000,
    )


def format_held(held: Sequence[Held]) -> str:
    # Ascending, as the stored record is: an unchanged member is recognised by comparing the text.
    return ",".join(f"{h.shard}:{h.token}" for h in sorted(held, key=lambda h: h.shard)) or "-"


def parse_held(held: str) -> dict[int, int]:
    pairs = (part.split(":") for part in held.split(",") if held != "-")
    return {int(shard): int(token) for shard, token in pairs}


def parse_set(shards: str) -> frozenset[int]:
    return frozenset(int(part) for part in shards.split(",") if shards != "-")
