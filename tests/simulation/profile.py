"""What may happen in one schedule: every seed has faults of its own kind, so that none hides behind another."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import cycle
from types import MappingProxyType
from typing import Any

import attrs

from redis_stream_coord.models import Timings

# How often each thing is tried when it is left in, in relation to the others.
THINGS: Mapping[str, int] = {
    "start": 10,
    "beat": 24,
    "send_beat": 10,
    "work": 100,
    "deliver": 26,
    "receive": 20,
    "give_up": 4,
    "arrive_late": 10,
    "publish": 36,
    "hear": 4,
    "pass_time": 24,
    "get_stuck": 1,
    "crash": 2,
    "freeze": 3,
    "thaw": 3,
    "cut": 3,
    "reconnect": 3,
    "leave": 5,
    "change_weight": 3,
    "lose_leases": 1,
    "lose_fence": 1,
    "lose_events": 1,
    "lose_consumer_group": 1,
    "trim": 2,
    "seek": 3,
    "recreate": 1,
    "rollback": 1,
    "restore": 1,
    "operate": 12,
}
# The same of what a stream has that is resharded.
RESHARDING: Mapping[str, int] = {"reshard": 12, "drive": 80, "lose_route": 1}
# What a schedule may do without.
OPTIONAL = (
    *(
        "send_beat",
        "give_up",
        "arrive_late",
        "get_stuck",
        "crash",
        "freeze",
        "cut",
        "leave",
        "change_weight",
        "lose_leases",
    ),
    *("lose_fence", "lose_events", "lose_consumer_group", "trim", "seek", "recreate"),
)
# What does nothing without another thing.
_NEEDS = {"thaw": "freeze", "reconnect": "cut"}
# What a schedule is about: how much more often, or rarely, some things are tried.
_FOCUS: Mapping[str, Mapping[str, float]] = {
    "everything": {},
    "shards that come and go": {
        "work": 0.3,
        "publish": 0.2,
        "beat": 1.5,
        "start": 2,
        "leave": 3,
        "change_weight": 5,
        "get_stuck": 6,
        "arrive_late": 2,
        "recreate": 0,
        "seek": 0,
        "lose_leases": 0.3,
    },
    "late reports": {
        "work": 0.3,
        "publish": 0.1,
        "beat": 1.5,
        "start": 0.7,
        "leave": 1.5,
        "change_weight": 10,
        "get_stuck": 3,
        "arrive_late": 5,
        "recreate": 0,
        "seek": 0,
        "lose_leases": 0,
        "crash": 0,
        "freeze": 0.3,
    },
    "leases": {
        "cut": 1,
        "work": 0.3,
        "freeze": 1,
        "start": 1.5,
        "leave": 0.2,
        "crash": 0.2,
        "publish": 1.5,
        "recreate": 0,
        "seek": 0,
        "lose_leases": 0.2,
        "get_stuck": 2,
        "receive": 0.1,
        "give_up": 0.1,
        "thaw": 0.4,
        "reconnect": 0.5,
    },
}
_CALM_MS = (1, 10, 100, 500, 1000, 1000, 2000, 3000)
_ROUGH_MS = (1, 10, 100, 500, 1000, 2000, 3000, 3000, 5000, 8000, 14000, 21000)
# What changes so much that most schedules go without.
RARE = ("rollback", "restore")


@attrs.frozen
class Race:
    """What is too rare to be met among everything else.

    Attributes:
        name: a few words.
        times: how much more often, or rarely, things are tried; everything not named as in `THINGS`.
        fixed: what of the profile is not drawn.
        round: what is tried in this order, again and again, with other things in between; empty: in no order.
    """

    name: str
    times: Mapping[str, float]
    fixed: Mapping[str, Any]
    round: tuple[str, ...] = ()


_LOSSES = ("lose_leases", "lose_fence", "lose_events", "lose_consumer_group")
_EVERY = 25
# By the rest of the seed when it is divided by `_EVERY`.
_RACES: Mapping[int, Race] = MappingProxyType(
    {
        # A shard is asked back, drained and reported, kept after all, and asked back again; then a copy of the report
        # comes. It has to be a late one, but not by much: two epochs later nobody takes it.
        19: Race(
            "late reports of one token",
            {
                "work": 0.6,
                "publish": 0.5,
                "beat": 2,
                "change_weight": 20,
                "arrive_late": 4,
                "start": 0.5,
                "leave": 0.1,
                **dict.fromkeys(("crash", "freeze", "cut", "get_stuck", "trim", "seek", "recreate", *_LOSSES), 0),
            },
            {
                "shards": 5,
                "groups": 1,
                "members": 3,
                "prefetch": 20,
                "keys": 8,
                "trouble": 15,
                "duplicates": 60,
                "late": 3,
                "passes_ms": _CALM_MS,
                "failing": 0,
                "steps": 3000,
            },
        ),
        # Reshardings one after the other, whose drivers sleep and whose commands come late and twice.
        9: Race(
            "late drivers",
            {
                "publish": 0.4,
                "beat": 1.5,
                "reshard": 5,
                "drive": 4,
                "arrive_late": 3,
                **dict.fromkeys(("crash", "freeze", "leave", "change_weight", "start"), 0.3),
                **dict.fromkeys(("recreate", "trim", "seek", "cut", "get_stuck", "lose_route", *_LOSSES), 0),
            },
            {
                "reshards": True,
                "takes_back": 15,
                "shards": 2,
                "groups": 1,
                "trouble": 15,
                "duplicates": 60,
                "late": 40,
                "passes_ms": _CALM_MS,
                "failing": 0,
                "steps": 2500,
            },
        ),
        # A shard is given up because its handler is stuck; the lease passes for the member and not for Redis, which
        # says that the shard is the member's; then the report comes.
        14: Race(
            "late reports after a lapsed lease",
            {
                "work": 0.5,
                "start": 0.1,
                **dict.fromkeys(("leave", "crash", "freeze", "seek", "trim", "recreate", "operate", *_LOSSES), 0),
                **dict.fromkeys(("cut", "reconnect", "get_stuck", "arrive_late"), 0.2),
            },
            {
                "shards": 2,
                "groups": 1,
                "members": 1,
                "prefetch": 20,
                "trouble": 0,
                "duplicates": 0,
                "passes_ms": (1000, 2000, 3000),
                "patience_ms": 5000,
                "rates": (1.0, 1.2),
                "steps": 1200,
            },
            (
                *("start", "beat", "beat", "publish", "publish", "work", "work", "cut", "pass_time", "get_stuck"),
                *("pass_time",) * 9,
                *("reconnect", "beat", "work", "work", "arrive_late", "publish", "work", "work"),
            ),
        ),
        # Redis loses acknowledgements and nothing else, so that no other owner comes and reads from the beginning.
        4: Race(
            "lost acknowledgements",
            {
                "rollback": 10,
                "start": 0.2,
                "publish": 0.5,
                **dict.fromkeys(("leave", "crash", "freeze", "cut", "change_weight", "get_stuck"), 0.1),
                **dict.fromkeys(("seek", "trim", "recreate", "operate", *_LOSSES), 0),
            },
            {
                "groups": 1,
                "shards": 2,
                "members": 2,
                "trouble": 0,
                "duplicates": 0,
                "passes_ms": _CALM_MS,
                "failing": 0,
                "steps": 300,
            },
        ),
        # A deletion and a creation are over, the shards are claimed anew, and then a command of the deletion comes.
        24: Race(
            "late retirements",
            {
                "work": 0.5,
                "operate": 5,
                "recreate": 10,
                "arrive_late": 2,
                **dict.fromkeys(("crash", "freeze", "cut", "seek", "leave"), 0.3),
                **dict.fromkeys(_LOSSES, 0),
            },
            {"trouble": 30, "steps": 1500},
        ),
    }
)


@attrs.frozen(kw_only=True)
class Profile:
    """Drawn once for each seed.

    Attributes:
        focus: what it is about.
        shards, groups, members: how many there are; of members, different ids per group.
        timings: of the groups.
        concurrency, prefetch: of every worker.
        trouble: percentage of requests to which something happens.
        duplicates: percentage of requests that arrive once more, later.
        late: how many requests at most are on the way to arrive late; a further one replaces one of them.
        passes_ms: how much time passes at once.
        patience_ms: how long a process waits for an answer.
        rates: speeds of the clocks of processes; a lease is safe up to a tenth less than Redis's.
        keys: number of partition keys.
        reshards: the number of shards changes.
        takes_back: percentage of an operator's looks at a resharding that take it back.
        unordered: percentage of reshardings that do not keep the order of keys.
        failing: percentage of handler calls that fail.
        things: weight of each thing that may happen.
        steps: how many things are tried in phase one.
    """

    focus: str
    shards: int
    groups: int
    members: int
    timings: Timings
    concurrency: int
    prefetch: int
    trouble: int
    duplicates: int
    late: int
    passes_ms: tuple[int, ...]
    patience_ms: int
    rates: tuple[float, ...]
    keys: int
    failing: int
    reshards: bool
    takes_back: int
    unordered: int
    things: Mapping[str, int]
    steps: int


def profile(seed: int) -> Profile:
    """Return the profile of a seed."""
    rng = random.Random(seed)
    things = dict(THINGS)
    for name in OPTIONAL:
        if rng.random() < 0.4:
            del things[name]
    focus = rng.choice(("everything", "everything", *_FOCUS))
    race = _RACES.get(seed % _EVERY)
    if race is not None:
        things = {**THINGS, **(RESHARDING if race.fixed.get("reshards") else {})}
    weights = _FOCUS[focus] if race is None else race.times
    for name, times in weights.items():
        if name in things:
            things[name] = round(10 * things[name] * times)
    for name in things:
        if name not in weights:
            things[name] *= 10
    for name in RARE:
        rare = rng.random() < 0.85
        if rare if race is None else name not in race.times:
            del things[name]
    for name, other in _NEEDS.items():
        if other not in things:
            del things[name]
    drawn = Profile(
        focus=focus,
        shards=rng.choice((1, 2, 2, 3, 3, 4, 5)),
        groups=rng.choice((1, 1, 1, 2)),
        members=3 if focus == "leases" else rng.choice((1, 2, 2, 3, 3, 4)),
        timings=Timings(heartbeat_seconds=3, lease_seconds=15, rebalance_seconds=rng.choice((5, 20, 60))),
        concurrency=rng.choice((1, 1, 2, 3)),
        prefetch=20 if focus == "leases" else rng.choice((2, 5, 20)),
        trouble=30 if focus == "leases" else rng.choice((0, 5, 15, 30)),
        duplicates=30 if focus == "late reports" else rng.choice((0, 2, 10, 20)),
        late=40,
        passes_ms=_CALM_MS if focus == "leases" else rng.choice((_CALM_MS, _CALM_MS, _ROUGH_MS)),
        patience_ms=12000 if focus == "leases" else rng.choice((5000, 5000, 12000)),
        rates=rng.choice(((1.0,), (1.0, 0.93, 1.05), (1.0, 0.93, 1.2))),
        keys=rng.choice((1, 2, 4, 8)),
        failing=rng.choice((0, 5, 20)),
        reshards=False,
        takes_back=0,
        unordered=0,
        things=things,
        steps=1500 if focus in ("leases", "late reports") else rng.choice((150, 300, 600)),
    )
    if race is not None:
        return attrs.evolve(drawn, focus=race.name, **race.fixed)
    return drawn if rng.random() < 0.55 else _resharded(drawn, rng)


def _resharded(drawn: Profile, rng: random.Random) -> Profile:
    things = dict(drawn.things)
    things.update((name, 10 * weight) for name, weight in RESHARDING.items())
    if rng.random() < 0.5:
        del things["lose_route"]
    return attrs.evolve(
        drawn,
        reshards=True,
        takes_back=rng.choice((0, 10, 40)),
        unordered=rng.choice((0, 0, 0, 50)),
        things=things,
        steps=max(600, drawn.steps),
    )


def schedule(seed: int, of: Profile) -> list[tuple[str, int]]:
    """Return what is tried, in order: a thing, and the seed of its own choices."""
    rng = random.Random(~seed)
    names = rng.choices(list(of.things), weights=list(of.things.values()), k=of.steps)
    race = _RACES.get(seed % _EVERY)
    if race is not None and race.round:
        turns = cycle(race.round)
        names = [name if rng.random() < 0.3 else next(turns) for name in names]
    return [(name, rng.getrandbits(48)) for name in names]
