"""Sagas under way, the real ones: producers that publish, operators that create, delete and move groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from redis_stream_coord.commands import Command, Pause, Saga, Together
from redis_stream_coord.errors import (
    AdminError,
    ConflictError,
    CoordError,
    NotFoundError,
    PublishError,
    RedisUnavailableError,
)
from redis_stream_coord.keys import GroupKeys
from redis_stream_coord.machine import Machine
from redis_stream_coord.models import Outgoing, Timings
from redis_stream_coord.publishing import Publishing
from redis_stream_coord.sagas import Sagas
from redis_stream_coord.settings import RedisSettings

if TYPE_CHECKING:
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

    def clock(self) -> float:
        return self._clock()


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
    """

    def __init__(self, world: World, saga: Saga[Any], end: Callable[[Any], None]) -> None:
        self.world = world
        self.over = False
        self._saga = saga
        self._end = end
        self._next: Command[Any] | Pause | Together | None = None
        self._go(lambda: next(saga))

    def _go(self, on: Callable[[], Any]) -> None:
        try:
            self._next = on()
        except StopIteration as stop:
            self.over = True
            self._end(stop.value)
        except CoordError as error:
            self.over = True
            self._end(error)

    def advance(self) -> None:
        """Carry out the next command; something may happen to it."""
        world, command = self.world, self._next
        if self.over:
            return  # refused before anything was sent
        if isinstance(command, Pause):
            self._go(lambda: self._saga.send(None))
            return
        assert command is not None
        if isinstance(command, Together):
            outcomes = [self._one_of_several(one) for one in command.commands]
            self._go(lambda: self._saga.send(outcomes))
            return
        if command.name == "CLIENT INFO":
            self._go(lambda: self._saga.send({"user": "default", "addr": "127.0.0.1:1"}))
            return
        if world.troubled and world.chance.likely(world.profile.trouble):
            world.steps += 1
            what = world.chance.below(3)
            if what == 0:
                world.perform(command, fresh=False)  # and the answer is lost
            elif what == 1:
                world.delay(command, None)
            # A producer decides itself what is sent again.
            if command.idempotent and command.name != "publish" and world.chance.likely(60):
                return  # tried again
            self._go(lambda: self._saga.throw(RedisUnavailableError("lost")))
            return
        outcome = world.perform(command)
        world.steps += 1
        if isinstance(outcome, CoordError):
            self._go(lambda: self._saga.throw(outcome))
        else:
            self._go(lambda: self._saga.send(outcome))

    def _one_of_several(self, command: Command[Any]) -> Any:
        """Carry out a command that was sent together with others; none of them is sent again."""
        world = self.world
        world.steps += 1
        if world.troubled and world.chance.likely(world.profile.trouble):
            if world.chance.likely(50):
                world.perform(command, fresh=False)
            return RedisUnavailableError("lost")
        return world.perform(command)

    def finish(self) -> None:
        """Go on to the end."""
        for _ in range(1000):
            if self.over:
                return
            self.advance()
        raise AssertionError("a saga does not come to its end")


class Publisher:
    """Producers of one stream."""

    def __init__(self, world: World, stream: str) -> None:
        self.world = world
        self.errands: list[Errand] = []
        where = settings(world.seconds)
        self._producers = [
            Publishing(stream, where, fenced=True, lease_seconds=10.0, lock=contextlib.nullcontext()) for _ in range(2)
        ]
        self._events = 0

    def publish(self, key: bytes, *, event_id: bool) -> None:
        """Begin to publish one entry."""
        self._events += 1
        event = f"e{self._events}" if event_id else None
        outgoing = Outgoing(fields={"n": str(self._events)}, key=key, event_id=event)
        self._begin(self.world.chance.pick(self._producers), outgoing)

    def _begin(self, publishing: Any, outgoing: Outgoing) -> None:
        def end(result: Any) -> None:
            again = isinstance(result, PublishError) and outgoing.event_id is not None
            if again and self.world.chance.likely(80):
                self._begin(publishing, outgoing)

        self.errands.append(Errand(self.world, publishing.publish(publishing.prepare(outgoing)), end))

    def step(self) -> None:
        """Begin to publish something, or go on with it."""
        chance = self.world.chance
        for _ in range(1 + chance.below(3)):
            if len(self.errands) < _MOST_PUBLISHING:
                key = b"k%d" % chance.below(self.world.profile.keys)
                self.publish(key, event_id=chance.likely(50))
        errand = chance.pick(self.errands)
        errand.advance()
        if chance.likely(70) and not errand.over:
            errand.advance()
        self.tidy()

    def finish(self) -> None:
        while self.errands:
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
        self._sagas = Sagas(settings(world.seconds), requested_by="operator")
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
