"""The connections of a process: three on one server, however many consumers, groups and shards it has.

One for heartbeats, so that a slow read cannot cost a lease; one for claims, reads and acknowledgements; one that
blocks. Consumers on the same event loop with the same settings share them, and the last one to stop closes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import Any

from . import commands
from .errors import CoordError
from .runner import AsyncRunner
from .settings import RedisSettings
from .tasks import end
from .waiting import Waiter

_links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[RedisSettings, Links]] = weakref.WeakKeyDictionary()


class Links:
    """Connections that consumers share. Get them with `acquire`, and give them back with `release`.

    Attributes:
        control: for heartbeats.
        data: for claims, reads and acknowledgements.
        waiter: for blocking.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self.control = AsyncRunner(settings, together=True)
        self.data = AsyncRunner(settings, together=True)
        self.waiter = Waiter(settings, self.control)
        self._settings = settings
        self._users = 0
        self._waiting: asyncio.Task[Any] | None = None

    @classmethod
    def acquire(cls, settings: RedisSettings) -> Links:
        """Return the links of the running event loop for these settings."""
        of_loop = _links.setdefault(asyncio.get_running_loop(), {})
        links = of_loop.setdefault(settings, cls(settings))
        links._users += 1
        if links._waiting is None:
            links._waiting = asyncio.get_running_loop().create_task(links._run())
        return links

    async def _run(self) -> None:
        # Connecting takes several round trips, and the first answer to a join is soon followed by claims and events.
        with contextlib.suppress(CoordError):
            await asyncio.gather(self.data.run(commands.client_id(), retry=False), self.waiter.connect())
        await self.waiter.run()

    async def release(self) -> None:
        """Give them back; the last one closes them."""
        self._users -= 1
        if self._users > 0:
            return
        _links.get(asyncio.get_running_loop(), {}).pop(self._settings, None)
        if self._waiting is not None:
            await end([self._waiting])
        await self.waiter.close()
        await self.control.close()
        await self.data.close()
