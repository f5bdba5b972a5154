"""A handler that does not return: its shard goes elsewhere, everything else goes on."""

from __future__ import annotations

import threading
import time

import pytest

from redis_stream_coord import Consumer, FencedError, Message, Timings
from tests.integration.kit import GROUP, SLOW, Bench, Crew, Recorder, two_servers
from tests.waiting import eventually

pytestmark = two_servers

LIMIT_SECONDS = 1.0
TIMINGS = Timings(heartbeat_seconds=0.15, lease_seconds=1.5, rebalance_seconds=30.0)


class Counter:
    """In place of a metric: notes what is added to it."""

    def __init__(self) -> None:
        self.added: list[dict[str, object]] = []

    def add(self, amount: int, attributes: dict[str, object]) -> None:
        self.added += [attributes] * amount


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    monkeypatch.setattr("redis_stream_coord.telemetry.stuck_handlers", counter)
    return counter


def test_stuck_shard_moves_to_another_member_and_everything_else_goes_on(
    bench: Bench, crew: Crew, caplog: pytest.LogCaptureFixture, stuck: Counter
) -> None:
    bench.create(shards=4, timings=TIMINGS)
    refused: list[str] = []

    def acknowledge(message: Message) -> None:
        try:
            message.ack()
        except FencedError:
            refused.append(message.id)

    recorders = [Recorder(acknowledge), Recorder(acknowledge)]
    a, b = (
        crew.start(name, recorder, ack="manual", max_handler_seconds=LIMIT_SECONDS)
        for name, recorder in zip("ab", recorders, strict=True)
    )
    bench.settled(["a", "b"])
    eventually(lambda: a.consumer.assignment | b.consumer.assignment == set(range(4)), what="claims")
    shard, other = sorted(a.consumer.assignment)
    a.recorder.hold(lambda message: message.shard == shard)
    ids = bench.fill(shard, 3)
    eventually(lambda: a.recorder.ids(shard) == ids[:1], what="an entry in its handler")
    token = a.recorder.began[-1].token
    # The other member has it, with the entry that was stuck and those behind it, in order.
    eventually(lambda: b.recorder.done(shard) == ids, what="all of them elsewhere")
    assert b.recorder.began[-1].token > token
    bench.settled(["a", "b"])
    view = bench.view()
    assert view.shards[shard].holder == "b"
    counts = [sum(one.holder == name for one in view.shards.values()) for name in "ab"]
    assert max(counts) - min(counts) <= 1
    # The lease goes on, and so do the other shards, those it got in exchange too.
    bench.heartbeats_pass("a")
    health = a.consumer.health
    assert health.state == "member"
    assert health.lease_remaining_seconds > 0
    kept = [index for index, one in view.shards.items() if one.holder == "a"]
    assert len(kept) == 2
    if other in kept:
        assert a.kinds(other)[-1] == "assigned"
    for index in kept:
        (one,) = bench.fill(index)
        eventually(lambda index=index, one=one: one in a.recorder.done(index), what="another shard")
    assert a.kinds(shard)[-1] == "lost"
    assert refused == []
    a.recorder.release()
    eventually(lambda: refused == ids[:1], what="a refused acknowledgement")
    eventually(lambda: not bench.pending(shard), what="all acknowledgements")
    # By name: which entry, on which shard, for how long.
    (record,) = [one for one in caplog.records if "handler has not returned" in one.getMessage()]
    assert ids[0] in record.getMessage()
    assert record.__dict__["shard"] == shard
    assert [attributes["shard"] for attributes in stuck.added] == [shard]
    assert bench.view().violations() == []


def test_lone_member_keeps_its_other_shards_and_gets_the_stuck_one_again(bench: Bench, crew: Crew) -> None:
    bench.create(shards=3, timings=TIMINGS)
    a = crew.start("a", max_handler_seconds=LIMIT_SECONDS)
    a.owns(0, 1, 2)
    a.recorder.hold(lambda message: message.shard == 0)
    ids = bench.fill(0, 3)
    eventually(lambda: "lost" in a.kinds(0), what="the shard given up")
    for _ in range(3):
        for shard in (1, 2):
            (one,) = bench.fill(shard)
            eventually(lambda shard=shard, one=one: one in a.recorder.done(shard), what="another shard")
        bench.heartbeats_pass("a")
    assert a.consumer.health.state == "member"
    assert a.kinds(1) == a.kinds(2) == ["assigned"]
    # The entry is in no second handler of this process, even when it gets the shard again.
    eventually(lambda: a.kinds(0).count("assigned") >= 2, what="the shard again")
    assert a.recorder.ids(0) == ids[:1]
    a.recorder.release()
    eventually(lambda: a.recorder.done(0) == ids, what="the rest")
    eventually(lambda: not bench.pending(0), what="all acknowledgements")
    assert bench.view().violations() == []


def test_stop_does_not_wait_for_a_stuck_handler(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=TIMINGS)
    a = crew.start("a", max_handler_seconds=LIMIT_SECONDS, shutdown_seconds=20.0)
    a.owns(0, 1)
    a.recorder.hold(lambda message: message.shard == 0)
    ids = bench.fill(0)
    eventually(lambda: "lost" in a.kinds(0), what="the shard given up")
    began = time.monotonic()
    a.consumer.stop()
    assert time.monotonic() - began < 10
    b = crew.start("b")
    eventually(lambda: b.recorder.done(0) == ids, what="the entry elsewhere")


def test_handler_within_its_time_is_left_alone(bench: Bench, crew: Crew, stuck: Counter) -> None:
    bench.create(shards=1, timings=TIMINGS)
    a = crew.start("a", Recorder(lambda _: time.sleep(0.3)), max_handler_seconds=1.5)
    # Together they take longer than one may.
    ids = bench.fill(0, 6)
    a.finishes(*ids)
    assert a.kinds(0) == ["assigned"]
    assert stuck.added == []


def test_waiting_for_a_thread_is_not_the_time_of_the_handler(bench: Bench, crew: Crew, stuck: Counter) -> None:
    bench.create(shards=4, timings=TIMINGS)
    ids = [(shard, one) for shard in range(4) for one in bench.fill(shard, 2)]
    # One thread for four shards: each entry waits longer for it than a handler may take.
    a = crew.start("a", Recorder(lambda _: time.sleep(0.4)), handler_threads=1, max_handler_seconds=LIMIT_SECONDS)
    eventually(lambda: len(a.recorder.done()) == len(ids), within_seconds=20, what="all of them")
    assert stuck.added == []
    assert sorted((one.shard, one.id) for one in a.recorder.began) == sorted(ids)


@pytest.mark.parametrize("way", ["one thread", "loop"])
def test_entry_that_waits_for_its_handler_does_not_hold_its_shard(bench: Bench, crew: Crew, way: str) -> None:
    bench.create(shards=2, timings=SLOW)
    released = threading.Event()
    taken: list[int] = []

    def take(message: Message) -> None:
        taken.append(message.shard)
        assert released.wait(30)

    def loop() -> None:
        for message in consumer:
            take(message)

    handler = take if way == "one thread" else None
    consumer = Consumer(bench.stream, group=GROUP, redis=bench.url, member="a", handler=handler, handler_threads=1)
    thread = threading.Thread(target=loop if way == "loop" else consumer.run)
    thread.start()
    try:
        eventually(lambda: consumer.assignment == {0, 1}, what="both shards")
        ids = {shard: bench.fill(shard) for shard in range(2)}
        eventually(lambda: taken, what="one in its handler")
        eventually(lambda: bench.pending(0) and bench.pending(1), what="both entries read")
        b = crew.start("b", weight=0.001)
        eventually(lambda: "b" in bench.view().members, what="somebody to take over")
        consumer.request_stop()
        # A rebalance timeout is a minute here, and so is the lease.
        b.finishes(*ids[1 - taken[0]])
        assert [(one.shard, one.deliveries) for one in b.recorder.began] == [(1 - taken[0], 1)]
        assert len(taken) == 1
    finally:
        released.set()
        consumer.request_stop()
        thread.join(20)
    assert not thread.is_alive()
    eventually(lambda: not bench.pending(0) and not bench.pending(1), what="all acknowledgements")
    assert len(taken) == 1


REBALANCE = Timings(heartbeat_seconds=0.15, lease_seconds=3.0, rebalance_seconds=1.5)


def test_member_fenced_for_a_stuck_handler_leaves_that_shard_to_others_until_it_returns(
    bench: Bench, crew: Crew
) -> None:
    bench.create(shards=3, timings=REBALANCE)
    released = [threading.Event() for _ in range(3)]
    recorder = Recorder(lambda message: bool(released[message.shard].wait(30)))
    a = crew.start("a", recorder, shutdown_seconds=1.0)
    a.owns(0, 1, 2)
    ids = [bench.fill(shard) for shard in range(3)]
    eventually(lambda: len(recorder.ids()) == 3, what="all shards in their handlers")
    b = crew.start("b")
    try:
        (stuck,) = eventually(lambda: list(bench.view().members["a"].revoking), what="a shard to be given up")
        for shard in {0, 1, 2} - {stuck}:
            released[shard].set()
        fenced = lambda: bench.events("member_fenced", "member_expired")  # noqa: E731
        eventually(lambda: fenced(), what="a fenced for not draining in time")
        bench.settled(["a", "b"])
        # Wherever the shard is now, its entries are handled by the one whose handler is free.
        for _ in range(3):
            for shard in range(3):
                ids[shard] += bench.fill(shard)
            everything = {(shard, one) for shard, of_shard in enumerate(ids) for one in of_shard}
            eventually(
                lambda expected=everything: (
                    expected == {(one.shard, one.id) for one, _ in recorder.ended + b.recorder.ended}
                ),
                within_seconds=20,
                what="everything",
            )
            bench.heartbeats_pass("a")
        assert recorder.ids(stuck) == ids[stuck][:1]
        assert b.recorder.done(stuck) == ids[stuck]
        assert len(fenced()) == 1, fenced()
        health = a.consumer.health
        assert f"shard {stuck}: the handler" in health.waits_for
    finally:
        for event in released:
            event.set()
    eventually(lambda: a.consumer.health.ok and not a.consumer.health.waits_for, what="that a is well again")
    eventually(lambda: not any(bench.pending(shard) for shard in range(3)), within_seconds=20, what="acknowledgements")
    bench.settled(["a", "b"])
