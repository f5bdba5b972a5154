"""A group's record with a field damaged by hand: nothing is guessed, nothing is written, nothing is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from redis_stream_coord import commands
from redis_stream_coord.commands import HeartbeatRequest
from redis_stream_coord.errors import (
    CorruptMetadataError,
    MetadataError,
    UnsupportedProtocolError,
    UnsupportedSchemaError,
)
from redis_stream_coord.models import Held
from tests.unit.fake import FakeGroup, fake_group

JOIN = HeartbeatRequest(
    member="a",
    nonce="na",
    epoch=0,
    incarnation=0,
    version=0,
    assignment_epoch=0,
    weight=1.0,
    replaces=None,
    leaving=False,
    owned=[],
    revoked=[],
    refused=[],
)
HEADER = [
    *("schema", "stream", "group", "protocol_min", "protocol_max", "incarnation", "version", "group_epoch"),
    *("assignment_epoch", "grant_counter", "next_due_ms", "heartbeat_ms", "lease_ms", "rebalance_ms"),
    *("member_count", "shard_count", "layout_epoch", "layout_step", "duty", "round", "frozen"),
]
NUMBERS = [name for name in HEADER if name not in ("schema", "stream", "group", "duty", "round", "frozen")]


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    """Member `a` holds shards 0 and 1 and has to drain 2 and 3; `b` waits for those."""
    with fake_group(shards=4) as group:
        reply = beat(group)
        beat(group, member="b", nonce="nb")
        beat(group, epoch=reply.epoch, version=reply.version)
        yield group


def beat(group: FakeGroup, **changes: Any) -> Any:
    return group.run(commands.heartbeat(group.keys, attrs.evolve(JOIN, **changes)))


def stored(group: FakeGroup) -> dict[bytes, bytes]:
    fields: dict[bytes, bytes] = group.client.hgetall(group.keys.metadata)
    return fields


def member_request(group: FakeGroup) -> HeartbeatRequest:
    """What `a` says next."""
    view = group.view()
    mine = view.members["a"]
    held = {**mine.assigned, **mine.revoking}
    owned = [Held(*pair) for pair in sorted(held.items())]
    return attrs.evolve(JOIN, epoch=mine.epoch, version=view.version, owned=owned)


def everything_refuses(group: FakeGroup, request: HeartbeatRequest) -> None:
    before = stored(group)
    for command in (
        commands.heartbeat(group.keys, request),
        commands.heartbeat(group.keys, attrs.evolve(JOIN, member="c", nonce="nc")),
        commands.describe(group.keys),
    ):
        with pytest.raises(MetadataError):
            group.run(command)
    assert stored(group) == before


def test_the_header_is_all_that_is_not_a_member_or_shard(group: FakeGroup) -> None:
    names = {name.decode() for name in stored(group)}
    assert names == {*HEADER, "member:a", "member:b", *(f"shard:{index}" for index in range(4))}


@pytest.mark.parametrize("field", HEADER)
def test_a_field_of_the_header_is_missing(group: FakeGroup, field: str) -> None:
    request = member_request(group)
    group.client.hdel(group.keys.metadata, field)
    everything_refuses(group, request)


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["", "x", "-1", "1.5", "1e3", " 1", "0x10"])
def test_a_number_of_the_header_is_unreadable(group: FakeGroup, field: str, value: str) -> None:
    request = member_request(group)
    group.client.hset(group.keys.metadata, field, value)
    everything_refuses(group, request)


def test_a_newer_schema_is_named(group: FakeGroup) -> None:
    group.client.hset(group.keys.metadata, "schema", "2")
    with pytest.raises(UnsupportedSchemaError, match="2"):
        group.view()
    with pytest.raises(UnsupportedSchemaError):
        beat(group, member="c", nonce="nc")


@pytest.mark.parametrize(("lowest", "highest"), [("2", "9"), ("0", "0")])
def test_a_protocol_out_of_range_is_named(group: FakeGroup, lowest: str, highest: str) -> None:
    group.client.hset(group.keys.metadata, mapping={"protocol_min": lowest, "protocol_max": highest})
    with pytest.raises(UnsupportedProtocolError, match=f"{lowest} to {highest}"):
        beat(group, member="c", nonce="nc")


@pytest.mark.parametrize("field", ["member:a", "member:b", "shard:0", "shard:3"])
def test_a_field_of_a_member_or_shard_is_missing(group: FakeGroup, field: str) -> None:
    request = member_request(group)
    group.client.hdel(group.keys.metadata, field)
    everything_refuses(group, request)


@pytest.mark.parametrize("field", ["member:z", "shard:4", "shard:00", "shard:x", "note", "key", "members"])
def test_a_field_too_many(group: FakeGroup, field: str) -> None:
    request = member_request(group)
    group.client.hset(group.keys.metadata, field, stored(group)[b"shard:0"])
    everything_refuses(group, request)


def test_the_record_is_no_hash(group: FakeGroup) -> None:
    request = member_request(group)
    group.client.delete(group.keys.metadata)
    group.client.set(group.keys.metadata, "text")
    for command in (commands.heartbeat(group.keys, request), commands.describe(group.keys)):
        with pytest.raises(CorruptMetadataError):
            group.run(command)


def damaged(text: bytes, part: str, value: str) -> str:
    parts = dict(piece.split("=") for piece in text.decode().split())
    assert part in parts
    return " ".join(f"{name}={value if name == part else old}" for name, old in parts.items())


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("nonce", "-"),
        ("nonce", ""),
        ("epoch", "x"),
        ("changed", "2"),
        ("weight", "1.0"),
        ("joined_ms", "-1"),
        ("state", "gone"),
        *(
            (part, value)
            for part in ("assigned", "revoking", "pending")
            for value in ("", "x", ",", "0:1:2", "0:1x1:2")
        ),
        *(
            (part, value)
            for part in ("assigned", "revoking")
            for value in ("0", "0:", ":1", "1:2,0:1", "0:1,0:1", "0:1,")
        ),
        *(("pending", value) for value in ("0:1", ",,", "1,0", "0,", "0,0")),
    ],
)
@pytest.mark.parametrize("member", ["a", "b"])
def test_a_part_of_a_member_is_unreadable(group: FakeGroup, member: str, part: str, value: str) -> None:
    request = member_request(group)
    field = f"member:{member}"
    group.client.hset(group.keys.metadata, field, damaged(stored(group)[field.encode()], part, value))
    before = stored(group)
    with pytest.raises(CorruptMetadataError):
        group.view()
    if member == "a":
        # A steady heartbeat reads no other member: that costs the same however many there are.
        with pytest.raises(CorruptMetadataError):
            group.run(commands.heartbeat(group.keys, request))
    assert stored(group) == before


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("target", ""),
        ("holder", ""),
        ("holder", "-"),
        ("holder", "b"),
        ("holder", "nobody"),
        ("token", "x"),
        ("token", "99"),
        ("state", "free"),
        ("state", "mine"),
        ("deadline_ms", "-1"),
        ("hold_until_ms", ""),
    ],
)
@pytest.mark.parametrize("shard", [0, 3])
def test_a_part_of_a_shard_is_unreadable_or_contradicts_its_holder(
    group: FakeGroup, shard: int, part: str, value: str
) -> None:
    field = f"shard:{shard}"
    group.client.hset(group.keys.metadata, field, damaged(stored(group)[field.encode()], part, value))
    before = stored(group)
    with pytest.raises(CorruptMetadataError):
        group.view()
    # A join loads everything.
    with pytest.raises(CorruptMetadataError):
        beat(group, member="c", nonce="nc")
    assert stored(group) == before


def test_a_damaged_fence_is_not_guessed(group: FakeGroup) -> None:
    fence = commands.Fence(0, "a", "na", group.view().incarnation, 1)
    group.client.hset(group.keys.fence(0), "token", "x")
    with pytest.raises(CorruptMetadataError):
        group.run(commands.claim(group.keys, fence))
    group.client.delete(group.keys.fence(0))
    group.client.set(group.keys.fence(0), "text")
    with pytest.raises(CorruptMetadataError):
        group.run(commands.claim(group.keys, fence))
