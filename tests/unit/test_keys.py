"""Names of keys, and that those which a script touches together share a slot."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from redis_stream_coord import keys
from redis_stream_coord.errors import ConfigError
from redis_stream_coord.keys import GroupKeys, StreamKeys, check_group, check_member, check_stream

streams = st.from_regex(r"[A-Za-z0-9._:-]{1,200}", fullmatch=True)
groups = st.from_regex(r"[A-Za-z0-9._-]{1,200}", fullmatch=True)
prefixes = st.sampled_from(["redis-stream:coord", "p", "a:b:c"])


def slot(key: str) -> int:
    return int(key_slot(key.encode()))


def test_the_names_stand_as_documented() -> None:
    group = GroupKeys("orders", "billing")
    assert group.metadata == "redis-stream:coord:{orders:billing}:metadata"
    assert group.leases == "redis-stream:coord:{orders:billing}:leases"
    assert group.events == "redis-stream:coord:{orders:billing}:events"
    assert group.audit == "redis-stream:coord:{orders:billing}:audit"
    assert group.fence(3) == "redis-stream:coord:{orders:3}:fence:billing"
    stream = StreamKeys("orders")
    assert stream.record == "redis-stream:coord:{orders}:stream"
    shard = stream.shard(3)
    assert shard.stream == "orders:3"
    assert shard.route == "redis-stream:coord:{orders:3}:route"
    assert shard.published == "redis-stream:coord:{orders:3}:published"
    assert keys.index() == "redis-stream:coord:groups"


def test_a_prefix_of_ones_own() -> None:
    assert GroupKeys("orders", "billing", "mine").metadata == "mine:{orders:billing}:metadata"
    assert StreamKeys("orders", "mine").shard(0).route == "mine:{orders:0}:route"
    assert StreamKeys("orders", "mine").shard(0).stream == "orders:0"
    assert keys.index("mine") == "mine:groups"


@given(streams, groups, prefixes)
def test_keys_of_one_group_share_a_slot(stream: str, group: str, prefix: str) -> None:
    names = GroupKeys(stream, group, prefix)
    together = {slot(key) for key in (names.metadata, names.leases, names.events, names.audit)}
    assert together == {slot(f"{stream}:{group}")}


@given(streams, groups, prefixes, st.integers(0, 65535))
def test_keys_of_one_shard_share_the_slot_of_its_stream(stream: str, group: str, prefix: str, index: int) -> None:
    shard = StreamKeys(stream, prefix).shard(index)
    fence = GroupKeys(stream, group, prefix).fence(index)
    assert {slot(key) for key in (shard.stream, shard.route, shard.published, fence)} == {slot(f"{stream}:{index}")}


@given(st.tuples(streams, groups), st.tuples(streams, groups))
def test_two_groups_never_share_a_key(one: tuple[str, str], other: tuple[str, str]) -> None:
    if one != other:
        assert GroupKeys(*one).metadata != GroupKeys(*other).metadata


def test_a_group_named_like_a_shard_shares_no_key_with_it() -> None:
    group, shard = GroupKeys("orders", "0"), StreamKeys("orders").shard(0)
    of_group = {group.metadata, group.leases, group.events, group.audit}
    of_shard = {shard.stream, shard.route, shard.published, group.fence(0)}
    assert of_group.isdisjoint(of_shard)


@pytest.mark.parametrize("name", ["a", "orders", "a:b.c_d-e", ":", "-", "x" * 200])
def test_a_stream_may_be_named(name: str) -> None:
    assert check_stream(name) == name


@pytest.mark.parametrize("name", ["", "{a}", "a b", "a\n", "ä", "x" * 201, "a/b", None, b"a", 1])
def test_a_stream_may_not_be_named(name: object) -> None:
    with pytest.raises(ConfigError, match="cannot name a stream"):
        check_stream(name)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        StreamKeys(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a", "billing", "a.b_c-d", "x" * 200, "-"])
def test_a_group_may_be_named(name: str) -> None:
    assert check_group(name) == name


@pytest.mark.parametrize("name", ["", "a:b", "a{", "a b", "a\n", "x" * 201, None])
def test_a_group_may_not_be_named(name: object) -> None:
    with pytest.raises(ConfigError, match="cannot name a group"):
        check_group(name)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        GroupKeys("orders", name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a", "pod-7.ns:1@host_x", "x" * 200, "0"])
def test_a_member_may_be_named(name: str) -> None:
    assert check_member(name) == name


@pytest.mark.parametrize("name", ["", "-", "-a", ".a", "a b", "a=b", "a,b", "a\n", "x" * 201, "{a}"])
def test_a_member_may_not_be_named(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a member"):
        check_member(name)


def test_what_is_wrong_is_said_with_the_rule() -> None:
    with pytest.raises(ConfigError, match=re.escape("'a:b' cannot name a group. Use 1 to 200 characters")):
        check_group("a:b")
