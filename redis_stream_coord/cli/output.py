"""What commands print: tables for people, one JSON document for machines."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from enum import Enum
from typing import Any

import attrs
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import CoordError, RateLimitedError
from .exits import Exit

# Of the JSON documents. It grows only if a name or a meaning changes; new names may come at any time.
SCHEMA = 1


@attrs.frozen
class View:
    """What a command found or did.

    Attributes:
        data: for ``--json``.
        shown: for people.
        exit: how the program ends.
    """

    data: Any
    shown: Sequence[RenderableType]
    exit: Exit = Exit.OK


def plain(value: Any) -> Any:
    """Make JSON of a value: attrs classes as objects, sets as sorted lists, bytes as text or ``{"base64": ...}``."""
    if attrs.has(type(value)):
        fields = {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}
        return {name: plain(one) for name, one in fields.items() if not name.startswith("_")}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (set, frozenset)):
        return [plain(one) for one in sorted(value)]
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Enum):
        return value.value
    return value


def document(command: str, data: Any) -> str:
    """Return the JSON document of a command that did its work, in one line."""
    return json.dumps({"schema": SCHEMA, "command": command, "ok": True, "data": plain(data)}, ensure_ascii=False)


def error_document(command: str, error: CoordError, code: Exit) -> str:
    """Return the JSON document of a command that failed, in one line."""
    found: dict[str, Any] = {
        "type": type(error).__name__,
        "word": error.word or None,
        "message": error.message,
        "hint": error.hint or None,
        "retriable": error.retriable,
        "stream": error.stream,
        "group": error.group,
        "member": error.member,
        "shard": error.shard,
    }
    if isinstance(error, RateLimitedError):
        found["retry_after_seconds"] = error.retry_after_seconds
    whole = {"schema": SCHEMA, "command": command, "ok": False, "exit": int(code), "error": found}
    return json.dumps(whole, ensure_ascii=False)


def show_error(console: Console, error: CoordError) -> None:
    """Say what went wrong, where, and what to do next."""
    where = ", ".join(
        f"{name} {value}"
        for name, value in (
            ("stream", error.stream),
            ("group", error.group),
            ("member", error.member),
            ("shard", error.shard),
        )
        if value is not None
    )
    text = Text.assemble(("error: ", "bold red"), error.message, f" ({where})" if where else "")
    console.print(text, soft_wrap=True)
    if isinstance(error, RateLimitedError):
        console.print(f"retry after {error.retry_after_seconds:.1f} s", soft_wrap=True)
    if error.hint:
        console.print(Text.assemble(("hint: ", "bold"), error.hint), soft_wrap=True)


def table(title: str | None, *columns: str) -> Table:
    """Make an empty table. A column that begins with ``>`` is of numbers."""
    made = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return made


def row(made: Table, *cells: object) -> None:
    """Add a row. ``None`` is shown as ``-``, ``?`` stands for what is not known."""
    made.add_row(*("-" if cell is None else cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))


def moment(ms: int) -> str:
    """Show a time of the Redis server's clock, in UTC."""
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(sep=" ", timespec="milliseconds")[:-6]


def span(ms: float) -> str:
    """Show how long something takes or took."""
    seconds = ms / 1000
    if abs(seconds) < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if abs(seconds) < 7200 else f"{seconds / 3600:.1f} h"


def shards(indices: Any) -> str:
    """Show shards as ranges: ``0-3 7``."""
    found: list[list[int]] = []
    for index in sorted(indices):
        if found and found[-1][1] == index - 1:
            found[-1][1] = index
        else:
            found.append([index, index])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in found) or "-"
