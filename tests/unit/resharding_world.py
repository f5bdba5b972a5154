"""A stream that is resharded in memory while entries come and go: drivers die at any command, and order is checked."""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from redis_stream_coord import (
    ConflictError,
    CoordError,
    Outgoing,
    Receipt,
    RedisUnavailableError,
    Resharding,
    Timings,
    commands,
    reshard,
    standing,
)
from redis_stream_coord.commands import Command, Entry, Fence, Pause, Saga, StreamView, Together
from redis_stream_coord.errors import FencedError
from redis_stream_coord.keys import GroupKeys, StreamKeys
from redis_stream_coord.publishing import Publishing
from redis_stream_coord.routing import PROTOCOLS
from tests.unit.fake import FakeGroup, fake_group
from tests.unit.publish_world import Process, VirtualMachine, VirtualSettings

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


# --- a storm: everything at once, and everything goes wrong --------------------------------------------------------


@attrs.define
class Late:
    """A request on its way, which its sender has given up or has an answer to already."""

    command: Command[Any]
    done: Callable[[Any], None]


@attrs.define(eq=False)
class Session:
    """One claim of one shard by one member of a group.

    Attributes:
        fence: in whose name it reads and acknowledges.
        keys: of the group.
        claimed: its claim was answered.
        after: the last id received.
        received: not handled yet, in the order in which they came.
        handled: not acknowledged yet.
    """

    fence: Fence
    keys: GroupKeys
    claimed: bool = False
    after: str = "0-0"
    received: list[Entry] = attrs.field(factory=list)
    handled: list[Entry] = attrs.field(factory=list)


class Storm(World):
    """Reshardings at random moments, while requests and answers are lost, late and doubled, drivers and producers sleep
    and die, and consumers crash and are replaced. Calm at the end, when all has to be in order again.
    """

    PROCESSES, KEYS_EACH = 3, 5

    def __init__(self, group: FakeGroup, seed: int) -> None:
        super().__init__(group, random.Random(seed), "audit")
        self.random = self.rng  # as producers call it
        self.machine = VirtualMachine()
        self.trouble = self.rng.choice((0.03, 0.1, 0.2))
        self.haste = self.rng.choice((0.3, 0.45, 0.55))  # of the drivers
        self.late: list[Late] = []
        self.sessions: dict[tuple[str, int], Session] = {}
        self.zombies: list[Session] = []
        self.token = 0
        self.receipts: dict[str, Receipt] = {}
        self.numbers: dict[str, int] = defaultdict(int)
        self.acked: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.highest: dict[tuple[str, str], int] = defaultdict(lambda: -1)
        self.places: dict[tuple[str, int], int] = {}
        self.steps = self.reshardings = 0
        self.drivers = [Driver(self), Driver(self), Driver(self)]
        self.asleep: dict[Driver, int] = {}
        self.processes = [Process(str(number), self) for number in range(self.PROCESSES)]  # type: ignore[arg-type]

    # --- as seen by producers -----------------------------------------------------------------------------------------

    def new_publishing(self) -> Publishing:
        settings = VirtualSettings("redis://nowhere", timeout_seconds=0.2, machine=self.machine)
        return Publishing("orders", settings, fenced=True, lease_seconds=10.0, lock=contextlib.nullcontext())

    def note(self, outgoing: Outgoing, receipt: Receipt) -> None:
        assert outgoing.event_id is not None
        assert outgoing.event_id not in self.receipts
        self.receipts[outgoing.event_id] = receipt

    def happen(self, saga: Any, step: Any) -> Any:
        """Let a step of a producer happen. Returns: its next step."""
        if isinstance(step, Pause):
            self.machine.now += step.seconds
            return saga.send(None)
        if isinstance(step, Together):
            return saga.send([self.send(command) for command in step.commands])
        result = self.send(step)
        return saga.throw(result) if isinstance(result, CoordError) else saga.send(result)

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def send(self, command: Command[Any], done: Callable[[Any], None] = lambda result: None) -> Any:
        """Carry out a command, or not, or later, or twice; `done` is told each time that it is.

        Returns:
            Its result, or the error that it ended with.
        """
        what = self.rng.random() / self.trouble if self.trouble else 1.0
        if what < 0.3:  # the request is late
            self.late.append(Late(command, done))
        elif what < 0.4:  # it is lost
            pass
        else:
            result = super().send(command)
            if not isinstance(result, CoordError):
                done(result)
            if what < 0.7:  # a copy comes later
                self.late.append(Late(command, done))
            if what >= 0.55:
                return result
            if what < 0.5 and isinstance(result, CoordError):
                return result
        return RedisUnavailableError("lost")

    def _arrive(self) -> None:
        late = self.late.pop(self.rng.randrange(len(self.late)))
        result = super().send(late.command)
        if not isinstance(result, CoordError):
            late.done(result)

    # --- what happens -------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Let things go wrong for so many steps, then no more.

        Raises:
            AssertionError: something is out of order, or it does not end.
        """
        for _ in range(steps):
            self._step()
        self.trouble = 0.0
        self.asleep.clear()
        while self.late:
            self._arrive()
            if self.rng.random() < 0.5:
                self._step()
        for _ in range(250):
            if self._is_over():
                break
            for _ in range(20):
                self._step()
        else:
            waits = [str(waiting) for waiting in self.look().waits]
            left = sum(len(process.left) for process in self.processes)
            raise AssertionError(f"does not end: {self.state()}, {left} to publish, waits for {waits}")
        self.check()
        self.check_layout(self.view().layout.shards)

    def _step(self) -> None:
        self.steps += 1
        what = self.rng.random()
        if what < 0.08:
            if self.late:
                self._arrive()
        elif what < 0.11:
            self._operate()
        elif what < 0.11 + self.haste:
            self._drive()
        elif what < 0.25 + self.haste:
            self._produce()
        else:
            name = self.rng.choice(self.groups)
            self._serve(name)
        self.machine.now += 0.001
        self.group.clock.advance(0.001)

    def _operate(self) -> None:
        view = self.view()
        if view.saga is not None and view.saga.active:
            if self.trouble and self.rng.random() < 0.15:
                with contextlib.suppress(ConflictError):
                    self.rollback()
        elif (self.trouble and self.rng.random() < 0.6) or view.layout.shards == 0:
            to = self.rng.choice([n for n in (0, 1, 2, 3, 5, 6) if n != view.layout.shards and (n or self.trouble)])
            self.reshardings += 1
            self.scale(to, quiesce=self.rng.random() < 0.15)

    def _drive(self) -> None:
        at = self.rng.randrange(len(self.drivers))
        driver = self.drivers[at]
        if self.asleep.get(driver, 0) > self.steps:
            return
        if driver.over or (self.trouble and self.rng.random() < 0.01):
            self.drivers[at] = Driver(self)
        elif at and self.trouble and self.rng.random() < 0.015:
            self.asleep[driver] = self.steps + self.rng.randrange(600)
        else:
            for _ in range(self.rng.choice((1, 2, 8))):
                if not driver.over:
                    driver.step()

    def _produce(self) -> None:
        process = self.rng.choice(self.processes)
        if self.trouble and self.rng.random() < 0.02:
            process.restart()
        if self.trouble and len(process.left) < 3:
            key = f"{process.name}.{self.rng.randrange(self.KEYS_EACH)}"
            number = self.numbers[key]
            self.numbers[key] += 1
            process.left.append(Outgoing(fields={"n": str(number)}, key=key, event_id=f"{key}.{number}"))
        process.step()

    # --- consumers ----------------------------------------------------------------------------------------------------

    def _serve(self, name: str) -> None:
        """Some member of a group goes on, crashes, or takes a shard; or a zombie tries."""
        if self.zombies and self.rng.random() < 0.1:
            self._haunt(self.zombies.pop(self.rng.randrange(len(self.zombies))))
        keys = GroupKeys("orders", name)
        record = self.group.run(commands.describe(keys))
        readable = list(record.shards)
        for shard in [shard for group, shard in self.sessions if group == name and shard not in readable]:
            del self.sessions[name, shard]
        if not readable:
            return
        shard = self.rng.choice(readable)
        session = self.sessions.get((name, shard))
        if session is None or (self.trouble and self.rng.random() < 0.03):
            if session is not None:
                self.zombies.append(session)
            self.token += 1
            fence = Fence(shard, f"m{self.rng.randrange(3)}", f"n{self.token}", record.incarnation, self.token)
            session = self.sessions[name, shard] = Session(fence, keys)
        self._go_on(session)

    def _go_on(self, session: Session) -> None:
        if not session.claimed:
            session.claimed = not isinstance(self.send(commands.claim(session.keys, session.fence)), CoordError)
        elif session.handled and self.rng.random() < 0.6:
            some = session.handled[: self.rng.randint(1, len(session.handled))]
            if not isinstance(self._acknowledge(session, some), CoordError):
                del session.handled[: len(some)]
        elif session.received:
            entry = session.received.pop(0)
            self._handle(session, entry)
            session.handled.append(entry)
        else:
            page = self.send(commands.read(session.keys, session.fence, after=session.after, count=3))
            if not isinstance(page, CoordError):
                session.received += page.entries
                session.after = page.last or session.after

    def _acknowledge(self, session: Session, some: list[Entry]) -> Any:
        ids = [entry.id for entry in some]
        return self.send(
            commands.ack(session.keys, session.fence, ids),
            lambda _: self.acked[session.keys.group].update(_name_of(entry) for entry in some),
        )

    def _haunt(self, zombie: Session) -> None:
        """Whoever lost its shard to another session gets nothing, and acknowledges nothing."""
        current = self.sessions.get((zombie.keys.group, zombie.fence.shard))
        if current is None or not current.claimed:
            return
        tries: list[Command[Any]] = [commands.read(zombie.keys, zombie.fence, after=zombie.after, count=3)]
        tries += [commands.ack(zombie.keys, zombie.fence, [entry.id]) for entry in zombie.received + zombie.handled]
        for command in tries:
            result = super().send(command)
            assert isinstance(result, FencedError), f"{command.name} of a zombie: {result}"

    def _handle(self, session: Session, entry: Entry) -> None:
        group, (key, n) = session.keys.group, _name_of(entry)
        shard = session.fence.shard
        assert self.places.setdefault((key, n), shard) == shard, f"{key} {n} is on {shard} and another shard"
        assert (key, n) not in self.acked[group], f"{group}: {key} {n} again, though acknowledged"
        highest = self.highest[group, key]
        assert n <= highest + 1, f"{group}: {key} {n} after {highest}"
        if n and self.places[key, n - 1] != shard:
            assert (key, n - 1) in self.acked[group], f"{group}: {key} {n}, and {n - 1} on another shard not done"
        self.highest[group, key] = max(highest, n)

    # --- what has to be -----------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        view = self.view()
        if (view.saga is not None and view.saga.active) or any(one.left or one.saga for one in self.processes):
            return False
        return all(len(self.acked[name]) >= len(self.receipts) for name in self.groups)

    def check(self) -> None:
        """Each event id is there once, where its receipt says; and each group has acknowledged it."""
        stored: dict[str, tuple[int, str]] = {}
        for shard in range(self.view().top + 8):
            for entry_id, fields in self.group.client.xrange(KEYS.shard(shard).stream):
                event_id = fields[b"rsc-event"].decode()
                assert event_id not in stored, f"{event_id} is there twice: {stored[event_id]}, {(shard, entry_id)}"
                stored[event_id] = (shard, entry_id.decode())
        assert stored == {name: (receipt.shard, receipt.id) for name, receipt in self.receipts.items()}
        expected = {(key, n) for key, numbers in self.numbers.items() for n in range(numbers)}
        for name in self.groups:
            assert self.acked[name] == expected, f"{name} has not handled {expected - self.acked[name]}"


def _name_of(entry: Entry) -> tuple[str, int]:
    assert entry.event_id is not None
    key, _, number = entry.event_id.rpartition(".")
    return key, int(number)


@contextlib.contextmanager
def storm(seed: int) -> Iterator[Storm]:
    """A stream with two groups on which everything happens that a seed says."""
    with fake_group(shards=1 + seed % 4) as group:
        yield Storm(group, seed)


@contextlib.contextmanager
def world(seed: int, *groups: str, shards: int = 4) -> Iterator[World]:
    """A stream with group `billing` and others."""
    with fake_group(shards=shards) as group:
        yield World(group, random.Random(seed), *groups)
