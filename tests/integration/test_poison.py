"""Entries that no handler can take: given up after so many deliveries, wherever they were counted; dead letters."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import pytest

from redis_stream_coord import Batch, DeadLetter, Message, Poison, RedisSettings, Retry
from tests.integration.kit import GROUP, Bench, Crew, Recorder, sha, two_servers
from tests.proxy import LossyProxy
from tests.waiting import eventually

pytestmark = two_servers


class Hopeless(Exception):  # noqa: N818 - a test's own
    """What no further try will mend."""


def fail(_: Message) -> None:
    raise ValueError("on purpose")


def fail_on(*ids: str, error: type[Exception] = ValueError) -> Recorder:
    def handle(message: Message) -> None:
        if message.id in ids:
            raise error("on purpose")

    return Recorder(handle)


def all_acknowledged(bench: Bench) -> None:
    eventually(lambda: not bench.pending(0), what="all acknowledgements")


def dead(bench: Bench) -> list[dict[str, str]]:
    return [dict(fields) for _, fields in bench.redis.xrange("dead")]


# --- Poison ---------------------------------------------------------------------------------------------------------


def test_poison_is_given_up_after_so_many_deliveries_and_the_rest_goes_on(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    ids = bench.fill(0, 3)
    given: list[Message] = []
    a = crew.start("a", fail_on(ids[1]), poison=Poison(given.append, after_deliveries=3))
    a.finishes(ids[0], ids[2])
    assert a.recorder.ids() == [ids[0], *[ids[1]] * 3, ids[2]]
    assert [(message.id, message.deliveries) for message in given] == [(ids[1], 3)]
    assert repr(given[0].error) == "ValueError('on purpose')"
    all_acknowledged(bench)


def test_some_errors_are_poison_at_once(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    ids = bench.fill(0, 2)
    given: list[Message] = []
    poison = Poison(given.append, after_deliveries=10**6)
    a = crew.start("a", fail_on(ids[0], error=Hopeless), poison=poison, retry=Retry(fatal=(Hopeless,)))
    a.finishes(ids[1])
    assert a.recorder.ids() == ids
    assert [message.id for message in given] == ids[:1]
    all_acknowledged(bench)


def test_entry_is_tried_again_when_it_could_not_be_given_up(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    ids = bench.fill(0, 2)
    calls: list[int] = []

    def give_up(message: Message) -> None:
        calls.append(message.deliveries)
        if len(calls) < 3:
            raise OSError("the place for them is full")

    a = crew.start("a", fail_on(ids[0]), poison=Poison(give_up, after_deliveries=2))
    a.finishes(ids[1])
    assert a.recorder.ids() == [ids[0]] * 4 + ids[1:]
    assert calls == [2, 3, 4]
    all_acknowledged(bench)


def test_fatal_error_that_could_not_be_given_up_is_not_handled_again(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    ids = bench.fill(0, 2)
    calls: list[int] = []

    def give_up(message: Message) -> None:
        calls.append(message.deliveries)
        if len(calls) < 3:
            raise OSError("the place for them is full")

    retry = Retry(backoff_seconds=0.01, max_backoff_seconds=0.05, retriable=(OSError,))
    a = crew.start("a", fail_on(ids[0]), poison=Poison(give_up, after_deliveries=10**6), retry=retry)
    a.finishes(ids[1])
    assert a.recorder.ids() == ids
    assert calls == [1, 1, 1]
    all_acknowledged(bench)


def test_fatal_error_without_poison_stops_the_consumer_with_that_error(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2)
    (bad,), others = bench.fill(0), bench.fill(1, 3)
    a = crew.start("a", fail_on(bad, error=Hopeless), retry=Retry(fatal=(Hopeless,)))
    with pytest.raises(Hopeless, match="on purpose"):
        a.consumer.wait(20)
    # As at any stop: callbacks, acknowledgements, and the group is told.
    assert a.kinds(0)[-1] == "revoked"
    assert bench.view().members == {}
    assert list(bench.pending(0)) == [bad]
    assert a.recorder.ids(0) == [bad]
    b = crew.start("b")
    b.finishes(bad, *set(others) - set(a.recorder.done()))
    assert next(one.deliveries for one in b.recorder.began if one.id == bad) == 2


def test_without_poison_an_entry_is_tried_for_ever(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    ids = bench.fill(0)
    a = crew.start("a", Recorder(fail))
    eventually(lambda: len(a.recorder.ids()) > 30, within_seconds=20, what="many tries")
    assert list(bench.pending(0)) == ids


def test_refused_entry_is_poison_too(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    ids = bench.fill(0)
    given: list[Message] = []
    refuse = Recorder(lambda message: message.nack())
    crew.start("a", refuse, poison=Poison(given.append, after_deliveries=2))
    all_acknowledged(bench)
    eventually(lambda: given, what="the poison handler")
    assert refuse.ids() == ids * 2
    assert given[0].error is None


# --- counted across owners ------------------------------------------------------------------------------------------


def test_deliveries_are_counted_on_by_the_next_owner(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    ids = bench.fill(0, 2)
    tried = threading.Event()
    released = threading.Event()

    def handle(message: Message) -> None:
        if message.deliveries == 3:
            tried.set()
            assert released.wait(30)
        raise ValueError("on purpose")

    a = crew.start("a", Recorder(handle))
    assert tried.wait(20)
    a.consumer.request_stop()
    released.set()
    a.consumer.wait()
    given: list[Message] = []
    b = crew.start("b", fail_on(ids[0]), poison=Poison(given.append, after_deliveries=5))
    b.finishes(ids[1])
    assert [one.deliveries for one in b.recorder.began] == [4, 5, 1]
    assert [(message.id, message.deliveries) for message in given] == [(ids[0], 5)]


def test_entry_that_kills_its_process_is_poison_after_so_many(bench: Bench, crew: Crew, tmp_path: Path) -> None:
    bench.create(shards=1)
    ids = bench.fill(0, 3)
    for attempt in range(3):
        # Restarted under its own name, so it has its shard back at once.
        child = crew.child("child", tmp_path, deadly="1")
        assert child.process.wait(20) == 1
        last = child.notes("began")[-1]
        assert last["id"] == ids[1]
        # One count may be lost: the entry before it may be acknowledged too late, and is the first one left.
        assert max(1, attempt) <= last["deliveries"] <= attempt + 1
    given: list[Message] = []
    b = crew.start("b", poison=Poison(given.append, after_deliveries=2))
    b.finishes(ids[2])
    # It was not tried once more, and why it is bad nobody knows.
    assert b.recorder.ids() == ids[2:]
    assert [(message.id, message.error) for message in given] == [(ids[1], None)]
    all_acknowledged(bench)


def test_batch_that_kills_its_process_does_not_make_poison_of_the_innocent(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    ids = bench.fill(0, 4)
    stream = bench.stream_key(0)
    # Two owners died with a batch in hand; the entry that kills them is not the first one.
    bench.redis.xreadgroup(GROUP, "crashed", {stream: ">"})
    bench.redis.xclaim(stream, GROUP, "crashed", 0, [ids[0]], retrycount=2, justid=True)
    calls: list[list[str]] = []

    def handle(messages: list[Message]) -> None:
        calls.append([message.id for message in messages])

    crew.start("a", handler=Batch(handle, max_size=4, within_seconds=1.0))
    eventually(lambda: sum(map(len, calls)) == 4, what="all of them")
    # What may have killed its owner is tried alone, so its count is its own.
    assert calls == [ids[:1], ids[1:]]


# --- DeadLetter -----------------------------------------------------------------------------------------------------


def test_dead_letter_keeps_the_fields_and_says_where_from_and_why(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    receipt = bench.producer.publish({"text": "größer", "n": "7"}, key="customer-7", event_id="event-1")
    a = crew.start("a", fail_on(receipt.id), poison=DeadLetter("dead", after_deliveries=2))
    a.finishes(*bench.fill(0))
    all_acknowledged(bench)
    assert a.recorder.ids()[:2] == [receipt.id] * 2
    (letter,) = dead(bench)
    assert letter == {
        "text": "größer",
        "n": "7",
        "rsc-key": "customer-7",
        "rsc-event": "event-1",
        "rsc-dead-stream": bench.stream,
        "rsc-dead-shard": "0",
        "rsc-dead-id": receipt.id,
        "rsc-dead-group": GROUP,
        "rsc-dead-deliveries": "2",
        "rsc-dead-reason": "ValueError('on purpose')",
    }


def test_what_cannot_be_decoded_becomes_a_dead_letter(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    bad = bench.producer.publish({"data": "{"}, key="k").id
    good = bench.producer.publish({"data": "{}"}, key="k").id
    poison, retry = DeadLetter("dead", after_deliveries=10**6), Retry(fatal=(ValueError,))
    a = crew.start("a", decode=lambda fields: json.loads(fields["data"]), poison=poison, retry=retry)
    a.finishes(good)
    assert a.recorder.ids() == [good]
    (letter,) = dead(bench)
    assert letter["rsc-dead-id"] == bad
    assert letter["data"] == "{"
    assert "JSONDecodeError" in letter["rsc-dead-reason"]
    all_acknowledged(bench)


@pytest.mark.parametrize("lost", ["letter", "acknowledgement"])
def test_lost_reply_between_the_two_writes_loses_nothing(
    bench: Bench, crew: Crew, proxy: LossyProxy, lost: str
) -> None:
    bench.create(shards=1)
    bench.load_scripts()
    recorder = Recorder()
    redis = RedisSettings(proxy.url, timeout_seconds=1.0)
    a = crew.start("a", recorder, redis=redis, poison=DeadLetter("dead", after_deliveries=1))
    a.finishes(*bench.fill(0))
    all_acknowledged(bench)
    recorder.action = fail_on().action
    bad, good = bench.fill(0)[0], None
    a.finishes(bad)
    all_acknowledged(bench)
    recorder.action = fail
    proxy.drop_next_reply(sha("ack") if lost == "acknowledgement" else b"rsc-dead-stream")
    (bad,) = bench.fill(0)
    eventually(lambda: proxy.dropped == 1, what="the lost reply")
    eventually(lambda: dead(bench), what="the dead letter")
    all_acknowledged(bench)
    recorder.action = None
    (good,) = bench.fill(0)
    a.finishes(good)
    # Once, or, when nobody knows whether it got there, twice; and it was never acknowledged without.
    letters = [letter["rsc-dead-id"] for letter in dead(bench)]
    assert letters == [bad] * (1 if lost == "acknowledgement" else 2)


def test_crash_between_the_two_writes_repeats_the_first_and_loses_nothing(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    (bad,) = bench.fill(0)
    stream = bench.stream_key(0)
    # The owner had appended the letter, and died before it acknowledged.
    bench.redis.xreadgroup(GROUP, "crashed", {stream: ">"})
    bench.redis.xadd("dead", {"n": "0", "rsc-dead-id": bad})
    a = crew.start("a", Recorder(fail), poison=DeadLetter("dead", after_deliveries=1))
    all_acknowledged(bench)
    assert [letter["rsc-dead-id"] for letter in dead(bench)] == [bad, bad]
    # It had been delivered once, and that was enough.
    assert a.recorder.ids() == []
    assert dead(bench)[1]["rsc-dead-reason"] == "no handler survived it"


def test_killed_process_leaves_its_poison_to_the_next(bench: Bench, crew: Crew, tmp_path: Path) -> None:
    bench.create(shards=1)
    child = crew.child("child", tmp_path)
    child.hold()
    ids = bench.fill(0, 2)
    child.notes_eventually("began", id=ids[0])
    child.signal(signal.SIGKILL)
    child.process.wait()
    a = crew.start("a", poison=DeadLetter("dead", after_deliveries=1))
    a.finishes(ids[1])
    all_acknowledged(bench)
    assert a.recorder.ids() == ids[1:]
    (letter,) = dead(bench)
    assert (letter["rsc-dead-id"], letter["rsc-dead-reason"]) == (ids[0], "no handler survived it")
