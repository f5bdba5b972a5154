"""Plain commands of Redis that belong to no group: waiting without consuming, and the connection itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .base import Command, text


def wait(after: Mapping[str, str], *, block_seconds: float) -> Command[dict[str, str]]:
    """Wait until one of the given streams has an entry beyond its id. Result: those streams, each with the id of the
    first such entry; empty if none in time.

    On Cluster all of them have to be of one slot, so it takes one call per stream there.
    """
    block_ms = max(1, round(block_seconds * 1000))  # 0 would block for ever
    arguments = ["COUNT", "1", "BLOCK", str(block_ms), "STREAMS", *after, *after.values()]

    def parse(answer: Any) -> dict[str, str]:
        return {text(name): text(entries[0][0]) for name, entries in _streams(answer)}

    return Command("XREAD", None, list(after), arguments, parse)


def _streams(answer: Any) -> list[Any]:
    """Make a list of (name, entries) of the answer to XREAD, whichever way redis-py gives it."""
    return list(answer.items()) if isinstance(answer, dict) else list(answer or ())


def append_to(stream: str, fields: Sequence[str | bytes]) -> Command[str]:
    """Plain XADD to any stream, which it makes if need be. Result: the id."""
    return Command("XADD", None, [stream], [stream, "*", *fields], text, idempotent=False)


def client_id() -> Command[int]:
    """Ask for the number of the connection that this is sent over."""
    return Command("CLIENT ID", None, [], [], int)


def unblock(connection: int) -> Command[int]:
    """End the blocking command of a connection as if its time were up. Result: 1 if it was blocked."""
    return Command("CLIENT UNBLOCK", None, [], [str(connection), "TIMEOUT"], int)


def client_info() -> Command[Mapping[str, str]]:
    """Ask Redis who we are. Result: the fields of CLIENT INFO, among them ``addr`` and ``user``."""

    def parse(answer: Any) -> Mapping[str, str]:
        if isinstance(answer, dict):  # redis-py parses it in some versions
            return {text(name): text(value) for name, value in answer.items()}
        return dict(part.partition("=")[::2] for part in text(answer).split())

    return Command("CLIENT INFO", None, [], [], parse)
