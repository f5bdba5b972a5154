"""Writing to a sharded stream: the faces for plain code and for coroutines.

What they decide stands in `publishing` and `layouts`. The layout is cached under a lease, which a background thread (or
task) renews.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from .errors import CoordError
from .machine import Repeating
from .models import Fields, Layout, Outgoing, Receipt, Route
from .publishing import Publishing, key_bytes, windows
from .runner import AsyncRunner, SyncRunner, check_process
from .settings import RedisSettings
from .tasks import end

_LEASE_SECONDS = 10.0


class Router:
    """Tells which shard a key goes to, for those who call XADD themselves.

    The first `route` reads the layout; from then on a daemon thread keeps it fresh, and `route` does no I/O while
    the lease is valid, so it can be called from a coroutine after one `refresh`.

    Parameters:
        stream: name of the logical stream.
        redis: URL or settings.
        lease_seconds: how long a layout may be used without having been read again.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(self, stream: str, *, redis: str | RedisSettings, lease_seconds: float = _LEASE_SECONDS) -> None:
        self._init(
            Publishing(stream, RedisSettings.of(redis), fenced=True, lease_seconds=lease_seconds),
            redis,
        )

    def _init(self, publishing: Publishing, redis: str | RedisSettings) -> None:
        self._publishing = publishing
        self._runner = SyncRunner(RedisSettings.of(redis))
        self._closed = False
        self._refresher: Repeating | None = None
        self._lock = threading.Lock()

    def route(self, key: str | bytes) -> Route:
        """Return where a key goes.

        Raises:
            RoutingUnavailableError: the layout is not known, or too old, and could not be read.
            RoutingRegressionError: the stored layout went backwards.
            NotFoundError: there is no such stream.
            NoShardError: the stream has no shards.
        """
        encoded = key_bytes(key)
        layouts = self._publishing.layouts
        layout = layouts.current(layouts.clock()) or self.refresh()
        shard = layouts.shard(layout, encoded)
        return Route(shard, layouts.keys.shard(shard).stream, layout.epoch)

    def refresh(self) -> Layout:
        """Read the layout now, and keep it fresh from here on. Raises: as `route`."""
        layout = self._runner.drive(self._publishing.layouts.refresh())
        self._keep_fresh()
        return layout

    def _keep_fresh(self) -> None:
        with self._lock:
            if self._refresher is None and not self._closed:
                self._refresher = self._runner.settings.machine.repeat(
                    self._refresh_again, self._publishing.layouts.lease_seconds / 3, "redis-stream-coord-router"
                )

    def _refresh_again(self) -> None:
        # The next caller meets the same error if the lease has run out by then.
        with contextlib.suppress(CoordError):
            self._runner.drive(self._publishing.layouts.refresh())

    def close(self) -> None:
        """Stop the thread and close the connections."""
        with self._lock:
            self._closed = True
        if self._refresher is not None:
            self._refresher.stop()
        self._runner.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Producer(Router):
    """Publishes to a sharded stream. Thread-safe.

    Parameters:
        stream: name of the logical stream.
        redis: URL or settings.
        fenced: check in the shard itself that the layout is current, and each event id once. ``False`` is a plain
            XADD: a little faster, with duplicates and reordering possible while the number of shards changes.
        lease_seconds: see `Router`.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        stream: str,
        *,
        redis: str | RedisSettings,
        fenced: bool = True,
        lease_seconds: float = _LEASE_SECONDS,
    ) -> None:
        self._init(
            Publishing(stream, RedisSettings.of(redis), fenced=fenced, lease_seconds=lease_seconds),
            redis,
        )

    def publish(self, fields: Fields, *, key: str | bytes, event_id: str | None = None) -> Receipt:
        """Append one entry.

        Parameters:
            fields: see `Outgoing`. Not changed.
            key: partition key.
            event_id: makes it safe to publish again when the outcome is unknown.

        Returns:
            Where it went, or where the entry of the same event id is already.

        Raises:
            PublishError: it is unknown whether it was appended.
            RoutingError: nobody knows where to; nothing was appended.
            ConfigError: a field cannot be stored.
        """
        entry = self._publishing.prepare(Outgoing(fields=fields, key=key, event_id=event_id))
        receipt = self._runner.drive(self._publishing.publish(entry))
        self._keep_fresh()
        return receipt

    def publish_many(self, entries: Iterable[Outgoing]) -> Sequence[Receipt]:
        """Append many entries, those of one shard in the order given. Several go in one call.

        Parameters:
            entries: what to publish. It is read to its end before anything is sent.

        Returns:
            A receipt for each, in the order given.

        Raises:
            PartialPublishError: which were not, or perhaps not, published, and why.
        """
        publishing = self._publishing
        prepared = [publishing.prepare(entry) for entry in entries]
        layout = publishing.layouts.current(publishing.layouts.clock()) or self.refresh()
        receipts: list[Receipt | None] = [None] * len(prepared)
        failed: dict[int, CoordError] = {}
        for window, sends in windows(publishing, layout, prepared):
            if failed:
                publishing.hold_back(window, failed)
                continue
            for batch, result in zip(window, self._runner.pipeline(sends), strict=True):
                publishing.collect(batch, result, receipts, failed)
        for position in publishing.again(prepared, failed):
            try:
                receipts[position] = self._runner.drive(publishing.publish(prepared[position]))
                del failed[position]
            except CoordError as error:
                failed[position] = error
        return publishing.finish(receipts, failed)


class AsyncProducer:
    """Publishes to a sharded stream, from coroutines. Parameters as `Producer`."""

    def __init__(
        self,
        stream: str,
        *,
        redis: str | RedisSettings,
        fenced: bool = True,
        lease_seconds: float = _LEASE_SECONDS,
    ) -> None:
        settings = RedisSettings.of(redis)
        self._publishing = Publishing(stream, settings, fenced=fenced, lease_seconds=lease_seconds)
        self._make_runner: Callable[[], AsyncRunner] = lambda: AsyncRunner(settings)
        self._runner: AsyncRunner | None = None
        self._refresher: asyncio.Task[None] | None = None
        self._pid = os.getpid()

    def _connected(self) -> AsyncRunner:
        check_process(self._pid)
        if self._runner is None:
            self._runner = self._make_runner()
        return self._runner

    async def route(self, key: str | bytes) -> Route:
        """Return where a key goes; see `Router.route`."""
        encoded = key_bytes(key)
        layouts = self._publishing.layouts
        layout = layouts.current(layouts.clock()) or await self.refresh()
        shard = layouts.shard(layout, encoded)
        return Route(shard, layouts.keys.shard(shard).stream, layout.epoch)

    async def refresh(self) -> Layout:
        """Read the layout now, and keep it fresh from here on."""
        layout = await self._connected().drive(self._publishing.layouts.refresh())
        self._keep_fresh()
        return layout

    def _keep_fresh(self) -> None:
        if self._refresher is None:
            self._refresher = asyncio.get_running_loop().create_task(self._refresh_for_ever())

    async def _refresh_for_ever(self) -> None:
        layouts = self._publishing.layouts
        while True:
            await asyncio.sleep(layouts.lease_seconds / 3)
            with contextlib.suppress(CoordError):
                await self._connected().drive(layouts.refresh())

    async def publish(self, fields: Fields, *, key: str | bytes, event_id: str | None = None) -> Receipt:
        """Append one entry; see `Producer.publish`."""
        entry = self._publishing.prepare(Outgoing(fields=fields, key=key, event_id=event_id))
        receipt = await self._connected().drive(self._publishing.publish(entry))
        self._keep_fresh()
        return receipt

    async def publish_many(self, entries: Iterable[Outgoing]) -> Sequence[Receipt]:
        """Append many entries; see `Producer.publish_many`."""
        publishing = self._publishing
        prepared = [publishing.prepare(entry) for entry in entries]
        layout = publishing.layouts.current(publishing.layouts.clock()) or await self.refresh()
        receipts: list[Receipt | None] = [None] * len(prepared)
        failed: dict[int, CoordError] = {}
        for window, sends in windows(publishing, layout, prepared):
            if failed:
                publishing.hold_back(window, failed)
                continue
            for batch, result in zip(window, await self._connected().pipeline(sends), strict=True):
                publishing.collect(batch, result, receipts, failed)
        for position in publishing.again(prepared, failed):
            try:
                receipts[position] = await self._connected().drive(publishing.publish(prepared[position]))
                del failed[position]
            except CoordError as error:
                failed[position] = error
        return publishing.finish(receipts, failed)

    async def close(self) -> None:
        """Stop the background task and close the connections."""
        if self._refresher is not None:
            await end([self._refresher])
        if self._runner is not None:
            await self._runner.close()

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
