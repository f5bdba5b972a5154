"""A million steps, and every planted fault by the seed that is known to find it.

More: `REDIS_STREAM_COORD_SIMULATION_STEPS=20000000`; other schedules: `REDIS_STREAM_COORD_SEED`, the first of them.
"""

from __future__ import annotations

import os

import pytest

from tests.conftest import SEED_VARIABLE
from tests.simulation.faults import FAULTS
from tests.simulation.minimise import minimise
from tests.simulation.planting import Fault
from tests.simulation.profile import profile, schedule
from tests.simulation.run import Outcome, run, run_many, shorten
from tests.simulation.store import Store
from tests.simulation.table import recorded

STEPS = int(os.environ.get("REDIS_STREAM_COORD_SIMULATION_STEPS", "1000000"))
SEEDS = recorded()


@pytest.fixture(scope="module")
def store() -> Store:
    return Store()


def _explained(store: Store, failed: Outcome) -> str:
    kept = ",".join(map(str, shorten(store, failed)))
    return f"{failed.failure}\n  python -m tests.simulation --seed {failed.seed} --keep {kept}"


def test_a_million_steps(store: Store) -> None:
    first = int(os.environ.get(SEED_VARIABLE, "0"))
    done = run_many(store, range(first, first + 1_000_000), until_steps=STEPS)
    print(f"{done.schedules} schedules from {first}, {done.steps} steps in {done.seconds:.1f} s")
    assert not done.failures, "\n".join(_explained(store, failed) for failed in done.failures[:3])


def test_a_seed_says_everything(store: Store) -> None:
    """Whatever ran before, the same seed gives the same steps, to the last word."""
    first = run(store, 11, tracing=True)
    run(store, 12)
    assert run(Store(), 11, tracing=True) == first


def test_every_planted_fault_is_in_the_table() -> None:
    assert list(SEEDS) == [fault.name for fault in FAULTS], "python -m tests.simulation faults --write"
    assert not [name for name, seed in SEEDS.items() if seed is None], "nothing finds these"


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if SEEDS.get(fault.name) is not None], ids=lambda f: f.name
)
def test_a_planted_fault_is_found(store: Store, fault: Fault) -> None:
    seed = SEEDS[fault.name]
    assert seed is not None
    with fault.planted():
        found = run(store, seed)
    assert found.failure is not None, (
        f"seed {seed} does not find it any more: python -m tests.simulation faults --write"
    )
    without = run(store, seed)
    assert without.failure is None, f"and without the fault: {without.failure}"


def test_a_failing_schedule_is_made_short(store: Store) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "no fence on ack")
    with fault.planted():
        failed = run(store, SEEDS[fault.name] or 0)
        kept = shorten(store, failed)
        assert run(store, failed.seed, keep=set(kept)).kind == failed.kind
    assert len(kept) < len(schedule(failed.seed, profile(failed.seed))) / 4


def test_minimising_keeps_only_what_is_needed() -> None:
    assert minimise(range(100), lambda some: {17, 42, 99} <= set(some)) == [17, 42, 99]
    assert minimise(range(8), lambda some: 3 in some) == [3]
