"""Several keys and shards at once: what goes on beside what, how much is read ahead, what a crash repeats."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from redis_stream_coord import Message, Outgoing
from tests.integration.kit import GROUP, Bench, Crew, Recorder, taking_at_most, two_servers
from tests.waiting import eventually

pytestmark = two_servers


def fill_key(bench: Bench, number: int, count: int = 1, shard: int = 0) -> list[str]:
    """Publish so many entries of the `number`-th key of a shard; return their ids."""
    key = bench.key_of(shard, number)
    many = [Outgoing(fields={"n": str(n)}, key=key) for n in range(count)]
    return [receipt.id for receipt in bench.producer.publish_many(many)]


def is_key(bench: Bench, number: int) -> bytes:
    return bench.key_of(0, number).encode()


# --- partition keys -------------------------------------------------------------------------------------------------


def test_another_key_goes_on_while_one_is_in_its_handler(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    a = crew.start("a", concurrency=2)
    slow = is_key(bench, 0)
    a.recorder.hold(lambda message: message.key == slow)
    held = fill_key(bench, 0, 3)
    eventually(lambda: a.recorder.ids() == held[:1], what="the slow key in its handler")
    # It comes when the other one is at work already, not together with it.
    others = fill_key(bench, 1, 3)
    a.finishes(*others)
    assert a.recorder.ids() == [held[0], *others]
    a.recorder.release()
    a.finishes(*held)
    assert [one.id for one in a.recorder.began if one.key == slow] == held


def test_so_many_keys_at_once_and_each_in_order(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    lock, running, most = threading.Lock(), set[bytes | None](), 0

    def handle(message: Message) -> None:
        nonlocal most
        with lock:
            assert message.key not in running
            running.add(message.key)
            most = max(most, len(running))
        time.sleep(0.002)
        with lock:
            running.remove(message.key)

    keys = [bench.key_of(0, number) for number in range(6)]
    many = [Outgoing(fields={"n": str(n)}, key=keys[n * n % 6]) for n in range(150)]
    published = bench.producer.publish_many(many)
    a = crew.start("a", Recorder(handle), concurrency=3)
    a.finishes(*[receipt.id for receipt in published])
    assert most == 3
    for key in keys:
        expected = [receipt.id for one, receipt in zip(many, published, strict=True) if one.key == key]
        assert [one.id for one in a.recorder.began if one.key == key.encode()] == expected


def test_without_concurrency_a_shard_has_one_handler(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    a = crew.start("a")
    slow = is_key(bench, 0)
    a.recorder.hold(lambda message: message.key == slow)
    held = fill_key(bench, 0)
    others = fill_key(bench, 1, 2)
    eventually(lambda: len(bench.pending(0)) == 3, what="all of them read")
    bench.heartbeats_pass("a")
    assert a.recorder.ids() == held
    a.recorder.release()
    a.finishes(*others)
    assert a.recorder.ids() == held + others


def test_position_stays_before_the_smallest_unfinished_entry(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    first = bench.fill(0)
    a = crew.start("a", concurrency=4)
    a.finishes(*first)
    eventually(lambda: bench.fence(0).get("position") == first[0], what="the position")
    slow = is_key(bench, 1)
    a.recorder.hold(lambda message: message.key == slow)
    held = fill_key(bench, 1, 2)
    others = fill_key(bench, 2, 5)
    a.finishes(*others)
    eventually(lambda: list(bench.pending(0)) == held, what="the acknowledgements of the others")
    position = tuple(map(int, bench.fence(0)["position"].split("-")))
    assert tuple(map(int, first[0].split("-"))) <= position < tuple(map(int, held[0].split("-")))
    a.recorder.release()
    a.finishes(*held)
    eventually(lambda: bench.fence(0)["position"] == others[-1], what="the position at the end")


def next_delivery(bench: Bench) -> list[int]:
    """Of each pending entry the number of the delivery that comes next."""
    rows = bench.redis.xpending_range(bench.stream_key(0), GROUP, "-", "+", 10)
    return [row["times_delivered"] for row in rows]


def test_crash_with_holes_delivers_only_what_was_not_finished(bench: Bench, crew: Crew, tmp_path: Path) -> None:
    bench.create(shards=1)
    child = crew.child("child", tmp_path, concurrency=3, hold_key=bench.key_of(0))
    child.hold()
    held = fill_key(bench, 0, 2)
    others = fill_key(bench, 1, 3) + fill_key(bench, 2, 3)
    child.notes_eventually("finished", len(others))
    eventually(lambda: list(bench.pending(0)) == held, what="the acknowledgements of the others")
    # It is written down a little later than the handler began.
    eventually(lambda: next_delivery(bench) == [2, 1], what="the count of what is in the handler")
    child.kill()
    b = crew.start("b", concurrency=3)
    b.finishes(*held)
    later = fill_key(bench, 1)
    b.finishes(*later)
    assert b.recorder.ids() == held + later
    # Only the first was in a handler when the process died.
    assert [one.deliveries for one in b.recorder.began] == [2, 1, 1]


def test_ack_delete_leaves_nothing_behind_where_keys_finish_in_any_order(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    a = crew.start("a", Recorder(lambda message: message.ack_delete()), concurrency=4)
    slow = is_key(bench, 0)
    a.recorder.hold(lambda message: message.key == slow)
    held = fill_key(bench, 0)
    others = [entry_id for number in range(1, 4) for entry_id in fill_key(bench, number)]
    a.finishes(*others)
    eventually(lambda: [one for one, _ in bench.redis.xrange(bench.stream_key(0))] == held, what="the others deleted")
    a.recorder.release()
    eventually(lambda: bench.redis.xlen(bench.stream_key(0)) == 0, what="the last one deleted")


# --- shards ---------------------------------------------------------------------------------------------------------


def test_slow_shard_does_not_hold_up_the_others(bench: Bench, crew: Crew) -> None:
    bench.create(shards=3)
    a = crew.start("a")
    a.recorder.hold(lambda message: message.shard == 0)
    held = bench.fill(0, 3)
    eventually(lambda: a.recorder.ids(0) == held[:1], what="the slow shard in its handler")
    for _ in range(3):
        others = bench.fill(1, 20) + bench.fill(2, 20)
        a.finishes(*others)
    assert a.recorder.ids(0) == held[:1]
    a.recorder.release()
    a.finishes(*held)


def test_many_shards_take_turns_on_few_threads(bench: Bench, crew: Crew) -> None:
    shards, count = 8, 12
    bench.create(shards=shards)
    for shard in range(shards):
        fill_key(bench, 0, count, shard)
    lock, running, most = threading.Lock(), 0, 0

    def handle(_: Message) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.003)
        with lock:
            running -= 1

    a = crew.start("a", Recorder(handle), handler_threads=2)
    eventually(lambda: len(a.recorder.done()) == shards * count, within_seconds=20, what="everything")
    assert most == 2
    # Whenever one shard has been served so often, every other one has been served almost as often. Shards are claimed
    # one after another, so the first ones have a start.
    order = [one.shard for one in a.recorder.began]
    start = max(order.index(shard) for shard in range(shards))
    served = [order[start : start + 4 * shards].count(shard) for shard in range(shards)]
    assert min(served) >= 2, served
    assert max(served) <= 6, served


# --- reading ahead --------------------------------------------------------------------------------------------------


def test_no_more_entries_are_read_ahead_than_asked_for(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    ids = fill_key(bench, 0, 60)
    a = crew.prepare("a", prefetch=8)
    a.recorder.hold()
    a.consumer.start()
    eventually(lambda: len(bench.pending(0)) >= 8, what="entries read ahead")
    bench.heartbeats_pass("a")
    # And one is in the handler.
    assert 8 <= len(bench.pending(0)) <= 9
    a.recorder.release()
    a.finishes(*ids)
    assert a.recorder.ids() == ids


def test_no_more_bytes_are_read_ahead_than_asked_for(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    megabyte = "x" * (1 << 20)
    key = bench.key_of(0)
    ids = [bench.producer.publish({"data": megabyte}, key=key).id for _ in range(12)]
    a = crew.prepare("a", prefetch_bytes=4 << 20)
    a.recorder.hold()
    a.consumer.start()
    eventually(lambda: a.recorder.ids(), what="an entry in the handler")
    bench.heartbeats_pass("a")
    # Each is a little larger than a megabyte: three fit, and one is in the handler.
    assert 3 <= len(bench.pending(0)) <= 4
    a.recorder.release()
    a.finishes(*ids, within_seconds=20)
    assert a.recorder.ids() == ids


def test_entry_larger_than_the_room_gets_through_alone(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    key = bench.key_of(0)
    ids = [bench.producer.publish({"data": "x" * 50_000}, key=key).id for _ in range(4)]
    a = crew.prepare("a", prefetch_bytes=1000)
    a.recorder.hold()
    a.consumer.start()
    eventually(lambda: a.recorder.ids(), what="an entry in the handler")
    bench.heartbeats_pass("a")
    assert len(bench.pending(0)) <= 2
    a.recorder.release()
    a.finishes(*ids)
    assert a.recorder.ids() == ids


# --- ownership ------------------------------------------------------------------------------------------------------


def test_message_knows_whether_it_is_still_owned_and_tokens_grow(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    kept: list[Message] = []
    a = crew.start("a", Recorder(kept.append))
    ids = bench.fill(0)
    a.finishes(*ids)
    assert kept[0].owned
    with taking_at_most(10.0, "stopping"):
        a.consumer.stop()
    assert not kept[0].owned
    b = crew.start("b", Recorder(kept.append))
    b.finishes(*bench.fill(0))
    assert kept[1].owned
    assert kept[1].token > kept[0].token
    assert kept[1].token == (bench.view().incarnation, bench.view().shards[0].token)
