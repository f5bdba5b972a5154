"""How a fault is planted into the real code, to be switched on alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any
from unittest import mock

import attrs

from redis_stream_coord import scripts
from redis_stream_coord.commands import base
from redis_stream_coord.scripts import Script

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@attrs.frozen
class Fault:
    """One planted fault.

    Attributes:
        name: a few words.
        invariant: number in section 2 of the protocol that it breaks.
        lua: (file, what stands there, what is put there instead), each exactly once in its file.
        python: other ways in.
        place: what those change.
    """

    name: str
    invariant: str
    lua: tuple[tuple[str, str, str], ...] = ()
    python: tuple[Patch, ...] = ()
    place: str = "a model of the engine"

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Switch it on."""
        with contextlib.ExitStack() as stack:
            if self.lua:
                changed = _catalogue(self.lua)
                stack.enter_context(mock.patch.object(base, "catalogue", return_value=changed))
            for patch in self.python:
                stack.enter_context(patch())
            yield

    @property
    def where(self) -> str:
        """The files that it changes."""
        return ", ".join(sorted({f"`{name}.lua`" for name, _, _ in self.lua}) + [self.place] * bool(self.python))


@cache
def _texts() -> Mapping[str, str]:
    folder = resources.files("redis_stream_coord") / "lua"
    found = {}
    for place, prefix in ((folder, ""), (folder / "lib", "lib/")):
        for entry in place.iterdir():
            if entry.name.endswith(".lua"):
                found[prefix + entry.name.removesuffix(".lua")] = entry.read_text("utf-8")
    return found


@cache
def _catalogue(changes: tuple[tuple[str, str, str], ...]) -> Mapping[str, Script]:
    texts = dict(_texts())
    for name, old, new in changes:
        assert texts[name].count(old) == 1, f"{name}.lua has {texts[name].count(old)} of {old!r}"
        texts[name] = texts[name].replace(old, new)
    libraries = {name[4:]: text for name, text in texts.items() if name.startswith("lib/")}
    return {name: scripts.parse(name, text, libraries) for name, text in texts.items() if "/" not in name}


def instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """Patch a method by what `make` makes of it."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))
