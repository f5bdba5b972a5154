"""The number of shards changes while producers and consumers run."""

from __future__ import annotations

from ...errors import ConflictError
from .bench import Bench, refusal
from .catalogue import case
from .consuming import STEADY, Noted, nothing_pending, publish


def _all_in_order(noted: Noted, count: int) -> None:
    assert len(noted.messages) == count
    for key in range(5):
        assert noted.numbers(f"key-{key}") == [str(n) for n in range(key, count, 5)]


@case
def more_shards_keep_order(bench: Bench) -> None:
    """After growing, every shard has an owner, and entries of a key are handled once and in order across it."""
    bench.create(shards=3, timings=STEADY)
    noted = Noted()
    bench.start("a", noted)
    bench.start("b", noted)
    publish(bench, 50)
    begun = bench.admin.scale(bench.stream, shards=6, reason="a case", wait=False)
    publish(bench, 50, 50)
    assert bench.admin.wait(begun, timeout_seconds=30).state == "COMPLETED"
    publish(bench, 50, 100)
    bench.until(lambda: len(noted.messages) >= 150, "150 entries")
    _all_in_order(noted, 150)
    view = bench.settled("a", "b")
    assert set(view.shards) == set(range(6))
    bench.until(lambda: nothing_pending(bench, 6), "all acknowledgements")


@case
def fewer_shards_lose_nothing(bench: Bench) -> None:
    """After shrinking, what was in the removed shards has been handled, in order, and they have no owner any more."""
    bench.create(shards=6, timings=STEADY)
    noted = Noted()
    publish(bench, 50)
    bench.start("a", noted)
    begun = bench.admin.scale(bench.stream, shards=2, reason="a case", wait=False)
    publish(bench, 50, 50)
    assert bench.admin.wait(begun, timeout_seconds=30).state == "COMPLETED"
    publish(bench, 50, 100)
    bench.until(lambda: len(noted.messages) >= 150, "150 entries")
    _all_in_order(noted, 150)
    bench.until(lambda: set(bench.view().shards) == {0, 1}, "the removed shards to go from the group")


@case
def resharding_is_taken_back(bench: Bench) -> None:
    """A resharding that is rolled back ends at the old number of shards, and nothing is lost or out of order."""
    bench.create(shards=2, timings=STEADY)
    publish(bench, 50)
    begun = bench.admin.scale(bench.stream, shards=4, reason="a case", wait=False)
    bench.admin.rollback(begun, reason="a case", timeout_seconds=30)
    publish(bench, 50, 50)
    noted = Noted()
    bench.start("a", noted)
    bench.until(lambda: len(noted.messages) >= 100, "100 entries")
    _all_in_order(noted, 100)
    assert {bench.producer.route(str(n)).shard for n in range(50)} == {0, 1}


@case
def one_resharding_at_a_time(bench: Bench) -> None:
    """While one is under way another is refused; the same request again finds the one that it began."""
    bench.create(shards=2, timings=STEADY)
    scale = bench.admin.scale
    begun = scale(bench.stream, shards=3, reason="a case", wait=False, request_id="r1")
    assert scale(bench.stream, shards=3, reason="a case", wait=False, request_id="r1").id == begun.id
    refusal(lambda: scale(bench.stream, shards=5, reason="a case", wait=False), ConflictError)
    assert bench.admin.wait(begun, timeout_seconds=30).state == "COMPLETED"
    refusal(lambda: scale(bench.stream, shards=3, reason="a case"), ConflictError)
