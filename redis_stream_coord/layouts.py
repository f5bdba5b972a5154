"""The layout that a producer has cached, under a lease; no I/O.

A stale layout is noticed by the shard itself, in the same script that appends; an expired one that cannot be renewed
makes publishing fail: a producer never guesses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from . import commands, telemetry
from .attempts import Course
from .commands import Saga
from .errors import (
    CoordError,
    RedisUnavailableError,
    RoutingRegressionError,
    RoutingUnavailableError,
    UnsupportedProtocolError,
)
from .keys import StreamKeys
from .models import Layout
from .routing import PROTOCOLS


class Layouts:
    """The cached layout of one stream: decisions only.

    Parameters:
        keys: of the stream.
        lease_seconds: how long a layout may be used without having been read again.
        clock: seconds that never go back.
        window_seconds: layouts that ended so long ago, or later, are asked for too.
        lock: held while an answer is taken. Threads ask at the same time; half of a newer answer beside half of an
            older one would look like a regression.
    """

    def __init__(
        self,
        keys: StreamKeys,
        lease_seconds: float,
        clock: Callable[[], float],
        window_seconds: float = 0.0,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._lock = lock or nullcontext()
        self.keys = keys
        self.clock = clock
        self.lease_seconds = lease_seconds
        self.asked_at = float("-inf")  # when the latest layout that was taken was asked for
        self._window_ms = round(window_seconds * 1000)
        self._course: Course | None = None
        self._until = float("-inf")
        self._taken_at = float("-inf")  # when the highest layout was taken
        self._regression: RoutingRegressionError | None = None

    def current(self) -> Course | None:
        """Return the layout while its lease lasts. Raises: `RoutingRegressionError`, and keeps raising it."""
        if self._regression is not None:
            raise self._regression
        return self._course if self.clock() < self._until else None

    def is_current(self, course: Course) -> bool:
        """Whether no other layout is known, and the lease lasts. Raises: as `current`."""
        current = self.current()
        return current is not None and current.layout.layout == course.layout.layout

    def take(self, layout: Layout, asked_at: float) -> Course:
        """Take a layout that was read. The lease counts from when it was asked for.

        Parameters:
            layout: what was answered.
            asked_at: when it was asked for.

        Raises:
            RoutingRegressionError: it went backwards. Nothing but a record of a later lifecycle ends that.
            UnsupportedProtocolError: it routes keys in an unknown way.
            RoutingUnavailableError: the stream is still being created.
        """
        with self._lock:
            return self._take(layout, asked_at)

    def _take(self, layout: Layout, asked_at: float) -> Course:
        seen = self._course
        if seen is not None and _is_behind(layout, seen.layout):
            if asked_at < self._taken_at:
                # Overtaken on its way by the answer to a later question: that proves nothing.
                return seen
            self._refuse_regression(layout, seen.layout)
        if seen is not None and layout.incarnation == seen.layout.incarnation and self._regression is not None:
            raise self._regression
        self._until = float("-inf")  # what is refused here ends the lease of what was known before
        if layout.routing not in PROTOCOLS:
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
        course = seen if seen is not None and seen.layout == layout else Course(layout)
        self._course, self._regression = course, None
        self.asked_at = max(self.asked_at, asked_at)
        self._until = self.asked_at + self.lease_seconds
        self._taken_at = self.clock()
        return course

    def _refuse_regression(self, layout: Layout, seen: Layout) -> None:
        if self._regression is None:
            telemetry.metadata_regressions.add(1, {telemetry.STREAM: self.keys.stream})
            self._regression = RoutingRegressionError(
                f"the stored layout is {_describe(layout)}, this producer has seen {_describe(seen)}",
                stream=self.keys.stream,
                hint="Redis lost writes, or the stream record was restored from an old backup. Nothing is published "
                "until the record is created anew, or it is repaired and this producer restarted.",
            )
        raise self._regression

    def refresh(self) -> Saga[Course]:
        """Read the layout.

        Raises:
            RoutingUnavailableError: Redis gave no answer, or the stream is still being created.
            NotFoundError: there is no such stream.
            RoutingRegressionError, UnsupportedProtocolError, MetadataError: what is stored cannot be used.
        """
        asked_at = self.clock()
        try:
            layout = yield commands.layout(self.keys, window_ms=self._window_ms)
            course = self.take(layout, asked_at)
        except RedisUnavailableError as error:
            self._count("UNAVAILABLE")
            raise RoutingUnavailableError(
                f"the layout could not be read: {error.message}",
                stream=self.keys.stream,
                hint="Nothing was published. Redis is away or too slow; try again.",
            ) from error
        except CoordError as error:
            self._count(error.word or _STATUS.get(type(error), "ERROR"))
            raise
        self._count("OK")
        return course

    def _count(self, status: str) -> None:
        telemetry.routing_requests.add(1, {telemetry.STREAM: self.keys.stream, telemetry.STATUS: status})


_STATUS: dict[type[CoordError], str] = {
    RoutingRegressionError: "REGRESSION",
    UnsupportedProtocolError: "UNSUPPORTED_ROUTING",
    RoutingUnavailableError: "CREATING",
}


def _is_behind(layout: Layout, seen: Layout) -> bool:
    if layout.incarnation != seen.incarnation:
        return layout.incarnation < seen.incarnation
    if layout.epoch == seen.epoch and layout.layout != seen.layout:
        return True  # an epoch is never drawn twice, unless the record that drew it was lost
    return layout.epoch < seen.epoch or layout.version < seen.version


def _describe(layout: Layout) -> str:
    return f"{layout.layout} (epoch {layout.epoch}, version {layout.version}, incarnation {layout.incarnation})"
