"""The table of planted faults in the documentation: made by a command, and held against the code by a test."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import attrs

from .faults import FAULTS
from .planting import Fault
from .run import Outcome, run
from .store import Store

PAGE = Path(__file__).parents[2] / "docs" / "simulation.md"
LIMIT = 500
_BEGIN, _END = "<!-- faults -->\n", "<!-- end of faults -->\n"


@attrs.frozen
class Found:
    """A planted fault, and the first schedule that finds it; ``None``: none of the first `LIMIT` does."""

    fault: Fault
    outcome: Outcome | None


def find(store: Store, fault: Fault, seeds: Iterable[int] = range(LIMIT)) -> Found:
    """Run schedules with a fault planted until one fails that does not fail without it."""
    for seed in seeds:
        with fault.planted():
            outcome = run(store, seed)
        if outcome.failure is not None and run(store, seed).failure is None:
            return Found(fault, outcome)
    return Found(fault, None)


def table(found: Iterable[Found]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| planted fault | in | invariant | seed that finds it | what the judge says |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in found:
        if one.outcome is None:
            lines.append(f"| {one.fault.name} | {one.fault.where} | {one.fault.invariant} | - | not found |")
            continue
        said = re.sub(r"[|`]", " ", (one.outcome.failure or "").removeprefix("AssertionError: "))
        said = re.sub(r"\s+", " ", said.replace("\n", " "))
        short = said if len(said) <= 110 else said[:107] + "..."
        lines.append(
            f"| {one.fault.name} | {one.fault.where} | {one.fault.invariant} | {one.outcome.seed} | `{short}` |"
        )
    return "\n".join(lines) + "\n"


def write(text: str) -> None:
    """Put the table into the page."""
    page = PAGE.read_text("utf-8")
    head, rest = page.split(_BEGIN)
    PAGE.write_text(head + _BEGIN + "\n" + text + "\n" + _END + rest.split(_END)[1], "utf-8")


def recorded() -> dict[str, int | None]:
    """Return the seeds of the page, by the name of the fault; ``None``: not found."""
    body = PAGE.read_text("utf-8").split(_BEGIN)[1].split(_END)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line.startswith("| ")
    ]
    return {row[0]: int(row[3]) if row[3].isdigit() else None for row in rows if row[0] not in ("planted fault", "---")}


def by_name(name: str) -> Fault:
    """Return a fault by its name, or by a part that only one has."""
    matching = [fault for fault in FAULTS if name in fault.name]
    exact = [fault for fault in matching if fault.name == name]
    if len(exact or matching) != 1:
        raise SystemExit(f"no single planted fault is called {name!r}: {[fault.name for fault in matching]}")
    return (exact or matching)[0]
