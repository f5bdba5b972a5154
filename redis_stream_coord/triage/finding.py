"""What a checklist finds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import attrs

Checklist = Literal["rebalance", "resharding"]
Level = Literal["ok", "wait", "act"]


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that a checklist of the runbook found.

    Attributes:
        checklist: ``rebalance`` or ``resharding``.
        step: of that checklist in the runbook, from 1.
        level: ``ok``; ``wait``: it will pass by itself; ``act``: somebody has to do something.
        code: its kind, for machines; the runbook explains each.
        text: what is the matter, in a sentence.
        next: what to do, in a sentence; empty for ``ok``.
        member: whom it concerns, or ``None``.
        shard: which it concerns, or ``None``.
    """

    checklist: Checklist
    step: int
    level: Level
    code: str
    text: str
    next: str = ""
    member: str | None = None
    shard: int | None = None


def finding(
    checklist: Checklist,
    step: int,
    level: Level,
    code: str,
    text: str,
    then: str,
    *,
    member: str | None = None,
    shard: int | None = None,
) -> Finding:
    """Make a finding of a checklist; `then`: what to do."""
    return Finding(
        checklist=checklist, step=step, level=level, code=code, text=text, next=then, member=member, shard=shard
    )


def walk(checklist: Checklist, steps: Sequence[Iterable[Finding]], fine: Sequence[str]) -> list[Finding]:
    """Return what each step found, in their order; for one that found nothing, that it is fine, in its own words."""
    found: list[Finding] = []
    for step, (of_step, text) in enumerate(zip(steps, fine, strict=True), 1):
        found += list(of_step) or [Finding(checklist=checklist, step=step, level="ok", code="OK", text=text)]
    return found


def seconds(ms: float) -> str:
    """Show a duration."""
    return f"{ms / 1000:.1f} s"


def listed(shards: Iterable[int]) -> str:
    """Show shards."""
    return ", ".join(map(str, sorted(shards)))
