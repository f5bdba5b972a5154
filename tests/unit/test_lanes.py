"""Which entry of a shard goes next: each lane in order, one holder at a time, lanes in turn, room counted exactly."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from redis_stream_coord.commands import Entry
from redis_stream_coord.lanes import Lane, Lanes


def entry(number: int, key: bytes | None = None, size: int = 10) -> Entry:
    return Entry(f"{number}-0", 1, [b"data", b"x" * size], key, None, 4 + size)


def filled(*entries: Entry, by_key: bool = True) -> Lanes:
    lanes = Lanes(by_key=by_key)
    for one in entries:
        lanes.add(one)
    return lanes


def take(lanes: Lanes) -> Lane:
    lane = lanes.take()
    assert lane is not None
    return lane


def test_one_key_is_one_lane_in_order() -> None:
    entries = [entry(number, b"k") for number in range(3)]
    lanes = filled(*entries)
    assert lanes.ready == 1
    lane = take(lanes)
    assert lanes.pop(lane, 2) == entries[:2]
    assert lanes.pop(lane, 2) == entries[2:]
    assert lanes.pop(lane, 2) == []


def test_lane_that_was_taken_is_not_given_to_another() -> None:
    lanes = filled(entry(1, b"a"), entry(2, b"a"))
    lane = take(lanes)
    assert lanes.take() is None
    # Nor when more of it comes, with entries left in it and without.
    lanes.add(entry(3, b"a"))
    assert lanes.take() is None
    lanes.pop(lane, 3)
    lanes.add(entry(4, b"a"))
    assert lanes.ready == 0
    lanes.give_back(lane)
    assert [one.id for one in lanes.pop(take(lanes), 10)] == ["4-0"]


def test_empty_lane_is_forgotten_and_begins_anew() -> None:
    lanes = filled(entry(1, b"a"))
    lane = take(lanes)
    lanes.pop(lane, 1)
    lanes.give_back(lane)
    assert lanes.ready == 0
    lanes.add(entry(2, b"a"))
    assert lanes.ready == 1
    assert [one.id for one in lanes.pop(take(lanes), 1)] == ["2-0"]


def test_lanes_take_turns() -> None:
    lanes = filled(*[entry(number, b"hot") for number in range(5)], entry(5, b"a"), entry(6, b"b"))
    order = []
    while (lane := lanes.take()) is not None:
        order += [one.id for one in lanes.pop(lane, 1)]
        lanes.give_back(lane)
    assert order == ["0-0", "5-0", "6-0", "1-0", "2-0", "3-0", "4-0"]


def test_entries_without_a_key_keep_their_order_too() -> None:
    entries = [entry(1), entry(2, b"a"), entry(3)]
    lanes = filled(*entries)
    lane = take(lanes)
    assert lanes.pop(lane, 3) == [entries[0], entries[2]]


def test_without_keys_all_of_a_shard_is_one_lane() -> None:
    entries = [entry(number, f"key-{number % 2}".encode()) for number in range(6)]
    lanes = filled(*entries, by_key=False)
    lane = take(lanes)
    assert lanes.take() is None
    assert lanes.pop(lane, 10) == entries


def test_room_is_what_waits_and_not_what_was_taken_out() -> None:
    entries = [entry(1, b"a", 100), entry(2, b"a", 1000), entry(3, b"b", 10)]
    lanes = filled(*entries)
    assert (lanes.count, lanes.bytes) == (3, sum(one.size for one in entries))
    assert lanes.bytes >= 1110
    lanes.pop(take(lanes), 2)
    assert (lanes.count, lanes.bytes) == (1, entries[2].size)
    lanes.pop(take(lanes), 1)
    assert (lanes.count, lanes.bytes) == (0, 0)


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4))
def test_any_interleaving_keeps_order_and_loses_nothing(seed: int, keys: int, holders: int) -> None:
    rng = random.Random(seed)
    lanes = Lanes(by_key=True)
    given_in: dict[bytes, list[str]] = {}
    came_out: dict[bytes, list[str]] = {}
    held: list[Lane] = []
    total = 40
    number = 0
    while number < total or lanes.count or held:
        step = rng.choice(("add", "take", "pop", "give_back"))
        if step == "add" and number < total:
            key = b"key-%d" % rng.randrange(keys)
            lanes.add(entry(number, key))
            given_in.setdefault(key, []).append(f"{number}-0")
            number += 1
        elif step == "take" and len(held) < holders and (lane := lanes.take()) is not None:
            assert lane.name not in [one.name for one in held]
            held.append(lane)
        elif step == "pop" and held:
            lane = rng.choice(held)
            assert lane.name is not None
            came_out.setdefault(lane.name, []).extend(one.id for one in lanes.pop(lane, rng.randint(1, 3)))
        elif step == "give_back" and held:
            lanes.give_back(held.pop(rng.randrange(len(held))))
        assert lanes.count == number - sum(map(len, came_out.values()))
    assert {key: ids for key, ids in came_out.items() if ids} == given_in
    assert (lanes.count, lanes.bytes, lanes.ready) == (0, 0, 0)
