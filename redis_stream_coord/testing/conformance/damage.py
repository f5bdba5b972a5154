"""Records that are damaged are refused, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import CoordError, CorruptMetadataError, UnsupportedProtocolError, UnsupportedSchemaError
from .bench import Bench, refusal
from .catalogue import case


def _refused_after(bench: Bench, damage: Callable[[], object], kind: type[CoordError], *, whole: bool) -> None:
    """A member that lives and one that joins are refused, and the record stays as it is."""
    bench.create()
    a = bench.peer("a")
    a.beat()
    damage()
    before = bench.record()
    for peer in (bench.peer("b"), *([a] if whole else [])):
        refusal(peer.beat, kind)
    refusal(bench.view, kind)
    assert bench.record() == before


@case
def missing_header_is_refused(bench: Bench) -> None:
    """Without a field of the header nobody joins, renews or is expired."""
    _refused_after(
        bench, lambda: bench.raw("HDEL", bench.keys.metadata, "grant_counter"), CorruptMetadataError, whole=True
    )


@case
def unreadable_number_is_refused(bench: Bench) -> None:
    """A number that is none is damage."""
    _refused_after(
        bench, lambda: bench.raw("HSET", bench.keys.metadata, "version", "1e3x"), CorruptMetadataError, whole=True
    )


@case
def missing_shard_is_refused(bench: Bench) -> None:
    """A shard that vanished from the record is noticed by every script."""
    _refused_after(bench, lambda: bench.raw("HDEL", bench.keys.metadata, "shard:2"), CorruptMetadataError, whole=True)


@case
def broken_member_is_refused(bench: Bench) -> None:
    """A member that cannot be read is noticed by whoever loads the whole record."""
    _refused_after(
        bench, lambda: bench.raw("HSET", bench.keys.metadata, "member:a", "rubbish"), CorruptMetadataError, whole=True
    )


@case
def sides_that_disagree_are_refused(bench: Bench) -> None:
    """A shard that says another holder than the member's side does is damage."""

    def damage() -> None:
        record = bench.record()
        bench.raw("HSET", bench.keys.metadata, "shard:0", record["shard:0"].replace("a", "z"))

    _refused_after(bench, damage, CorruptMetadataError, whole=False)


@case
def unknown_schema_is_refused(bench: Bench) -> None:
    """A record of a schema that this release does not know is left alone."""
    _refused_after(
        bench, lambda: bench.raw("HSET", bench.keys.metadata, "schema", "99"), UnsupportedSchemaError, whole=True
    )


@case
def unknown_protocol_is_refused(bench: Bench) -> None:
    """A group that wants another protocol takes no member of this release."""
    bench.create()
    bench.raw("HSET", bench.keys.metadata, "protocol_min", "90", "protocol_max", "91")
    refusal(bench.peer("a").beat, UnsupportedProtocolError)


@case
def key_of_the_wrong_type_is_refused(bench: Bench) -> None:
    """Somebody wrote to the library's keys: said so, and nothing else is written."""
    bench.create()
    a = bench.peer("a")
    a.beat()
    before = bench.record()
    bench.raw("DEL", bench.keys.events)
    bench.raw("SET", bench.keys.events, "rubbish")
    refusal(a.beat, CorruptMetadataError)
    refusal(bench.peer("b").beat, CorruptMetadataError)
    assert bench.record() == before
    bench.raw("DEL", bench.keys.metadata)
    bench.raw("SET", bench.keys.metadata, "rubbish")
    refusal(a.beat, CorruptMetadataError)
    bench.raw("DEL", bench.keys.metadata)
