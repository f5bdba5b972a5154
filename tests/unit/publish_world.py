"""Producers against the real scripts, step by step and driven by chance: replies get lost, requests arrive long after
their sender gave up, processes die, and the stream is resharded under all of them.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import attrs
import redis

from redis_stream_coord import commands, reshard
from redis_stream_coord.bulk import Bulk
from redis_stream_coord.commands import Command, Pause, Together
from redis_stream_coord.errors import CoordError, PartialPublishError, RedisUnavailableError
from redis_stream_coord.keys import StreamKeys
from redis_stream_coord.machine import Machine
from redis_stream_coord.models import Outgoing, Receipt
from redis_stream_coord.publishing import Publishing
from redis_stream_coord.settings import RedisSettings
from tests.unit.fake import FakeGroup

MOST_SHARDS = 5
_KEYS = [f"key-{number}" for number in range(6)]


class VirtualMachine(Machine):
    """A machine whose clock is moved by the pauses of the sagas on it."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now


@attrs.frozen
class VirtualSettings(RedisSettings):
    _machine: Machine = attrs.field(kw_only=True, factory=VirtualMachine)

    @property
    def machine(self) -> Machine:
        return self._machine


@attrs.define(eq=False)
class Process:
    """A process with one producer, which publishes one event after the other, each until it has a receipt."""

    name: str
    world: World
    publishing: Publishing = attrs.field(init=False)
    left: list[Outgoing] = attrs.field(factory=list)
    saga: Any = None
    at: Any = None  # what the saga waits for
    count: int = 1  # entries under way

    def __attrs_post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Die, and come back with nothing but the list of what has no receipt yet."""
        self.publishing = self.world.new_publishing()
        self.saga = None

    def step(self) -> None:
        """Begin something, or let one step of it happen."""
        if self.world.random.random() < 0.2:
            # The thread in the background: the layout changes in the midst of a publish.
            refresh = self.publishing.layouts.refresh()
            with contextlib.suppress(StopIteration):
                refresh.send(self.world.group.run(next(refresh)))
        try:
            if self.saga is None:
                if self.left:
                    self._begin()
                return
            self.at = self.world.happen(self.saga, self.at)
        except StopIteration as over:
            self._take(over.value if isinstance(over.value, list) else [over.value])
        except PartialPublishError as error:
            self._take(error.receipts)
        except CoordError as error:
            if not error.retriable:
                raise
            self.saga = None

    def _begin(self) -> None:
        chance = self.world.random
        self.count = 1 if chance.random() < 0.5 else chance.randint(1, len(self.left))
        entries = [self.publishing.prepare(entry) for entry in self.left[: self.count]]
        many = self.count > 1 or chance.random() < 0.2
        self.saga = Bulk(self.publishing, entries).run() if many else self.publishing.publish(entries[0])
        self.at = next(self.saga)

    def _take(self, receipts: list[Receipt | None]) -> None:
        self.saga = None
        published, self.left = self.left[: self.count], self.left[self.count :]
        again = []
        for outgoing, receipt in zip(published, receipts, strict=True):
            if receipt is None:
                again.append(outgoing)
            else:
                self.world.note(outgoing, receipt)
        self.left = again + self.left


class Driver:
    """Somebody who carries the resharding on."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.over = False
        self._saga = reshard.drive(world.keys)
        self._at = next(self._saga)

    def step(self) -> None:
        try:
            self._at = self.world.happen(self._saga, self._at)
        except StopIteration:
            self.over = True
        except RedisUnavailableError:
            self.over = True


@attrs.define(eq=False)
class Wire:
    """A request that its sender has given up, and that arrives all the same."""

    commands: list[Command[Any]]


class World:
    """One stream, its producers and its reshardings.

    Parameters:
        group: on the in-memory server.
        seed: of everything that happens.
        processes: how many producers.
        events: how many entries each publishes.
        history: the record keeps the layouts before, and processes die. Otherwise producers have nothing but their own
            memory, and keep it.
    """

    def __init__(
        self, group: FakeGroup, seed: int, *, processes: int = 3, events: int = 12, history: bool = True
    ) -> None:
        self.history = history
        self.group = group
        self.random = random.Random(seed)
        self.keys = StreamKeys(group.keys.stream)
        self.machine = VirtualMachine()
        self.wire: list[Wire] = []
        self.receipts: dict[str, Receipt] = {}
        self.drivers: list[Driver] = []
        self.reshardings = 0
        self.trouble = self.random.choice((0.2, 0.5, 0.7))
        self.haste = self.random.choice((0.5, 0.8))  # of the resharding
        self.processes = [Process(str(number), self) for number in range(processes)]
        for process in self.processes:
            for number in range(events):
                key = self.random.choice(_KEYS)
                event_id = f"{process.name}.{number}"
                process.left.append(Outgoing(fields={"n": str(number), "by": process.name}, key=key, event_id=event_id))

    def new_publishing(self) -> Publishing:
        settings = VirtualSettings("redis://nowhere", timeout_seconds=0.2, machine=self.machine)
        return Publishing("orders", settings, fenced=True, lease_seconds=10.0, lock=contextlib.nullcontext())

    # --- what happens -------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Let things happen, then let all trouble end and everybody finish."""
        for _ in range(steps):
            self._step()
        self.trouble = 0.0
        for _ in range(20_000):
            if not any(process.left or process.saga for process in self.processes):
                break
            self._step()
        else:
            raise AssertionError("it does not end")
        while self.wire:
            self._arrive()

    def _step(self) -> None:
        what = self.random.random()
        if self.wire and what < 0.1:
            self._arrive()
        elif what < self.haste:
            self._reshard()
        elif what < self.haste + 0.02 and self.trouble and self.history:
            self.random.choice(self.processes).restart()
        else:
            self.random.choice(self.processes).step()
        self.machine.now += 0.001
        self.group.clock.advance(0.001)

    def _arrive(self) -> None:
        late = self.wire.pop(self.random.randrange(len(self.wire)))
        for command in late.commands:
            self.group.answer(command)

    def happen(self, saga: Any, step: Any) -> Any:
        """Let a step of a saga happen, or go wrong. Returns: its next step."""
        if isinstance(step, Pause):
            self.machine.now += step.seconds
            return saga.send(None)
        sent = list(step.commands) if isinstance(step, Together) else [step]
        if self.random.random() < self.trouble:
            self._lose(sent)
            lost = RedisUnavailableError("lost")
            return saga.send([lost] * len(sent)) if isinstance(step, Together) else saga.throw(lost)
        results = [self._carry_out(command) for command in sent]
        if isinstance(step, Together):
            return saga.send(results)
        return saga.throw(results[0]) if isinstance(results[0], CoordError) else saga.send(results[0])

    def _carry_out(self, command: Command[Any]) -> Any:
        try:
            return self.group.run(command)
        except CoordError as error:
            return error

    def _lose(self, sent: list[Command[Any]]) -> None:
        """The reply is lost: some of it was carried out, and what follows may still arrive, or not."""
        arrived = self.random.randint(0, len(sent))
        for command in sent[:arrived]:
            self.group.answer(command)
        if sent[arrived:] and self.random.random() < 0.5:
            self.wire.append(Wire(sent[arrived:]))

    # --- resharding, by its real drivers ------------------------------------------------------------------------------

    def _reshard(self) -> None:
        view = self.group.run(commands.resharding(self.keys))
        if view.saga is None or not view.saga.active:
            self.drivers.clear()
            if (self.trouble and self.random.random() < 0.5) or view.layout.shards == 0:
                self._scale(view.layout.shards)
            return
        if self.trouble and self.random.random() < 0.02:
            self._take_back(view.saga.id)
        if len(self.drivers) < 2:
            self.drivers.append(Driver(self))
        self._consume()
        self.random.choice(self.drivers).step()
        self.drivers = [driver for driver in self.drivers if not driver.over]
        if self.drivers and self.random.random() < 0.03:
            self.drivers.pop()  # it dies

    def _scale(self, shards: int) -> None:
        to = self.random.choice([n for n in range(MOST_SHARDS + 1) if n != shards and (n or self.trouble)])
        self.reshardings += 1
        name = f"s{self.reshardings}"
        self.group.run(
            commands.scale(
                self.keys, name, shards=to, ordered=False, quiesce=False, request_id=name, audit={"reason": "test"}
            )
        )

    def _take_back(self, saga_id: str) -> None:
        self.group.run(commands.rollback(self.keys, saga_id, request_id=f"{saga_id}-back", audit={"reason": "test"}))

    def _consume(self) -> None:
        """What the group's members do: everything."""
        client, name = self.group.client, self.group.keys.group
        for shard in range(MOST_SHARDS):
            stream = self.keys.shard(shard).stream
            with contextlib.suppress(redis.ResponseError):  # not there yet
                for _, entries in client.xreadgroup(name, "all", {stream: ">"}):
                    client.xack(stream, name, *[entry_id for entry_id, _ in entries])
        if not self.history:
            client.hset(self.keys.record, "earlier", "-")

    # --- what must be true --------------------------------------------------------------------------------------------

    def note(self, outgoing: Outgoing, receipt: Receipt) -> None:
        assert outgoing.event_id is not None
        assert outgoing.event_id not in self.receipts
        self.receipts[outgoing.event_id] = receipt

    def stored(self) -> list[tuple[int, str, dict[str, str]]]:
        """Every entry: shard, id, fields."""
        found = []
        for shard in range(MOST_SHARDS):
            for entry_id, fields in self.group.client.xrange(self.keys.shard(shard).stream):
                found.append((shard, entry_id.decode(), {k.decode(): v.decode() for k, v in fields.items()}))
        return found

    def check(self) -> None:
        """Each event id exactly once, where its receipt says; those of one process and key in their order."""
        stored = self.stored()
        assert Counter(fields["rsc-event"] for _, _, fields in stored) == Counter(self.receipts.keys())
        for shard, entry_id, fields in stored:
            receipt = self.receipts[fields["rsc-event"]]
            assert (receipt.shard, receipt.id) == (shard, entry_id)
        last: dict[tuple[int, str, str], int] = {}
        for shard, _, fields in stored:
            name = (shard, fields["by"], fields["rsc-key"])
            assert last.get(name, -1) < int(fields["n"]), name
            last[name] = int(fields["n"])
