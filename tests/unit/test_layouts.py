"""What a producer decides about the layout that it has cached; no server."""

from __future__ import annotations

import time
from typing import Any

import pytest

from redis_stream_coord import routing
from redis_stream_coord.errors import (
    ConfigError,
    CoordError,
    NoShardError,
    NotFoundError,
    PartialPublishError,
    PublishError,
    RedisUnavailableError,
    RoutingRegressionError,
    RoutingUnavailableError,
    UnsupportedProtocolError,
    refused,
)
from redis_stream_coord.keys import StreamKeys
from redis_stream_coord.layouts import Layouts
from redis_stream_coord.models import Layout, Outgoing, Receipt
from redis_stream_coord.publishing import Publishing
from redis_stream_coord.settings import RedisSettings


def layout(**changes: Any) -> Layout:
    values = {"version": 2, "incarnation": 7, "epoch": 3, "shards": 4, "routing": "jump-v1", "layout": "3:4:7"}
    return Layout(**{**values, "state": "active", **changes})


@pytest.fixture
def layouts() -> Layouts:
    return Layouts(StreamKeys("orders"), 10.0, time.monotonic)


def drive(saga: Any, *results: Any) -> Any:
    """Run a saga, answering each command with the next result; exceptions are raised in it."""
    step, left = next(saga), list(results)
    try:
        while True:
            result = left.pop(0)
            step = saga.throw(result) if isinstance(result, Exception) else saga.send(result)
    except StopIteration as end:
        assert left == [], step
        return end.value


# --- the lease ------------------------------------------------------------------------------------------------------


def test_nothing_is_known_at_first(layouts: Layouts) -> None:
    assert layouts.current(0.0) is None


def test_a_layout_may_be_used_until_its_lease_is_over(layouts: Layouts) -> None:
    taken = layouts.take(layout(), 100.0)
    assert layouts.current(100.0) is taken
    assert layouts.current(109.99) is taken
    assert layouts.current(110.0) is None


def test_the_lease_counts_from_asking(layouts: Layouts) -> None:
    """The answer may have been long on its way."""
    layouts.take(layout(), 50.0)
    assert layouts.current(61.0) is None


def test_a_later_layout_takes_over(layouts: Layouts) -> None:
    layouts.take(layout(), 100.0)
    later = layouts.take(layout(epoch=4, shards=8, layout="4:8:7"), 101.0)
    assert layouts.current(105.0) is later
    recreated = layouts.take(layout(incarnation=8, epoch=1, layout="1:4:8"), 102.0)
    assert layouts.current(105.0) is recreated


# --- refused layouts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"epoch": 2}, {"incarnation": 6}, {"incarnation": 6, "epoch": 9}])
def test_a_layout_that_went_backwards_stops_the_producer_for_good(layouts: Layouts, changes: dict[str, int]) -> None:
    layouts.take(layout(), 100.0)
    with pytest.raises(RoutingRegressionError) as regression:
        layouts.take(layout(**changes), 101.0)
    assert regression.value.hint
    for _ in range(2):
        with pytest.raises(RoutingRegressionError):
            layouts.current(102.0)


def test_an_unknown_routing_protocol_is_never_guessed(layouts: Layouts) -> None:
    with pytest.raises(UnsupportedProtocolError, match="'jump-v9'"):
        layouts.take(layout(routing="jump-v9"), 100.0)
    assert layouts.current(100.0) is None


def test_a_stream_that_is_being_created_is_not_ready(layouts: Layouts) -> None:
    with pytest.raises(RoutingUnavailableError, match="being created") as error:
        layouts.take(layout(state="creating"), 100.0)
    assert error.value.retriable
    assert layouts.current(100.0) is None
    layouts.take(layout(), 101.0)
    assert layouts.current(101.0) is not None


def test_a_layout_without_shards(layouts: Layouts) -> None:
    with pytest.raises(NoShardError):
        layouts.shard(layouts.take(layout(shards=0, layout="3:0:7"), 100.0), b"key")


@pytest.mark.parametrize("protocol", routing.PROTOCOLS)
def test_keys_go_where_the_protocol_says(layouts: Layouts, protocol: str) -> None:
    taken = layouts.take(layout(routing=protocol), 100.0)
    for number in range(100):
        key = str(number).encode()
        assert layouts.shard(taken, key) == routing.PROTOCOLS[protocol].shard(key, 4)


# --- reading it -----------------------------------------------------------------------------------------------------


def test_a_refresh_takes_what_it_reads(layouts: Layouts) -> None:
    assert drive(layouts.refresh(), layout()) == layout()


def test_a_refresh_without_an_answer_keeps_what_is_known(layouts: Layouts) -> None:
    layouts.take(layout(), 100.0)
    with pytest.raises(RoutingUnavailableError) as error:
        drive(layouts.refresh(), RedisUnavailableError("away"))
    assert error.value.retriable
    assert layouts.current(105.0) == layout()


def test_a_refresh_of_a_stream_that_does_not_exist(layouts: Layouts) -> None:
    with pytest.raises(NotFoundError):
        drive(layouts.refresh(), refused("STREAM_NOT_FOUND", stream="orders"))


# --- what is published ----------------------------------------------------------------------------------------------


@pytest.fixture
def publishing() -> Publishing:
    made = Publishing("orders", RedisSettings("redis://nowhere"), fenced=True, lease_seconds=1e9)
    made.layouts.take(layout(), 0.0)
    return made


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_lease_is_positive(seconds: float) -> None:
    with pytest.raises(ConfigError):
        Publishing("orders", RedisSettings("redis://nowhere"), fenced=True, lease_seconds=seconds)


def test_reserved_fields_come_first(publishing: Publishing) -> None:
    entry = publishing.prepare(Outgoing(fields={"a": "1", "b": b"\xff"}, key="k", event_id="e"))
    assert list(entry.flat) == [b"rsc-key", b"k", b"rsc-event", "e", "a", "1", "b", b"\xff"]
    assert (entry.key, entry.event_id) == (b"k", "e")


@pytest.mark.parametrize(
    "outgoing",
    [
        Outgoing(fields={"rsc-key": "x"}, key="k"),
        Outgoing(fields={"a": 1}, key="k"),  # type: ignore[dict-item]
        Outgoing(fields={1: "a"}, key="k"),  # type: ignore[dict-item]
        Outgoing(fields={"a": None}, key="k"),  # type: ignore[dict-item]
        Outgoing(fields={}, key=1),  # type: ignore[arg-type]
        Outgoing(fields={}, key=None),  # type: ignore[arg-type]
        Outgoing(fields={}, key="k", event_id=""),
        Outgoing(fields={}, key="k", event_id=1),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_sent(publishing: Publishing, outgoing: Outgoing) -> None:
    with pytest.raises(ConfigError):
        publishing.prepare(outgoing)


def test_an_entry_of_too_many_fields_is_refused_before_anything_is_sent(publishing: Publishing) -> None:
    """In the script it failed after others of its batch had been appended, and they were reported as failed too."""
    publishing.prepare(Outgoing(fields={str(number): "" for number in range(3400)}, key="k", event_id="e"))
    with pytest.raises(ConfigError, match="4000 fields"):
        publishing.prepare(Outgoing(fields={str(number): "" for number in range(4000)}, key="k"))


def test_batches_keep_the_order_of_each_shard(publishing: Publishing) -> None:
    entries = [publishing.prepare(Outgoing(fields={}, key=str(number))) for number in range(1000)]
    batches = publishing.batches(layout(), entries)
    assert sorted(position for _, positions in batches for position in positions) == list(range(1000))
    for shard in range(4):
        mine = [positions for of, positions in batches if of == shard]
        flat = [position for positions in mine for position in positions]
        assert flat == sorted(flat)
        assert all(len(positions) <= 100 for positions in mine)
        assert {routing.PROTOCOLS["jump-v1"].shard(entries[position].key, 4) for position in flat} <= {shard}


def test_only_what_is_safe_to_repeat_is_repeated(publishing: Publishing) -> None:
    with_id = publishing.prepare(Outgoing(fields={}, key="k", event_id="e"))
    without = publishing.prepare(Outgoing(fields={}, key="k"))
    away = RedisUnavailableError("away")
    entries = [with_id, without, with_id, without, with_id]
    failed: dict[int, CoordError] = {
        0: publishing.unknown(away, 0),
        1: publishing.unknown(away, 1),
        2: refused("STALE_ROUTE", shard=2),
        3: refused("STALE_ROUTE", shard=3),
        4: refused("STREAM_MISSING", shard=4),
    }
    assert isinstance(failed[0], PublishError)
    assert list(publishing.again(entries, failed)) == [0, 2, 3]


def test_nothing_is_repeated_behind_an_entry_of_its_shard_that_stays_failed(publishing: Publishing) -> None:
    with_id = publishing.prepare(Outgoing(fields={}, key="k", event_id="e"))
    without = publishing.prepare(Outgoing(fields={}, key="k"))
    failed: dict[int, CoordError] = {0: publishing.unknown(RedisUnavailableError("away"), 0)}
    publishing.hold_back([(0, [1, 3]), (1, [2])], failed)
    # The outcome of the first one is unknown for good: what follows on its shard would overtake it.
    assert list(publishing.again([without, with_id, with_id, with_id], failed)) == [2]
    repeated = []
    for position in publishing.again([with_id] * 4, failed):
        del failed[position]
        repeated.append(position)
    assert repeated == [0, 1, 2, 3]


def test_what_failed_is_told_entry_by_entry(publishing: Publishing) -> None:
    receipts = [Receipt("1-0", 0, False), None]
    assert publishing.finish(receipts[:1], {}) == receipts[:1]
    with pytest.raises(PartialPublishError) as error:
        publishing.finish(receipts, {1: refused("STREAM_MISSING")})
    assert error.value.receipts == receipts
    assert list(error.value.failed) == [1]
    assert "1 of 2" in str(error.value)
