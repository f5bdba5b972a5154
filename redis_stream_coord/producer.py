"""Writing to a sharded stream: which shard a key goes to, and appending there.

The layout is cached under a lease, which a background thread (or task) renews. A stale layout is noticed by the shard
itself, in the same script that appends; an expired one that cannot be renewed makes publishing fail: a producer never
guesses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import attrs
from opentelemetry import propagate

from . import commands, routing, telemetry
from .commands import Pause, Published, Saga
from .errors import (
    ConfigError,
    CoordError,
    NoShardError,
    PartialPublishError,
    PublishError,
    RedisUnavailableError,
    RoutingRegressionError,
    RoutingUnavailableError,
    UnsupportedProtocolError,
    refused,
)
from .keys import StreamKeys
from .models import EVENT_ID_FIELD, KEY_FIELD, RESERVED_PREFIX, Fields, Layout, Outgoing, Receipt, Route
from .runner import AsyncRunner, SyncRunner, check_process
from .settings import RedisSettings
from .tasks import end

# Event ids are remembered by each shard for this long, and so many of them; beyond it a duplicate is possible.
EVENT_ID_WINDOW_SECONDS = 3600.0
EVENT_ID_WINDOW_COUNT = 100_000

_LEASE_SECONDS = 10.0
_CLOSED_PAUSE_SECONDS = 0.005
_BATCH = 100  # entries per script call: Redis does nothing else meanwhile
_PIPELINE = 64  # script calls per round trip
_MAX_FIELDS = 3500  # Lua hands at most 8,000 values to one call, and would fail in the midst of a batch


class _Layouts:
    """The cached layout of one stream: decisions only, the time handed in."""

    def __init__(self, keys: StreamKeys, lease_seconds: float) -> None:
        self.keys = keys
        self.lease_seconds = lease_seconds
        self._layout: Layout | None = None
        self._until = 0.0
        self._regression: RoutingRegressionError | None = None

    def current(self, now: float) -> Layout | None:
        """Return the layout while its lease lasts. Raises: `RoutingRegressionError`, and keeps raising it."""
        if self._regression is not None:
            raise self._regression
        return self._layout if now < self._until else None

    def take(self, layout: Layout, asked_at: float) -> Layout:
        """Take a layout that was read. The lease counts from when it was asked for."""
        seen = self._layout
        if seen is not None and (layout.incarnation, layout.epoch) < (seen.incarnation, seen.epoch):
            telemetry.metadata_regressions.add(1, {telemetry.STREAM: self.keys.stream})
            self._regression = RoutingRegressionError(
                f"the stored routing epoch is {layout.epoch}, this producer has seen {seen.epoch}",
                stream=self.keys.stream,
                hint="The stream record was restored from an old backup. Repair or recreate it, then restart.",
            )
            raise self._regression
        if layout.routing not in routing.PROTOCOLS:
            raise UnsupportedProtocolError(
                f"the stream routes by {layout.routing!r}, which this release does not know",
                stream=self.keys.stream,
                hint="Upgrade this producer; guessing would break the order of keys.",
            )
        if layout.state == "creating":
            raise RoutingUnavailableError(
                "the stream is still being created",
                stream=self.keys.stream,
                hint="Try again; if it stays so, call Admin.create(..., exist_ok=True) to finish it.",
            )
        self._layout, self._until = layout, asked_at + self.lease_seconds
        return layout

    def shard(self, layout: Layout, key: bytes) -> int:
        """Return the shard of a key. Raises: `NoShardError`."""
        if layout.shards == 0:
            raise NoShardError("the stream has no shards at present", stream=self.keys.stream)
        return routing.PROTOCOLS[layout.routing].shard(key, layout.shards)

    def refresh(self) -> Saga[Layout]:
        """Read the layout.

        Raises:
            RoutingUnavailableError: Redis gave no answer.
            NotFoundError: there is no such stream.
        """
        asked_at = time.monotonic()
        try:
            layout = yield commands.layout(self.keys)
        except RedisUnavailableError as error:
            self._count(error)
            raise RoutingUnavailableError(
                "the layout could not be read", stream=self.keys.stream, hint=str(error)
            ) from error
        except CoordError as error:
            self._count(error)
            raise
        telemetry.routing_requests.add(1, {telemetry.STREAM: self.keys.stream, telemetry.STATUS: "OK"})
        return self.take(layout, asked_at)

    def _count(self, error: CoordError) -> None:
        status = error.word or "UNAVAILABLE"
        telemetry.routing_requests.add(1, {telemetry.STREAM: self.keys.stream, telemetry.STATUS: status})


@attrs.frozen
class _Entry:
    """An entry ready to send."""

    key: bytes
    event_id: str | None
    flat: Sequence[str | bytes]


class _NotSentError(PublishError):
    """An entry that was not even sent."""


class _Publishing:
    """What both producers do, as sagas."""

    def __init__(self, stream: str, settings: RedisSettings, *, fenced: bool, lease_seconds: float) -> None:
        if lease_seconds <= 0:
            raise ConfigError(f"lease_seconds={lease_seconds} must be positive")
        self.keys = StreamKeys(stream, settings.key_prefix)
        self.layouts = _Layouts(self.keys, lease_seconds)
        self.fenced = fenced
        self.timeout_seconds = settings.timeout_seconds

    def prepare(self, outgoing: Outgoing) -> _Entry:
        """Check an entry and add the reserved fields. Raises: `ConfigError`."""
        key = _key(outgoing.key)
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        flat: list[str | bytes] = [KEY_FIELD, key]
        if outgoing.event_id is not None:
            if not outgoing.event_id or not isinstance(outgoing.event_id, str):
                raise ConfigError(f"event_id={outgoing.event_id!r} must be a text that is not empty")
            flat += [EVENT_ID_FIELD, outgoing.event_id]
        for name, text in carrier.items():
            flat += [RESERVED_PREFIX + name, text]
        for field, value in outgoing.fields.items():
            if not isinstance(field, str) or not isinstance(value, (str, bytes)):
                raise ConfigError(
                    f"field {field!r} has a value of type {type(value).__name__}",
                    stream=self.keys.stream,
                    hint="Names are str, values str or bytes: encode other types yourself, for example with json.",
                )
            if field.startswith(RESERVED_PREFIX):
                raise ConfigError(
                    f"field {field!r} begins with {RESERVED_PREFIX!r}, which is reserved",
                    stream=self.keys.stream,
                )
            flat += [field, value]
        if self.fenced and len(flat) > 2 * _MAX_FIELDS:
            raise ConfigError(
                f"an entry of {len(outgoing.fields)} fields is too large",
                stream=self.keys.stream,
                hint=f"Use at most {_MAX_FIELDS}, those of the library included, or pack them into one field.",
            )
        return _Entry(key, outgoing.event_id, flat)

    def publish(self, entry: _Entry) -> Saga[Receipt]:
        """Append one entry."""
        deadline = time.monotonic() + self.timeout_seconds
        while True:
            layout = self.layouts.current(time.monotonic())
            if layout is None:
                layout = yield from self.layouts.refresh()
            shard = self.layouts.shard(layout, entry.key)
            outcome = yield from self._append(layout, shard, entry)
            if outcome.word in ("OK", "DUPLICATE"):
                self._count(outcome.word)
                return Receipt(outcome.detail, shard, outcome.word == "DUPLICATE")
            error = refused(outcome.word, outcome.detail, stream=self.keys.stream, shard=shard)
            if not error.retriable or time.monotonic() > deadline:
                self._count(outcome.word)
                raise error
            yield Pause(_CLOSED_PAUSE_SECONDS)
            yield from self.layouts.refresh()

    def _append(self, layout: Layout, shard: int, entry: _Entry) -> Saga[Published]:
        try:
            if self.fenced:
                outcomes = yield self.command(layout, shard, [entry])
                return outcomes[0]  # type: ignore[no-any-return]
            entry_id = yield commands.append(self.keys, shard, entry.flat)
            return Published("OK", entry_id) if entry_id else Published("STREAM_MISSING", self.keys.shard(shard).stream)
        except RedisUnavailableError as error:
            self._count("UNKNOWN")
            raise self.unknown(error, shard) from error

    def command(self, layout: Layout, shard: int, entries: Sequence[_Entry]) -> commands.Command[list[Published]]:
        """Return the fenced publish of entries to one shard."""
        return commands.publish(
            self.keys,
            shard,
            [(entry.event_id, entry.flat) for entry in entries],
            layout=layout.layout,
            window_ms=round(EVENT_ID_WINDOW_SECONDS * 1000),
            window_count=EVENT_ID_WINDOW_COUNT,
        )

    def unknown(self, error: CoordError, shard: int) -> PublishError:
        """Return the error for an entry of which nobody knows whether it was appended."""
        return PublishError(
            f"no answer from Redis: the entry may or may not have been published ({error.message})",
            stream=self.keys.stream,
            shard=shard,
            hint="Publish it again. With an event_id that cannot make a duplicate; without one it can.",
            retriable=True,
        )

    def batches(self, layout: Layout, entries: Sequence[_Entry]) -> list[tuple[int, list[int]]]:
        """Divide entries among shards: (shard, positions), at most `_BATCH` each, in the order given."""
        by_shard: dict[int, list[int]] = {}
        for position, entry in enumerate(entries):
            by_shard.setdefault(self.layouts.shard(layout, entry.key), []).append(position)
        return [
            (shard, positions[first : first + _BATCH])
            for shard, positions in sorted(by_shard.items())
            for first in range(0, len(positions), _BATCH)
        ]

    def collect(
        self,
        batch: tuple[int, list[int]],
        result: list[Published] | CoordError,
        receipts: list[Receipt | None],
        failed: dict[int, CoordError],
    ) -> None:
        """Note what became of a batch."""
        shard, positions = batch
        if isinstance(result, CoordError):
            for position in positions:
                unknown = isinstance(result, RedisUnavailableError)
                failed[position] = self.unknown(result, shard) if unknown else result
                self._count("UNKNOWN" if unknown else result.word or "ERROR")
            return
        for position, outcome in zip(positions, result, strict=True):
            if outcome.word in ("OK", "DUPLICATE"):
                receipts[position] = Receipt(outcome.detail, shard, outcome.word == "DUPLICATE")
                self._count(outcome.word)
            else:
                failed[position] = refused(outcome.word, outcome.detail, stream=self.keys.stream, shard=shard)

    def hold_back(self, window: Sequence[tuple[int, list[int]]], failed: dict[int, CoordError]) -> None:
        """Note that batches are not sent, because something before them failed: they must not overtake it."""
        for shard, positions in window:
            for position in positions:
                failed[position] = _NotSentError(
                    "not sent: an earlier entry was not published", stream=self.keys.stream, shard=shard, retriable=True
                )

    def again(self, entries: Sequence[_Entry], failed: Mapping[int, CoordError]) -> Iterator[int]:
        """Yield the positions to publish again by themselves, in order: those refused for good reasons, not sent, or
        safe to repeat. None behind one of its shard that stays failed: it would overtake it.
        """
        stuck: set[int | None] = set()
        for position in sorted(failed):
            error = failed[position]
            known = not isinstance(error, PublishError) or isinstance(error, _NotSentError)
            if error.retriable and error.shard not in stuck and (known or entries[position].event_id is not None):
                yield position
            if position in failed:
                stuck.add(error.shard)

    def finish(self, receipts: list[Receipt | None], failed: dict[int, CoordError]) -> list[Receipt]:
        """Return the receipts. Raises: `PartialPublishError`."""
        complete = [receipt for receipt in receipts if receipt is not None]
        if failed:
            first = min(failed)
            raise PartialPublishError(
                f"{len(failed)} of {len(receipts)} entries were not published; number {first}: {failed[first]}",
                receipts=receipts,
                failed=failed,
                stream=self.keys.stream,
                hint="See .failed for each entry's reason and .receipts for those that were published.",
            )
        return complete

    def _count(self, outcome: str) -> None:
        telemetry.publishes.add(1, {telemetry.STREAM: self.keys.stream, telemetry.OUTCOME: outcome})


def _key(key: Any) -> bytes:
    try:
        return routing.partition_key(key)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


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
        self._init(_Publishing(stream, RedisSettings.of(redis), fenced=True, lease_seconds=lease_seconds), redis)

    def _init(self, publishing: _Publishing, redis: str | RedisSettings) -> None:
        self._publishing = publishing
        self._runner = SyncRunner(RedisSettings.of(redis))
        self._closed = threading.Event()
        self._refresher: threading.Thread | None = None
        self._lock = threading.Lock()

    def route(self, key: str | bytes) -> Route:
        """Return where a key goes.

        Raises:
            RoutingUnavailableError: the layout is not known, or too old, and could not be read.
            RoutingRegressionError: the stored layout went backwards.
            NotFoundError: there is no such stream.
            NoShardError: the stream has no shards.
        """
        encoded = _key(key)
        layouts = self._publishing.layouts
        layout = layouts.current(time.monotonic()) or self.refresh()
        shard = layouts.shard(layout, encoded)
        return Route(shard, layouts.keys.shard(shard).stream, layout.epoch)

    def refresh(self) -> Layout:
        """Read the layout now, and keep it fresh from here on. Raises: as `route`."""
        layout = self._runner.drive(self._publishing.layouts.refresh())
        self._keep_fresh()
        return layout

    def _keep_fresh(self) -> None:
        with self._lock:
            if self._refresher is None and not self._closed.is_set():
                self._refresher = threading.Thread(
                    target=self._refresh_for_ever, name="redis-stream-coord-router", daemon=True
                )
                self._refresher.start()

    def _refresh_for_ever(self) -> None:
        layouts = self._publishing.layouts
        while not self._closed.wait(layouts.lease_seconds / 3):
            # The next caller meets the same error if the lease has run out by then.
            with contextlib.suppress(CoordError):
                self._runner.drive(layouts.refresh())

    def close(self) -> None:
        """Stop the thread and close the connections."""
        self._closed.set()
        if self._refresher is not None:
            self._refresher.join()
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
        self._init(_Publishing(stream, RedisSettings.of(redis), fenced=fenced, lease_seconds=lease_seconds), redis)

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
        layout = publishing.layouts.current(time.monotonic()) or self.refresh()
        receipts: list[Receipt | None] = [None] * len(prepared)
        failed: dict[int, CoordError] = {}
        for window, sends in _windows(publishing, layout, prepared):
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


def _windows(
    publishing: _Publishing, layout: Layout, entries: Sequence[_Entry]
) -> Iterator[tuple[list[tuple[int, list[int]]], list[commands.Command[list[Published]]]]]:
    """Yield what to send in one round trip: batches, and a command for each."""
    if publishing.fenced:
        batches = publishing.batches(layout, entries)
    else:
        batches = [(publishing.layouts.shard(layout, entry.key), [i]) for i, entry in enumerate(entries)]
    for first in range(0, len(batches), _PIPELINE):
        window = batches[first : first + _PIPELINE]
        yield window, [_send(publishing, layout, shard, [entries[i] for i in at]) for shard, at in window]


def _send(
    publishing: _Publishing, layout: Layout, shard: int, entries: list[_Entry]
) -> commands.Command[list[Published]]:
    if publishing.fenced:
        return publishing.command(layout, shard, entries)
    plain = commands.append(publishing.keys, shard, entries[0].flat)

    def parse(answer: Any) -> list[Published]:
        entry_id = plain.parse(answer)
        return [
            Published("OK", entry_id) if entry_id else Published("STREAM_MISSING", publishing.keys.shard(shard).stream)
        ]

    return commands.Command(plain.name, None, plain.keys, plain.arguments, parse, idempotent=False)


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
        self._publishing = _Publishing(stream, settings, fenced=fenced, lease_seconds=lease_seconds)
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
        encoded = _key(key)
        layouts = self._publishing.layouts
        layout = layouts.current(time.monotonic()) or await self.refresh()
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
        layout = publishing.layouts.current(time.monotonic()) or await self.refresh()
        receipts: list[Receipt | None] = [None] * len(prepared)
        failed: dict[int, CoordError] = {}
        for window, sends in _windows(publishing, layout, prepared):
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
