"""What a member does for the whole stream while it has the duty: it carries on a resharding that is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from . import reshard
from .errors import CoordError
from .keys import GroupKeys, StreamKeys
from .logs import Log
from .models import Resharding
from .runner import AsyncRunner


class Duties:
    """Carries on what the stream has under way, for as long as this member has the duty.

    The duty lasts one heartbeat, and the next one may renew it. It is no lock: a member that was asleep may go on with
    it while another one has it, which does no harm.

    Parameters:
        keys: of the group.
        runner: sends the commands.
        clock: seconds, the one of the heartbeats.
        log: of the consumer.
    """

    def __init__(self, keys: GroupKeys, runner: AsyncRunner, clock: Callable[[], float], log: Log) -> None:
        self._keys = StreamKeys(keys.stream, keys.prefix)
        self._runner = runner
        self._clock = clock
        self._log = log
        self._until = 0.0
        self._given = asyncio.Event()
        self._said: tuple[str, str] | None = None
        self._trouble = ""

    def take(self, until: float) -> None:
        """Have the duty until a time. On the event loop only."""
        self._until = until
        self._given.set()

    async def run(self) -> None:
        """Do what there is to do, whenever there is the duty, for ever."""
        while True:
            await self._given.wait()
            self._given.clear()
            try:
                saga = reshard.drive(self._keys, goes_on=lambda: self._clock() < self._until, progress=self._say)
                await self._runner.drive(saga, retry=False)
                self._trouble = ""
            except CoordError as error:
                # Whoever has the duty next tries again. Said once: a member without the rights meets it each time.
                if str(error) != self._trouble:
                    self._log.warning("cannot look after reshardings: %s", error)
                self._trouble = str(error)

    def _say(self, resharding: Resharding) -> None:
        if resharding.active or self._said is not None:
            said = (resharding.id, resharding.state)
            if said != self._said:
                self._log.info("resharding from %d to %d shards: %s", resharding.source, resharding.target, said[1])
            self._said = said if resharding.active else None
