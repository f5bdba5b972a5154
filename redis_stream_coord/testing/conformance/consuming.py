"""Real consumers: everything is handled in order, across handoff, failure, pause, stop and restart."""

from __future__ import annotations

from ...models import Message, Outgoing, Timings
from ...policies import DeadLetter, Retry
from .bench import Bench
from .catalogue import case

_QUICK = Retry(backoff_seconds=0.01, max_backoff_seconds=0.05)
# Nobody expires by accident, and nothing that a case waits for can have come by the interval.
STEADY = Timings(heartbeat_seconds=5.0, lease_seconds=30.0, rebalance_seconds=30.0)


class Noted:
    """A handler that notes what it is given."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def __call__(self, message: Message) -> None:
        self.messages.append(message)

    def numbers(self, key: str | None = None) -> list[str]:
        return [m.text("n") for m in list(self.messages) if key is None or m.key == key.encode()]


def publish(bench: Bench, count: int, first: int = 0) -> None:
    entries = (Outgoing(fields={"n": str(n)}, key=f"key-{n % 5}") for n in range(first, first + count))
    bench.producer.publish_many(entries)


def nothing_pending(bench: Bench, shards: int) -> bool:
    return not any(bench.pending(shard) for shard in range(shards))


@case
def everything_is_handled_in_order_and_acknowledged(bench: Bench) -> None:
    """Entries of a key are handled in the order in which they were published, each once, and acknowledged."""
    bench.create(timings=STEADY)
    noted = Noted()
    bench.start("a", noted)
    publish(bench, 100)
    bench.until(lambda: len(noted.messages) >= 100, "100 entries")
    for key in range(5):
        assert noted.numbers(f"key-{key}") == [str(n) for n in range(key, 100, 5)]
    bench.until(lambda: nothing_pending(bench, 4), "all acknowledgements")


@case
def lone_entry_wakes_its_consumer(bench: Bench) -> None:
    """An idle consumer hears of an entry at once, and of a change of the group too, not at its next heartbeat."""
    bench.create(timings=Timings(heartbeat_seconds=600.0, lease_seconds=2000.0, rebalance_seconds=2000.0))
    noted, others = Noted(), Noted()
    bench.start("a", noted)
    bench.settled("a")
    for shard in range(4):
        bench.fill(shard)
        bench.until(lambda: len(noted.messages) == bench.published, "the entry")
    b = bench.start("b", others)
    bench.settled("a", "b")
    b.stop()
    bench.settled("a")


@case
def handoff_repeats_and_loses_nothing(bench: Bench) -> None:
    """While members come and go in an orderly way, everything is handled exactly once and in order."""
    bench.create(timings=STEADY)
    noted = Noted()
    a = bench.start("a", noted)
    publish(bench, 50)
    b = bench.start("b", noted)
    publish(bench, 50, 50)
    bench.settled("a", "b")
    a.stop()
    publish(bench, 50, 100)
    bench.settled("b")
    bench.until(lambda: len(noted.messages) >= 150, "150 entries")
    b.stop()
    assert len(noted.messages) == 150
    for key in range(5):
        assert noted.numbers(f"key-{key}") == [str(n) for n in range(key, 150, 5)]
    assert nothing_pending(bench, 4)


@case
def failure_is_tried_again_in_place(bench: Bench) -> None:
    """A handler that fails gets the same entry again, before any later one of its shard, with a higher count."""
    bench.create(shards=1, timings=STEADY)
    seen: list[tuple[str, int]] = []

    def fail_twice(message: Message) -> None:
        seen.append((message.id, message.deliveries))
        if message.deliveries < 3:
            raise ValueError("on purpose")

    entries = bench.fill(0, 2)
    bench.start("a", fail_twice, retry=_QUICK)
    bench.until(lambda: len(seen) >= 6, "three tries each")
    assert seen == [(entry, count) for entry in entries for count in (1, 2, 3)]


@case
def hopeless_entry_goes_to_the_dead_letters(bench: Bench) -> None:
    """An entry that fails too often is put aside with its fields and the reason, and the next ones get through."""
    bench.create(shards=1, timings=STEADY)
    key, noted = bench.key_of(0), Noted()

    def handle(message: Message) -> None:
        if "bad" in message.fields:
            raise ValueError("on purpose")
        noted(message)

    bench.producer.publish({"bad": "1"}, key=key)
    bench.producer.publish({"n": "1"}, key=key)
    bench.start("a", handle, retry=_QUICK, poison=DeadLetter(bench.dead, after_deliveries=2))
    bench.until(lambda: noted.messages, "the good one")
    bench.until(lambda: nothing_pending(bench, 1), "all acknowledgements")
    assert bench.raw("XLEN", bench.dead) == 1


@case
def paused_shards_are_kept_and_not_read(bench: Bench) -> None:
    """A paused consumer keeps its shards and hands out nothing, until it is resumed."""
    bench.create(shards=2, timings=STEADY)
    noted = Noted()
    a = bench.start("a", noted)
    bench.settled("a")
    a.pause([0])
    bench.fill(0)
    bench.fill(1)
    bench.until(lambda: [message.shard for message in noted.messages] == [1], "the entry of the other shard")
    assert set(bench.view().owners.values()) == {"a"}
    a.resume()
    bench.until(lambda: len(noted.messages) == 2, "the entry that waited")


@case
def held_shards_come_back_without_movement(bench: Bench) -> None:
    """After `stop(hold=True)` a restart under the same member id finds its shards; those of others do not move."""
    bench.create(timings=STEADY)
    a = bench.start("a", Noted())
    bench.start("b", Noted())
    before = bench.settled("a", "b")
    a.stop(hold=True)
    noted = Noted()
    again = bench.start("a", noted)
    bench.until(lambda: again.assignment == set(before.members["a"].assigned), "the same shards")
    after = bench.view()
    assert after.members["b"].assigned == before.members["b"].assigned
    bench.fill(min(again.assignment))
    bench.until(lambda: noted.messages, "an entry")


@case
def seek_is_heard_by_running_consumers(bench: Bench) -> None:
    """A running consumer whose group is moved back gets everything again."""
    bench.create(shards=1, timings=STEADY)
    noted = Noted()
    bench.start("a", noted)
    entries = bench.fill(0, 5)
    bench.until(lambda: len(noted.messages) == 5, "five entries")
    bench.until(lambda: nothing_pending(bench, 1), "all acknowledgements")
    bench.admin.seek(bench.stream, group="billing", to="oldest", reason="a case")
    bench.until(lambda: [message.id for message in noted.messages] == entries * 2, "all of them once more")
