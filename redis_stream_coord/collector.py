"""Gauges of whole groups, which no single consumer can know: run one for a Redis, wherever you like."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Iterator
from types import TracebackType

from . import telemetry
from .checks import check_number
from .errors import CoordError, LifecycleError, RedisUnavailableError
from .group_view import GroupView
from .monitor import Monitor
from .reads import assess
from .settings import RedisSettings
from .telemetry import Attributes, Reading
from .views import ShardStatus, member_state

_log = logging.getLogger("redis_stream_coord")


class Collector:
    """Reads groups at an interval and reports what it saw as OpenTelemetry gauges, until it is closed.

    It reads in a thread of its own: an exporter that asks for gauges never waits for Redis. One is enough for a Redis;
    two report the same twice. It needs no more rights than `Monitor`.

    Parameters:
        redis: URL or settings.
        interval_seconds: how often it reads.
        groups: (stream, group) of those to read; ``None``: every group of the index, looked up each time.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        redis: str | RedisSettings,
        *,
        interval_seconds: float = 15.0,
        groups: Collection[tuple[str, str]] | None = None,
    ) -> None:
        check_number("interval_seconds", interval_seconds, 0.001, 86_400.0)
        self._monitor = Monitor(redis)
        self._interval_seconds = interval_seconds
        self._groups = None if groups is None else sorted(groups)
        self._readings: tuple[Reading, ...] = ()
        self._violations: dict[tuple[str, str], set[str]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redis-stream-coord-collector", daemon=True)

    def start(self) -> None:
        """Begin to read and to report. Raises: `LifecycleError` if it was started or closed before."""
        if self._stopping.is_set() or self._thread.is_alive():
            raise LifecycleError("a collector can be started only once", hint="Make a new one.")
        telemetry.observe(self)
        self._thread.start()

    def close(self) -> None:
        """Stop reading and reporting."""
        telemetry.forget(self)
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._monitor.close()

    def readings(self) -> Iterable[Reading]:
        """Return what was seen last, for the gauges."""
        return self._readings

    def collect(self) -> None:
        """Read everything once, now."""
        try:
            names = self._monitor.groups() if self._groups is None else self._groups
            found = [("redis_reachable", 1.0, {}), *(one for name in names for one in self._group(*name))]
            found += [one for stream in sorted({stream for stream, _ in names}) for one in self._stream(stream)]
        except RedisUnavailableError as error:
            _log.warning("the collector got no answer: %s", error)
            found = [("redis_reachable", 0.0, {})]
        self._readings = tuple(found)

    def _run(self) -> None:
        while True:
            try:
                self.collect()
            except CoordError as error:
                _log.warning("the collector cannot read: %s", error)
            if self._stopping.wait(self._interval_seconds):
                return

    def _stream(self, stream: str) -> Iterator[Reading]:
        where: Attributes = {telemetry.STREAM: stream}
        try:
            found = self._monitor.resharding(stream)
        except RedisUnavailableError:
            raise
        except CoordError as error:
            _log.warning("the collector cannot read stream %s: %s", stream, error)
            return
        active = found is not None and found.active
        yield "migration_active", float(active), where
        if found is not None and active:
            yield "migration_active_age_seconds", found.age_seconds, where

    def _group(self, stream: str, group: str) -> Iterator[Reading]:
        where: Attributes = {telemetry.STREAM: stream, telemetry.GROUP: group}
        try:
            view = self._monitor.describe(stream, group=group)
            shards = self._monitor.shards(stream, group=group)
        except RedisUnavailableError:
            raise
        except CoordError as error:
            _log.warning("the collector cannot read group %s of stream %s: %s", group, stream, error)
            yield "group_healthy", 0.0, where
            return
        self._count_violations(view)
        yield "group_healthy", float(not assess(view)), where
        for state in ("active", "leaving", "overdue"):
            count = sum(member_state(member) == state for member in view.members.values())
            yield "members", float(count), {**where, telemetry.STATE: state}
        for shard in shards:
            yield from _shard(shard, {**where, telemetry.SHARD: shard.shard})

    def _count_violations(self, view: GroupView) -> None:
        seen = set(view.violations())
        # Each counts once for as long as it lasts.
        new = seen - self._violations.get((view.stream, view.group), set())
        self._violations[view.stream, view.group] = seen
        if new:
            where: Attributes = {telemetry.STREAM: view.stream, telemetry.GROUP: view.group}
            telemetry.invariant_violations.add(len(new), where)
            _log.error("group %s of stream %s violates: %s", view.group, view.stream, "; ".join(sorted(new)))

    def __enter__(self) -> Collector:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _shard(status: ShardStatus, where: Attributes) -> Iterator[Reading]:
    reading = status.reading
    values = {
        "shard_lag": reading.lag,
        "shard_pending": reading.pending,
        "shard_stream_length": reading.length if reading.exists else None,
        "shard_memory_usage_bytes": reading.memory_bytes,
    }
    for name, value in values.items():
        # Unknown is not zero.
        if value is not None:
            yield name, float(value), where
