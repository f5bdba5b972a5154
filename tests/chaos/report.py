"""What a chaos run has found out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from examples.demo_support.judge import Finding


@dataclass
class Report:
    """The verdict of a run, and what is needed to understand it.

    Attributes:
        findings: whether each promise held.
        summary: the run in a line of numbers, its seed among them.
        trouble: what went wrong in the run itself.
        logs: what the processes said.
    """

    findings: Sequence[Finding] = ()
    summary: str = ""
    trouble: list[str] = field(default_factory=list)
    logs: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.findings) and not self.trouble and all(finding.ok for finding in self.findings)

    def __str__(self) -> str:
        lines = [line for finding in self.findings for line in finding.lines()]
        lines += [f"FAIL {what}" for what in self.trouble]
        lines.append(self.summary)
        if not self.ok and self.logs:
            lines += ["what the processes said:", self.logs]
        return "\n".join(lines)
