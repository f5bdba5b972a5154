"""Acknowledgements of one shard under one token: queued from anywhere, sent together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from . import commands, telemetry
from .commands import Fence
from .errors import CoordError, FencedError
from .keys import GroupKeys
from .logs import Log
from .runner import AsyncRunner

# They wait so long for company. What a crash can repeat is what was finished in this time, plus one call.
ACK_DELAY_SECONDS = 0.01
ACK_BATCH = 200
_AGAIN_SECONDS = 0.05


class Acks:
    """Queues and sends acknowledgements.

    Parameters:
        runner: to send them.
        keys: of the group.
        fence: in whose name.
        owns: whether the shard is still owned under that token.
        acknowledged: is told the ids that were sent.
        fenced: is told that nothing of it counted, because another session has the shard.
        log: of the consumer.
    """

    def __init__(
        self,
        runner: AsyncRunner,
        keys: GroupKeys,
        fence: Fence,
        owns: Callable[[], bool],
        acknowledged: Callable[[list[str]], None],
        fenced: Callable[[], None],
        log: Log,
    ) -> None:
        self._queue: list[str] = []
        self._labels: telemetry.Attributes = {telemetry.STREAM: keys.stream, telemetry.GROUP: keys.group}
        self._deletes: set[str] = set()
        self._runner = runner
        self._keys = keys
        self._fence = fence
        self._owns = owns
        self._acknowledged = acknowledged
        self._fenced = fenced
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def queued(self) -> int:
        """How many wait to be sent."""
        return len(self._queue)

    @property
    def ids(self) -> list[str]:
        """Ids that wait to be sent."""
        return list(self._queue)

    def check(self, entry_id: str) -> None:
        """Raise `FencedError` if an entry cannot be acknowledged any more."""
        if not self._owns():
            raise FencedError(
                f"entry {entry_id} cannot be acknowledged: the shard is lost",
                stream=self._keys.stream,
                group=self._keys.group,
                member=self._fence.member,
                shard=self._fence.shard,
                hint="It was given up, or another member owns it by now; the entry is delivered to its next owner.",
            )

    def add(self, entry_id: str, delete: bool = False) -> None:
        """Queue one; it is sent soon, together with others. On the event loop only."""
        self._queue.append(entry_id)
        if delete:
            self._deletes.add(entry_id)
        self._schedule()

    def _schedule(self) -> None:
        if not self._owns():
            return  # whoever owns the shard next acknowledges, and that may be this process again
        if len(self._queue) >= ACK_BATCH:
            self._send_soon()
        elif self._queue and self._timer is None:
            self._timer = self._loop.call_later(ACK_DELAY_SECONDS, self._send_soon)

    def _send_soon(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._owns() and not self._sending.locked():
            task = self._loop.create_task(self._send())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self) -> None:
        try:
            # No more than is there now: what comes meanwhile waits for company of its own.
            await self._flush(len(self._queue))
        except FencedError:
            # The reading side meets the same fence, and reports it; at once, not when it has room again.
            self._fenced()
            self._log.info("acknowledgement refused: fenced", shard=self._fence.shard)
        except CoordError as error:
            self._log.warning("acknowledgement not sent yet: %s", error, shard=self._fence.shard)

    async def flush(self) -> None:
        """Send what is queued. Gives up when the shard is lost: its entries are delivered to the new owner.

        Raises:
            FencedError: nothing of it was acknowledged.
        """
        await self._flush(None)

    async def _flush(self, most: int | None) -> None:
        try:
            await self._send_queued(most)
        except FencedError:
            raise
        except BaseException:
            # Perhaps only whoever waited for it has gone away.
            self._schedule()
            raise
        self._schedule()

    async def _send_queued(self, most: int | None) -> None:
        sent = 0
        async with self._sending:
            while self._queue and self._owns() and (most is None or sent < most):
                batch = self._queue[:ACK_BATCH]
                keep = [entry_id for entry_id in batch if entry_id not in self._deletes]
                delete = [entry_id for entry_id in batch if entry_id in self._deletes]
                try:
                    if keep:
                        await self._runner.run(commands.ack(self._keys, self._fence, keep))
                    if delete:
                        await self._runner.run(commands.ack(self._keys, self._fence, delete, delete=True))
                except CoordError as error:
                    if not error.retriable:
                        raise
                    await asyncio.sleep(_AGAIN_SECONDS)
                    continue
                del self._queue[: len(batch)]
                sent += len(batch)
                self._acknowledged(batch)
                self._deletes.difference_update(batch)
                telemetry.acknowledged.add(len(batch), self._labels)
