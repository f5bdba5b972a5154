"""What the processes write down about what they did: one JSON object a line, appended at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar


class Published(NamedTuple):
    """An entry that Redis accepted. `sequence` counts the entries of its key, from 0."""

    shard: int
    id: str
    key: str
    sequence: int


class Handled(NamedTuple):
    """One finished run of a handler. Times are `time.monotonic_ns`: on Linux one clock for all processes."""

    shard: int
    id: str
    key: str
    sequence: int
    member: str
    token: tuple[int, int]
    started_ns: int
    ended_ns: int


Record = TypeVar("Record", Published, Handled)


class Recorder:
    """Appends records to a file. Thread-safe.

    A record reaches the kernel in a single write before `add` returns, so a killed process loses none of them; at
    worst the last line of its file is cut short.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, *records: Published | Handled) -> None:
        os.write(self._descriptor, "".join(f"{json.dumps(record._asdict())}\n" for record in records).encode())


class Tail(Generic[Record]):
    """Reads a file that a process is still appending to, each record once.

    Parameters:
        path: may not exist yet.
        make: what a line becomes, see `published` and `handled`.
    """

    def __init__(self, path: Path, make: Callable[[dict[str, Any]], Record]) -> None:
        self._path = path
        self._make: Callable[[dict[str, Any]], Record] = make
        self._offset = 0

    def new(self) -> list[Record]:
        """Return what was added since the last call. A line without its end is left for the next one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [self._make(json.loads(line)) for line in complete.splitlines()]


def published(line: dict[str, Any]) -> Published:
    return Published(**line)


def handled(line: dict[str, Any]) -> Handled:
    return Handled(**{**line, "token": tuple(line["token"])})


def read_handled(paths: Iterable[Path]) -> list[Handled]:
    """Return every record of some files."""
    return [record for path in paths for record in Tail(path, handled).new()]
