"""A group in an in-memory server that runs the real scripts, on a clock that only the test moves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import attrs
import fakeredis
import redis
from fakeredis import _helpers
from fakeredis.commands_mixins import scripting_mixin, server_mixin
from fakeredis.model import _stream

from redis_stream_coord import commands
from redis_stream_coord.commands import Command
from redis_stream_coord.keys import GroupKeys
from redis_stream_coord.models import GroupView, Timings
from redis_stream_coord.runner import translate

T = TypeVar("T")

# Every place where the in-memory server reads the time; each module asks `time.time()`.
_CLOCKED = (_helpers, server_mixin, _stream)
_BEGIN_MS = 1_700_000_000_000


def _pcall(self: Any, runtime: Any, expected: Any, *command: Any) -> Any:
    """As the in-memory server does it, but with the error as text, as in Redis, and not as an object of Python."""
    try:
        return self._lua_redis_call(runtime, expected, *command)
    except Exception as error:
        return runtime.table_from({b"err": str(error).encode()})


@attrs.define
class Clock:
    """The server's clock, which is also everybody else's. Stands still unless `advance` is called."""

    ms: int = _BEGIN_MS

    def time(self) -> float:
        return self.ms / 1000

    @property
    def seconds(self) -> float:
        """Since the beginning: short numbers for the local times of sessions."""
        return (self.ms - _BEGIN_MS) / 1000

    def advance(self, seconds: float) -> None:
        self.ms += round(seconds * 1000)


class FakeServer:
    """Sends commands as the runners do: by source at first, by hash from then on."""

    def __init__(self, clock: Clock, *, version: tuple[int, ...] = (7, 0)) -> None:
        self.clock = clock
        self.client: Any = fakeredis.FakeRedis(server=fakeredis.FakeServer(version=version), protocol=2)
        self._known: set[str] = set()

    def run(self, command: Command[T]) -> T:
        """Carry out a command and return what its parser makes of the answer. Raises: `CoordError`."""
        return command.parse(self.answer(command))

    def answer(self, command: Command[Any]) -> Any:
        """Carry out a command and return the raw answer."""
        script = command.script
        if script is None:
            line: tuple[Any, ...] = (command.name, *command.arguments)
        else:
            by_hash = script.sha in self._known
            head = ("EVALSHA", script.sha) if by_hash else ("EVAL", script.source)
            self._known.add(script.sha)
            line = (*head, len(command.keys), *command.keys, *command.arguments)
        try:
            return self.client.execute_command(*line)
        except redis.RedisError as error:
            raise translate(error, command.name) from error


class FakeGroup(FakeServer):
    """A server with one group on it."""

    def __init__(self, clock: Clock, keys: GroupKeys, **options: Any) -> None:
        super().__init__(clock, **options)
        self.keys = keys

    def create(self, shards: int, timings: Timings, *, request_id: str = "1") -> None:
        """Make stream and group, step by step as `Admin.create` does."""
        layout = self.run(commands.register(self.keys, shards=shards, routing="jump-v1"))
        found = [self.run(commands.provision(self.keys, i, start="0", layout=layout)) for i in range(shards)]
        incarnation = self.run(
            commands.create(
                self.keys,
                incarnation=max(found) + 1,
                shards=shards,
                epoch=layout.epoch,
                timings=timings,
                request_id=request_id,
                audit={"reason": "test"},
            )
        )
        self.run(commands.activate(self.keys, layout.layout, incarnation=incarnation))

    def view(self) -> GroupView:
        """Return the record as an operator sees it. Raises: `CorruptMetadataError`."""
        return self.run(commands.describe(self.keys))


@contextlib.contextmanager
def virtual_time() -> Iterator[Clock]:
    """Move the in-memory server to a clock of its own."""
    clock = Clock()
    with contextlib.ExitStack() as stack:
        for module in _CLOCKED:
            stack.enter_context(mock.patch.object(module, "time", SimpleNamespace(time=clock.time)))
        stack.enter_context(mock.patch.object(scripting_mixin.ScriptingCommandsMixin, "_lua_redis_pcall", _pcall))
        yield clock


@contextlib.contextmanager
def fake_group(*, shards: int = 4, timings: Timings | None = None, **options: Any) -> Iterator[FakeGroup]:
    """A new group on a server of its own."""
    with virtual_time() as clock:
        group = FakeGroup(clock, GroupKeys("orders", "billing"), **options)
        try:
            group.create(shards, timings or Timings())
            yield group
        finally:
            group.client.close()
