"""Writing to a sharded stream: the faces for plain code and for coroutines.

What they decide stands in `publishing`, `bulk`, `layouts` and `attempts`. The layout is cached under a lease, which a
background thread (or task) renews.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from opentelemetry import trace

from . import telemetry
from .attempts import Course
from .bulk import Bulk
from .errors import CoordError, DrainTimeoutError, NoShardError
from .machine import Repeating
from .models import Fields, Layout, Outgoing, Quiesced, Receipt, Route
from .publishing import Publishing, key_bytes
from .runner import AsyncRunner, SyncRunner, check_process
from .settings import RedisSettings
from .tasks import end

_LEASE_SECONDS = 10.0
_Self = TypeVar("_Self", bound="Router")


def _route(publishing: Publishing, course: Course, key: bytes) -> Route:
    if course.is_empty:
        raise NoShardError("the stream has no shards at present", stream=publishing.keys.stream)
    shard = course.place(key).shard
    return Route(shard, publishing.keys.shard(shard).stream, course.layout.epoch)


def _span(publishing: Publishing) -> Any:
    """Open the span that consumers of the entry continue."""
    return telemetry.tracer.start_as_current_span(f"{publishing.keys.stream} publish", kind=trace.SpanKind.PRODUCER)


def _not_drained(publishing: Publishing, timeout_seconds: float) -> DrainTimeoutError:
    return DrainTimeoutError(
        f"{publishing.gate.inside} calls of the producer had not returned after {timeout_seconds} s",
        stream=publishing.keys.stream,
        hint="It stays quiesced: call quiesce() again to go on waiting, or resume().",
        retriable=True,
    )


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
        self._init(stream, RedisSettings.of(redis), True, lease_seconds)

    def _init(self, stream: str, settings: RedisSettings, fenced: bool, lease_seconds: float) -> None:
        self._publishing = Publishing(
            stream, settings, fenced=fenced, lease_seconds=lease_seconds, lock=threading.Lock()
        )
        self._runner = SyncRunner(settings)
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
        course = self._publishing.layouts.current() or self._refresh()
        return _route(self._publishing, course, encoded)

    def refresh(self) -> Layout:
        """Read the layout now, and keep it fresh from here on. Raises: as `route`."""
        return self._refresh().layout

    def _refresh(self) -> Course:
        course = self._runner.drive(self._publishing.layouts.refresh())
        self._keep_fresh()
        return course

    def _keep_fresh(self) -> None:
        if self._refresher is not None:
            return
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

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Producer(Router):
    """Publishes to a sharded stream. Thread-safe.

    Parameters:
        stream: name of the logical stream.
        redis: URL or settings. Its ``timeout_seconds`` bounds how long a call tries again.
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
        self._init(stream, RedisSettings.of(redis), fenced, lease_seconds)
        self._turn = threading.Condition()

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
            RoutingError: nobody knows where to, or the shard was closed all the time; nothing was appended.
            LifecycleError: the producer is quiesced; nothing was sent.
            ConfigError: a field cannot be stored.
        """
        publishing = self._publishing
        with self._inside(), _span(publishing):
            entry = publishing.prepare(Outgoing(fields=fields, key=key, event_id=event_id), publishing.carrier())
            receipt = self._runner.drive(publishing.publish(entry), retry=False)
        self._keep_fresh()
        return receipt

    def publish_many(self, entries: Iterable[Outgoing]) -> Sequence[Receipt]:
        """Append many entries, those of one key in the order given. Several go in one call.

        Parameters:
            entries: what to publish. It is read to its end before anything is sent.

        Returns:
            A receipt for each, in the order given.

        Raises:
            PartialPublishError: which were not, or perhaps not, published, and why.
            RoutingError: nobody knows where to; nothing was appended.
            LifecycleError: the producer is quiesced; nothing was sent.
            ConfigError: a field cannot be stored; nothing was sent.
        """
        publishing = self._publishing
        with self._inside(), _span(publishing):
            carrier = publishing.carrier()
            prepared = [publishing.prepare(entry, carrier) for entry in entries]
            receipts = self._runner.drive(Bulk(publishing, prepared).run(), retry=False)
        self._keep_fresh()
        return receipts

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        gate = self._publishing.gate
        with self._turn:
            gate.enter()
        try:
            yield
        finally:
            with self._turn:
                gate.leave()
                if gate.shut:
                    self._turn.notify_all()

    def quiesce(self, *, timeout_seconds: float = 30.0) -> Quiesced:
        """Let no call begin, and wait until those under way have ended, with all they try again.

        From here on `publish` and `publish_many` raise `LifecycleError` (retriable) at once. It holds for this object,
        not for other producers. `route` and `refresh` go on.

        Parameters:
            timeout_seconds: how long to wait. One call takes about three times the ``timeout_seconds`` of the
                settings at most.

        Returns:
            What has no known outcome.

        Raises:
            DrainTimeoutError: calls were still under way. The producer stays quiesced; call again to go on waiting.
        """
        publishing = self._publishing
        gate = publishing.gate
        with self._turn:
            gate.shut = True

            def wait(seconds: float | None) -> bool:
                return self._turn.wait_for(lambda: gate.is_empty, seconds)

            if not self._runner.settings.machine.block(wait, lambda: gate.is_empty, timeout_seconds):
                raise _not_drained(publishing, timeout_seconds)
        return publishing.quiesced()

    def resume(self) -> Layout:
        """Read the layout, then let calls in again. Raises: as `route`; the producer stays quiesced then."""
        layout = self.refresh()
        with self._turn:
            self._publishing.resumed()
        return layout


class AsyncProducer:
    """Publishes to a sharded stream, from coroutines. Parameters as `Producer`.

    Calls that run at the same time share round trips, in no order.
    """

    def __init__(
        self,
        stream: str,
        *,
        redis: str | RedisSettings,
        fenced: bool = True,
        lease_seconds: float = _LEASE_SECONDS,
    ) -> None:
        settings = RedisSettings.of(redis)
        self._publishing = Publishing(
            stream, settings, fenced=fenced, lease_seconds=lease_seconds, lock=contextlib.nullcontext()
        )
        self._make_runner: Callable[[], AsyncRunner] = lambda: AsyncRunner(settings, together=True)
        self._runner: AsyncRunner | None = None
        self._refresher: asyncio.Task[None] | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._pid = os.getpid()

    def _connected(self) -> AsyncRunner:
        check_process(self._pid)
        if self._runner is None:
            self._runner = self._make_runner()
        return self._runner

    async def route(self, key: str | bytes) -> Route:
        """Return where a key goes; see `Router.route`."""
        encoded = key_bytes(key)
        course = self._publishing.layouts.current() or await self._refresh()
        return _route(self._publishing, course, encoded)

    async def refresh(self) -> Layout:
        """Read the layout now, and keep it fresh from here on."""
        return (await self._refresh()).layout

    async def _refresh(self) -> Course:
        course = await self._connected().drive(self._publishing.layouts.refresh())
        self._keep_fresh()
        return course

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
        publishing = self._publishing
        with self._inside(), _span(publishing):
            entry = publishing.prepare(Outgoing(fields=fields, key=key, event_id=event_id), publishing.carrier())
            receipt = await self._connected().drive(publishing.publish(entry), retry=False)
        self._keep_fresh()
        return receipt

    async def publish_many(self, entries: Iterable[Outgoing]) -> Sequence[Receipt]:
        """Append many entries; see `Producer.publish_many`."""
        publishing = self._publishing
        with self._inside(), _span(publishing):
            carrier = publishing.carrier()
            prepared = [publishing.prepare(entry, carrier) for entry in entries]
            receipts = await self._connected().drive(Bulk(publishing, prepared).run(), retry=False)
        self._keep_fresh()
        return receipts

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        gate = self._publishing.gate
        gate.enter()
        try:
            yield
        finally:
            gate.leave()
            if gate.is_empty:
                waiting, self._waiting = self._waiting, []
                for one in waiting:
                    if not one.done():
                        one.set_result(None)

    async def quiesce(self, *, timeout_seconds: float = 30.0) -> Quiesced:
        """Let no call begin, and wait until those under way have ended; see `Producer.quiesce`."""
        publishing = self._publishing
        publishing.gate.shut = True
        if not publishing.gate.is_empty:
            empty = asyncio.get_running_loop().create_future()
            self._waiting.append(empty)
            await asyncio.wait([empty], timeout=timeout_seconds)
            if not publishing.gate.is_empty:
                raise _not_drained(publishing, timeout_seconds)
        return publishing.quiesced()

    async def resume(self) -> Layout:
        """Read the layout, then let calls in again; see `Producer.resume`."""
        layout = await self.refresh()
        self._publishing.resumed()
        return layout

    async def close(self) -> None:
        """Stop the background task and close the connections."""
        if self._runner is not None:
            self._runner.check_loop()
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
