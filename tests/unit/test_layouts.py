"""What a producer decides about the layout that it has cached, and about what it publishes; no server."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
import pytest

from redis_stream_coord import routing
from redis_stream_coord.errors import (
    ConfigError,
    NotFoundError,
    RedisUnavailableError,
    RoutingRegressionError,
    RoutingUnavailableError,
    UnsupportedProtocolError,
    refused,
)
from redis_stream_coord.keys import StreamKeys
from redis_stream_coord.layouts import Layouts
from redis_stream_coord.models import Layout, Outgoing
from redis_stream_coord.publishing import Publishing
from redis_stream_coord.settings import RedisSettings


def layout(**changes: Any) -> Layout:
    values = {"version": 2, "incarnation": 7, "epoch": 3, "shards": 4, "routing": "jump-v1", "layout": "3:4:n"}
    return Layout(**{**values, "state": "active", **changes})


@attrs.define
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def layouts(clock: Clock) -> Layouts:
    return Layouts(StreamKeys("orders"), 10.0, clock)


def known(layouts: Layouts) -> Layout | None:
    course = layouts.current()
    return None if course is None else course.layout


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
    assert known(layouts) is None


def test_a_layout_may_be_used_until_its_lease_is_over(layouts: Layouts, clock: Clock) -> None:
    layouts.take(layout(), 100.0)
    assert known(layouts) == layout()
    clock.now = 109.99
    assert known(layouts) == layout()
    clock.now = 110.0
    assert known(layouts) is None


def test_the_lease_counts_from_asking(layouts: Layouts) -> None:
    """The answer may have been long on its way."""
    layouts.take(layout(), 89.0)
    assert known(layouts) is None


def test_a_later_layout_takes_over(layouts: Layouts) -> None:
    layouts.take(layout(), 100.0)
    later = layout(version=3, epoch=4, shards=8, layout="4:8:n")
    layouts.take(later, 100.0)
    assert known(layouts) == later
    recreated = layout(incarnation=8, epoch=1, layout="1:4:n")
    layouts.take(recreated, 100.0)
    assert known(layouts) == recreated


def test_an_answer_that_was_overtaken_proves_no_regression(layouts: Layouts, clock: Clock) -> None:
    """Two threads ask; the one that asked first gets its answer last."""
    later = layout(version=3, epoch=4, shards=8, layout="4:8:n")
    clock.now = 101.0
    layouts.take(later, 100.5)
    assert layouts.take(layout(), 100.4).layout == later
    assert known(layouts) == later
    with pytest.raises(RoutingRegressionError):
        layouts.take(layout(), 101.1)


# --- refused layouts ------------------------------------------------------------------------------------------------

BACKWARDS: list[dict[str, Any]] = [
    {"epoch": 2, "layout": "2:4:n"},
    {"version": 1},
    {"layout": "3:8:m", "shards": 8},
    {"incarnation": 6},
    {"incarnation": 6, "epoch": 9, "version": 9},
]


@pytest.mark.parametrize("changes", BACKWARDS)
def test_a_layout_that_went_backwards_stops_the_producer_for_good(layouts: Layouts, changes: dict[str, Any]) -> None:
    layouts.take(layout(), 100.0)
    with pytest.raises(RoutingRegressionError) as regression:
        layouts.take(layout(**changes), 100.0)
    assert regression.value.hint
    assert not regression.value.retriable
    # Neither time nor the record as it was before mends it: what happened in between is not known.
    for answer in (layout(**changes), layout(), layout(version=9, epoch=9, layout="9:4:n")):
        with pytest.raises(RoutingRegressionError):
            layouts.current()
        with pytest.raises(RoutingRegressionError):
            layouts.take(answer, 100.0)


def test_a_record_that_was_created_anew_ends_a_regression(layouts: Layouts) -> None:
    layouts.take(layout(), 100.0)
    with pytest.raises(RoutingRegressionError):
        layouts.take(layout(epoch=2, layout="2:4:n"), 100.0)
    anew = layout(incarnation=8, version=1, epoch=1, layout="1:4:m")
    layouts.take(anew, 100.0)
    assert known(layouts) == anew


def test_an_unknown_routing_protocol_is_never_guessed(layouts: Layouts) -> None:
    with pytest.raises(UnsupportedProtocolError, match="'jump-v9'"):
        layouts.take(layout(routing="jump-v9"), 100.0)
    assert known(layouts) is None


def test_an_unknown_routing_protocol_ends_the_lease_of_what_was_known(layouts: Layouts) -> None:
    layouts.take(layout(), 100.0)
    with pytest.raises(UnsupportedProtocolError):
        layouts.take(layout(version=3, epoch=4, layout="4:4:n", routing="jump-v9"), 100.0)
    assert known(layouts) is None
    repaired = layout(version=4, epoch=5, layout="5:4:n")
    layouts.take(repaired, 100.0)
    assert known(layouts) == repaired


def test_a_stream_that_is_being_created_is_not_ready(layouts: Layouts) -> None:
    with pytest.raises(RoutingUnavailableError, match="being created") as error:
        layouts.take(layout(state="creating"), 100.0)
    assert error.value.retriable
    assert known(layouts) is None
    layouts.take(layout(), 101.0)
    assert known(layouts) is not None


@pytest.mark.parametrize("protocol", routing.PROTOCOLS)
def test_keys_go_where_the_protocol_says(layouts: Layouts, protocol: str) -> None:
    course = layouts.take(layout(routing=protocol), 100.0)
    for number in range(100):
        key = str(number).encode()
        assert course.place(key).shard == routing.PROTOCOLS[protocol].shard(key, 4)


# --- reading it -----------------------------------------------------------------------------------------------------


def test_a_refresh_takes_what_it_reads(layouts: Layouts) -> None:
    assert drive(layouts.refresh(), layout()).layout == layout()


def test_a_refresh_without_an_answer_keeps_what_is_known(layouts: Layouts) -> None:
    layouts.take(layout(), 100.0)
    with pytest.raises(RoutingUnavailableError) as error:
        drive(layouts.refresh(), RedisUnavailableError("away"))
    assert error.value.retriable
    assert known(layouts) == layout()


def test_a_refresh_of_a_stream_that_does_not_exist(layouts: Layouts) -> None:
    with pytest.raises(NotFoundError):
        drive(layouts.refresh(), refused("STREAM_NOT_FOUND", stream="orders"))


# --- what is published ----------------------------------------------------------------------------------------------


@pytest.fixture
def publishing(monkeypatch: pytest.MonkeyPatch) -> Publishing:
    made = make_publishing(fenced=True)
    made.layouts.take(layout(), made.clock())
    return made


def make_publishing(*, fenced: bool, lease_seconds: float = 1e9) -> Publishing:
    settings = RedisSettings("redis://nowhere", timeout_seconds=1.0)
    return Publishing("orders", settings, fenced=fenced, lease_seconds=lease_seconds, lock=contextlib.nullcontext())


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_lease_is_positive(seconds: float) -> None:
    with pytest.raises(ConfigError):
        make_publishing(fenced=True, lease_seconds=seconds)


def test_reserved_fields_come_first(publishing: Publishing) -> None:
    entry = publishing.prepare(Outgoing(fields={"a": "1", "b": b"\xff"}, key="k", event_id="e"))
    assert list(entry.flat) == [b"rsc-key", b"k", b"rsc-event", b"e", b"a", b"1", b"b", b"\xff"]
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
        Outgoing(fields={"a": "\ud800"}, key="k"),
        Outgoing(fields={"\ud800": "a"}, key="k"),
        Outgoing(fields={}, key="k", event_id="\ud800"),
        Outgoing(fields='{"a": 1}', key="k"),  # type: ignore[arg-type]
        {"fields": {}, "key": "k"},
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
