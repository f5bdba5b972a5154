"""Reshardings of the one stream: operators that ask for them and take them back, and whoever carries them on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis_stream_coord import commands, removed, reshard
from redis_stream_coord.commands import Saga, StreamView
from redis_stream_coord.errors import AdminError, ConflictError, CoordError, NotFoundError, RedisUnavailableError
from redis_stream_coord.keys import StreamKeys
from redis_stream_coord.scaling import Scaling

from .errands import Errand, settings

if TYPE_CHECKING:
    from .member import Process
    from .world import World

MOST_SHARDS = 6
_MOST_WAITING = 2
_SLEEPS = 60  # turns of driving that an operator's process may sleep


class Waiting(Errand):
    """An operator's process that waits for the end of a resharding, and carries it on: `Admin.wait`.

    Attributes:
        sleeps: so many turns it does nothing, and believes what it believed.
    """

    sleeps = 0


class Resharder:
    """Operators of the number of shards.

    Parameters:
        world: where their commands are carried out.
        stream: name.
    """

    def __init__(self, world: World, stream: str) -> None:
        self.world = world
        self.stream = stream
        self.keys = StreamKeys(stream)
        self.errand: Errand | None = None  # a request under way
        self.waiting: list[Waiting] = []
        self._sagas = Scaling(settings(world.seconds), requested_by="operator")
        self._requests = 0

    def _request(self) -> str:
        self._requests += 1
        return f"s{self._requests}"

    # --- requests -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Ask for another number of shards, or take a resharding back, or go on with what was asked for."""
        chance, record = self.world.chance, self.world.judge.layout
        if self.errand is not None:
            self.errand.advance()
        elif record.saga is None or not record.saga.active:
            shards = chance.below(MOST_SHARDS + 1) or chance.below(2)
            if shards != record.shards:
                what = chance.below(100)
                self.scale(shards, ordered=what >= self.world.profile.unordered, quiesce=what >= 88)
        elif chance.likely(self.world.profile.takes_back):
            self._begin(self._sagas.rollback(self.stream, record.saga.id, "test", self._request()))
        self.tidy()

    def scale(self, shards: int, *, ordered: bool = True, quiesce: bool = False) -> None:
        self._begin(self._sagas.scale(self.stream, shards, ordered, quiesce, "test", self._request()))

    def _begin(self, saga: Any) -> None:
        def end(result: Any) -> None:
            # Another request was first, or the resharding is over.
            accepted = (AdminError, ConflictError, NotFoundError, RedisUnavailableError)
            assert not isinstance(result, CoordError) or isinstance(result, accepted), f"refused: {result!r}"

        self.errand = Errand(self.world, saga, end)

    def tidy(self) -> None:
        if self.errand is not None and self.errand.over:
            self.errand = None
        self.waiting = [one for one in self.waiting if not one.over]

    def finish(self) -> None:
        """Go on to the end of what was asked for."""
        if self.errand is not None:
            self.errand.finish()
        self.tidy()

    def break_off(self) -> None:
        """Whatever is under way ends where it is."""
        self.errand = None
        self.waiting.clear()
        for process in self.world.processes:
            process.driver = None

    # --- carrying on --------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """An operator begins to wait for the end."""
        saga = self.world.judge.layout.saga
        if saga is not None and saga.active and len(self.waiting) < _MOST_WAITING:
            self.waiting.append(Waiting(self.world, reshard.drive(self.keys, saga_id=saga.id), retries=False))

    def drive(self) -> None:
        """A member that has the duty, or an operator who waits, goes on with the resharding."""
        world, chance = self.world, self.world.chance
        if chance.likely(4):
            self.wait()
        if self.waiting and chance.likely(5):
            one = chance.pick(self.waiting)
            if chance.likely(40):
                self.waiting.remove(one)  # it dies
            else:
                one.sleeps = chance.below(_SLEEPS)
        members = [process for process in world.processes if not process.frozen and self._has_duty(process)]
        chosen = chance.below(len(members) + len(self.waiting) or 1)
        if chosen < len(members):
            self.drive_as(members[chosen], chance.pick((1, 1, 2, 8)))
        elif self.waiting:
            driver = self.waiting[chosen - len(members)]
            if driver.sleeps:
                driver.sleeps -= 1
            else:
                self._advance(driver, chance.pick((1, 1, 2, 8)))

    def trim(self, keep: int) -> None:
        """Trim the shards that went, by a record that may be an old one by then."""
        errand = Errand(self.world, self._trim(keep), retries=False)
        while not errand.over:
            errand.advance()

    def _trim(self, keep: int) -> Saga[Any]:
        view: StreamView = yield commands.resharding(self.keys)
        return (yield from removed.trim(self.keys, view, keep=keep))

    @staticmethod
    def _has_duty(process: Process) -> bool:
        return process.driver is not None or process.now < process.duty_until

    def drive_as(self, process: Process, count: int) -> bool:
        """A member goes on with its duty. Returns: whether there was anything to do at once."""
        if process.driver is None:
            if not self._has_duty(process):
                return False
            saga = reshard.drive(self.keys, goes_on=lambda: process.now < process.duty_until)
            process.driver = Errand(self.world, saga, retries=False, process=process)
        driver = process.driver
        self._advance(driver, count)
        if driver.over:
            process.driver = None
        return not (driver.over or driver.pauses)

    @staticmethod
    def _advance(driver: Errand, count: int) -> None:
        for _ in range(count):
            paused = driver.pauses
            driver.advance()
            if driver.over or (driver.pauses and not paused):
                break

    def waits(self) -> list[str]:
        """Return what the resharding waits for, in words."""
        found: list[Any] = []
        Errand(self.world, reshard.look(self.keys), found.append, retries=False).finish()
        return [str(waiting) for waiting in getattr(found[0], "waits", found)]
