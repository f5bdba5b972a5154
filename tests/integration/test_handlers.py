"""What a handler may do, and what follows: batches, decoding, acknowledging by hand, refusing, failing."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from redis_stream_coord import Batch, Message, Outgoing, Retry
from tests.integration.kit import GROUP, SLOW, Bench, Crew, Recorder, two_servers
from tests.waiting import eventually

pytestmark = two_servers


def publish_numbers(bench: Bench, count: int, shard: int = 0) -> list[str]:
    """Publish entries with ``n`` from 0 on; return their ids."""
    many = [Outgoing(fields={"n": str(n)}, key=bench.key_of(shard)) for n in range(count)]
    return [receipt.id for receipt in bench.producer.publish_many(many)]


def number(message: Message) -> int:
    return int(message.text("n"))


class Batches:
    """A batch handler that notes the ids it is given, call by call, and fails where a number is bad."""

    def __init__(self, *bad: int) -> None:
        self.bad = set(bad)
        self.calls: list[list[str]] = []
        self.at: list[float] = []
        self.deliveries: list[tuple[str, int]] = []
        self.handled: list[str] = []

    def __call__(self, messages: list[Message]) -> None:
        self.at.append(time.monotonic())
        self.calls.append([message.id for message in messages])
        self.deliveries += [(message.id, message.deliveries) for message in messages]
        if self.bad & {number(message) for message in messages}:
            raise ValueError("on purpose")
        self.handled += [message.id for message in messages]


# --- batches --------------------------------------------------------------------------------------------------------


def test_batches_are_full_and_in_order(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    ids = publish_numbers(bench, 25)
    batches = Batches()
    crew.start("a", handler=Batch(batches, max_size=10, within_seconds=2.0))
    eventually(lambda: len(batches.calls) == 2, what="the full batches")
    # The third one is not full, and waits.
    assert batches.calls == [ids[:10], ids[10:20]]
    eventually(lambda: batches.handled == ids, within_seconds=20, what="the last batch")
    assert batches.calls == [ids[:10], ids[10:20], ids[20:]]
    assert batches.at[2] - batches.at[1] > 1.5
    eventually(lambda: not bench.pending(0), what="all acknowledgements")


def test_batch_waits_for_company_that_comes_in_time(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    batches = Batches()
    a = crew.start("a", handler=Batch(batches, max_size=3, within_seconds=20.0))
    a.owns(0)
    ids = bench.fill(0)
    eventually(lambda: bench.pending(0), what="the first one read")
    assert batches.calls == []
    ids += bench.fill(0, 2)
    eventually(lambda: batches.calls == [ids], what="a full batch")


def test_failed_batch_comes_one_by_one_and_all_but_the_bad_get_through(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    ids = publish_numbers(bench, 6)
    batches = Batches(2)
    a = crew.start("a", handler=Batch(batches, max_size=4, within_seconds=1.0))
    eventually(lambda: len(batches.calls) >= 6, what="the bad one tried again")
    assert batches.calls[:4] == [ids[:4], ids[:1], ids[1:2], ids[2:3]]
    assert batches.handled == ids[:2]
    # Order holds: what is behind the bad one waits for it.
    assert set(map(tuple, batches.calls[3:])) == {(ids[2],)}
    # Each of them had been handed out before.
    assert [count for entry_id, count in batches.deliveries if entry_id == ids[0]] == [1, 2]
    assert [count for entry_id, count in batches.deliveries if entry_id == ids[2]][:3] == [1, 2, 3]
    eventually(lambda: list(bench.pending(0)) == ids[2:], what="the acknowledgements of the others")
    batches.bad.clear()
    eventually(lambda: batches.handled == ids, what="the rest")
    a.consumer.stop()
    assert bench.pending(0) == {}


def test_refused_message_sends_its_batch_back_and_is_not_refused_for_ever(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    ids = publish_numbers(bench, 3)
    calls: list[list[str]] = []

    def handle(messages: list[Message]) -> None:
        calls.append([message.id for message in messages])
        if len(calls) == 1:
            messages[1].nack()

    crew.start("a", handler=Batch(handle, max_size=3, within_seconds=5.0))
    eventually(lambda: not bench.pending(0) and len(calls) > 3, what="all acknowledgements")
    assert calls == [ids, ids[:1], ids[1:2], ids[2:]]


# --- decoding -------------------------------------------------------------------------------------------------------


def test_decoded_value_comes_with_the_message_and_what_cannot_be_decoded_has_failed(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    broken = threading.Event()
    broken.set()
    values: list[Any] = []

    def decode(fields: dict[str, bytes]) -> Any:
        if broken.is_set() and fields["data"] == b"{":
            raise ValueError("no such thing")
        return json.loads(fields["data"]) if fields["data"] != b"{" else "mended"

    a = crew.start("a", Recorder(lambda message: values.append(message.value)), decode=decode)
    ids = [bench.producer.publish({"data": data}, key="k").id for data in ('{"a": 1}', "{", "[2]")]
    a.finishes(ids[0])
    eventually(lambda: list(bench.pending(0)) == ids[1:], what="the first acknowledged")
    # The count of tries grows, though the handler has never been called with it.
    eventually(lambda: deliveries(bench, ids[1]) >= 3, what="more tries")
    assert a.recorder.ids() == ids[:1]
    broken.clear()
    a.finishes(*ids)
    assert values == [{"a": 1}, "mended", [2]]
    assert a.recorder.began[1].deliveries >= 3


def deliveries(bench: Bench, entry_id: str) -> int:
    rows = bench.redis.xpending_range(bench.stream_key(0), GROUP, entry_id, entry_id, 1)
    return int(rows[0]["times_delivered"]) if rows else 0


# --- acknowledging --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ack", ["auto", "manual"])
def test_ack_delete_waits_for_every_group_of_the_stream(bench: Bench, crew: Crew, ack: str) -> None:
    bench.create(shards=1)
    stream = bench.stream_key(0)
    bench.redis.xgroup_create(stream, "unregistered", "0")
    a = crew.start("a", Recorder(lambda message: message.ack_delete()), ack=ack)
    ids = publish_numbers(bench, 3)
    eventually(lambda: len(a.recorder.done()) == 3 and not bench.pending(0), what="all acknowledgements")
    # The other group has not even received them.
    assert bench.redis.xlen(stream) == 3
    bench.redis.xreadgroup("unregistered", "other", {stream: ">"}, count=3)
    bench.redis.xack(stream, "unregistered", ids[0], ids[1])
    more = bench.redis.xadd(stream, {"n": "3"})
    eventually(lambda: more in a.recorder.done() and not bench.pending(0), what="one more")
    assert bench.redis.xlen(stream) == 4
    bench.redis.xgroup_destroy(stream, "unregistered")
    last = bench.fill(0)
    eventually(lambda: last[0] in a.recorder.done() and not bench.pending(0), what="the last one")
    assert last[0] not in [entry_id for entry_id, _ in bench.redis.xrange(stream)]


def test_acknowledgements_travel_together_and_do_not_wait_long(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    a = crew.start("a")
    a.owns(0)
    (one,) = bench.fill(0)
    eventually(lambda: one in a.recorder.done() and not bench.pending(0), within_seconds=5, what="a single one")
    before = calls(bench, "xack")
    ids = publish_numbers(bench, 1000)
    a.finishes(*ids, within_seconds=30)
    a.consumer.flush()
    assert bench.pending(0) == {}
    # One call for what was finished in ten milliseconds, and no more than 200 in one.
    took = a.recorder.ended[-1][1] - a.recorder.began[1].began
    assert 1000 / 200 <= calls(bench, "xack") - before <= 1000 / 200 + took / 0.01 + 2
    assert calls(bench, "xack") - before < 500


def calls(bench: Bench, command: str) -> int:
    return int(bench.redis.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


# --- refusing and failing -------------------------------------------------------------------------------------------


def test_refused_entry_comes_again_in_place_after_its_delay(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2)
    at: list[float] = []
    ids = publish_numbers(bench, 3)

    def handle(message: Message) -> None:
        if message.shard == 0 and message.id == ids[1]:
            at.append(time.monotonic())
            if len(at) < 3:
                message.nack(delay_seconds=0.5)

    # Its own pauses are much longer, so the delay asked for is the one that counts.
    a = crew.start("a", Recorder(handle), retry=Retry(backoff_seconds=60.0, max_backoff_seconds=60.0))
    bench.fill(1, 3)
    eventually(lambda: len(a.recorder.done(1)) == 3, what="the other shard")
    eventually(lambda: len(a.recorder.done(0)) == 5, what="everything")
    assert a.recorder.ids(0) == [ids[0], ids[1], ids[1], ids[1], ids[2]]
    assert [one.deliveries for one in a.recorder.began if one.id == ids[1] and one.shard == 0] == [1, 2, 3]
    assert at[1] - at[0] >= 0.5
    assert at[2] - at[1] >= 0.5
    eventually(lambda: not bench.pending(0), what="all acknowledgements")


def test_pauses_between_tries_grow_while_other_shards_go_on(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2)
    tries: list[float] = []
    (bad, after) = publish_numbers(bench, 2)

    def handle(message: Message) -> None:
        if message.shard == 0 and message.id == bad:
            tries.append(time.monotonic())
            if len(tries) < 4:
                raise ValueError("on purpose")

    a = crew.start("a", Recorder(handle), retry=Retry(backoff_seconds=0.4, max_backoff_seconds=10.0))
    eventually(lambda: len(tries) == 1, what="the first try")
    while len(tries) < 3:
        # Each of them is served in a pause of the other shard.
        (other,) = bench.fill(1)
        eventually(lambda other=other: other in a.recorder.done(1), what="the other shard")
    eventually(lambda: len(a.recorder.done(0)) == 2, what="this shard")
    assert a.recorder.ids(0) == [bad] * 4 + [after]
    assert len(a.recorder.ids(1)) > 3
    pauses = [later - earlier for earlier, later in zip(tries, tries[1:], strict=False)]  # noqa: RUF007
    for pause, ceiling in zip(pauses, (0.4, 0.8, 1.6), strict=True):
        assert pause >= ceiling / 2


def test_shard_can_be_given_up_in_a_long_pause_between_tries(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=SLOW)

    def fail(_: Message) -> None:
        raise ValueError("on purpose")

    a = crew.start("a", Recorder(fail), retry=Retry(backoff_seconds=60.0, max_backoff_seconds=60.0))
    ids = bench.fill(0)
    eventually(lambda: a.recorder.ids() == ids, what="the first try")
    began = time.monotonic()
    a.consumer.stop()
    assert time.monotonic() - began < 5
    assert list(bench.pending(0)) == ids
