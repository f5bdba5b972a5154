"""Load the Lua files: read their headers, expand their includes, and keep the catalogue.

A script's header is its contract, and the only place where the names and the order of its keys and
arguments stand::

    -- What it does, and the race it closes.
    -- @include group
    -- @key metadata     the group's record
    -- @arg member string
    -- @arg ids list     a list takes all that is left, so it comes last
    -- @returns OK ...
    -- @error GROUP_NOT_FOUND

Inside the script they are ``key.metadata``, ``arg.member`` and so on. ``@include group`` makes the table that
``lua/lib/group.lua`` returns available as the local ``group``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Literal, cast

import attrs

if TYPE_CHECKING:
    from importlib.abc import Traversable

Kind = Literal["string", "integer", "list"]
Argument = str | bytes | int | Sequence[str | bytes | int]

_TAG = re.compile(r"^-- @(\w+)\s+(\S+)(?:\s+(\S+))?")

# Refusals are raised as tables, from however deep, before anything is written; they become plain answers here.
# Redis 6.2 puts the place in front of an error's code; the code has to come first to be recognised.
_PROLOGUE = "local function run()\n"
_EPILOGUE = """
end
local ok, answer = pcall(run)
if ok then return answer end
if type(answer) == 'table' then return answer.refused or answer end
return redis.error_reply((string.gsub(tostring(answer), '^[^:]*user_script: ?%d+: %-?', '')))
"""


@attrs.frozen
class Script:
    """One Lua file, ready to send.

    Attributes:
        name: name of the file without its ending.
        keys: names of its keys, in order.
        arguments: name and kind of its arguments, in order.
        includes: library files it uses, each after those it needs itself.
        refusals: error words it can answer with.
        source: what is sent to Redis.
        sha: SHA-1 of `source` in hex, as EVALSHA wants it.
    """

    name: str
    keys: tuple[str, ...]
    arguments: tuple[tuple[str, Kind], ...]
    includes: tuple[str, ...]
    refusals: frozenset[str]
    source: str = attrs.field(repr=False)
    sha: str

    def bind(self, keys: Mapping[str, str], arguments: Mapping[str, Argument]) -> tuple[list[str], list[str | bytes]]:
        """Put keys and arguments, given by name, into the script's order.

        Returns:
            KEYS and ARGV.

        Raises:
            TypeError: a name is missing or unknown, or a value is not of its kind. Both sides of a script are
                ours, so this is a mistake in the library and never one of its user.
        """
        if set(keys) != set(self.keys) or set(arguments) != {name for name, _ in self.arguments}:
            raise TypeError(f"{self.name}: takes keys {self.keys} and arguments {self.arguments}")
        argv: list[str | bytes] = []
        for name, kind in self.arguments:
            value = arguments[name]
            if kind == "list":
                if isinstance(value, (str, bytes, int)):
                    raise TypeError(f"{self.name}: {name} must be a sequence")
                argv.extend([str(item) if isinstance(item, int) else item for item in value])
            elif isinstance(value, (str, bytes)) if kind == "string" else type(value) is int:
                argv.append(_scalar(cast("str | bytes | int", value)))
            else:
                raise TypeError(f"{self.name}: {name} must be of kind {kind}, not {value!r}")
        return [keys[name] for name in self.keys], argv


def _scalar(value: str | bytes | int) -> str | bytes:
    return str(value) if isinstance(value, int) else value


def parse(name: str, text: str, libraries: Mapping[str, str]) -> Script:
    """Make a `Script` of the text of a Lua file.

    Parameters:
        name: name of the script.
        text: content of its file.
        libraries: name -> content of each library file.

    Raises:
        ValueError: the header or an include is wrong; says which line.
    """
    keys: list[str] = []
    arguments: list[tuple[str, Kind]] = []
    refusals: set[str] = set()
    for tag, word, rest in _tags(text):
        if tag == "key":
            keys.append(word)
        elif tag == "arg":
            if rest not in ("string", "integer", "list"):
                raise ValueError(f"{name}: argument {word} has the unknown kind {rest!r}")
            if arguments and arguments[-1][1] == "list":
                raise ValueError(f"{name}: argument {word} stands after a list, which takes all that is left")
            arguments.append((word, cast(Kind, rest)))
        elif tag == "error":
            refusals.add(word)
        elif tag not in ("include", "returns"):
            raise ValueError(f"{name}: unknown tag @{tag}")
    for names in (keys, [argument for argument, _ in arguments]):
        if len(set(names)) != len(names):
            raise ValueError(f"{name}: a name stands twice in {names}")

    includes: list[str] = []
    _collect(name, text, libraries, includes, path=())
    for library in includes:
        refusals.update(word for tag, word, _ in _tags(libraries[library]) if tag == "error")
    parts = [f"local {library} = (function()\n{libraries[library]}\nend)()\n" for library in includes]
    source = "".join([*parts, _names(keys, arguments), _PROLOGUE, text, _EPILOGUE])
    return Script(
        name=name,
        keys=tuple(keys),
        arguments=tuple(arguments),
        includes=tuple(includes),
        refusals=frozenset(refusals),
        source=source,
        sha=hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest(),
    )


def _tags(text: str) -> list[tuple[str, str, str | None]]:
    return [(match[1], match[2], match[3]) for line in text.splitlines() if (match := _TAG.match(line)) is not None]


def _collect(name: str, text: str, libraries: Mapping[str, str], found: list[str], path: tuple[str, ...]) -> None:
    for tag, library, _ in _tags(text):
        if tag != "include" or library in found:
            continue
        if library in path:
            raise ValueError(f"{name}: {library} includes itself through {' -> '.join(path)}")
        if library not in libraries:
            raise ValueError(f"{name}: there is no lib/{library}.lua")
        _collect(name, libraries[library], libraries, found, (*path, library))
        found.append(library)


def _names(keys: Sequence[str], arguments: Sequence[tuple[str, Kind]]) -> str:
    lines = [f"local key = {{ {', '.join(f'{key} = KEYS[{i}]' for i, key in enumerate(keys, 1))} }}\n"]
    values = []
    for position, (argument, kind) in enumerate(arguments, 1):
        if kind == "list":
            lines.append(f"local rest = {{}}\nfor i = {position}, #ARGV do rest[#rest + 1] = ARGV[i] end\n")
            values.append(f"{argument} = rest")
        else:
            values.append(
                f"{argument} = " + (f"tonumber(ARGV[{position}])" if kind == "integer" else f"ARGV[{position}]")
            )
    lines.append(f"local arg = {{ {', '.join(values)} }}\n")
    return "".join(lines)


@cache
def catalogue() -> Mapping[str, Script]:
    """Return every script of the package by name."""
    folder = resources.files(__package__) / "lua"
    libraries = _read(folder / "lib")
    return {name: parse(name, text, libraries) for name, text in _read(folder).items()}


def _read(folder: Traversable) -> dict[str, str]:
    return {
        entry.name.removesuffix(".lua"): entry.read_text("utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".lua")
    }
