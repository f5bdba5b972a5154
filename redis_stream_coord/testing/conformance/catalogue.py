"""The cases by name. A case is a function that takes a `Bench`, and asserts."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from .bench import Bench

_cases: dict[str, Case] = {}


@attrs.frozen
class Case:
    """One promise.

    Attributes:
        name: area and name.
        promise: in a sentence.
        run: raises AssertionError, or an error of the library, if it is not kept.
    """

    name: str
    promise: str
    run: Callable[[Bench], None]


def case(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
    """Put a function into the catalogue; its docstring is the promise."""
    area = function.__module__.rpartition(".")[2]
    name = f"{area}.{function.__name__}"
    _cases[name] = Case(name, (function.__doc__ or "").strip(), function)
    return function


def cases() -> list[Case]:
    """Return all cases, in the order in which they are written."""
    from . import administration, consuming, damage, membership, publishing, reading, resharding, wire

    assert all((administration, consuming, damage, membership, publishing, reading, resharding, wire))
    return list(_cases.values())
