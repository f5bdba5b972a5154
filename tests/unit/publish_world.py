"""Producers against the real scripts, step by step and driven by chance: replies get lost, requests arrive long after
their sender gave up, processes die, and the stream is resharded under all of them.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs

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
        self.resharding: Iterator[None] | None = None
        self.reshardings = 0
        self.trouble = self.random.choice((0.2, 0.5, 0.7))
        self.haste = self.random.choice((0.3, 0.6))  # of the resharding
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
            if not any(process.left or process.saga for process in self.processes) and self.resharding is None:
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

    # --- resharding, as the saga does it ------------------------------------------------------------------------------

    def _reshard(self) -> None:
        if self.resharding is None:
            if self.trouble and self.random.random() < 0.5:
                self.resharding = self._scale(self.random.randint(0 if self.random.random() < 0.2 else 1, MOST_SHARDS))
            elif self._record("shards") == "0":
                self.resharding = self._scale(self.random.randint(1, MOST_SHARDS))
            return
        if next(self.resharding, self) is self:
            self.resharding = None

    def _record(self, field: str) -> str:
        return str(self.group.client.hget(self.keys.record, field).decode())

    def _scale(self, to: int) -> Iterator[None]:
        epoch, shards = int(self._record("epoch")) + 1, int(self._record("shards"))
        self.reshardings += 1
        if to == shards:
            return
        for shard in self._shuffled(max(to, shards)):
            self._close(shard, epoch)
            yield
        if self.random.random() < 0.2:
            # Given up: the old layout again, under an epoch of its own; the others stay closed.
            epoch, to = epoch + 1, shards
            self._decide(epoch, to)
            yield
            for shard in self._shuffled(MOST_SHARDS):
                self._close(shard, epoch)
        else:
            self._decide(epoch, to)
        yield
        for shard in self._shuffled(to):
            self.group.client.hset(self.keys.shard(shard).route, mapping={"state": "open", "layout": self._layout()})
            yield

    def _shuffled(self, count: int) -> list[int]:
        return self.random.sample(range(count), count)

    def _layout(self) -> str:
        return self._record("layout")

    def _close(self, shard: int, epoch: int) -> None:
        names = self.keys.shard(shard)
        if not self.group.client.exists(names.stream):
            self.group.client.xgroup_create(names.stream, "made", mkstream=True)
        self.group.client.hset(names.route, mapping={"epoch": epoch, "state": "closed"})

    def _decide(self, epoch: int, shards: int) -> None:
        ended = f"{self._layout()}@{self.group.clock.ms}" if self.history else "-"
        earlier = self._record("earlier")
        self.group.client.hset(
            self.keys.record,
            mapping={
                "version": int(self._record("version")) + 1,
                "epoch": epoch,
                "shards": shards,
                "layout": f"{epoch}:{shards}:x{epoch}",
                "earlier": ended if earlier == "-" or not self.history else f"{earlier},{ended}",
            },
        )

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
