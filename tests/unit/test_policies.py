"""Batches, retries, poison and dead letters: what may be chosen, and what follows from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redis_stream_coord import Batch, ConfigError, DeadLetter, Message, Poison, Retry
from redis_stream_coord.policies import dead_fields


def message(**changes: Any) -> Message:
    chosen: dict[str, Any] = {
        "stream": "orders",
        "shard": 3,
        "id": "5-1",
        "key": b"k",
        "fields": {"n": b"1"},
        "event_id": None,
        "deliveries": 4,
        "token": (1, 2),
        "ack": lambda entry_id, delete: None,
        "owned": lambda: True,
    }
    return Message(**(chosen | changes))


# --- Retry ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10_000), st.floats(0.001, 10.0), st.floats(1.0, 100.0))
def test_pause_doubles_up_to_the_longest_with_jitter_below(failures: int, backoff: float, factor: float) -> None:
    longest = backoff * factor
    delay = Retry(backoff_seconds=backoff, max_backoff_seconds=longest).delay(failures)
    ceiling = min(longest, backoff * 2.0 ** min(failures - 1, 1000))
    assert ceiling / 2 <= delay <= ceiling


def test_pauses_are_not_all_the_same() -> None:
    retry = Retry(backoff_seconds=1.0)
    assert len({retry.delay(1) for _ in range(20)}) > 10


def test_no_pause_at_all_can_be_chosen() -> None:
    assert Retry(backoff_seconds=0.0, max_backoff_seconds=0.0).delay(5) == 0.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Retry(backoff_seconds=-0.1),
        lambda: Retry(backoff_seconds=2.0, max_backoff_seconds=1.0),
        lambda: Retry(backoff_seconds=float("nan")),
        lambda: Batch(print, max_size=0),
        lambda: Batch(print, within_seconds=-1.0),
        lambda: Poison(print, after_deliveries=0),
        lambda: DeadLetter("dead", after_deliveries=0),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


# --- Poison ---------------------------------------------------------------------------------------------------------


# --- fatal errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retry", "error", "fatal"),
    [
        (Retry(), ValueError(), False),
        (Retry(fatal=(LookupError,)), KeyError(), True),
        (Retry(fatal=(LookupError,)), ValueError(), False),
        (Retry(retriable=(OSError,)), ConnectionError(), False),
        (Retry(retriable=(OSError,)), ValueError(), True),
        # Both say something: what no further try will mend is not tried again.
        (Retry(retriable=(OSError,), fatal=(ConnectionError,)), ConnectionError(), True),
        (Retry(retriable=(ConnectionError,), fatal=(OSError,)), ConnectionError(), True),
        (Retry(retriable=()), ValueError(), True),
        # No failure of the entry.
        (Retry(retriable=(OSError,)), asyncio.CancelledError(), False),
    ],
)
def test_errors_are_fatal_or_worth_another_try(retry: Retry, error: BaseException, fatal: bool) -> None:
    assert retry.is_fatal(error) is fatal


@pytest.mark.parametrize("name", ["retriable", "fatal"])
@pytest.mark.parametrize("types", [ValueError, [ValueError], ("ValueError",), (ValueError(),), (KeyboardInterrupt,)])
def test_types_of_errors_are_a_tuple_of_exceptions(name: str, types: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Retry(**{name: types})


# --- dead letters ---------------------------------------------------------------------------------------------------


def test_dead_letter_has_the_raw_fields_first_then_where_from_and_why() -> None:
    one = message()
    one.error = ValueError("on purpose")
    raw = [b"n", b"1", b"rsc-key", b"\xff"]
    assert dead_fields(one, "billing", raw) == [
        *raw,
        *("rsc-dead-stream", "orders"),
        *("rsc-dead-shard", "3"),
        *("rsc-dead-id", "5-1"),
        *("rsc-dead-group", "billing"),
        *("rsc-dead-deliveries", "4"),
        *("rsc-dead-reason", "ValueError('on purpose')"),
    ]


def test_dead_letter_of_an_entry_that_nobody_survived_says_so() -> None:
    assert dead_fields(message(), "billing", [])[-1] == "no handler survived it"


# --- nack -----------------------------------------------------------------------------------------------------------


def test_refusal_is_taken_once() -> None:
    one = message()
    assert not one.was_refused
    one.nack(delay_seconds=1.5)
    assert one.was_refused
    assert one.taken_delay() == 1.5
    assert not one.was_refused
    assert one.taken_delay() is None
