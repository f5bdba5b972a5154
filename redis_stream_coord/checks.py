"""Checks of what a user passes, where it is passed: a mistake is named there, and not met in the midst of work."""

from __future__ import annotations

import inspect
from numbers import Integral, Real
from typing import Any

from .errors import ConfigError


def check_number(name: str, value: Any, low: float, high: float = float("inf"), *, hint: str | None = None) -> None:
    """Check a number. `low`, `high`: the least and the greatest that may be; whole ones, if both are an `int`.

    Raises:
        ConfigError: it is something else.
    """
    whole = isinstance(low, int) and isinstance(high, int)
    is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        bounds = f"between {low} and {high}" if high != float("inf") else f"of at least {low}"
        raise ConfigError(f"{name}={value!r} must be a {'whole ' if whole else ''}number {bounds}", hint=hint)


def check_kind(name: str, value: Any, *kinds: type, hint: str | None = None) -> None:
    """Check of what kind a value is. Raises: `ConfigError`."""
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{name}={value!r} must be of type {wanted}", hint=hint)


def check_function(name: str, function: Any, takes: str, *, want_async: bool) -> None:
    """Check a function that the library will call with one argument.

    Parameters:
        name: of the parameter, for the message.
        function: what was passed.
        takes: what it is called with, for the message.
        want_async: a coroutine function; otherwise a plain one.

    Raises:
        ConfigError: it cannot be called so, or is of the other kind.
    """
    if not callable(function):
        raise ConfigError(f"{name}={function!r} cannot be called", hint="Pass the function itself.")
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if is_async is not want_async:
        kind, other = ("coroutine", "Consumer") if want_async else ("plain", "AsyncConsumer")
        raise ConfigError(f"{name} must be a {kind} function here", hint=f"Use {other} for the other kind.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some that are written in C have none
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{name} cannot be called with one argument: {error}", hint=f"It is given {takes}, and nothing else."
        ) from None
