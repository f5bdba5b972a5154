"""A group in an in-memory server that runs the real scripts, on a clock that only the test moves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import attrs
import redis

from redis_stream_coord import commands
from redis_stream_coord.commands import Command
from redis_stream_coord.group_view import GroupView
from redis_stream_coord.keys import GroupKeys
from redis_stream_coord.models import Timings
from redis_stream_coord.testing.server import EPOCH_SECONDS, MemoryServer
from redis_stream_coord.translation import translate

T = TypeVar("T")

# So that the server's clock and that of the test begin together.
_BEGIN_MS = EPOCH_SECONDS * 1000


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
        self.memory = MemoryServer(lambda: clock.seconds, version=version)
        self.client: Any = self.memory.client()
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
                deleted=None,
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
    """Give a clock for servers in memory."""
    yield Clock()


@contextlib.contextmanager
def fake_group(*, shards: int = 4, timings: Timings | None = None, **options: Any) -> Iterator[FakeGroup]:
    """A new group on a server of its own."""
    with virtual_time() as clock:
        group = FakeGroup(clock, GroupKeys("orders", "billing"), **options)
        try:
            group.create(shards, timings or Timings())
            yield group
        finally:
            group.memory.close()
