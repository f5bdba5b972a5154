"""The user's callbacks: one at a time, in order, never on the heartbeat's task."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from .errors import LifecycleError
from .models import Shards
from .tasks import end

Kind = Literal["assigned", "revoked", "lost"]
_Callback = Callable[[Shards], Awaitable[None]]


class Callbacks:
    """Calls ``on_assigned``, ``on_revoked`` and ``on_lost``. Shards that wait for the same call share one.

    For each shard they take turns: assigned, then revoked or lost. A shard that went before it was announced, or came
    back before it was given up, is not mentioned.

    Parameters:
        on_assigned, on_revoked, on_lost: coroutine functions, or ``None``.
        failed: is given the exception that one of them raised.
    """

    def __init__(
        self,
        on_assigned: _Callback | None,
        on_revoked: _Callback | None,
        on_lost: _Callback | None,
        failed: Callable[[Exception], None],
    ) -> None:
        self._functions: dict[Kind, _Callback | None] = {
            "assigned": on_assigned,
            "revoked": on_revoked,
            "lost": on_lost,
        }
        self._failed = failed
        self._announced: dict[int, asyncio.Event] = {}  # set when ``on_assigned`` has returned
        self._queue: list[tuple[Kind, set[int], asyncio.Event]] = []
        self._filled = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._calling: asyncio.Future[None] | None = None

    async def assigned(self, shard: int) -> None:
        """Wait until ``on_assigned`` has returned for a shard."""
        if shard not in self._announced:
            self._announced[shard] = self._add("assigned", {shard})
        await self._announced[shard].wait()

    async def revoked(self, shard: int) -> None:
        """Wait until ``on_revoked`` has returned for a shard."""
        if self._announced.pop(shard, None) is not None:
            await self._add("revoked", {shard}).wait()

    def lost(self, shards: Shards) -> None:
        """Have ``on_lost`` called; does not wait."""
        known = self._announced.keys() & shards
        for shard in known:
            del self._announced[shard]
        if known:
            self._add("lost", known)

    def _add(self, kind: Kind, shards: set[int]) -> asyncio.Event:
        if self._functions[kind] is None:
            done = asyncio.Event()
            done.set()
            return done
        self._idle.clear()
        self._filled.set()
        if self._queue and self._queue[-1][0] == kind:
            self._queue[-1][1].update(shards)
            return self._queue[-1][2]
        self._queue.append((kind, shards, asyncio.Event()))
        return self._queue[-1][2]

    async def run(self) -> None:
        """Call what is queued, for ever."""
        while True:
            await self._filled.wait()
            # One turn of the loop, so that the shards of one answer come in one call.
            await asyncio.sleep(0)
            self._filled.clear()
            while self._queue:
                kind, shards, done = self._queue.pop(0)
                function = self._functions[kind]
                try:
                    if function is not None:
                        await self._call(function, frozenset(shards))
                except Exception as error:  # noqa: BLE001 - the user's code; it ends the consumer, not this task
                    self._failed(error)
                finally:
                    done.set()
            self._idle.set()

    async def _call(self, function: _Callback, shards: Shards) -> None:
        # In a task of its own: a cancellation that escapes from the user's code is told from one of this task.
        self._calling = asyncio.ensure_future(function(shards))
        try:
            await asyncio.wait([self._calling])
        finally:
            if not self._calling.done():
                await end([self._calling])
        if self._calling.cancelled():
            raise LifecycleError("a callback was cancelled from within")
        self._calling.result()

    def runs_in(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether a task is that of a callback."""
        return task is not None and task is self._calling

    async def settle(self, within_seconds: float) -> None:
        """Wait until nothing is queued or running, but no longer than that."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), within_seconds)
