"""Waiting by condition with a deadline, so that no test sleeps for a guessed time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar, overload

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.05


def eventually(
    predicate: Callable[[], T],
    *,
    within_seconds: float = 10.0,
    what: str = "the condition",
    ignoring: tuple[type[Exception], ...] = (),
) -> T:
    """Poll `predicate` until it answers something truthy.

    Args:
        predicate: called again and again; always at least once.
        within_seconds: the deadline.
        what: the awaited thing, for the error message.
        ignoring: exceptions that mean "not yet"; any other one ends the wait at once.

    Returns:
        The truthy answer.

    Raises:
        AssertionError: the deadline passed; the message shows the last answer or exception.
    """
    last: object = None
    for pause in _pauses(within_seconds):
        try:
            last = answer = predicate()
        except ignoring as error:
            last = error
        else:
            if answer:
                return answer
        time.sleep(pause)
    raise AssertionError(_late(what, within_seconds, last))


@overload
async def aeventually(
    predicate: Callable[[], Awaitable[T]],
    *,
    within_seconds: float = ...,
    what: str = ...,
    ignoring: tuple[type[Exception], ...] = ...,
) -> T: ...
@overload
async def aeventually(
    predicate: Callable[[], T],
    *,
    within_seconds: float = ...,
    what: str = ...,
    ignoring: tuple[type[Exception], ...] = ...,
) -> T: ...
async def aeventually(
    predicate: Callable[[], Any],
    *,
    within_seconds: float = 10.0,
    what: str = "the condition",
    ignoring: tuple[type[Exception], ...] = (),
) -> Any:
    """`eventually` for a running event loop; the predicate may be a plain or a coroutine function."""
    last: object = None
    for pause in _pauses(within_seconds):
        try:
            answer = predicate()
            last = result = await answer if inspect.isawaitable(answer) else answer
        except ignoring as error:
            last = error
        else:
            if result:
                return result
        await asyncio.sleep(pause)
    raise AssertionError(_late(what, within_seconds, last))


def _pauses(within_seconds: float) -> Iterator[float]:
    deadline = time.monotonic() + within_seconds
    pause = _FIRST_PAUSE_SECONDS
    yield pause
    while time.monotonic() < deadline:
        pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
        yield pause


def _late(what: str, within_seconds: float, last: object) -> str:
    return f"{what}: not within {within_seconds:g} s; last seen: {last!r}"
