"""What a member does for the whole stream while it has the duty: it carries on a resharding that is under way, and
trims what lies on shards that the layout has no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from . import removed, reshard, telemetry
from .errors import CoordError
from .keys import GroupKeys, StreamKeys
from .logs import Log
from .models import Resharding
from .runner import AsyncRunner

# How often shards that the layout has no more are looked at; nothing new comes there. And once a resharding has ended.
REMOVED_SECONDS = 60.0


class Duties:
    """Does what the stream as a whole needs, for as long as this member has the duty.

    The duty lasts one heartbeat, and the next one may renew it. It is no lock: a member that was asleep may go on with
    it while another one has it, which does no harm.

    Parameters:
        keys: of the group.
        runner: sends the commands.
        clock: seconds, the one of the heartbeats.
        log: of the consumer.
        attributes: of the consumer's metrics.
    """

    def __init__(
        self,
        keys: GroupKeys,
        runner: AsyncRunner,
        clock: Callable[[], float],
        log: Log,
        attributes: telemetry.Attributes,
    ) -> None:
        self._keys = StreamKeys(keys.stream, keys.prefix)
        self._runner = runner
        self._clock = clock
        self._log = log
        self._attributes = attributes
        self._until = 0.0
        self._given = asyncio.Event()
        self._said: tuple[str, str] | None = None
        self._trouble = ""
        self._trim_at = 0.0
        self._last: tuple[str, str] | None = None

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
                saga = reshard.drive(self._keys, goes_on=self._goes_on, progress=self._say)
                await self._trim(await self._runner.drive(saga, retry=False))
            except CoordError as error:
                # Whoever has the duty next tries again. Said once: a member without the rights meets it each time.
                if str(error) != self._trouble:
                    self._log.warning("cannot do its duty for the stream: %s", error)
                self._trouble = str(error)

    def _goes_on(self) -> bool:
        return self._clock() < self._until

    async def _trim(self, last: Resharding | None) -> None:
        """Trim shards that the layout has no more, if the stream wants it, and if it is time."""
        ended = None if last is None else (last.id, last.state)
        if (last is not None and last.active) or (ended == self._last and self._clock() < self._trim_at):
            return
        self._last, self._trim_at = ended, self._clock() + REMOVED_SECONDS
        trimmed = await self._runner.drive(removed.retain(self._keys, self._goes_on), retry=False)
        telemetry.trimmed.add(trimmed.entries, self._attributes)
        for waiting in trimmed.waits:
            self._log.warning("not trimmed: %s", waiting, shard=waiting.shard)
        self._trouble = ""

    def _say(self, resharding: Resharding) -> None:
        if resharding.active or self._said is not None:
            said = (resharding.id, resharding.state)
            if said != self._said:
                self._log.info("resharding from %d to %d shards: %s", resharding.source, resharding.target, said[1])
            self._said = said if resharding.active else None
