"""Run one schedule by its seed, or a part of it, or many; make a failing one short."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable

import attrs

from .minimise import minimise
from .profile import profile, schedule
from .store import Store
from .world import World


@attrs.frozen
class Outcome:
    """What became of one schedule.

    Attributes:
        seed: which.
        steps: how many things happened.
        failure: what was violated; ``None`` if nothing was.
        trace: what happened, if it was traced.
        tried: how many things of phase one were tried.
        healed: it got to the end of phase one.
    """

    seed: int
    steps: int
    failure: str | None
    trace: list[str]
    tried: int
    healed: bool

    @property
    def kind(self) -> str | None:
        """The failure without names and numbers."""
        return None if self.failure is None else re.sub(r"\d+|'\w+'", "#", self.failure)[:40]


@attrs.frozen
class Range:
    """What became of many.

    Attributes:
        schedules, steps: how many.
        seconds: how long they took.
        failures: those that failed.
    """

    schedules: int
    steps: int
    seconds: float
    failures: list[Outcome]


def run(
    store: Store, seed: int, *, keep: Collection[int] | None = None, tracing: bool = False, healing: bool = True
) -> Outcome:
    """Run a schedule: phase one, then phase two.

    Parameters:
        store: to run it in.
        seed: of the schedule.
        keep: only these things of phase one happen, by their number; ``None``: all.
        tracing: write down what happens.
        healing: go on with phase two.
    """
    of = profile(seed)
    things = schedule(seed, of)
    world = World(store, of)
    world.tracing = tracing
    failure, healed = None, False
    try:
        world.run(things if keep is None else [things[number] for number in sorted(keep)])
        healed = True
        if healing:
            world.heal()
    except Exception as error:  # a violation, or what it led to in whoever met it
        failure = f"{type(error).__name__}: {error}"
    return Outcome(seed, world.steps, failure, world.trace, world.tried, healed)


def run_many(
    store: Store, seeds: Iterable[int], *, until_steps: int | None = None, report: Callable[[Range], None] | None = None
) -> Range:
    """Run many schedules.

    Parameters:
        store: to run them in, one after another.
        seeds: of the schedules.
        until_steps: stop after so many steps.
        report: is told from time to time.
    """
    began = reported = time.monotonic()
    schedules = steps = 0
    failures: list[Outcome] = []
    for seed in seeds:
        outcome = run(store, seed)
        schedules, steps = schedules + 1, steps + outcome.steps
        if outcome.failure is not None:
            failures.append(outcome)
        now = time.monotonic()
        if report is not None and now - reported > 30:
            reported = now
            report(Range(schedules, steps, now - began, failures))
        if until_steps is not None and steps >= until_steps:
            break
    return Range(schedules, steps, time.monotonic() - began, failures)


def shorten(store: Store, failed: Outcome, *, seconds: float = 60.0) -> list[int]:
    """Return the numbers of things that are enough to fail in the same way; fewest if there is time enough."""
    until = time.monotonic() + seconds

    def fails(numbers: Iterable[int]) -> bool:
        if time.monotonic() > until:
            return False
        return run(store, failed.seed, keep=set(numbers), healing=failed.healed).kind == failed.kind

    return minimise(range(failed.tried), fails)
