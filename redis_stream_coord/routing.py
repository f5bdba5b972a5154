"""From a partition key to a shard: the routing protocols, and the vectors that pin them.

A routing protocol is a pure function of the key's bytes and the shard count. Its name stands in the stream
record, so that every producer of a stream, in any language, routes the same key to the same shard. A protocol
that is in use never changes: another rule is another name. The definitions for implementers in other
languages, with the same vectors, are in ``docs/routing-vectors.md``.

``jump-v1``
    The default. The first 64 bits of BLAKE2b-512 of the key, then jump consistent hash: going from n to n + 1 shards
    moves about 1 / (n + 1) of the keys, all of them to the new shard.
``murmur3-mod-v1``
    MurmurHash3 (x86, 32-bit) of the key, modulo the shard count, for producers that already route so. A
    change of the shard count moves most keys, between any two shards.

Neither hash is keyed. Whoever may choose partition keys can choose many that meet in one shard.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import unpack_from
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DEFAULT_PROTOCOL",
    "MAX_SHARDS",
    "PROTOCOLS",
    "TEST_VECTORS",
    "JumpV1",
    "Murmur3ModV1",
    "RoutingProtocol",
    "jump_bucket",
    "key_hash64",
    "lookup",
    "murmur3_32",
    "partition_key",
]

MAX_SHARDS: Final = 65_536
"""Largest shard count that a routing protocol accepts."""

_MASK_32: Final = 0xFFFF_FFFF
_MASK_64: Final = 0xFFFF_FFFF_FFFF_FFFF

# Lamping & Veach 2014, figure 1.
_JUMP_MULTIPLIER: Final = 2_862_933_555_777_941_757
_TWO_POW_31: Final = 2_147_483_648.0

# MurmurHash3_x86_32.
_C1: Final = 0xCC9E_2D51
_C2: Final = 0x1B87_3593


class RoutingProtocol(Protocol):
    """How the partition key of a message chooses its shard. Implementations are stateless and immutable."""

    @property
    def name(self) -> str:
        """The name that the stream record carries; it ends in the version of the definition."""
        ...

    @property
    def ordered_resharding(self) -> bool:
        """Whether a change of the shard count moves keys only to added shards or from removed shards.

        If so, a key whose shard is in both layouts keeps it, and keeps its order without waiting.
        """
        ...

    def shard(self, key: bytes, shards: int) -> int:
        """Return the shard of a key.

        Args:
            key: partition key as bytes, of any length; see `partition_key`.
            shards: shard count of the layout, 1 to `MAX_SHARDS`.

        Returns:
            The shard's index, 0 to ``shards - 1``.

        Raises:
            ValueError: `shards` is out of range.
        """
        ...


def partition_key(key: str | bytes) -> bytes:
    """Return the bytes of a partition key, on which alone routing depends.

    Text is encoded as UTF-8, without normalisation: two spellings of the same glyph are two keys. The empty
    key is a key like any other.

    Args:
        key: text, or bytes that are taken as they are.

    Returns:
        The key's bytes.

    Raises:
        TypeError: `key` is neither `str` nor `bytes`. Other types have no one form in bytes that producers in
            all languages would agree on.
        UnicodeEncodeError: `key` is text with a lone surrogate, which UTF-8 cannot express.
    """
    if isinstance(key, str):
        return key.encode("utf-8")
    if isinstance(key, bytes):
        return key
    raise TypeError(
        f"partition key must be str or bytes, not {type(key).__name__}: convert it first, the same way in "
        "every producer of the stream, for example str(key) for an integer or bytes(key) for a bytearray"
    )


def key_hash64(key: bytes) -> int:
    """Return the 64-bit hash that ``jump-v1`` starts from: the first 8 bytes of BLAKE2b-512, read big-endian.

    BLAKE2b (RFC 7693), unkeyed, with its usual output of 64 bytes, of which the first 8 count. Chosen because it is
    in the standard library (no dependency on a third party), frozen by an RFC, offered in this very form by the
    cryptographic library of nearly every language and as ``b2sum``, well mixed in all bits, and not dependent on a
    seed, on the process (as `hash` is) or on the machine. Shorter outputs of BLAKE2b are other hashes, and not offered
    everywhere. Big-endian, so that the hash reads like the beginning of the hexadecimal digest.

    Args:
        key: bytes of any length.

    Returns:
        An unsigned 64-bit integer.
    """
    return int.from_bytes(blake2b(key, usedforsecurity=False).digest()[:8], "big")


def jump_bucket(hash64: int, buckets: int) -> int:
    """Return the bucket of a 64-bit hash under jump consistent hash.

    The state is an unsigned 64-bit integer, stepped by a linear congruential generator. The next jump is
    ``floor((b + 1) * (2^31 / ((state >> 33) + 1)))`` in IEEE 754 doubles, the division first and rounded,
    as published: in another order some keys land elsewhere.

    Source: J. Lamping, E. Veach, "A Fast, Minimal Memory, Consistent Hash Algorithm", 2014, arXiv:1406.2294.

    Args:
        hash64: unsigned 64-bit integer; higher bits are dropped.
        buckets: bucket count, 1 to `MAX_SHARDS`.

    Returns:
        The bucket, 0 to ``buckets - 1``, after about ln(buckets) steps.

    Raises:
        ValueError: `buckets` is out of range.
    """
    if not 1 <= buckets <= MAX_SHARDS:
        raise _out_of_range(buckets)
    bucket = candidate = 0
    while candidate < buckets:
        bucket = candidate
        hash64 = (hash64 * _JUMP_MULTIPLIER + 1) & _MASK_64
        candidate = int((bucket + 1) * (_TWO_POW_31 / ((hash64 >> 33) + 1)))
    return bucket


def murmur3_32(key: bytes, seed: int = 0) -> int:
    """Return MurmurHash3_x86_32 of a key, as an unsigned integer.

    Time grows with the key's length, some 0.1 µs per byte: meant for keys, not for payloads.

    Source: A. Appleby, SMHasher, ``MurmurHash3.cpp``, public domain. Blocks are little-endian, whatever the
    machine; bytes are unsigned.

    Args:
        key: bytes of any length.
        seed: unsigned 32-bit integer; ``murmur3-mod-v1`` uses 0.

    Returns:
        An unsigned 32-bit integer.
    """
    length = len(key)
    block_count = length >> 2
    h = seed
    for k in unpack_from(f"<{block_count}I", key):
        # A rotation's spill over bit 31 is left to the mask of the product that follows.
        k = (k * _C1) & _MASK_32
        h ^= ((k << 15 | k >> 17) * _C2) & _MASK_32
        h = ((h << 13 | h >> 19) * 5 + 0xE654_6B64) & _MASK_32

    if length & 3:
        k = (int.from_bytes(key[block_count << 2 :], "little") * _C1) & _MASK_32
        h ^= ((k << 15 | k >> 17) * _C2) & _MASK_32

    h ^= length & _MASK_32
    h ^= h >> 16
    h = (h * 0x85EB_CA6B) & _MASK_32
    h ^= h >> 13
    h = (h * 0xC2B2_AE35) & _MASK_32
    return h ^ h >> 16


class JumpV1:
    """``jump-v1``: `jump_bucket` of `key_hash64`.

    The shards that n and m > n have in common keep all their keys but those that move to shards n to m - 1.
    The way back, m to n, is the exact inverse.
    """

    __slots__ = ()

    name: Final = "jump-v1"
    ordered_resharding: Final = True

    def shard(self, key: bytes, shards: int) -> int:
        """Return the shard of a key; see `RoutingProtocol.shard`.

        Args:
            key: partition key as bytes.
            shards: shard count, 1 to `MAX_SHARDS`.

        Returns:
            The shard's index, 0 to ``shards - 1``.

        Raises:
            ValueError: `shards` is out of range.
        """
        return jump_bucket(key_hash64(key), shards)


class Murmur3ModV1:
    """``murmur3-mod-v1``: `murmur3_32` with seed 0, as an unsigned integer, modulo the shard count.

    Unsigned, so the sign has no say: read as signed, half of the hashes would be negative and their remainder
    would depend on the language (and ``abs`` of the least 32-bit integer is still negative in some). What
    remains is the modulo's own bias: unless `shards` divides 2^32, the lower shards own one hash value more
    than the others, out of floor(2^32 / shards). That is an excess below 2e-5 for any count up to
    `MAX_SHARDS`, far under the noise of real keys, and zero for powers of two. Removing it too would need
    rejection or multiplication, which is not what existing producers do.
    """

    __slots__ = ()

    name: Final = "murmur3-mod-v1"
    ordered_resharding: Final = False

    def shard(self, key: bytes, shards: int) -> int:
        """Return the shard of a key; see `RoutingProtocol.shard`.

        Args:
            key: partition key as bytes.
            shards: shard count, 1 to `MAX_SHARDS`.

        Returns:
            The shard's index, 0 to ``shards - 1``.

        Raises:
            ValueError: `shards` is out of range.
        """
        if not 1 <= shards <= MAX_SHARDS:
            raise _out_of_range(shards)
        return murmur3_32(key) % shards


def _out_of_range(shards: int) -> ValueError:
    return ValueError(f"shard count must be 1 to {MAX_SHARDS}, not {shards}")


_JUMP_V1: Final = JumpV1()
_MURMUR3_MOD_V1: Final = Murmur3ModV1()

DEFAULT_PROTOCOL: Final = _JUMP_V1.name
"""The protocol of a stream that was created without naming one."""

PROTOCOLS: Final[Mapping[str, RoutingProtocol]] = MappingProxyType(
    {_JUMP_V1.name: _JUMP_V1, _MURMUR3_MOD_V1.name: _MURMUR3_MOD_V1}
)
"""Every routing protocol this version knows, by name. Read-only."""


def lookup(name: str) -> RoutingProtocol:
    """Return the routing protocol of that name.

    Args:
        name: as in the stream record, for example ``"jump-v1"``.

    Returns:
        The protocol.

    Raises:
        KeyError: this version does not know the protocol. A producer must then refuse to publish.
    """
    return PROTOCOLS[name]


# Chosen for what goes wrong in ports: the empty key, zero bytes, each length modulo 4, bytes over 0x7f in
# blocks and in the tail, hashes with the top bit set under shard counts that are no power of two, more than
# one 128-byte block of BLAKE2b, and both ends of the shard count.
TEST_VECTORS: Final[tuple[tuple[str, bytes, int, int], ...]] = (
    ("jump-v1", b"", 1, 0),
    ("jump-v1", b"", 16, 5),
    ("jump-v1", b"\x00", 8, 5),
    ("jump-v1", b"a", 2, 0),
    ("jump-v1", b"hello", 3, 0),
    ("jump-v1", b"order:1001", 8, 2),
    ("jump-v1", b"user-42", 16, 15),
    ("jump-v1", b"user-42", 17, 15),
    ("jump-v1", b"\xec\xa3\xbc\xeb\xac\xb8-7", 256, 236),  # 주문-7
    ("jump-v1", b"\xff\xfe\xfd", 3, 0),
    ("jump-v1", b"0123456789" * 20, 1000, 331),
    ("jump-v1", b"0123456789" * 20, 1024, 331),
    ("jump-v1", b"tenant/7f3a", 65536, 14141),
    ("murmur3-mod-v1", b"", 1, 0),
    ("murmur3-mod-v1", b"", 16, 0),
    ("murmur3-mod-v1", b"\x00", 8, 7),
    ("murmur3-mod-v1", b"a", 2, 0),
    ("murmur3-mod-v1", b"hello", 3, 1),
    ("murmur3-mod-v1", b"order:1001", 8, 0),
    ("murmur3-mod-v1", b"user-42", 16, 0),
    ("murmur3-mod-v1", b"user-42", 17, 11),
    ("murmur3-mod-v1", b"\xec\xa3\xbc\xeb\xac\xb8-7", 256, 167),  # 주문-7
    ("murmur3-mod-v1", b"\xff\xfe\xfd", 3, 1),
    ("murmur3-mod-v1", b"0123456789" * 20, 1000, 214),
    ("murmur3-mod-v1", b"0123456789" * 20, 1024, 182),
    ("murmur3-mod-v1", b"tenant/7f3a", 65536, 26744),
)
"""Published vectors: protocol, key, shard count, shard. The same table stands in docs/routing-vectors.md."""
