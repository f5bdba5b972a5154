"""Where an entry may be by now, what a refusal proves, and what `publish_many` makes of answers; no server."""

from __future__ import annotations

import contextlib
from typing import Any

import attrs
import pytest

from redis_stream_coord.attempts import Attempts, Course, Place
from redis_stream_coord.bulk import Bulk
from redis_stream_coord.commands import Pause, Published, Together
from redis_stream_coord.errors import LifecycleError, PartialPublishError, PublishError, RedisUnavailableError
from redis_stream_coord.models import Layout, Outgoing
from redis_stream_coord.publishing import Gate, NotSentError, Publishing
from redis_stream_coord.routing import PROTOCOLS
from tests.unit.publish_world import VirtualMachine, VirtualSettings

OLD, NOW = Place(7, "3:4:n", 0), Place(7, "5:9:n", 1)


def layout(shards: int, *earlier: str, epoch: int = 5) -> Layout:
    return Layout(9, 7, epoch, shards, "jump-v1", f"{epoch}:{shards}:n", "active", "all", ("g",), earlier)


def shard_of(key: bytes, shards: int) -> int:
    return PROTOCOLS["jump-v1"].shard(key, shards)


# --- what a refusal proves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "detail", "is_over"),
    [
        ("CLOSED", "4 3:4:n", True),
        ("STALE_ROUTE", "5 5:9:n", True),
        ("CLOSED", "3 2:9:n", False),  # about to be opened for this very layout
        ("STALE_ROUTE", "2 2:9:n", False),  # the shard is behind the record
        ("CLOSED", "4 -", True),  # rebuilt
        ("ROUTE_MISSING", "P:{orders:0}:route", False),
        ("STREAM_MISSING", "orders:0", False),
        ("OK", "9-0", False),
    ],
)
def test_only_a_refusal_from_a_later_phase_is_for_good(word: str, detail: str, is_over: bool) -> None:
    assert OLD.is_over(Published(word, detail)) is is_over


# --- where else an entry may be -------------------------------------------------------------------------------------


def test_a_key_is_looked_for_where_it_lived_oldest_first() -> None:
    course = Course(layout(9, "1:2:a", "2:0:b", "3:4:c", "4:12:d"))
    for key in (str(number).encode() for number in range(300)):
        places = course.before(key)
        assert places == sorted(places, key=lambda place: place.epoch)
        shards = [place.shard for place in places]
        assert len(set(shards)) == len(shards)
        assert course.place(key).shard not in shards
        for epoch, count in ((1, 2), (3, 4), (4, 12)):
            assert shard_of(key, count) in {*shards, course.place(key).shard}, epoch
        for place in places:
            assert shard_of(key, int(place.layout.split(":")[1])) == place.shard


def test_of_a_shard_its_latest_layout_is_asked() -> None:
    key = next(k for k in (str(n).encode() for n in range(99)) if shard_of(k, 9) != shard_of(k, 4) == shard_of(k, 2))
    (place,) = Course(layout(9, "1:2:a", "3:4:c")).before(key)
    assert place.layout == "3:4:c"


def test_nothing_is_asked_where_nothing_changed() -> None:
    course = Course(layout(4, "3:4:c"))
    assert all(course.before(str(number).encode()) == [] for number in range(100))


def test_what_was_sent_under_another_lifecycle_is_forgotten() -> None:
    key = next(k for k in (str(n).encode() for n in range(99)) if shard_of(k, 9) not in (0, 3))
    course = Course(layout(9))
    assert course.before(key, [Place(6, "8:4:n", 0), Place(7, "3:4:n", 3)]) == [Place(7, "3:4:n", 3)]


def test_without_shards_every_place_is_asked() -> None:
    course = Course(layout(0, "3:4:c"))
    assert course.is_empty
    assert [place.shard for place in course.before(b"k")] == [shard_of(b"k", 4)]


# --- the memory of a producer ---------------------------------------------------------------------------------------


@attrs.define
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def attempts(clock: Clock) -> Attempts:
    return Attempts(clock, contextlib.nullcontext(), 100.0, 3)


def test_a_place_is_remembered_until_it_is_over_or_has_the_entry(attempts: Attempts) -> None:
    attempts.begin("e", b"k", OLD)
    assert attempts.places("e", b"k") == [OLD]
    assert attempts.places("e", b"another key") == []
    attempts.answered("e", b"k", OLD, Published("CLOSED", "4 3:4:n"))
    assert attempts.places("e", b"k") == []
    attempts.begin("e", b"k", NOW)
    attempts.answered("e", b"k", NOW, Published("OK", "1-0"))
    assert len(attempts) == 0


def test_an_answer_that_is_not_final_leaves_what_was_lost_before(attempts: Attempts) -> None:
    attempts.begin("e", b"k", OLD)  # lost, and perhaps still on the wire
    attempts.begin("e", b"k", OLD)
    attempts.answered("e", b"k", OLD, Published("CLOSED", "3 2:9:n"))
    assert attempts.places("e", b"k") == [OLD]
    # Alone it was refused: nothing of it is anywhere.
    attempts.begin("f", b"k", OLD)
    attempts.answered("f", b"k", OLD, Published("CLOSED", "3 2:9:n"))
    assert attempts.places("f", b"k") == []


def test_the_memory_is_bounded_by_count_and_time(attempts: Attempts, clock: Clock) -> None:
    for number in range(5):
        attempts.begin(str(number), b"k", OLD)
    assert attempts.event_ids() == ("2", "3", "4")
    clock.now = 50.0
    attempts.begin("3", b"k", OLD)
    clock.now = 140.0
    attempts.begin("5", b"k", OLD)
    assert attempts.event_ids() == ("3", "5")


# --- many -----------------------------------------------------------------------------------------------------------


class Scripted:
    """Runs a `Bulk` whose round trips are answered by a function of what is sent."""

    def __init__(self, *, fenced: bool = True) -> None:
        self.machine = VirtualMachine()
        settings = VirtualSettings("redis://nowhere", timeout_seconds=1.0, machine=self.machine)
        self.publishing = Publishing(
            "orders", settings, fenced=fenced, lease_seconds=1e9, lock=contextlib.nullcontext()
        )
        self.publishing.layouts.take(layout(1), 0.0)

    def run(self, entries: list[Outgoing], *answers: Any) -> Any:
        left = list(answers)
        saga = Bulk(self.publishing, [self.publishing.prepare(entry) for entry in entries]).run()
        step = next(saga)
        try:
            while True:
                if isinstance(step, Pause):
                    self.machine.now += step.seconds
                    step = saga.send(None)
                else:
                    assert isinstance(step, Together)
                    step = saga.send([left.pop(0) for _ in step.commands])
        except StopIteration as end:
            assert left == []
            return end.value


LOST = RedisUnavailableError("lost")


def test_nothing_overtakes_an_entry_of_its_key_whose_outcome_is_unknown() -> None:
    """The others go on; those with an event id are sent again."""
    entries = [
        Outgoing(fields={}, key="a"),
        Outgoing(fields={}, key="b", event_id="1"),
        Outgoing(fields={}, key="a", event_id="2"),
    ]
    with pytest.raises(PartialPublishError) as caught:
        Scripted().run(entries, LOST, [Published("DUPLICATE", "1-0")])
    assert list(caught.value.failed) == [0, 2]
    assert all("may or may not" in str(error) for error in caught.value.failed.values())
    assert caught.value.receipts[1] is not None
    assert "2 of 3" in str(caught.value)


def test_what_was_not_sent_is_said_to_be_not_sent() -> None:
    entries = [Outgoing(fields={}, key="a") for _ in range(201)]
    with pytest.raises(PartialPublishError) as caught:
        Scripted().run(entries, LOST)
    assert not any(isinstance(caught.value.failed[n], NotSentError) for n in range(200))
    assert isinstance(caught.value.failed[200], NotSentError)
    assert caught.value.failed[200].retriable


def test_many_give_up_after_the_timeout_without_progress() -> None:
    entries = [Outgoing(fields={}, key="a", event_id=str(number)) for number in range(2)]
    scripted = Scripted()
    refusal = [Published("CLOSED", "5 -"), Published("CLOSED", "5 -")]
    saga = Bulk(scripted.publishing, [scripted.publishing.prepare(entry) for entry in entries]).run()

    def refuse_all() -> None:
        step = next(saga)
        for _ in range(1000):
            if isinstance(step, Pause):
                scripted.machine.now += step.seconds
                step = saga.send(None)
            elif isinstance(step, Together):
                step = saga.send([refusal] * len(step.commands))
            else:
                step = saga.send(layout(1))

    with pytest.raises(PartialPublishError) as caught:
        refuse_all()
    assert [error.word for error in caught.value.failed.values()] == ["CLOSED", "CLOSED"]
    assert 1.0 <= scripted.machine.now < 1.5


def test_plain_entries_with_event_ids_are_not_sent_again() -> None:
    with pytest.raises(PartialPublishError) as caught:
        Scripted(fenced=False).run([Outgoing(fields={}, key="a", event_id="1")], LOST)
    assert isinstance(caught.value.failed[0], PublishError)


def test_a_large_batch_is_cut_by_bytes() -> None:
    entries = [Outgoing(fields={"x": "x" * 400_000}, key="a", event_id=str(number)) for number in range(5)]
    answers = [[Published("OK", f"{n}-0") for n in range(count)] for count in (2, 2, 1)]
    assert len(Scripted().run(entries, *answers)) == 5


# --- quiescing ------------------------------------------------------------------------------------------------------


def test_a_gate_lets_nobody_in_while_it_is_shut() -> None:
    gate = Gate("orders")
    gate.enter()
    gate.shut = True
    with pytest.raises(LifecycleError) as caught:
        gate.enter()
    assert caught.value.retriable
    assert not gate.is_empty
    gate.leave()
    assert gate.is_empty
