"""A stream that is resharded in memory while entries come and go: drivers die at any command, and order is checked."""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from redis_stream_coord import (
    CoordError,
    RedisUnavailableError,
    Resharding,
    Timings,
    commands,
    reshard,
    standing,
)
from redis_stream_coord.commands import Command, Fence, Pause, Saga, StreamView, Together
from redis_stream_coord.keys import GroupKeys, StreamKeys
from redis_stream_coord.routing import PROTOCOLS
from tests.unit.fake import FakeGroup, fake_group

KEYS = StreamKeys("orders")
AUDIT = {"reason": "a test"}


class Driver:
    """Carries the resharding out one command at a time, and can die between any two."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.saga: Saga[Resharding | None] = reshard.drive(KEYS)
        self.over = False
        self._left: list[Command[Any]] = []
        self._results: list[Any] = []
        self._advance(None)

    def _advance(self, result: Any) -> None:
        try:
            step = self.saga.throw(result) if isinstance(result, CoordError) else self.saga.send(result)
        except (StopIteration, RedisUnavailableError):
            self.over = True
            return
        self._step = step
        self._results = []
        self._left = list(step.commands) if isinstance(step, Together) else []

    def step(self) -> bool:
        """Carry out one command. Returns whether it only paused."""
        step = self._step
        if isinstance(step, Pause):
            self._advance(None)
            return True
        if isinstance(step, Together):
            self._results.append(self._run(self._left.pop(0)))
            if not self._left:
                self._advance(self._results)
        else:
            self._advance(self._run(step))
        return False

    def _run(self, command: Command[Any]) -> Any:
        return self.world.send(command)


class World:
    """A stream with groups, whose entries are published and consumed by calls of `publish` and `consume`."""

    def __init__(self, group: FakeGroup, rng: random.Random, *groups: str) -> None:
        self.group = group
        self.rng = rng
        self.groups = ["billing", *groups]
        self.away: set[str] = set()  # keys on a node that gives no answer
        self.published: list[tuple[str, int]] = []
        self.handled: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self.sequence: dict[str, int] = defaultdict(int)
        self.layout = group.run(commands.layout(KEYS))
        for name in groups:
            self.register(name)
        self._requests = 0

    def send(self, command: Command[Any]) -> Any:
        """Carry out a command. Returns: its result, or the error that it ended with."""
        if any(key in self.away for key in command.keys):
            return RedisUnavailableError("no answer", shard=0)
        try:
            return self.group.run(command)
        except CoordError as error:
            return error

    # --- what happens -------------------------------------------------------------------------------------------------

    def register(self, name: str) -> None:
        """Create a group as `Admin.create` does it."""
        keys = GroupKeys("orders", name)
        layout = self.group.run(commands.register(keys, shards=None, routing="jump-v1"))
        found = [self.group.run(commands.provision(keys, i, start="0", layout=layout)) for i in range(layout.shards)]
        incarnation = self.group.run(
            commands.create(
                keys,
                incarnation=max(found, default=0) + 1,
                shards=layout.shards,
                epoch=layout.epoch,
                timings=Timings(),
                request_id=name,
                audit=AUDIT,
            )
        )
        self.group.run(commands.activate(keys, layout.layout, incarnation=incarnation))

    def scale(self, shards: int, **options: Any) -> str:
        self._requests += 1
        chosen = {"ordered": True, "quiesce": False, **options}
        return self.group.run(
            commands.scale(
                KEYS, f"s{self._requests}", shards=shards, request_id=f"r{self._requests}", audit=AUDIT, **chosen
            )
        )

    def rollback(self) -> None:
        saga = self.view().saga
        assert saga is not None
        self._requests += 1
        self.group.run(commands.rollback(KEYS, saga.id, request_id=f"r{self._requests}", audit=AUDIT))

    def view(self) -> StreamView:
        return self.group.run(commands.resharding(KEYS))

    def state(self) -> str:
        found = standing.describe("orders", self.view())
        return "-" if found is None else found.state

    def publish(self) -> bool:
        """Publish the next entry of some key by the layout known; learn the present one if that is refused."""
        key = f"key-{self.rng.randrange(40)}"
        if self.layout.shards:
            shard = PROTOCOLS[self.layout.routing].shard(key.encode(), self.layout.shards)
            entry = (None, ["rsc-key", key, "n", str(self.sequence[key])])
            command = commands.publish(KEYS, shard, [entry], layout=self.layout.layout, window_ms=1000, window_count=10)
            (outcome,) = self.group.run(command)
            if outcome.word == "OK":
                self.published.append((key, self.sequence[key]))
                self.sequence[key] += 1
                return True
            assert outcome.word in ("CLOSED", "STALE_ROUTE"), outcome
        self.layout = self.group.run(commands.layout(KEYS))
        return False

    def consume(self, name: str | None = None, *, count: int = 3) -> int:
        """Some group reads one of its shards and acknowledges some of it. Returns how many it has handled."""
        name = name or self.rng.choice(self.groups)
        keys = GroupKeys("orders", name)
        record = self.group.run(commands.describe(keys))
        if not record.shards:
            return 0
        return self._consume(keys, record.incarnation, self.rng.choice(list(record.shards)), count)

    def _consume(self, keys: GroupKeys, incarnation: int, shard: int, count: int) -> int:
        fence = Fence(shard, "a", "n1", incarnation, 1)
        self.group.run(commands.claim(keys, fence))
        page = self.group.run(commands.read(keys, fence, after="0-0", count=count))
        done = page.entries[: self.rng.randint(0, len(page.entries))]
        for entry in done:
            assert entry.key is not None
            self.handled[keys.group].append((entry.key.decode(), int(entry.fields[3])))
        if done:
            self.group.run(commands.ack(keys, fence, [entry.id for entry in done]))
        return len(done)

    # --- what has to be -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Drive and consume until the resharding is over and everything is handled.

        Raises:
            AssertionError: it does not end.
        """
        driver = Driver(self)
        for _ in range(20_000):
            self.consume(count=20)
            if driver.over:
                if not self._waiting():
                    return
            else:
                driver.step()
        found = [str(waiting) for waiting in self.look().waits]
        raise AssertionError(f"still {self.state()}, waits for {found}")

    def _waiting(self) -> bool:
        return any(len(self.handled[name]) < len(self.published) for name in self.groups)

    def look(self) -> Resharding:
        found: Resharding = self.drive(reshard.look(KEYS))
        return found

    def drive(self, saga: Saga[Any]) -> Any:
        """Carry out what a saga yields. Returns: its result."""
        result: Any = None
        for _ in range(20_000):
            try:
                step = saga.throw(result) if isinstance(result, CoordError) else saga.send(result)
            except StopIteration as over:
                return over.value
            if isinstance(step, Together):
                result = [self.send(command) for command in step.commands]
            elif isinstance(step, Command):
                result = self.send(step)
            else:
                result = None  # a pause
        raise AssertionError("it does not end")

    def check(self) -> None:
        """Each entry was handled once by each group, and those of a key in order."""
        for name in self.groups:
            assert sorted(self.handled[name]) == sorted(self.published), name
            last: dict[str, int] = defaultdict(lambda: -1)
            for key, n in self.handled[name]:
                assert n == last[key] + 1, f"group {name}: entry {n} of {key} after {last[key]}"
                last[key] = n

    def check_layout(self, shards: int) -> None:
        """Routes, groups and record agree on a layout, and nothing of the resharding is left."""
        view = self.view()
        assert view.layout.shards == shards
        assert (view.cuts, list(view.barriers)) == ({}, [])
        for shard in range(view.top):
            route = self.group.client.hgetall(KEYS.shard(shard).route)
            if not route:
                continue
            assert route[b"state"] == (b"open" if shard < shards else b"closed"), shard
            if shard < shards:
                assert route[b"layout"].decode() == view.layout.layout
        for name in self.groups:
            record = self.group.run(commands.describe(GroupKeys("orders", name)))
            assert sorted(record.shards) == list(range(shards))


@contextlib.contextmanager
def world(seed: int, *groups: str, shards: int = 4) -> Iterator[World]:
    """A stream with group `billing` and others."""
    with fake_group(shards=shards) as group:
        yield World(group, random.Random(seed), *groups)
