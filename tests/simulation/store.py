"""The simulation's Redis: the real scripts run by Lua 5.1 against a store in the same Lua, on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from lupa import lua51

from redis_stream_coord.commands import Command
from redis_stream_coord.errors import CoordError
from redis_stream_coord.scripts import Script

T = TypeVar("T")

GONE, NEW, PENDING, FINISHED, NO_GROUP = range(5)
BEGIN_MS = 1_700_000_000_000
_HERE = Path(__file__).parent


class Store:
    """Everything that Redis holds. One for a process: `reset` empties it.

    Attributes:
        ms: Redis server time. Stands still unless somebody moves it.
        calls: how many commands were carried out and not taken back; a point to go back to.
    """

    def __init__(self) -> None:
        self.ms = BEGIN_MS
        lua = lua51.LuaRuntime(encoding=None, register_eval=False, register_builtins=False, unpack_returned_tuples=True)
        made = lua.execute((_HERE / "store.lua").read_bytes())
        lua.execute((_HERE / "streams.lua").read_bytes(), made)
        self._compile, self._run, self._plain = made[b"compile"], made[b"run"], made[b"plain"]
        self._take_back, self._reset, self._changes = made[b"take_back"], made[b"reset"], made[b"changes"]
        self._count, self._table = made[b"count"], lua.table_from
        self._standing, self._ids, self._hash = made[b"standing"], made[b"ids"], made[b"hash"]
        self._scripts: dict[str, Any] = {}
        self.recorded: list[tuple[int, Command[Any], Any]] | None = None  # time, command, answer or error of each call

    def reset(self) -> None:
        """Forget everything, and begin time anew."""
        self._reset()
        self.ms = BEGIN_MS

    @property
    def calls(self) -> int:
        count: int = self._count()
        return count

    def answer(self, command: Command[Any]) -> Any:
        """Carry out a command. Returns: the raw answer. Raises: `CoordError`: an error of Redis, not a refusal."""
        script = command.script
        arguments = [part if type(part) is bytes else str(part).encode() for part in command.arguments]
        if script is None:
            slot = (command.keys[0] if command.keys else "").encode()
            found = self._plain(self.ms * 1000, slot, *command.name.encode().split(), *arguments)
            return self._unpack(command.name, found)
        keys = [key.encode() for key in command.keys]
        found = self._scripts.get(script.sha) or self._load(script)
        return self._unpack(script.name, self._run(found, self.ms * 1000, len(keys), *keys, *arguments))

    def run(self, command: Command[T]) -> T:
        """Carry out a command and return what its parser makes of the answer. Raises: `CoordError`."""
        if self.recorded is None:
            return command.parse(self.answer(command))
        try:
            answer = self.answer(command)
        except CoordError as error:
            self.recorded.append((self.ms, command, error))
            raise
        self.recorded.append((self.ms, command, answer))
        return command.parse(answer)

    def plain(self, key: str, *words: str | bytes | int) -> Any:
        """Carry out a plain command given in words, on the slot of a key."""
        given = [word if type(word) is bytes else str(word).encode() for word in words]
        return self._unpack(str(words[0]), self._plain(self.ms * 1000, key.encode(), *given))

    def changes(self) -> Iterable[tuple[bytes, bytes, Any]]:
        """Return what the latest call wrote into hashes and sorted sets: (key, field, value now, or ``None``).

        A key that came or went is (b"", key, whether it is there).
        """
        found = self._changes()
        if type(found) is not tuple:
            return ()
        return zip(found[1::3], found[2::3], found[3::3], strict=True)

    def take_back(self, calls: int, slots: Iterable[str] | None = None) -> None:
        """Undo everything since there were so many `calls`; with `slots` (texts between braces) only there."""
        self._take_back(calls, None if slots is None else self._table({slot.encode(): True for slot in slots}))

    # --- for the judge: looks that are no calls -----------------------------------------------------------------------

    def standing(self, key: bytes, group: bytes, entry_id: bytes) -> int:
        """Return how an entry stands with a group: `GONE`, `NEW`, `PENDING`, `FINISHED` or `NO_GROUP`."""
        found: int = self._standing(key, group, entry_id)
        return found

    def ids(self, key: bytes) -> tuple[bytes, ...]:
        """Return the ids in a stream."""
        found = self._ids(key)
        return found[1:] if type(found) is tuple else ()

    def hash(self, key: bytes) -> dict[bytes, Any]:
        """Return the content of a hash or sorted set."""
        found = self._hash(key)
        return dict(zip(found[1::2], found[2::2], strict=True)) if type(found) is tuple else {}

    def _load(self, script: Script) -> Any:
        self._scripts[script.sha] = found = self._compile(script.source.encode())
        return found

    @staticmethod
    def _unpack(name: str, found: Any) -> Any:
        if type(found) is not tuple:
            return ()
        kind = found[0]
        if kind == 0:
            return found[1:]
        if kind == 1:
            return _nested(found)
        if kind == 2:
            raise CoordError(f"{name} failed: {found[1].decode()}")
        return found[1]


def _nested(found: tuple[Any, ...]) -> list[Any]:
    whole: list[Any] = []
    open_lists = [(whole, -1)]
    at = 1
    while at < len(found):
        into, left = open_lists[-1]
        if left == 0:
            open_lists.pop()
            continue
        open_lists[-1] = (into, left - 1)
        value = found[at]
        if value is True:
            inner: list[Any] = []
            into.append(inner)
            open_lists.append((inner, found[at + 1]))
            at += 2
        else:
            into.append(value)
            at += 1
    return whole
