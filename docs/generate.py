"""Draw the state diagrams of `docs/protocol.md` from the tables in `redis_stream_coord.session`.

    python docs/generate.py

A test fails while the page is out of date.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path

from redis_stream_coord.session import SHARD_TRANSITIONS, TRANSITIONS, ShardState, State

PAGE = Path(__file__).parent / "protocol.md"


def diagram(table: Mapping[tuple[Enum, Enum], Enum], first: Enum, last: Iterable[Enum]) -> str:
    """Return a mermaid state diagram of a table (state, input) -> state.

    Parameters:
        table: the transitions.
        first: where it begins.
        last: where it ends.
    """
    arrows: dict[tuple[Enum, Enum], list[str]] = {}
    for (state, given), to in table.items():
        arrows.setdefault((state, to), []).append(given.value)
    lines = ["stateDiagram-v2", f"    [*] --> {first.value}"]
    lines += [f"    {state.value} --> {to.value} : {', '.join(inputs)}" for (state, to), inputs in arrows.items()]
    lines += [f"    {state.value} --> [*]" for state in last]
    return "\n".join(lines)


DIAGRAMS: Mapping[str, Callable[[], str]] = {
    "member": lambda: diagram(TRANSITIONS, State.JOINING, (State.GONE, State.FAILED)),
    "shard": lambda: diagram(SHARD_TRANSITIONS, ShardState.CLAIMING, (ShardState.REVOKED, ShardState.UNCLAIMABLE)),
}


def updated(text: str) -> str:
    """Return a page with its diagrams drawn anew. Raises: `ValueError`: it has no place for one."""
    for name, draw in DIAGRAMS.items():
        begin, end = f"<!-- diagram: {name} -->", f"<!-- end of diagram: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"no markers for the diagram of a {name}: {begin} ... {end}")
        block = f"{begin}\n\n```mermaid\n{draw()}\n```\n\n{end}"
        text = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: block, text, flags=re.DOTALL)  # noqa: B023
    return text


def main() -> None:
    """Write the page, if it changed."""
    text = PAGE.read_text("utf-8")
    if updated(text) != text:
        PAGE.write_text(updated(text), "utf-8")


if __name__ == "__main__":
    main()
