"""Reshardings at random moments under faults: invariants hold, and each fault planted into the real code is found.

`RESHARDING_STORMS=300` takes so many seeds, `RESHARDING_STORM_FROM` is the first. The table of planted faults in the
documentation is made anew by `python -m tests.unit.test_resharding_simulation --write`.
"""

from __future__ import annotations

# ruff: noqa: E501 - what stands in a script is quoted as it stands there
import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest

from redis_stream_coord import reshard
from redis_stream_coord.attempts import Course
from redis_stream_coord.commands import SagaRecord
from tests.simulation.faults import Fault
from tests.unit.resharding_world import storm

STORMS = int(os.environ.get("RESHARDING_STORMS", "30"))
FIRST = int(os.environ.get("RESHARDING_STORM_FROM", "0"))
STEPS = 700
LIMIT = 40  # seeds within which a planted fault has to be found
PAGE = Path(__file__).parents[2] / "docs" / "simulation.md"
BEGIN, END = "<!-- resharding faults -->\n", "<!-- end of resharding faults -->\n"


def failure(seed: int) -> str | None:
    """Run one seed. Returns: what is wrong, or `None`."""
    try:
        with storm(seed) as some:
            some.run(STEPS)
    except Exception as error:
        said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        return f"{type(error).__name__}: {said}"
    return None


# --- planted faults ---------------------------------------------------------------------------------------------------


def _instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def _said(**changes: Any) -> Callable[[Any], Any]:
    """What `standing` finds is not what is there."""
    return lambda real: lambda *args, **options: attrs.evolve(real(*args, **options), **changes)


def _all_consumed(real: Any) -> Any:
    def patched(view: Any, name: str, evidence: Any) -> Any:
        return attrs.evolve(real(view, name, evidence), consumed=view.barriers, passed=True)

    return patched


def _blind(real: Any) -> Any:
    """A shard that gave no answer counts as closed."""

    def patched(*args: Any) -> Any:
        yield from real(*args)
        return {}

    return patched


_DECIDE = "if not route.cut_of({ cuts = cuts }, s.epoch) then refuse('NOT_READY', 'no cut of shard ' .. int(shard)) end"

FAULTS = (
    Fault(
        "no barrier in the read",
        "order",
        (("read", "local limit = route.barrier(route.read(key.route), stored.passed)", "local limit = nil"),),
    ),
    Fault(
        "of several barriers the largest counts",
        "order",
        (("lib/route", "position.less(cut.id, lowest)) then lowest", "position.less(lowest, cut.id)) then lowest"),),
    ),
    Fault(
        "a driver that slept opens a route",
        "route",
        (("open", "if order > 0 then", "if false then"), ("open", "if now.epoch ~= arg.epoch then", "if false then")),
    ),
    Fault("a driver that slept closes a route again", "route", (("close", "if order > 0 then", "if false then"),)),
    Fault(
        "the close notes no cut of what is there",
        "order",
        (("close", "local id, kept = position.last_id(key.stream), {}", "local id, kept = '0-0', {}"),),
    ),
    Fault(
        "a second close notes a smaller cut",
        "order",
        (
            (
                "close",
                "if order == 0 then return { 'OK', route.cut_of(now, arg.epoch) or '0-0' } end",
                "if order == 0 then return { 'OK', '0-0' } end",
            ),
            ("note_cuts", "elseif position.less(own.id, arg.cuts[i + 1]) then", "else"),
        ),
    ),
    Fault("decided without all cuts: the script alone", "cuts", (("decide", _DECIDE, ""),)),
    Fault(
        "decided without all cuts: script and driver",
        "cuts",
        (("decide", _DECIDE, ""),),
        (_instead(reshard, "_close", _blind),),
    ),
    Fault(
        "the event id is looked up after the route",
        "event ids",
        (("publish", "  if known then", "  if known and not word then"),),
    ),
    Fault(
        "the layout is not compared in the publish",
        "route",
        (("publish", "route[1] ~= arg.layout and 'STALE_ROUTE' or nil", "nil"),),
    ),
    Fault(
        "layouts before are not asked for event ids",
        "event ids",
        python=(_instead(Course, "before", lambda real: lambda self, key, remembered=(): []),),
    ),
    Fault(
        "the record forgets the layouts before",
        "event ids",
        (
            (
                "layout",
                "answer[#answer + 1] = layout.ended_since(record, clock.now_ms() - arg.window_ms)",
                "answer[#answer + 1] = {}",
            ),
        ),
    ),
    Fault(
        "evidence ignores what is pending",
        "drained",
        (
            (
                "evidence",
                "first = pending > 0 and summary[2] or (after and after[1] or '')",
                "pending, first = 0, after and after[1] or ''",
            ),
        ),
    ),
    Fault(
        "evidence ignores what was not delivered",
        "drained",
        (
            (
                "evidence",
                "first = pending > 0 and summary[2] or (after and after[1] or '')",
                "first = pending > 0 and summary[2] or ''",
            ),
        ),
    ),
    Fault(
        "a removed shard is taken before it is drained",
        "drained",
        python=(_instead(reshard, "standing", _said(drained=True)),),
    ),
    Fault("a group passes before it has consumed", "order", python=(_instead(reshard, "standing", _all_consumed),)),
    Fault(
        "remaining shards hold nothing on the way in",
        "order",
        (("lib/saga", "  return shard < s.to\nend", "  return false\nend"),),
        (
            lambda: mock.patch.object(
                SagaRecord, "holds", lambda self, shard: self.target > self.source and shard in self.added
            ),
        ),
    ),
    Fault(
        "older words about readable shards count",
        "readable",
        (
            (
                "readable",
                "local newer = arg.epoch > g.layout_epoch or (arg.epoch == g.layout_epoch and arg.step > g.layout_step)",
                "local newer = true",
            ),
        ),
    ),
    Fault("the passed epoch goes back", "order", (("pass", "if stored.passed >= arg.epoch then", "if false then"),)),
    Fault(
        "the epoch is not compared in the record",
        "route",
        (
            (
                "lib/saga",
                "if s and s.id == arg.saga and s.epoch == arg.epoch and s.state == state then return s end",
                "if s and s.state == state then return s end",
            ),
        ),
    ),
    Fault(
        "a takeover forgets what was passed",
        "order",
        (("claim", "  'nonce', arg.nonce)\nreturn", "  'nonce', arg.nonce, 'passed', '0')\nreturn"),),
    ),
    Fault(
        "a lower token may claim",
        "zombies",
        (("claim", "then fence.refuse_for(stored) end", "then end"),),
    ),
    Fault("no fence on ack", "zombies", (("ack", "fence.check(key.fence, arg)\n", ""),)),
    Fault(
        "an abandoned cut-over draws no fresh epoch",
        "route",
        (
            (
                "lib/saga",
                "fields = { 'drawn', fields[2], 'epoch', fields[2], 'layout', layout.id(record.drawn + 1, s.from, s.id)",
                "fields = { 'drawn', int(record.drawn), 'epoch', int(s.epoch), 'layout', layout.id(s.epoch, s.from, s.id)",
            ),
            (
                "lib/saga",
                "s.state, s.epoch, s.reason = 'REOPENING', record.drawn + 1, reason",
                "s.state, s.reason = 'REOPENING', reason",
            ),
        ),
    ),
)


def find(fault: Fault) -> tuple[int, str] | None:
    """Return the first seed that fails only with the fault, and what it says."""
    for seed in range(LIMIT):
        with fault.planted():
            said = failure(seed)
        if said is not None and failure(seed) is None:
            return seed, said
    return None


def recorded() -> dict[str, int | None]:
    """Return the seeds of the page by the name of the fault; `None`: not found."""
    body = PAGE.read_text("utf-8").split(BEGIN)[1].split(END)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line[:2] == "| "]
    return {row[0]: int(row[3]) if row[3].isdigit() else None for row in rows if row[0] not in ("planted fault", "---")}


def write() -> None:
    """Find every fault anew, and put the table into the page."""
    lines = ["| planted fault | in | breaks | seed that finds it | what is said |", "| --- | --- | --- | --- | --- |"]
    for fault in FAULTS:
        found = find(fault)
        seed, said = found or ("-", "not found")
        said = re.sub(r"\s+", " ", re.sub(r"[|`]", " ", said.removeprefix("AssertionError: ")))
        said = said if len(said) <= 110 else said[:107] + "..."
        where = ", ".join([fault.where] * bool(fault.lua) + ["the drivers or producers"] * bool(fault.python))
        lines.append(f"| {fault.name} | {where} | {fault.invariant} | {seed} | `{said}` |")
        print(lines[-1], flush=True)
    head, rest = PAGE.read_text("utf-8").split(BEGIN)
    PAGE.write_text(head + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + rest.split(END)[1], "utf-8")


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(FIRST, FIRST + STORMS))
def test_invariants_hold_in_a_storm(seed: int) -> None:
    said = failure(seed)
    assert said is None, f"seed {seed} (RESHARDING_STORM_FROM={seed} RESHARDING_STORMS=1): {said}"


def test_every_planted_fault_is_in_the_table() -> None:
    assert list(recorded()) == [fault.name for fault in FAULTS]
    assert sum(seed is not None for seed in recorded().values()) >= 17


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault) -> None:
    seed = recorded()[fault.name]
    if seed is None:
        with fault.planted():  # what it changes is still there
            return
    with fault.planted():
        said = failure(seed)
    assert said is not None, f"seed {seed} finds it no more: python -m tests.unit.test_resharding_simulation --write"
    if seed not in range(FIRST, FIRST + STORMS):  # those have a test of their own
        assert failure(seed) is None


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write()
