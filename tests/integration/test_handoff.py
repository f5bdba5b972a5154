"""A shard going from one member to another: in order, under new tokens, and never to two at once."""

from __future__ import annotations

import threading

import pytest

from redis_stream_coord import CoordError, FencedError, Message, Timings
from redis_stream_coord.commands import claim, read
from redis_stream_coord.models import Held
from tests.integration.kit import GROUP, SLOW, STEADY, Bench, Call, Crew, Peer, Recorder, two_servers
from tests.waiting import eventually

# Somebody may expire while a handler takes its time.
PATIENT = Timings(heartbeat_seconds=0.2, lease_seconds=1.2, rebalance_seconds=20.0)


# --- revoke before assign -------------------------------------------------------------------------------------------


def test_shard_is_not_owned_by_the_next_before_the_handler_finished_and_was_acknowledged(
    bench: Bench, crew: Crew
) -> None:
    bench.create(shards=2, timings=STEADY)
    a = crew.start("a")
    a.owns(0, 1)
    a.recorder.hold(lambda message: message.shard == 1)
    ids = bench.fill(1, 3)
    eventually(lambda: a.recorder.ids(1), what="an entry in the handler")
    pending_at_the_start: list[dict[str, str]] = []
    b = crew.start("b", Recorder(lambda message: pending_at_the_start.append(bench.pending(1))))
    eventually(lambda: bench.view().shards[1].state == "revoking", what="the revoke")
    bench.heartbeats_pass("a")
    bench.heartbeats_pass("b")
    view = bench.view()
    assert view.shards[1].holder == "a"
    assert view.members["b"].pending == {1}
    assert b.consumer.assignment == frozenset()
    assert "shards [1]" in a.consumer.health.waits_for
    # Other shards go on meanwhile.
    a.finishes(*bench.fill(0))
    a.recorder.release()
    b.finishes(*ids[1:])
    assert a.recorder.ids(1) == ids[:1]
    assert b.recorder.ids(1) == ids[1:]
    assert ids[0] not in pending_at_the_start[0]
    (_, finished) = next(entry for entry in a.recorder.ended if entry[0].shard == 1)
    revoked = next(call for call in a.calls if call.kind == "revoked")
    assigned = next(call for call in b.calls if call.kind == "assigned")
    assert finished <= revoked.began
    assert revoked.ended is not None
    assert revoked.ended <= assigned.began
    assert [event["token"] for event in bench.events("shard_released")] == [str(view.shards[1].token)]


def test_member_that_does_not_drain_in_time_is_fenced(bench: Bench, crew: Crew) -> None:
    timings = Timings(heartbeat_seconds=0.15, lease_seconds=6.0, rebalance_seconds=0.8)
    bench.create(shards=2, timings=timings)
    refused: list[FencedError] = []

    def acknowledge(message: Message) -> None:
        try:
            message.ack()
        except FencedError as error:
            refused.append(error)

    a = crew.start("a", Recorder(acknowledge), ack="manual")
    a.owns(0, 1)
    a.recorder.hold(lambda message: message.shard == 1)
    (entry_id,) = bench.fill(1)
    eventually(lambda: a.recorder.ids(1), what="the entry in the handler")
    # Held, so that the late acknowledgement comes while its entry is pending for the new owner.
    others = Recorder()
    others.hold()
    b, c = crew.start("b", others), crew.start("c", others)
    eventually(lambda: others.ids(1) == [entry_id], what="the entry with its new owner")
    assert [event["member"] for event in bench.events("member_fenced")] == ["a"]
    eventually(lambda: a.kinds(1) == ["assigned", "lost"], what="the loss")
    a.recorder.release()
    eventually(lambda: refused, what="a refused acknowledgement")
    assert refused[0].shard == 1
    bench.heartbeats_pass("b", 1)
    assert set(bench.pending(1)) == {entry_id}
    assert bench.pending(1)[entry_id] in ("b", "c")
    others.release()
    eventually(lambda: not bench.pending(1), what="the acknowledgement of the owner")
    assert others.done(1) == [entry_id]
    # It is a member again, and works: now there are two shards for it.
    for other in (b, c):
        other.consumer.stop()
    bench.settled(["a"])
    a.owns(0, 1)
    a.finishes(*bench.fill(1))


@pytest.mark.parametrize("end", ["leaves", "dies"])
def test_shard_that_comes_back_before_it_was_drained_stays_under_its_token(bench: Bench, crew: Crew, end: str) -> None:
    bench.create(shards=2, timings=PATIENT if end == "dies" else STEADY)
    a = crew.start("a")
    a.owns(0, 1)
    before = bench.view()
    a.recorder.hold(lambda message: message.shard == 1)
    ids = bench.fill(1, 3)
    eventually(lambda: a.recorder.ids(1), what="an entry in the handler")
    b = Peer(bench, "b")
    b.beat()
    eventually(lambda: a.consumer.assignment == {0}, what="the revoke")
    if end == "leaves":
        assert b.beat(leaving=True).status == "LEFT"
    view = bench.settled(["a"])
    assert [event["type"] for event in bench.events("revoke_cancelled")] == ["revoke_cancelled"]
    assert view.shards[1].token == before.shards[1].token
    a.owns(0, 1)
    a.recorder.release()
    ids += bench.fill(1, 2)
    a.finishes(*ids)
    # Each once: what was in the handler is not handed out a second time.
    assert a.recorder.ids(1) == ids
    assert a.kinds(1) == ["assigned"]
    eventually(lambda: not bench.pending(1), what="all acknowledgements")
    assert bench.view().shards[1].token == before.shards[1].token


# --- reports --------------------------------------------------------------------------------------------------------


def test_revoked_report_counts_only_with_shard_and_token(bench: Bench) -> None:
    bench.create(shards=2, timings=STEADY)
    a, b = Peer(bench, "a"), Peer(bench, "b")
    a.beat()
    b.beat()
    a.beat()
    token = a.revoking[1]
    for stale in ([Held(1, token - 1)], [Held(1, token + 1)], [Held(0, token)], [a.held(0)], [Held(7, token)]):
        record = bench.record_of()
        a.beat(revoked=stale)
        assert bench.record_of() == record, stale
    a.beat(revoked=[Held(1, token)])
    view = bench.view()
    assert (view.shards[1].holder, view.shards[1].state) == ("b", "assigned")
    assert view.shards[1].token > token


def test_delayed_duplicate_of_a_report_does_not_free_a_shard_that_came_back(bench: Bench) -> None:
    bench.create(shards=2, timings=STEADY)
    a, b = Peer(bench, "a"), Peer(bench, "b")
    a.beat()
    b.beat()
    a.beat()
    old = a.held(1)
    a.beat(revoked=[old])
    b.beat()
    b.beat(leaving=True, revoked=[b.held(1)])
    a.beat()
    assert set(a.assigned) == {0, 1}
    assert a.assigned[1] > old.token
    # Also while that shard is to be given up once more, under its new token.
    for joiner in (None, Peer(bench, "c")):
        if joiner is not None:
            joiner.beat()
            a.beat()
            assert set(a.revoking) == {1}
        record = bench.record_of()
        a.beat(revoked=[old])
        assert bench.record_of() == record


def test_absence_from_a_report_is_no_release(bench: Bench) -> None:
    bench.create(shards=2, timings=STEADY)
    a, b = Peer(bench, "a"), Peer(bench, "b")
    a.beat()
    b.beat()
    a.beat()
    record = bench.record_of()
    for owned in ([], [a.held(0)], [a.held(1)]):
        reply = a.beat(owned=owned)
        assert reply.holdings is not None
        assert reply.holdings.assigned.keys() == {0}
        assert reply.holdings.revoking.keys() == {1}
    assert bench.record_of() == record


def test_member_that_drains_is_granted_nothing_new(bench: Bench) -> None:
    bench.create(shards=4, timings=STEADY)
    a, b, c = (Peer(bench, name) for name in "abc")
    a.beat()
    b.beat()
    a.beat()
    a.beat(revoked=[a.held(shard) for shard in a.revoking])
    b.beat()
    c.beat()
    b.beat()
    assert (set(a.assigned), set(b.assigned), set(b.revoking)) == ({0, 1}, {2}, {3})
    assert a.beat(leaving=True, revoked=[a.held(0), a.held(1)]).status == "LEFT"
    # Both shards are free now. The one is for b, which still drains; the other for c, which does not.
    reply = b.beat()
    assert (reply.status, set(b.assigned), b.pending) == ("REVOKE_PENDING", {2}, {0})
    c.beat()
    assert (set(c.assigned), c.pending) == ({1}, {3})
    assert bench.view().shards[0].state == "free"
    assert b.beat(revoked=[b.held(3)]).status == "OK"
    c.beat()
    assert (set(b.assigned), set(c.assigned)) == ({0, 2}, {1, 3})
    assert bench.view().violations() == []


# --- takeover -------------------------------------------------------------------------------------------------------


def test_takeover_delivers_everything_pending_in_order_before_new_entries(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=STEADY)
    ids = bench.fill(0, 12)
    stream = bench.stream_key(0)
    # Left behind by earlier owners, in no order; two of them acknowledged, one has nothing.
    for consumer, count in (("x", 4), ("y", 3), ("x", 2)):
        bench.redis.xreadgroup(GROUP, consumer, {stream: ">"}, count=count)
    bench.redis.xgroup_createconsumer(stream, GROUP, "idle")
    bench.redis.xack(stream, GROUP, ids[1], ids[5])
    a = crew.start("a")
    left = [entry_id for entry_id in ids if entry_id not in (ids[1], ids[5])]
    a.finishes(*left)
    assert a.recorder.ids() == left
    eventually(lambda: not bench.pending(0), what="all acknowledgements")
    assert bench.consumers(0) == {"a"}


def test_consumers_left_behind_go_when_more_is_pending_than_is_read_at_once(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=STEADY)
    ids = bench.fill(0, 9)
    bench.redis.xreadgroup(GROUP, "x", {bench.stream_key(0): ">"})
    a = crew.start("a", prefetch=3)
    ids += bench.fill(0, 2)
    a.finishes(*ids)
    assert a.recorder.ids() == ids
    eventually(lambda: bench.consumers(0) == {"a"}, what="only the owner left")


def test_consumer_with_pending_entries_is_not_deleted(bench: Bench) -> None:
    bench.create(shards=1, timings=STEADY)
    ids = bench.fill(0, 4)
    bench.redis.xreadgroup(GROUP, "x", {bench.stream_key(0): ">"})
    a = Peer(bench, "a")
    a.beat()
    bench.runner.run(claim(bench.keys, a.fence(0)))
    first = bench.runner.run(read(bench.keys, a.fence(0), after="0-0", count=2))
    assert [entry.id for entry in first.entries] == ids[:2]
    assert not first.caught_up
    assert bench.pending(0) == dict(zip(ids, ["a", "a", "x", "x"], strict=True))
    second = bench.runner.run(read(bench.keys, a.fence(0), after=ids[1], count=10))
    assert [entry.id for entry in second.entries] == ids[2:]
    assert second.caught_up
    assert set(bench.pending(0).values()) == {"a"}
    # Left behind by hand, below what was received: not ours to read, and its entry must not go with it.
    bench.redis.xclaim(bench.stream_key(0), GROUP, "x", 0, [ids[0]])
    last = bench.runner.run(read(bench.keys, a.fence(0), after=ids[2], count=10))
    assert last.caught_up
    assert bench.pending(0)[ids[0]] == "x"
    assert bench.consumers(0) == {"a", "x"}


def test_lost_read_reply_loses_nothing_and_counts_no_delivery(bench: Bench) -> None:
    bench.create(shards=1, timings=STEADY)
    ids = bench.fill(0, 3)
    a = Peer(bench, "a")
    a.beat()
    bench.runner.run(claim(bench.keys, a.fence(0)))
    for _ in range(3):
        page = bench.runner.run(read(bench.keys, a.fence(0), after=ids[0], count=10))
        assert [entry.id for entry in page.entries] == (ids if _ == 0 else ids[1:])
        assert {entry.deliveries for entry in page.entries} == {1}


# --- callbacks ------------------------------------------------------------------------------------------------------


def test_callbacks_wait_for_each_other_and_the_first_message_waits_for_on_assigned(bench: Bench, crew: Crew) -> None:
    bench.create(shards=4, timings=STEADY)
    ids = [bench.fill(shard)[0] for shard in range(4)]
    go_on = threading.Event()
    a = crew.prepare("a")
    a.on_call = lambda _: go_on.wait(10)
    a.consumer.start()
    eventually(lambda: a.calls, what="on_assigned")
    bench.heartbeats_pass("a")
    assert a.recorder.ids() == []
    b = crew.start("b")
    eventually(lambda: bench.view().members["a"].revoking, what="the revoke")
    assert [call.kind for call in a.calls] == ["assigned"]
    go_on.set()
    bench.settled(["a", "b"])
    a.owns(0, 1)
    eventually(lambda: set(a.recorder.done()) | set(b.recorder.done()) == set(ids), what="all entries")
    for handled in a.recorder.began:
        assigned = next(call for call in a.calls if handled.shard in call.shards)
        assert assigned.ended is not None
        assert assigned.ended <= handled.began


def test_on_revoked_comes_before_the_last_acknowledgements_also_at_stop(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=SLOW)
    kept: list[Message] = []
    a = crew.start("a", Recorder(kept.append), ack="manual")
    ids = bench.fill(0, 3)
    a.finishes(*ids)
    assert set(bench.pending(0)) == set(ids)

    def acknowledge_all(_: object) -> None:
        for message in kept:
            assert message.owned
            message.ack()

    a.on_call = acknowledge_all
    a.consumer.stop()
    assert a.kinds(0) == ["assigned", "revoked"]
    assert bench.pending(0) == {}
    assert bench.fence(0)["position"] == ids[-1]


def test_failing_callback_stops_the_consumer_and_is_raised(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1, timings=STEADY)

    def fail(call: Call) -> None:
        if call.kind == "assigned":
            raise ZeroDivisionError("on purpose")

    a = crew.prepare("a")
    a.on_call = fail
    a.consumer.start()
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        a.consumer.wait(5)
    assert bench.view().members == {}


def test_stop_may_be_asked_for_in_a_handler_and_in_a_callback(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=STEADY)
    a = crew.start("a")
    a.recorder.action = lambda _: a.consumer.request_stop()
    a.owns(0, 1)
    bench.fill(0)
    assert a.consumer.wait(5)
    b = crew.start("b")
    b.on_call = lambda _: b.consumer.request_stop()
    assert b.consumer.wait(5)
    assert bench.view().members == {}
    assert bench.pending(0) == {}


@two_servers
def test_stop_waits_for_handlers_no_longer_than_it_is_told(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=STEADY)
    a = crew.start("a", shutdown_seconds=0.3)
    a.owns(0, 1)
    a.recorder.hold()
    (entry_id,) = bench.fill(0)
    eventually(lambda: a.recorder.ids(), what="the entry in the handler")
    a.consumer.request_stop()
    with pytest.raises(CoordError, match="did not finish within"):
        a.consumer.wait(5)
    # Nobody has to wait for a lease; the entry is delivered again.
    assert bench.view().members == {}
    assert set(bench.pending(0)) == {entry_id}
    b = crew.start("b")
    b.finishes(entry_id)
    assert [handled.deliveries for handled in b.recorder.began] == [2]
