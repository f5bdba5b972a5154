"""Sagas under way, the real ones: producers that publish, operators that create, delete and move groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from redis_stream_coord.bulk import Bulk
from redis_stream_coord.commands import Command, Pause, Saga, Together
from redis_stream_coord.errors import (
    AdminError,
    ConflictError,
    CoordError,
    NotFoundError,
    PartialPublishError,
    PublishError,
    RedisUnavailableError,
)
from redis_stream_coord.keys import GroupKeys
from redis_stream_coord.machine import Machine
from redis_stream_coord.models import Outgoing, Timings
from redis_stream_coord.publishing import Publishing
from redis_stream_coord.repairs import Repairs
from redis_stream_coord.settings import RedisSettings

if TYPE_CHECKING:
    from .member import Process
    from .world import World

_MOST_PUBLISHING = 4
_MOST_OPERATING = 1


class Virtual(Machine):
    """A machine that has nothing but a clock, that of the world.

    Parameters:
        clock: tells the time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._words = 0

    def clock(self) -> float:
        return self._clock()

    def word(self) -> str:
        self._words += 1
        return f"w{self._words}"


class _Settings(RedisSettings):
    """Settings for a virtual machine; no connection is ever made."""

    @property
    def machine(self) -> Machine:
        return _MACHINES[self.url]


_MACHINES: dict[str, Machine] = {}


def settings(clock: Callable[[], float]) -> RedisSettings:
    """Return settings that name this clock; the latest one counts."""
    _MACHINES["redis://simulation"] = Virtual(clock)
    return _Settings("redis://simulation")


class Errand:
    """One saga under way, driven command by command as the runners do it.

    Parameters:
        world: where its commands are carried out.
        saga: what yields them.
        end: is told the result, or the error.
        retries: commands that may be repeated are, when their answer does not come.
        process: in which it runs; ``None``: one of its own.
    """

    def __init__(
        self,
        world: World,
        saga: Saga[Any],
        end: Callable[[Any], None] = lambda result: None,
        *,
        retries: bool = True,
        process: Process | None = None,
    ) -> None:
        self.world = world
        self.process = process
        self.over = False
        self._saga = saga
        self._end = end
        self._retries = retries
        self._next: Command[Any] | Pause | Together | None = None
        self._outcomes: list[Any] = []  # of commands that were sent together
        self._go(lambda: next(saga))

    @property
    def pauses(self) -> bool:
        """Whether it waits for time to pass."""
        return isinstance(self._next, Pause)

    def _go(self, on: Callable[[], Any]) -> None:
        try:
            self._next = on()
        except StopIteration as stop:
            self.over = True
            self._end(stop.value)
        except CoordError as error:
            self.over = True
            self._end(error)

    def _take(self, outcome: Any) -> None:
        if isinstance(outcome, CoordError):
            self._go(lambda: self._saga.throw(outcome))
        else:
            self._go(lambda: self._saga.send(outcome))

    def advance(self) -> None:
        """Carry out the next command; something may happen to it. Of several that are sent together, one."""
        command = self._next
        if self.over:
            return  # refused before anything was sent
        if isinstance(command, Pause):
            self._take(None)
            return
        assert command is not None
        if isinstance(command, Together):
            # None of them is sent again.
            self._outcomes.append(self._carry(command.commands[len(self._outcomes)]))
            if len(self._outcomes) == len(command.commands):
                outcomes, self._outcomes = self._outcomes, []
                self._take(outcomes)
            return
        if command.name == "CLIENT INFO":
            self._take({"user": "default", "addr": "127.0.0.1:1"})
            return
        outcome = self._carry(command)
        # A producer decides itself what is sent again.
        repeatable = self._retries and command.idempotent and command.name != "publish"
        if isinstance(outcome, RedisUnavailableError) and repeatable and self.world.chance.likely(60):
            return
        self._take(outcome)

    def _carry(self, command: Command[Any]) -> Any:
        """Let a command be carried out, or be lost, or its answer, or be late. Returns: what is heard of it."""
        world = self.world
        world.steps += 1
        if self.process is not None and self.process.cut:
            return RedisUnavailableError("cut off")
        if world.troubled and world.chance.likely(world.profile.trouble):
            what = world.chance.below(3)
            if what == 0:
                world.perform(command, fresh=False)  # and the answer is lost
            elif what == 1:
                world.delay(command, None)
            return RedisUnavailableError("lost")
        if world.troubled and world.profile.reshards and world.chance.likely(world.profile.duplicates):
            world.delay(command, None)
        return world.perform(command)

    def finish(self) -> None:
        """Go on to the end."""
        for _ in range(1000):
            if self.over:
                return
            if self.pauses:
                self.world.wait()
            self.advance()
        raise AssertionError(f"a saga does not come to its end, now at {self._next}")


class _Publication(Errand):
    """Entries on their way.

    Attributes:
        producer: that publishes them.
        entries: which.
    """

    def __init__(self, world: World, producer: Publishing, entries: list[Outgoing], end: Callable[[Any], None]) -> None:
        self.producer = producer
        self.entries = entries
        prepared = [producer.prepare(outgoing) for outgoing in entries]
        saga: Saga[Any] = Bulk(producer, prepared).run() if len(entries) > 1 else producer.publish(prepared[0])
        super().__init__(world, saga, end)


class Publisher:
    """Producers of one stream."""

    def __init__(self, world: World, stream: str) -> None:
        self.world = world
        self.stream = stream
        self.errands: list[_Publication] = []
        self._settings = settings(world.seconds)
        self._producers = [self._producer() for _ in range(2)]
        self._left: list[Outgoing] = []  # of producers that died, or gave up: what has an event id and no receipt
        self._events = 0

    def _producer(self) -> Publishing:
        return Publishing(self.stream, self._settings, fenced=True, lease_seconds=10.0, lock=contextlib.nullcontext())

    def _draw(self) -> Outgoing:
        """Make an entry."""
        chance = self.world.chance
        key = b"k%d" % chance.below(self.world.profile.keys)
        self._events += 1
        event = f"e{self._events}" if chance.likely(50) else None
        return Outgoing(fields={"n": str(self._events)}, key=key, event_id=event)

    def _begin(self, producer: Publishing, entries: list[Outgoing]) -> None:
        def end(result: Any) -> None:
            if isinstance(result, PartialPublishError):
                again = [one for one, receipt in zip(entries, result.receipts, strict=True) if receipt is None]
            else:
                again = entries if isinstance(result, PublishError) else []
            again = [outgoing for outgoing in again if outgoing.event_id is not None]
            if again and self.world.profile.reshards and self.world.chance.likely(30):
                self._left += again
            elif again and self.world.chance.likely(80):
                self._begin(producer, again)

        self.errands.append(_Publication(self.world, producer, entries, end))

    def step(self) -> None:
        """Begin to publish something, or go on with it."""
        chance = self.world.chance
        if self.world.profile.reshards:
            if chance.likely(3):
                self._die()
            if chance.likely(10):
                self._refresh()
        for _ in range(1 + chance.below(3)):
            if len(self.errands) < _MOST_PUBLISHING:
                if self._left and chance.likely(50):
                    some, self._left = self._left[:3], self._left[3:]
                elif self.world.profile.reshards and chance.likely(20):
                    some = [self._draw() for _ in range(3)]
                else:
                    some = [self._draw()]
                self._begin(chance.pick(self._producers), some)
        errand = chance.pick(self.errands)
        errand.advance()
        if chance.likely(70) and not errand.over:
            errand.advance()
        self.tidy()

    def _die(self) -> None:
        """A producer dies, and comes back with nothing but the list of what has no receipt yet."""
        at = self.world.chance.below(len(self._producers))
        dead, self._producers[at] = self._producers[at], self._producer()
        self.world.say("producer {} dies", at)
        for errand in [errand for errand in self.errands if errand.producer is dead]:
            self.errands.remove(errand)
            self._left += [outgoing for outgoing in errand.entries if outgoing.event_id is not None]

    def _refresh(self) -> None:
        """The thread in the background: a producer learns the layout in the midst of whatever it does."""
        errand = Errand(self.world, self.world.chance.pick(self._producers).layouts.refresh(), retries=False)
        while not errand.over:
            errand.advance()

    def finish(self) -> None:
        """Go on to the end, with what dead producers left too."""
        while self.errands or self._left:
            if not self.errands:
                some, self._left = self._left[:3], self._left[3:]
                self._begin(self._producers[0], some)
            self.errands[0].finish()
            self.tidy()

    def tidy(self) -> None:
        self.errands = [errand for errand in self.errands if not errand.over]


class Operator:
    """Operators of one stream and its groups."""

    def __init__(self, world: World, stream: str) -> None:
        self.world = world
        self.stream = stream
        self.errands: list[Errand] = []
        self._sagas = Repairs(settings(world.seconds), requested_by="operator")
        self._requests = 0
        self.contended = True  # several of them work on one group, perhaps

    def _request(self) -> str:
        self._requests += 1
        return f"r{self._requests}"

    def _begin(self, saga: Saga[Any], end: Callable[[Any], None]) -> Errand:
        errand = Errand(self.world, saga, end)
        self.errands.append(errand)
        return errand

    @property
    def busy(self) -> bool:
        return len(self.errands) >= _MOST_OPERATING

    def create(self, keys: GroupKeys, shards: int | None, timings: Timings, start: str = "oldest") -> Errand:
        saga = self._sagas.create(
            keys.stream,
            keys.group,
            shards,
            start,
            timings,
            "jump-v1",
            "all",
            True,
            "test",
            self._request(),  # type: ignore[arg-type]
        )

        def end(result: Any) -> None:
            # Another operator may have deleted it meanwhile, or a request to delete it came late.
            accepted = (RedisUnavailableError, NotFoundError, ConflictError, AdminError) if self.contended else ()
            assert not isinstance(result, CoordError) or isinstance(result, accepted), f"not created: {result!r}"

        return self._begin(saga, end)

    def recreate(self, keys: GroupKeys, start: str) -> None:
        """Delete a group and create it again, the one begun when the other is over."""

        def end(result: Any) -> None:
            accepted = (NotFoundError, ConflictError, AdminError, RedisUnavailableError)
            assert not isinstance(result, CoordError) or isinstance(result, accepted), f"not deleted: {result!r}"
            self.create(keys, None, self.world.profile.timings, start)

        self._begin(self._sagas.delete(keys.stream, keys.group, True, "test", self._request()), end)

    def repair_routes(self) -> None:
        """Make lost routes anew, as the runbook says."""

        def end(result: Any) -> None:
            assert not isinstance(result, CoordError), f"not repaired: {result!r}"

        self._begin(self._sagas.repair("routes", self.stream, None, "test", self._request()), end)

    def seek(self, keys: GroupKeys, place: str) -> None:
        """Move a group."""

        def end(result: Any) -> None:
            accepted = (NotFoundError, AdminError, RedisUnavailableError)
            assert not isinstance(result, CoordError) or isinstance(result, accepted), f"not moved: {result!r}"

        self._begin(self._sagas.seek(keys.stream, keys.group, place, None, "test", self._request()), end)

    def step(self) -> None:
        """Go on with something that is under way."""
        if self.errands:
            self.world.chance.pick(self.errands).advance()
            self.tidy()

    def finish(self) -> None:
        while self.errands:
            self.errands[0].finish()
            self.tidy()

    def tidy(self) -> None:
        self.errands = [errand for errand in self.errands if not errand.over]
