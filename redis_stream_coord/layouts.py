"""The layout that a producer has cached, under a lease; no I/O.

A stale layout is noticed by the shard itself, in the same script that appends; an expired one that cannot be renewed
makes publishing fail: a producer never guesses.
"""

from __future__ import annotations

from collections.abc import Callable

from . import commands, routing, telemetry
from .commands import Saga
from .errors import (
    CoordError,
    NoShardError,
    RedisUnavailableError,
    RoutingRegressionError,
    RoutingUnavailableError,
    UnsupportedProtocolError,
)
from .keys import StreamKeys
from .models import Layout


class Layouts:
    """The cached layout of one stream: decisions only.

    Parameters:
        keys: of the stream.
        lease_seconds: how long a layout may be used without having been read again.
        clock: seconds that never go back.
    """

    def __init__(self, keys: StreamKeys, lease_seconds: float, clock: Callable[[], float]) -> None:
        self.keys = keys
        self.clock = clock
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
        asked_at = self.clock()
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
