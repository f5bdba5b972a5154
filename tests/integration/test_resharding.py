"""Resharding on real servers: consumers alone carry it on, the administrator alone does, nothing is lost on the way."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from redis_stream_coord import (
    AlreadyExistsError,
    ConflictError,
    CoordError,
    NoShardError,
    Producer,
    Resharding,
    RoutingUnavailableError,
    WaitTimeoutError,
)
from redis_stream_coord.commands import Command, Pause, Together
from redis_stream_coord.keys import GroupKeys, StreamKeys
from redis_stream_coord.reshard import drive
from tests.integration.kit import FAST, GROUP, STEADY, Bench, Crew, Recorder, two_servers
from tests.waiting import eventually


def scale(bench: Bench, shards: int, **options: object) -> Resharding:
    return bench.admin.scale(bench.stream, shards=shards, reason="a test", **options)  # type: ignore[arg-type]


def over(bench: Bench) -> Resharding:
    """Wait until nothing is under way; return how it ended."""

    def ended() -> Resharding | None:
        found = bench.monitor.resharding(bench.stream)
        return found if found is not None and not found.active else None

    return eventually(ended, within_seconds=20, what="the end of the resharding")


class Load:
    """A producer that publishes numbered entries of many keys until it is stopped."""

    def __init__(self, bench: Bench) -> None:
        self.published: list[tuple[str, int]] = []
        self.places: set[tuple[int, str]] = set()
        self._stop = threading.Event()
        self._producer = Producer(bench.stream, redis=bench.url)
        self._thread = threading.Thread(target=self._run)
        self.failure: BaseException | None = None

    def _run(self) -> None:
        number = 0
        try:
            while not self._stop.is_set():
                key = f"key-{number % 50}"
                while not self._stop.is_set():
                    try:
                        receipt = self._producer.publish({"n": str(number)}, key=key, event_id=f"event-{number}")
                        break
                    except NoShardError:
                        time.sleep(0.01)
                else:
                    return
                self.published.append((key, number))
                self.places.add((receipt.shard, receipt.id))
                number += 1
                time.sleep(0.001)
        except BaseException as error:
            self.failure = error

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._producer.close()
        if self.failure is not None:
            raise self.failure


def in_order(seen: list[tuple[str, int]], published: list[tuple[str, int]]) -> None:
    """Check that each entry was handled, and those of a key in order."""
    by_key: dict[str, list[int]] = {}
    for key, number in seen:
        numbers = by_key.setdefault(key, [])
        if number not in numbers:
            numbers.append(number)
    assert sorted(number for numbers in by_key.values() for number in numbers) == [n for _, n in published]
    for key, numbers in by_key.items():
        assert numbers == sorted(numbers), key


# --- whoever drives ---------------------------------------------------------------------------------------------------


def test_consumers_alone_carry_it_on_under_load(bench: Bench, crew: Crew) -> None:
    bench.create(shards=3, timings=STEADY)
    seen: list[tuple[str, int]] = []
    for member in ("a", "b"):
        crew.start(member, Recorder(lambda m: seen.append((str(m.key, "ascii"), int(m.text("n"))))))  # type: ignore[arg-type]
    with Load(bench) as load:
        for shards in (7, 2, 4):
            found = scale(bench, shards, wait=False)
            assert found.state == "PREPARING"
            ended = over(bench)
            assert (ended.state, ended.id) == ("COMPLETED", found.id)
            view = bench.settled(["a", "b"])
            assert sorted(view.shards) == list(range(shards))
    numbers = {number for _, number in load.published}
    eventually(lambda: numbers <= {number for _, number in list(seen)}, what="all handled")
    in_order(seen, load.published)


def test_admin_alone_carries_it_on_as_far_as_nothing_is_left(bench: Bench) -> None:
    bench.create(shards=2)
    seen: list[Resharding] = []
    assert scale(bench, 5, progress=seen.append).state == "COMPLETED"
    assert seen[0].state == "PREPARING"
    assert seen[-1].state == "COMPLETED"
    assert sorted(bench.view().shards) == list(range(5))
    bench.fill(4, 3)
    with pytest.raises(WaitTimeoutError, match="shard 4"):
        scale(bench, 2, timeout_seconds=0.5)
    found = bench.monitor.resharding(bench.stream)
    assert found is not None
    # Redis 6.2 does not tell the lag.
    count = None if "lag" not in bench.redis.xinfo_groups(bench.stream_key(4))[0] else 3
    assert (found.state, found.entries_left) == ("DRAINING", count or 0)
    assert [(waiting.group, waiting.shard, waiting.entries) for waiting in found.waits] == [(GROUP, 4, count)]


def test_a_removed_shard_keeps_a_reader_until_it_is_drained(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=STEADY)
    a = crew.start("a")
    a.owns(0, 1)
    a.recorder.hold()
    bench.fill(1, 3)
    eventually(lambda: a.recorder.ids(), what="one in its handler")
    scale(bench, 1, wait=False)
    eventually(lambda: bench.monitor.resharding(bench.stream).state == "DRAINING", what="the decision")  # type: ignore[union-attr]
    assert bench.view().shards[1].readable
    a.recorder.release()
    assert over(bench).state == "COMPLETED"
    eventually(lambda: list(bench.view().shards) == [0], what="the shard is gone")
    eventually(lambda: a.consumer.assignment == {0}, what="one shard")
    assert len(a.recorder.done(1)) == 3


@two_servers
def test_to_none_and_back(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=STEADY)
    a = crew.start("a")
    a.owns(0, 1)
    ids = bench.fill(0, 2)
    scale(bench, 0)
    with pytest.raises(NoShardError):
        bench.producer.publish({"n": "1"}, key="k")
    eventually(lambda: not a.consumer.assignment, what="nothing to own")
    scale(bench, 3)
    a.owns(0, 1, 2)
    bench.producer.refresh()
    a.finishes(*ids, *bench.fill(2, 2))


# --- a driver that dies -----------------------------------------------------------------------------------------------


def steps(bench: Bench, count: int) -> Iterator[None]:
    """Carry the resharding on for so many commands, as a driver that is killed then."""
    saga = drive(StreamKeys(bench.stream))
    result: object = None
    for _ in range(count):
        try:
            step = saga.throw(result) if isinstance(result, CoordError) else saga.send(result)
        except StopIteration:
            return
        if isinstance(step, Pause):
            result = None
        elif isinstance(step, Together):
            result = bench.runner.pipeline(step.commands)
        else:
            assert isinstance(step, Command)
            try:
                result = bench.runner.run(step)
            except CoordError as error:
                result = error
        yield


@two_servers
def test_a_driver_is_replaced_wherever_it_dies(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=STEADY)
    a = crew.start("a")
    a.owns(0, 1)
    ids: list[str] = []
    count = 0
    for died_after in (1, 4, 7, 9, 10, 11, 12, 13, 14, 15, 17):
        target = 4 if bench.monitor.routing(bench.stream).layout.shards == 2 else 2
        scale(bench, target, wait=False)
        count = sum(1 for _ in steps(bench, died_after))
        ids += bench.fill(0, 2)
        assert over(bench).state == "COMPLETED"
    a.finishes(*ids)
    assert count == 17


@pytest.mark.parametrize("state", ["PREPARING", "CUTOVER", "DRAINING"])
def test_rollback(bench: Bench, crew: Crew, state: str) -> None:
    bench.create(shards=2, timings=STEADY)
    bench.fill(0, 2)
    found = scale(bench, 4, wait=False)
    for _ in steps(bench, 40):
        now = bench.monitor.resharding(bench.stream)
        assert now is not None
        if now.state == state:
            break
    back = bench.admin.rollback(found, reason="a test", wait=False)
    assert back.id == found.id
    ids = bench.fill(0, 2) if state == "PREPARING" else []
    a = crew.start("a")
    ended = bench.admin.wait(back, timeout_seconds=20)
    assert ended.state == ("ROLLED_BACK" if state == "DRAINING" else "ABANDONED")
    assert (ended.source, ended.target) == (2, 4)
    a.owns(0, 1)
    a.finishes(*ids, *bench.fill(1, 2))
    with pytest.raises(ConflictError, match="not under way"):
        bench.admin.rollback(found, reason="a test")


# --- groups -----------------------------------------------------------------------------------------------------------


def test_a_second_group_with_another_number_of_shards_is_refused(bench: Bench) -> None:
    bench.create(shards=4)
    with pytest.raises(ConflictError, match="stored 4, asked for 6"):
        bench.admin.create(bench.stream, group="other", shards=6, reason="a test")
    with pytest.raises(AlreadyExistsError):
        bench.create(shards=4)


def test_a_group_is_created_while_it_goes_on(bench: Bench) -> None:
    bench.create(shards=2)
    bench.fill(0)
    scale(bench, 3, wait=False)
    for _ in steps(bench, 3):
        pass
    bench.admin.create(bench.stream, group="other", reason="a test", timings=FAST)
    with contextlib.suppress(WaitTimeoutError):
        bench.admin.wait(bench.monitor.resharding(bench.stream), timeout_seconds=0.3)  # type: ignore[arg-type]
    for group in (GROUP, "other"):
        assert sorted(bench.monitor.describe(bench.stream, group=group).shards) == [0, 1, 2]
        assert bench.redis.xinfo_groups(bench.stream_key(2))
    bench.admin.create(bench.stream, group="third", start="new", reason="a test", timings=FAST)
    assert len(bench.redis.xinfo_groups(bench.stream_key(2))) == 3


def test_a_deleted_group_leaves_tombstones_where_there_were_shards_once(bench: Bench) -> None:
    bench.create(shards=3)
    scale(bench, 1)
    bench.delete()
    keys = GroupKeys(bench.stream, GROUP)
    assert all(bench.redis.hget(keys.fence(shard), "incarnation") for shard in range(3))


def test_a_lost_route_is_made_anew_by_creating_the_group_again(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=STEADY)
    scale(bench, 3)
    a = crew.start("a")
    a.owns(0, 1, 2)
    bench.redis.delete(StreamKeys(bench.stream).shard(1).route)
    with pytest.raises(RoutingUnavailableError):
        bench.fill(1)
    bench.create(shards=3, exist_ok=True)
    assert bench.monitor.routing(bench.stream).problems == ()
    a.finishes(*bench.fill(1, 2))


# --- what a person asks -----------------------------------------------------------------------------------------------


@two_servers
def test_plan(bench: Bench, crew: Crew) -> None:
    bench.create(shards=4)
    bench.fill(1, 5)
    plan = bench.admin.plan_scale(bench.stream, shards=6)
    assert (plan.source, plan.target, plan.added, plan.removed) == (4, 6, (4, 5), ())
    assert plan.moved_share == pytest.approx(1 / 3)
    assert [(drain.group, drain.entries, drain.members) for drain in plan.groups] == [(GROUP, 5, 0)]
    assert plan.refused is None
    assert "no live member" in plan.notes[0]
    bench.redis.xgroup_create(bench.stream_key(3), "stranger")
    plan = bench.admin.plan_scale(bench.stream, shards=2)
    assert any("stranger" in note for note in plan.notes)
    assert bench.admin.plan_scale(bench.stream, shards=4).refused == "the stream has 4 shards already"
    assert bench.monitor.resharding(bench.stream) is None


def test_quiesce_waits_for_the_groups_with_closed_shards(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=STEADY)
    bench.fill(0, 3)
    found = scale(bench, 3, quiesce=True, wait=False)
    with pytest.raises(WaitTimeoutError, match="CUTOVER"):
        bench.admin.wait(found, timeout_seconds=0.3)
    a = crew.start("a")
    assert bench.admin.wait(found, timeout_seconds=20).state == "COMPLETED"
    assert len(a.recorder.done(0)) == 3


# --- members come and go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_members_join_leave_and_crash_meanwhile(bench: Bench, crew: Crew, tmp_path: Path) -> None:
    """Whoever owns a held or a removed shard may go; what it leaves behind is finished before the barrier is passed."""
    bench.create(shards=4, timings=FAST)
    a = crew.start("a")
    with Load(bench) as load:
        for shards in (8, 3):
            victim = crew.child(f"victim-{shards}", tmp_path)
            victim.notes_eventually("finished")
            scale(bench, shards, wait=False)
            leaver = crew.start(f"leaver-{shards}")
            victim.kill()
            eventually(lambda leaver=leaver: leaver.consumer.assignment, what="shards of the newcomer")
            leaver.consumer.stop()
            assert over(bench).state == "COMPLETED"
    bench.settled(["a"])

    def handled() -> set[tuple[int, str]]:
        noted = {(note["shard"], note["id"]) for child in crew.children for note in child.notes("finished")}
        return noted.union(*({(one.shard, one.id) for one, _ in list(w.recorder.ended)} for w in crew.members))

    eventually(lambda: load.places <= handled(), what="all handled")
    assert a.consumer.health.ok
