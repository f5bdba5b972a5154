"""Routing: the published vectors, independent vectors of each step, and what resharding promises."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redis_stream_coord import routing
from redis_stream_coord.routing import (
    DEFAULT_PROTOCOL,
    MAX_SHARDS,
    PROTOCOLS,
    TEST_VECTORS,
    jump_bucket,
    key_hash64,
    lookup,
    murmur3_32,
    partition_key,
)

DOCS_PAGE = Path(__file__).parents[2] / "docs" / "routing-vectors.md"

JUMP = lookup("jump-v1")
MURMUR3_MOD = lookup("murmur3-mod-v1")
EACH_PROTOCOL = pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)

# Published by others for MurmurHash3_x86_32, and confirmed with a binding of the reference C++.
PUBLIC_MURMUR3 = [
    (b"", 0, 0x00000000),
    (b"", 1, 0x514E28B7),
    (b"", 0xFFFFFFFF, 0x81F16F39),
    (b"\x00", 0, 0x514E28B7),
    (b"\x00\x00", 0, 0x30F4C306),
    (b"\x00\x00\x00", 0, 0x85F0B427),
    (b"\x00\x00\x00\x00", 0, 0x2362F9DE),
    (b"\xff\xff\xff\xff", 0, 0x76293B50),
    (b"\x21", 0, 0x72661CF4),
    (b"\x21\x43", 0, 0xA0F7B07A),
    (b"\x21\x43\x65", 0, 0x7E4A8634),
    (b"\x21\x43\x65\x87", 0, 0xF55B516B),
    (b"\x21\x43\x65\x87", 0x5082EDEE, 0x2362F9DE),
    (b"hello", 0, 0x248BFA47),
    (b"hello, world", 0, 0x149BBB7F),
    (b"The quick brown fox jumps over the lazy dog", 0, 0x2E4FF723),
    ("π".encode() * 8, 0x9747B28C, 0xD58063C1),
    (b"a" * 256, 0x9747B28C, 0x37405BDC),
]

# The first six are vectors of other implementations; the last two were run through the C++ of the paper.
JUMP_STEPS = [
    (0, 1, 0),
    (1, 1, 0),
    (42, 57, 43),
    (0xDEAD10CC, 1, 0),
    (0xDEAD10CC, 666, 361),
    (256, 1024, 520),
    # (48 + 1) * (2^31 / (49 * 2^16)) rounds to just under 32768, (48 + 1) * 2^31 / (49 * 2^16) is 32768.
    (0x0EDF7288564A3FBC, 32768, 32767),
    (0xFFFFFFFFFFFFFFFF, 65536, 18311),
]


def keys(count: int) -> list[bytes]:
    return [b"user-%d" % i for i in range(count)]


def tables(page: str) -> dict[str, list[list[str]]]:
    """Tables of a Markdown page by their heading row: rows of cells, backquotes removed."""
    found: dict[str, list[list[str]]] = {}
    for block in re.findall(r"(?:^\|.*\|$\n?)+", page, re.MULTILINE):
        lines = block.splitlines()
        found[lines[0]] = [[cell.strip().replace("`", "") for cell in line[1:-1].split("|")] for line in lines[2:]]
    return found


def key_of_cell(cell: str) -> bytes:
    if cell == "-":
        return b""
    digits, _, times = cell.partition(" x ")
    return bytes.fromhex(digits) * int(times or 1)


# --- vectors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("protocol", "key", "shards", "shard"), TEST_VECTORS)
def test_vector_holds(protocol: str, key: bytes, shards: int, shard: int) -> None:
    assert lookup(protocol).shard(key, shards) == shard


def test_vectors_cover_what_goes_wrong_in_ports() -> None:
    for protocol in PROTOCOLS:
        rows = [(key, shards) for name, key, shards, _ in TEST_VECTORS if name == protocol]
        assert {len(key) % 4 for key, _ in rows} == {0, 1, 2, 3}
        assert any(key == b"" for key, _ in rows)
        assert any(len(key) > 128 for key, _ in rows)
        assert {1, 2, 3, 8, 16, 256, 1024, MAX_SHARDS} <= {shards for _, shards in rows}
    # A signed hash gives another shard in at least one row.
    assert any(
        (murmur3_32(key) - (1 << 32 if murmur3_32(key) >> 31 else 0)) % shards != shard
        for name, key, shards, shard in TEST_VECTORS
        if name == MURMUR3_MOD.name
    )


@pytest.mark.parametrize(("key", "seed", "expected"), PUBLIC_MURMUR3)
def test_murmur3_agrees_with_public_vectors(key: bytes, seed: int, expected: int) -> None:
    assert murmur3_32(key, seed) == expected


@pytest.mark.parametrize(("hash64", "buckets", "expected"), JUMP_STEPS)
def test_jump_agrees_with_public_vectors(hash64: int, buckets: int, expected: int) -> None:
    assert jump_bucket(hash64, buckets) == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    # As `b2sum | cut -c1-16` prints.
    [(b"", 0x786A02F742015903), (b"hello", 0xE4CFA39A3D37BE31), (b"user-42", 0xCDEFB494BD8745BC)],
)
def test_key_hash_is_the_beginning_of_blake2b_512(key: bytes, expected: int) -> None:
    assert key_hash64(key) == expected


# --- the page for implementers -----------------------------------------------------------------------------


def test_docs_table_equals_the_vectors() -> None:
    rows = tables(DOCS_PAGE.read_text(encoding="utf-8"))["| protocol | key | key bytes | hash | shards | shard |"]
    parsed = [(row[0], key_of_cell(row[2]), int(row[4]), int(row[5])) for row in rows]
    assert tuple(parsed) == TEST_VECTORS
    for protocol, shown, cell, digest, _, _ in rows:
        key = key_of_cell(cell)
        expected = f"{key_hash64(key):016x}" if protocol == JUMP.name else f"{murmur3_32(key):08x}"
        assert digest == expected
        if not shown.startswith("(") and " x " not in cell:
            assert shown.encode() == key


def test_docs_jump_steps_equal_the_tested_ones() -> None:
    rows = tables(DOCS_PAGE.read_text(encoding="utf-8"))["| hash | shards | shard |"]
    assert [(int(row[0], 16), int(row[1]), int(row[2])) for row in rows] == JUMP_STEPS


# --- registry ----------------------------------------------------------------------------------------------


def test_registry_is_closed_and_keyed_by_name() -> None:
    assert list(PROTOCOLS) == ["jump-v1", "murmur3-mod-v1"]
    assert all(protocol.name == name for name, protocol in PROTOCOLS.items())
    assert DEFAULT_PROTOCOL == "jump-v1"
    with pytest.raises(TypeError):
        PROTOCOLS["mine"] = JUMP  # type: ignore[index]
    with pytest.raises(AttributeError):
        JUMP.name = "other"  # type: ignore[misc]


def test_lookup_of_an_unknown_protocol() -> None:
    with pytest.raises(KeyError, match="jump-v2"):
        lookup("jump-v2")


def test_exported_names_exist() -> None:
    assert all(hasattr(routing, name) for name in routing.__all__)


# --- partition_key -----------------------------------------------------------------------------------------


def test_partition_key_of_text_and_bytes() -> None:
    assert partition_key("주문-7") == b"\xec\xa3\xbc\xeb\xac\xb8-7"
    assert partition_key(b"\xff\x00") == b"\xff\x00"
    assert partition_key("") == partition_key(b"") == b""
    assert partition_key("\u00e9") != partition_key("e\u0301")


@pytest.mark.parametrize("key", [7, None, 1.5, bytearray(b"a"), memoryview(b"a"), ("a",)])
def test_partition_key_of_another_type_says_what_to_do(key: object) -> None:
    with pytest.raises(TypeError, match=rf"not {type(key).__name__}: convert it first"):
        partition_key(key)  # type: ignore[arg-type]


def test_partition_key_refuses_a_lone_surrogate() -> None:
    with pytest.raises(UnicodeEncodeError):
        partition_key("\ud800")


# --- properties --------------------------------------------------------------------------------------------


@EACH_PROTOCOL
@given(key=st.binary(max_size=300), shards=st.integers(1, MAX_SHARDS))
@settings(deadline=None)
def test_shard_is_in_range_and_repeatable(protocol: routing.RoutingProtocol, key: bytes, shards: int) -> None:
    shard = protocol.shard(key, shards)
    assert 0 <= shard < shards
    assert protocol.shard(key, shards) == shard
    assert protocol.shard(key, 1) == 0


@EACH_PROTOCOL
@pytest.mark.parametrize("shards", [0, -1, MAX_SHARDS + 1])
def test_shard_count_out_of_range(protocol: routing.RoutingProtocol, shards: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 65536, not {shards}"):
        protocol.shard(b"key", shards)


@given(hash64=st.integers(0, 2**64 - 1), buckets=st.integers(1, MAX_SHARDS - 1))
@settings(deadline=None, max_examples=500)
def test_jump_moves_only_to_the_new_bucket(hash64: int, buckets: int) -> None:
    before, after = jump_bucket(hash64, buckets), jump_bucket(hash64, buckets + 1)
    assert after in (before, buckets)


@given(
    key=st.binary(max_size=40),
    counts=st.lists(st.integers(1, MAX_SHARDS), min_size=2, max_size=2).map(sorted),
)
@settings(deadline=None, max_examples=300)
def test_jump_over_any_step_leaves_common_shards_alone(key: bytes, counts: list[int]) -> None:
    fewer, more = counts
    small, large = JUMP.shard(key, fewer), JUMP.shard(key, more)
    assert large == small or large >= fewer


@pytest.mark.parametrize("shards", [1, 2, 3, 8, 16, 31])
def test_jump_moves_its_fair_share(shards: int) -> None:
    sample = keys(50_000)
    moved = sum(JUMP.shard(key, shards) != JUMP.shard(key, shards + 1) for key in sample)
    assert moved / len(sample) == pytest.approx(1 / (shards + 1), rel=0.08)


def test_ordered_resharding_is_told_truly() -> None:
    def moves_between_common_shards(protocol: routing.RoutingProtocol) -> int:
        pairs = ((protocol.shard(key, 8), protocol.shard(key, 12)) for key in keys(2_000))
        return sum(before != after < 8 for before, after in pairs)

    assert JUMP.ordered_resharding
    assert moves_between_common_shards(JUMP) == 0
    assert not MURMUR3_MOD.ordered_resharding
    assert moves_between_common_shards(MURMUR3_MOD) > 0


@EACH_PROTOCOL
@pytest.mark.parametrize("shards", [3, 16])
def test_spread_is_even(protocol: routing.RoutingProtocol, shards: int) -> None:
    sample = keys(100_000)
    load = Counter(protocol.shard(key, shards) for key in sample)
    fair = len(sample) / shards
    assert set(load) == set(range(shards))
    assert max(abs(count - fair) for count in load.values()) < 0.04 * fair


def test_modulo_bias_is_as_documented() -> None:
    # The lower shards own floor + 1 hash values, the others floor; the excess is relative to floor.
    worst = max(1 / (2**32 // shards) for shards in range(1, MAX_SHARDS + 1) if 2**32 % shards)
    assert worst < 2e-5
