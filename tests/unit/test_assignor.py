"""`lua/lib/assignor.lua`: complete, balanced, sticky with the fewest moves, idempotent, free of order."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lua import load_library, to_lua

Weights = dict[str, int]
Owners = dict[int, str]

assignor = load_library("assignor")
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture
def rng() -> random.Random:
    seed = int(os.environ.get("TEST_SEED", random.randrange(2**32)))
    print(f"TEST_SEED={seed}")
    return random.Random(seed)


def assign(shards: list[int], weights: Weights, owners: Owners) -> Owners:
    members = [{"id": member, "weight": weight} for member, weight in weights.items()]
    return dict(assignor.assign(to_lua(shards), to_lua(members), to_lua(owners)).items())


def equal(*members: str) -> Weights:
    return dict.fromkeys(members, 1000)


def named(count: int) -> Weights:
    return equal(*(f"m{number}" for number in range(count)))


def shuffled(weights: Weights, rng: random.Random) -> Weights:
    return dict(rng.sample(list(weights.items()), len(weights)))


def moves(owners: Owners, target: Owners) -> int:
    return sum(owners.get(shard) != member for shard, member in target.items())


def fewest_moves(shards: list[int], weights: Weights, owners: Owners) -> int:
    """The minimum over every assignment whose quotas are by largest remainder, in closed form.

    A member keeps at most min(owned, quota). Quotas differ only in who among those with the boundary
    remainder (with equal weights: everybody) gets one more than the floor, and that saves a move exactly if
    the member owns more than the floor.
    """
    total = sum(weights.values())
    floor = {member: len(shards) * weight // total for member, weight in weights.items()}
    remainder = {member: len(shards) * weight % total for member, weight in weights.items()}
    owned = Counter(owners.get(shard) for shard in shards)
    saves = {member: owned[member] > floor[member] for member in weights}
    kept = sum(min(owned[member], floor[member]) for member in weights)
    spare = len(shards) - sum(floor.values())
    if spare:
        boundary = sorted(remainder.values(), reverse=True)[spare - 1]
        above = [member for member in weights if remainder[member] > boundary]
        tied = [member for member in weights if remainder[member] == boundary]
        kept += sum(saves[member] for member in above)
        kept += min(spare - len(above), sum(saves[member] for member in tied))
    return len(shards) - kept


def check(shards: list[int], weights: Weights, owners: Owners, rng: random.Random) -> Owners:
    """Assert every promise of the assignor for these arguments; return the target."""
    target = assign(shards, weights, owners)
    if not weights:
        assert target == {}
        return target
    assert set(target) == set(shards), "covers the shards and no others"
    assert set(target.values()) <= set(weights), "names members only"

    load, total = Counter(target.values()), sum(weights.values())
    for member, weight in weights.items():
        assert abs(load[member] * total - len(shards) * weight) < total, "floor or ceil of the exact share"
    if len(set(weights.values())) == 1:
        loads = [load[member] for member in weights]
        assert max(loads) - min(loads) <= 1, "balanced to within one"

    assert moves(owners, target) == fewest_moves(shards, weights, owners)
    for member in weights:
        mine = [shard for shard in shards if owners.get(shard) == member]
        kept = [shard for shard in mine if target[shard] == member]
        assert kept == mine[: len(kept)], "keeps its lowest"
    assert assign(shards, weights, target) == target, "idempotent"
    assert assign(shards, shuffled(weights, rng), owners) == target, "free of the order of members"
    return target


def start_states(shards: list[int], weights: Weights, rng: random.Random) -> Iterator[Owners]:
    members = list(weights)
    yield {}
    for joined in members[:1] + members[-1:]:
        yield assign(shards, {member: 1000 for member in members if member != joined}, {})
    yield assign(shards, weights | equal("gone"), {})
    yield assign(shards[::2], weights, {})
    yield assign([*shards, len(shards), len(shards) + 1], weights, {})
    for _ in range(2):
        anyone = [*members, "unknown", None]
        drawn = {shard: rng.choice(anyone) for shard in [*shards, 99]}
        yield {shard: member for shard, member in drawn.items() if member}
    yield {shard: rng.choice(members[:2] or ["unknown"]) for shard in shards}


@pytest.mark.parametrize("member_count", range(13))
def test_every_small_size(member_count: int, rng: random.Random) -> None:
    for shard_count in range(25):
        shards, weights = list(range(shard_count)), named(member_count)
        for owners in start_states(shards, weights, rng):
            check(shards, weights, owners, rng)


def hamilton_quotas(shard_count: int, weights: Weights) -> set[tuple[int, ...]]:
    """Every choice of quotas by largest remainder: sets of members with the largest sum of remainders."""
    total = sum(weights.values())
    floors = [shard_count * weight // total for weight in weights.values()]
    remainders = [shard_count * weight % total for weight in weights.values()]
    choices = list(itertools.combinations(range(len(weights)), shard_count - sum(floors)))
    best = max(sum(remainders[i] for i in choice) for choice in choices)
    return {
        tuple(floor + (i in choice) for i, floor in enumerate(floors))
        for choice in choices
        if sum(remainders[i] for i in choice) == best
    }


@pytest.mark.parametrize(
    "relative_weights", [(1,), (1, 1), (1, 1, 1), (3, 1), (1, 3), (1, 1, 2), (1, 3, 3), (5, 3, 1), (999, 1)]
)
def test_no_assignment_moves_less(relative_weights: tuple[int, ...]) -> None:
    weights = {member: weight * 1000 for member, weight in zip("abc", relative_weights, strict=False)}
    for shard_count in range(6):
        shards = list(range(shard_count))
        quotas = hamilton_quotas(shard_count, weights)
        valid = [
            choice
            for choice in itertools.product(weights, repeat=shard_count)
            if tuple(choice.count(member) for member in weights) in quotas
        ]
        for before in itertools.product([*weights, "unknown"], repeat=shard_count):
            target = assign(shards, weights, dict(enumerate(before)))
            chosen = tuple(target[shard] for shard in shards)
            least = min(sum(map(str.__ne__, before, choice)) for choice in valid)
            assert chosen in valid
            assert sum(map(str.__ne__, before, chosen)) == least, before


def draw_shards(rng: random.Random, most: int = 1024) -> list[int]:
    count = rng.choice([rng.randint(0, 8), rng.randint(0, 100), rng.randint(0, most)])
    return sorted(rng.sample(range(2 * most), count))


def draw_weight(rng: random.Random, spread: str) -> int:
    """Few values make many ties; the largest is the last one that 1024 shards allow below 2**53."""
    drawn = {
        "equal": 1000,
        "ties": rng.choice([500, 1000, 1500, 3000]),
        "any": rng.randint(1, 10_000),
        "extreme": rng.choice([1, 2, 1000, 2**43 - 2, 2**43 - 1]),
    }
    return drawn[spread]


def draw_weights(rng: random.Random, spread: str, most: int = 64) -> Weights:
    ids = rng.sample([f"consumer-{number}" for number in range(2 * most)], rng.randint(1, most))
    return {member: draw_weight(rng, spread) for member in ids}


spreads = st.sampled_from(["equal", "ties", "any", "extreme"])


@settings(max_examples=150, deadline=None, print_blob=True)
@given(seed=seeds, spread=spreads)
def test_large_and_weighted(seed: int, spread: str) -> None:
    rng = random.Random(seed)
    shards, weights = draw_shards(rng), draw_weights(rng, spread)
    anyone = [*rng.sample(sorted(weights), rng.randint(1, len(weights))), "unknown"]
    owners = {shard: rng.choice(anyone) for shard in draw_shards(rng) + shards if rng.random() < 0.8}
    check(shards, weights, owners, rng)


@settings(max_examples=25, deadline=None, print_blob=True)
@given(seed=seeds, spread=spreads)
def test_chain_of_changes(seed: int, spread: str) -> None:
    rng = random.Random(seed)
    shards, weights, target = draw_shards(rng, 128), draw_weights(rng, spread, 16), {}
    for step in range(20):
        change = rng.choice(["join", "leave", "restart", "weight", "shards"])
        if change == "join":
            weights[f"{rng.randrange(10**6)}-{step}"] = draw_weight(rng, spread)
        elif change == "leave" and weights:
            del weights[rng.choice(sorted(weights))]
        elif change == "weight" and weights:
            weights[rng.choice(sorted(weights))] = draw_weight(rng, spread)
        elif change == "shards":
            shards = draw_shards(rng, 128)
        target = check(shards, shuffled(weights, rng), target, rng)


@settings(max_examples=50, deadline=None, print_blob=True)
@given(shard_count=st.integers(0, 200), member_count=st.integers(1, 30), seed=seeds)
def test_join_and_leave_move_one_share(shard_count: int, member_count: int, seed: int) -> None:
    rng = random.Random(seed)
    shards, weights = list(range(shard_count)), shuffled(named(member_count), rng)
    target = assign(shards, weights, {})

    joined = weights | equal(f"m{rng.randrange(10)}-new")
    after_join = check(shards, joined, target, rng)
    assert moves(target, after_join) == shard_count // len(joined)

    gone = rng.choice(sorted(joined))
    after_leave = check(shards, {m: w for m, w in joined.items() if m != gone}, after_join, rng)
    assert moves(after_join, after_leave) == Counter(after_join.values())[gone]


def test_spare_shard_goes_to_the_larger_owner_then_by_id() -> None:
    assert assign([0, 1, 2], equal("b", "a"), {}) == {0: "a", 1: "b", 2: "a"}
    assert assign([0, 1, 2], equal("a", "b"), {0: "b", 1: "b"}) == {0: "b", 1: "b", 2: "a"}


def test_tied_remainder_stays_with_its_owner_whatever_the_weights() -> None:
    """Shares 1.5 and 0.5: if plain counts decided, `a` would take back the shard that `b` just got."""
    weights = {"a": 3000, "b": 1000}
    for before in ({1: "b"}, {0: "a", 1: "b"}):
        assert assign([0, 1], weights, before) == {0: "a", 1: "b"}
    assert assign([0, 1], weights, {0: "a", 1: "a"}) == {0: "a", 1: "a"}


def test_rest_goes_ascending_to_the_least_loaded() -> None:
    owners = {1: "a", 3: "a", 5: "b", 7: "gone"}
    assert assign([1, 2, 3, 5, 7, 8], equal("c", "b", "a"), owners) == {
        1: "a", 2: "c", 3: "a", 5: "b", 7: "b", 8: "c",
    }  # fmt: skip


def test_ids_sort_by_their_bytes() -> None:
    ids = ["m10", "m1", "M2", "m 1", "m1\n", "m", "é", "z", "키", "m-1", "\x00", "m\x00"]
    target = assign(list(range(len(ids))), equal(*ids), {})
    assert [target[shard] for shard in range(len(ids))] == sorted(ids, key=str.encode)


def test_weight_defaults_to_one_thousand() -> None:
    shards = to_lua(list(range(6)))
    members = to_lua([{"id": "a"}, {"id": "b", "weight": 2000}])
    target = assignor.assign(shards, members, to_lua({}))
    assert Counter(target.values()) == {"a": 2, "b": 4}


def test_arguments_stay_as_they_are() -> None:
    arguments = [
        to_lua([0, 1, 2]),
        to_lua([{"id": "b", "weight": 1}, {"id": "a", "weight": 2}]),
        to_lua({0: "b", 7: "gone"}),
    ]
    assignor.assign(*arguments)
    shards, members, owners = (dict(argument.items()) for argument in arguments)
    assert shards == {1: 0, 2: 1, 3: 2}
    assert [dict(members[i].items()) for i in (1, 2)] == [{"id": "b", "weight": 1}, {"id": "a", "weight": 2}]
    assert owners == {0: "b", 7: "gone"}
