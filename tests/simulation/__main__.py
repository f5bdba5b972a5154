"""Simulated schedules from the command line.

python -m tests.simulation --seed 7              one schedule, told step by step
python -m tests.simulation --seed 7 --keep 3,17  only these things of it
python -m tests.simulation --from 0 --count 500  a range; failures are made short and printed
python -m tests.simulation --from 0 --steps 1000000
python -m tests.simulation faults [--write]      find every planted fault; write the table of the documentation
python -m tests.simulation --fault NAME ...      with a planted fault
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys

from .faults import FAULTS
from .profile import profile
from .run import Outcome, Range, run, run_many, shorten
from .store import Store
from .table import LIMIT, Found, by_name, find, recorded, table, write

_SHOWN = 400


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["run", "faults"], default="run")
    parser.add_argument("--seed", type=int, help="run one schedule, and tell what happens")
    parser.add_argument("--keep", help="numbers of the things to try, of those of the seed")
    parser.add_argument("--from", type=int, default=0, dest="first", help="first seed of a range")
    parser.add_argument("--count", type=int, help="number of schedules")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--fault", help="plant this fault")
    parser.add_argument("--write", action="store_true", help="write the table into the documentation")
    parser.add_argument("--anew", action="store_true", help="with --write: do not begin with the seeds of the table")
    options = parser.parse_args()
    store = Store()
    if options.what == "faults":
        return _faults(store, writing=options.write, anew=options.anew)
    with by_name(options.fault).planted() if options.fault else contextlib.nullcontext():
        if options.seed is not None:
            keep = None if options.keep is None else {int(number) for number in options.keep.split(",")}
            return _tell(run(store, options.seed, keep=keep, tracing=True))
        return _range(store, options.first, options.count, options.steps)


def _tell(outcome: Outcome) -> int:
    print(profile(outcome.seed))
    for line in outcome.trace:
        print(line if len(line) <= _SHOWN else line[:_SHOWN] + "...")
    print(f"seed {outcome.seed}, {outcome.steps} steps:", outcome.failure or "nothing was violated")
    return int(outcome.failure is not None)


def _range(store: Store, first: int, count: int | None, steps: int | None) -> int:
    seeds = itertools.count(first) if count is None and steps is not None else range(first, first + (count or 100))
    done = run_many(store, seeds, until_steps=steps, report=_report)
    for failed in done.failures[:5]:
        kept = ",".join(map(str, shorten(store, failed)))
        print(
            f"\nseed {failed.seed}: {failed.failure}\n  python -m tests.simulation --seed {failed.seed} --keep {kept}"
        )
    _report(done)
    return int(bool(done.failures))


def _report(done: Range) -> None:
    speed = f"{done.steps} steps in {done.seconds:.1f} s ({done.steps / done.seconds:.0f} a second)"
    failed = [failed.seed for failed in done.failures]
    print(f"{done.schedules} schedules, {speed}, {len(failed)} failed {failed[:20]}", flush=True)


def _faults(store: Store, *, writing: bool, anew: bool) -> int:
    found: list[Found] = []
    known = recorded() if writing and not anew else {}
    for fault in FAULTS:
        seed = known.get(fault.name)
        one = Found(fault, None) if seed is None else find(store, fault, [seed])
        if one.outcome is None:
            one = find(store, fault)
        print(f"{fault.name}: {'not found in ' + str(LIMIT) if one.outcome is None else one.outcome.seed}", flush=True)
        found.append(one)
    if writing:
        write(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
