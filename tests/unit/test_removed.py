"""Shards that the layout has no more: trimmed as far as nobody needs them, and never one that is back."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest

from redis_stream_coord import CoordError, CorruptMetadataError, commands, removed
from redis_stream_coord.commands import Command, RemovedTrim, Saga, StreamView, Together
from redis_stream_coord.keys import GroupKeys
from redis_stream_coord.views import RemovedShard, Trimmed
from tests.unit.resharding_world import AUDIT, KEYS, Driver, World, world

# RESHARDING_SEEDS=200 takes so many chances.
SEEDS = int(os.environ.get("RESHARDING_SEEDS", "2"))
WINDOW_SECONDS = commands.EVENT_ID_WINDOW_SECONDS
OTHER = GroupKeys("orders", "audit")


@pytest.fixture
def some() -> Iterator[World]:
    """A stream of 3 shards that was scaled down to 1. Two groups have finished all that there is."""
    with world(7, "audit", shards=3) as some:
        goes_down(some)
        yield some


def goes_down(some: World) -> None:
    for _ in range(60):
        some.publish()
    some.scale(1)
    some.finish()
    assert all(length(some, shard) > 5 for shard in (1, 2))


def comes_back(some: World, state: str = "COMPLETED") -> None:
    some.scale(3)
    driver = Driver(some)
    for _ in range(1000):
        if some.state() == state:
            return
        driver.step()
    raise AssertionError(some.state())


def stream(shard: int) -> str:
    return KEYS.shard(shard).stream


def length(some: World, shard: int) -> int:
    return int(some.group.client.xlen(stream(shard)))


def lengths(some: World) -> list[int]:
    return [length(some, shard) for shard in range(3)]


def last_id(some: World, shard: int) -> bytes:
    return bytes(some.group.client.xinfo_stream(stream(shard))["last-generated-id"])


def contents(some: World) -> dict[bytes, Any]:
    """All that lies on the shards, as it is."""
    client, found = some.group.client, {}
    for key in sorted(client.keys("*")):
        kind = client.type(key)
        found[key] = client.hgetall(key) if kind == b"hash" else client.xrange(key) if kind == b"stream" else None
    return found


def retention(some: World, kept: str) -> None:
    some.group.run(commands.retain(KEYS, kept, request_id=f"retain-{kept}", audit=AUDIT))


def carry_out(some: World, saga: Saga[Any]) -> Any:
    """Drive a saga to its end."""
    result: Any = None
    while True:
        try:
            step = saga.send(result)
        except StopIteration as over:
            return over.value
        assert isinstance(step, (Command, Together))
        result = [some.send(one) for one in step.commands] if isinstance(step, Together) else some.group.run(step)


def retain(some: World) -> Trimmed:
    found = carry_out(some, removed.retain(KEYS, lambda: True))
    assert isinstance(found, Trimmed)
    return found


def look(some: World) -> Sequence[RemovedShard]:
    return list(carry_out(some, removed.look(KEYS, some.view())))


def trim(some: World, shard: int = 1, *, view: StreamView | None = None, keep: int = 0) -> RemovedTrim:
    return some.group.run(commands.trim_removed(KEYS, shard, view or some.view(), keep=keep))


def refusal(some: World, view: StreamView, shard: int = 1) -> str:
    """The word that a trim is refused with; it changes nothing."""
    before = contents(some)
    with pytest.raises(CoordError) as caught:
        trim(some, shard, view=view)
    assert contents(some) == before
    return caught.value.word


# --- what goes, and what stays --------------------------------------------------------------------------------------


def test_without_a_retention_nothing_goes(some: World) -> None:
    before = contents(some)
    assert retain(some) == Trimmed()
    assert contents(some) == before


def test_what_all_groups_have_finished_goes(some: World) -> None:
    retention(some, "consumed")
    before, ids = lengths(some), [last_id(some, shard) for shard in range(3)]
    kept = {key: value for key, value in contents(some).items() if b"fence" in key or b"route" in key}
    assert retain(some) == Trimmed(entries=sum(before[1:]) - 2)
    assert lengths(some) == [before[0], 1, 1]
    assert [last_id(some, shard) for shard in range(3)] == ids
    assert {key: contents(some)[key] for key in kept} == kept
    assert retain(some) == Trimmed()


def test_a_number_stays_if_the_stream_wants_it(some: World) -> None:
    retention(some, "keep:4")
    retain(some)
    assert 4 <= length(some, 1) < 60
    assert trim(some, keep=100).entries == 0
    # Servers remove whole nodes for a number; this one has so few that none is whole.
    assert trim(some, keep=0).entries > 0


@pytest.mark.parametrize("state", ["PREPARING", "CUTOVER", "DRAINING"])
def test_nothing_goes_while_a_resharding_is_under_way(some: World, state: str) -> None:
    retention(some, "consumed")
    comes_back(some, state)
    before = contents(some)
    assert retain(some) == Trimmed()
    assert contents(some) == before


def test_a_group_that_nobody_registered_keeps_what_it_needs(some: World) -> None:
    client = some.group.client
    ids = [entry_id for entry_id, _ in client.xrange(stream(1))]
    client.xgroup_create(stream(1), "by-hand", "0")
    client.xreadgroup("by-hand", "me", {stream(1): ">"}, count=4)
    assert trim(some).entries == 0
    client.xack(stream(1), "by-hand", *ids[:3])
    assert trim(some).entries == 2  # the last one that it has finished stays
    assert client.xrange(stream(1))[0][0] == ids[2]
    (waiting,) = next(one for one in look(some) if one.shard == 1).waits
    assert (waiting.group, ids[3].decode() in waiting.what) == ("by-hand", True)


def test_what_came_past_the_fence_stays(some: World) -> None:
    """A plain XADD may come to a shard that has gone. Its groups read it when the shard is back."""
    late = some.group.client.xadd(stream(1), {"n": "late"})
    trim(some)
    assert late in [entry_id for entry_id, _ in some.group.client.xrange(stream(1))]
    assert {waiting.group for one in look(some) for waiting in one.waits} == {"audit", "billing"}


def test_a_group_that_was_there_and_vanished_keeps_everything(some: World) -> None:
    some.group.client.xgroup_destroy(stream(1), "audit")
    before = lengths(some)
    retention(some, "consumed")
    trimmed = retain(some)
    assert [(one.group, one.shard) for one in trimmed.waits] == [("audit", 1)]
    assert lengths(some) == [before[0], before[1], 1]
    assert [(one.group, one.shard) for found in look(some) for one in found.waits] == [("audit", 1)]


def test_a_group_that_came_later_needs_nothing_there(some: World) -> None:
    some.register("later")
    assert some.view().groups["later"].since == some.view().layout.epoch
    before = length(some, 1)
    assert trim(some) == RemovedTrim(before - 1, 0, None)


def test_without_any_group_nobody_needs_anything(some: World) -> None:
    for name in some.groups:
        some.group.client.xgroup_destroy(stream(1), name)
        registered = some.view().groups[name].registered
        some.group.run(commands.unregister(GroupKeys("orders", name), registered=registered))
    last = last_id(some, 1)
    trim(some)
    assert (length(some, 1), last_id(some, 1)) == (1, last)


def test_a_shard_without_a_stream_has_nothing(some: World) -> None:
    some.group.client.delete(stream(1))
    assert trim(some) == RemovedTrim(0, 0, None)
    assert look(some)[0].entries == 0


def test_a_shard_that_was_never_made_is_not_spoken_of(some: World) -> None:
    some.scale(5)
    some.rollback()
    some.finish()
    assert some.view().top == 5
    assert [one.shard for one in look(some)] == [1, 2]
    retention(some, "consumed")
    assert retain(some).waits == ()


# --- whoever comes late, and damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["CUTOVER", "DRAINING", "COMPLETED"])
def test_a_copy_that_comes_when_the_shard_is_back_changes_nothing(some: World, state: str) -> None:
    """Who is registered since then is not on its list. Without the look at the route it loses that group's entries."""
    view = some.view()
    some.register("later")
    some.group.client.xgroup_setid(stream(0), "later", "$")
    comes_back(some, state)
    if state == "COMPLETED":
        while not length(some, 1) > 20:
            some.publish()
        for name in some.groups:
            some.group.client.xgroup_setid(stream(1), name, "$")
        # Its fence knows its place; the consumer group is made anew there by its next read.
        some.group.client.xgroup_destroy(stream(1), "later")
    elif state == "CUTOVER":
        driver = Driver(some)
        while some.group.client.hget(KEYS.shard(1).route, "epoch") == str(view.layout.epoch).encode():
            driver.step()
    assert refusal(some, view) == "AHEAD"


def test_a_copy_that_comes_when_the_shard_has_gone_again_changes_nothing(some: World) -> None:
    view = some.view()
    comes_back(some)
    some.finish()
    goes_down(some)
    assert refusal(some, view) == "AHEAD"
    assert trim(some).entries > 0


def test_a_record_that_is_older_than_the_shard_trims_nothing(some: World) -> None:
    view = some.view()
    older = attrs.evolve(view, layout=attrs.evolve(view.layout, epoch=view.layout.epoch - 1))
    assert refusal(some, older) == "AHEAD"


def test_a_shard_that_lost_its_close_is_left_alone(some: World) -> None:
    some.group.client.hset(KEYS.shard(1).route, mapping={"epoch": "1", "state": "open", "layout": "1:3:x"})
    assert refusal(some, some.view()) == "NOT_CLOSED"
    some.group.client.delete(KEYS.shard(1).route)
    assert refusal(some, some.view()) == "ROUTE_MISSING"
    found = {one.shard: one for one in look(some)}
    assert (found[1].route, found[1].epoch) == ("missing", None)
    assert [waiting.shard for waiting in found[1].waits] == [1]
    retention(some, "consumed")
    assert [waiting.shard for waiting in retain(some).waits] == [1]
    assert length(some, 2) == 1


@pytest.mark.parametrize("what", ["stream", "published"])
def test_a_key_of_another_type_is_damage(some: World, what: str) -> None:
    some.group.client.delete(getattr(KEYS.shard(1), what))
    some.group.client.set(getattr(KEYS.shard(1), what), "rubbish")
    before = contents(some)
    with pytest.raises(CorruptMetadataError):
        trim(some)
    assert contents(some) == before


# --- the shard comes back -------------------------------------------------------------------------------------------


def test_ids_go_on_where_they_were(some: World) -> None:
    trim(some)
    trim(some, 2)
    last = {shard: last_id(some, shard) for shard in (1, 2)}
    some.group.clock.advance(-60)
    comes_back(some)
    for _ in range(60):
        some.publish()
    for shard in (1, 2):
        after = [entry_id for entry_id, _ in some.group.client.xrange(stream(shard), f"({last[shard].decode()}")]
        assert len(after) == length(some, shard) - 1 > 0
    some.finish()
    some.check()


def publish(some: World, shard: int, *event_ids: str) -> list[str]:
    """Publish to a shard by the present layout; return the words of the answers."""
    command = commands.publish(
        KEYS,
        shard,
        [(event_id, ["rsc-event", event_id]) for event_id in event_ids],
        layout=some.view().layout.layout,
        window_ms=round(WINDOW_SECONDS * 1000),
        window_count=commands.EVENT_ID_WINDOW_COUNT,
    )
    return [outcome.word for outcome in some.group.run(command)]


def test_event_ids_are_remembered_for_their_window_and_no_longer() -> None:
    many = [f"event-{n}" for n in range(commands.EVENT_IDS_AT_ONCE * 2 + 5)]
    with world(1, "audit", shards=2) as some:
        assert publish(some, 1, *many[:5]) == ["OK"] * 5
        some.group.clock.advance(WINDOW_SECONDS / 2)
        publish(some, 1, *many[5:])
        for name in some.groups:
            some.group.client.xgroup_setid(stream(1), name, "$")
        some.scale(1)
        driver = Driver(some)
        while not driver.over:
            driver.step()
        retention(some, "consumed")
        assert (retain(some).event_ids, look(some)[0].event_ids) == (0, len(many))
        some.group.clock.advance(WINDOW_SECONDS / 2 + 1)
        assert (retain(some).event_ids, look(some)[0].event_ids) == (5, len(many) - 5)
        some.scale(2)
        driver = Driver(some)
        while not driver.over:
            driver.step()
        assert publish(some, 1, many[5], many[-1], "new") == ["DUPLICATE", "DUPLICATE", "OK"]
        some.group.client.xgroup_setid(stream(1), "audit", "$")
        some.group.client.xgroup_setid(stream(1), "billing", "$")
        some.scale(1)
        driver = Driver(some)
        while not driver.over:
            driver.step()
        some.group.clock.advance(WINDOW_SECONDS + 1)
        assert trim(some).event_ids == commands.EVENT_IDS_AT_ONCE
        retain(some)
        assert look(some)[0].event_ids == 0
        some.scale(2)
        driver = Driver(some)
        while not driver.over:
            driver.step()
        assert publish(some, 1, "again", "again") == ["OK", "DUPLICATE"]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_is_lost_whoever_trims_whenever(seed: int) -> None:
    """Reshardings to and fro, and trims that were meant for any earlier moment."""
    with world(seed, "audit", shards=4) as some:
        chance = random.Random(seed)
        late: list[Command[Any]] = []
        went = refused = 0

        def prepare() -> None:
            view = some.view()
            late.extend(
                commands.trim_removed(KEYS, shard, view, keep=0) for shard in range(view.layout.shards, view.top)
            )

        for _ in range(5):
            target = chance.choice([n for n in range(5) if n != some.view().layout.shards])
            some.scale(target)
            driver = Driver(some)
            for _ in range(chance.randrange(300)):
                things: list[Callable[[], object]] = [some.publish, some.consume, prepare]
                if not driver.over:
                    things.append(driver.step)
                chance.choice(things)()
                if late and chance.random() < 0.5:
                    answer = some.send(late.pop(chance.randrange(len(late))))
                    went += answer.entries if isinstance(answer, RemovedTrim) else 0
                    refused += isinstance(answer, CoordError)
            some.finish()
        some.check()
        assert went > 0
        assert refused > 0
