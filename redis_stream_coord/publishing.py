"""What both producers decide about one entry, as sagas: checks, where it goes, when it is sent again; no I/O.

An entry with an event id is first sent to every other shard where it may be by now, *with the layout of that time*.
Such a shard finds the id, still accepts that layout (then that is the entry), or refuses it for good; only after the
last may the entry go to another shard. See `attempts` for why that is safe, docs/guide/publishing.md for the windows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice, repeat
from typing import Any

import attrs
from opentelemetry import propagate

from . import commands, routing, telemetry
from .attempts import Attempts, Course, Place
from .checks import check_number
from .commands import EVENT_ID_WINDOW_COUNT, EVENT_ID_WINDOW_SECONDS, Command, Pause, Published, Saga
from .errors import (
    ConfigError,
    CoordError,
    LifecycleError,
    NoShardError,
    PublishError,
    RedisUnavailableError,
    RoutingRegressionError,
    RoutingUnavailableError,
    refused,
)
from .keys import StreamKeys
from .layouts import Layouts
from .models import EVENT_ID_FIELD, KEY_FIELD, RESERVED_PREFIX, Outgoing, Quiesced, Receipt
from .settings import RedisSettings

MAX_FIELDS = 3500  # Lua hands at most 8,000 values to one call, and would fail in the midst of a batch

# While many threads wait for the next layout, one look serves all of them for so long.
_LOOK_SECONDS = 0.001


@attrs.define(eq=False)
class Entry:
    """An entry ready to send."""

    key: bytes
    event_id: str | None
    flat: Sequence[str | bytes]


class NotSentError(PublishError):
    """An entry that was not even sent."""


class Gate:
    """Counts the calls under way, and lets none in while it is shut. Waiting for the last is up to the faces."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self.shut = False
        self.inside = 0

    def enter(self) -> None:
        """Raises: `LifecycleError`: it is shut."""
        if self.shut:
            raise LifecycleError(
                "the producer is quiesced",
                stream=self._stream,
                hint="Nothing was sent. Call resume(), or publish again after somebody else has.",
                retriable=True,
            )
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1

    @property
    def is_empty(self) -> bool:
        return self.inside == 0


class Publishing:
    """What both producers do, as sagas. Their runners leave it to them what is sent again (`drive(..., retry=False)`).

    Parameters:
        stream: name of the logical stream.
        settings: of Redis.
        fenced: check in the shard that the layout is current, and each event id once.
        lease_seconds: of the layout.
        lock: held while what threads share is looked at or changed.
    """

    def __init__(
        self,
        stream: str,
        settings: RedisSettings,
        *,
        fenced: bool,
        lease_seconds: float,
        lock: AbstractContextManager[object],
    ) -> None:
        check_number("lease_seconds", lease_seconds, 0.001)
        self.keys = StreamKeys(stream, settings.key_prefix)
        self.clock = settings.machine.clock
        window_seconds = EVENT_ID_WINDOW_SECONDS if fenced else 0.0
        self.layouts = Layouts(self.keys, lease_seconds, self.clock, window_seconds, lock)
        self.attempts = Attempts(self.clock, lock, EVENT_ID_WINDOW_SECONDS, EVENT_ID_WINDOW_COUNT)
        self.gate = Gate(self.keys.stream)
        self.fenced = fenced
        self.timeout_seconds = settings.timeout_seconds
        self._lost_count = 0  # entries without event id whose answer was lost

    # --- entries ------------------------------------------------------------------------------------------------------

    def carrier(self) -> Sequence[str | bytes]:
        """Return the present trace context as fields of an entry."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return [part for name, text in carrier.items() for part in (RESERVED_PREFIX + name, text)]

    def prepare(self, outgoing: Outgoing, carrier: Sequence[str | bytes] = ()) -> Entry:
        """Check an entry and add the reserved fields. Raises: `ConfigError`."""
        if not isinstance(outgoing, Outgoing):
            raise self._unfit(
                f"an entry is a {type(outgoing).__name__}", "Pass Outgoing(fields=..., key=...) for each."
            )
        if not isinstance(outgoing.fields, Mapping):
            raise self._unfit(
                f"fields must be a mapping, not {type(outgoing.fields).__name__}", "Names are str, values str or bytes."
            )
        key = key_bytes(outgoing.key)
        flat: list[str | bytes] = [KEY_FIELD, key]
        if outgoing.event_id is not None:
            if not outgoing.event_id or not isinstance(outgoing.event_id, str):
                raise self._unfit(f"event_id={outgoing.event_id!r} must be text", "It may not be empty, either.")
            flat += [EVENT_ID_FIELD, self._encoded("event_id", outgoing.event_id)]
        flat += carrier
        for field, value in outgoing.fields.items():
            flat += self._checked(field, value)
        if self.fenced and len(flat) > 2 * MAX_FIELDS:
            raise self._unfit(
                f"an entry of {len(outgoing.fields)} fields is too large",
                f"Use at most {MAX_FIELDS}, those of the library included, or pack them into one field.",
            )
        return Entry(key, outgoing.event_id, flat)

    def _checked(self, field: Any, value: Any) -> tuple[bytes, bytes]:
        if not isinstance(field, str) or not isinstance(value, (str, bytes)):
            names, values = type(field).__name__, type(value).__name__
            raise self._unfit(
                f"field {field!r} has a name of type {names} and a value of type {values}",
                "Names are str, values str or bytes: encode other types yourself, for example with json.",
            )
        if field.startswith(RESERVED_PREFIX):
            raise self._unfit(f"field {field!r} begins with {RESERVED_PREFIX!r}, which is reserved", "Rename it.")
        what = f"field {field!r}"
        return self._encoded(what, field), value if isinstance(value, bytes) else self._encoded(what, value)

    def _encoded(self, what: str, value: str) -> bytes:
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            remedy = "Pass text that can be encoded, or a value in bytes."
            raise self._unfit(f"{what} cannot be stored as UTF-8: {error}", remedy) from None

    def _unfit(self, message: str, hint: str) -> ConfigError:
        return ConfigError(message, stream=self.keys.stream, hint=hint)

    def is_repeatable(self, entry: Entry) -> bool:
        """Whether it may be sent again when its outcome is unknown."""
        return self.fenced and entry.event_id is not None

    # --- one entry ----------------------------------------------------------------------------------------------------

    def publish(self, entry: Entry) -> Saga[Receipt]:
        """Append one entry."""
        try:
            receipt = yield from self._publish(entry)
        except CoordError as error:
            self.count(error)
            raise
        self.count(receipt)
        return receipt

    def _publish(self, entry: Entry) -> Saga[Receipt]:
        began = self.clock()
        deadline = began + self.timeout_seconds
        closed, away = closed_pauses(), away_pauses()
        was_lost = False
        while True:
            course = yield from self.course(deadline)
            try:
                place, outcome = yield from self._send(course, entry)
            except RedisUnavailableError as error:
                if not was_lost:  # one answer that does not come costs all the time there is
                    was_lost, deadline = True, self.clock() + self.timeout_seconds
                if self.is_repeatable(entry) and self.clock() < deadline:
                    yield Pause(next(away))
                    continue
                raise self.unknown(error, entry) from error
            if place is None:
                yield from self.no_shards(course, began)
                continue
            if outcome.is_there:
                return self.receipt(place, outcome)
            refusal = self.refused(place, outcome)
            if not refusal.retriable or self.clock() >= deadline:
                raise refusal
            yield from self.another(course, place.is_over(outcome), closed, deadline)

    def _send(self, course: Course, entry: Entry) -> Saga[tuple[Place | None, Published]]:
        """Send an entry to each place in turn, until one has it or may still take it.

        Returns:
            The place and what it answered; no place: there are no shards.
        """
        outcome = Published("", "")
        for place in self.before(course, entry):
            outcome = yield from self._send_to(place, entry)
            if not place.is_over(outcome):
                return place, outcome
        if course.is_empty:
            return None, outcome
        place = course.place(entry.key)
        outcome = yield from self._send_to(place, entry)
        return place, outcome

    def _send_to(self, place: Place, entry: Entry) -> Saga[Published]:
        self.begin(place, entry)
        (outcome,) = yield self.command(place, [entry])
        self.answered(place, entry, outcome)
        return outcome  # type: ignore[no-any-return]

    # --- shared with publishing many ----------------------------------------------------------------------------------

    def before(self, course: Course, entry: Entry) -> list[Place]:
        """Return where else the entry may be by now, oldest first."""
        if not self.fenced or entry.event_id is None:
            return []
        return course.before(entry.key, self.attempts.places(entry.event_id, entry.key))

    def begin(self, place: Place, entry: Entry) -> None:
        """Note that an entry is about to be sent."""
        if self.fenced and entry.event_id is not None:
            self.attempts.begin(entry.event_id, entry.key, place)

    def answered(self, place: Place, entry: Entry, outcome: Published) -> None:
        """Note what the shard answered."""
        if self.fenced and entry.event_id is not None:
            self.attempts.answered(entry.event_id, entry.key, place, outcome)

    def command(self, place: Place, entries: Sequence[Entry]) -> Command[list[Published]]:
        """Return what sends entries to one place; of plain ones it is one only."""
        if not self.fenced:
            return commands.append(self.keys, place.shard, entries[0].flat)
        return commands.publish(
            self.keys,
            place.shard,
            [(entry.event_id, entry.flat) for entry in entries],
            layout=place.layout,
            window_ms=round(EVENT_ID_WINDOW_SECONDS * 1000),
            window_count=EVENT_ID_WINDOW_COUNT,
        )

    def course(self, deadline: float) -> Saga[Course]:
        """Return the layout; read it if need be, again and again until `deadline`, and once more in any case."""
        pauses, until = away_pauses(), None
        while True:
            course = self.layouts.current()
            if course is not None:
                return course
            try:
                return (yield from self.layouts.refresh())
            except RoutingUnavailableError:
                until = until or max(deadline, self.clock() + self.timeout_seconds)
                if self.clock() >= until:
                    raise
            yield Pause(next(pauses))

    def no_shards(self, course: Course, since: float) -> Saga[None]:
        """Look whether there are shards again. Raises: `NoShardError`."""
        if self.layouts.asked_at < since:
            course = yield from self.layouts.refresh()
        if course.is_empty:
            raise NoShardError(
                "the stream has no shards at present",
                stream=self.keys.stream,
                hint="Nothing was published. It was scaled to 0; publish again once it has been scaled up.",
            )

    def another(self, course: Course, is_over: bool, pauses: Iterator[float], deadline: float) -> Saga[None]:
        """Wait until it makes sense to try again after a refusal.

        Parameters:
            course: what was refused.
            is_over: it was refused for good, so only another layout helps.
            pauses: between two looks.
            deadline: return then at the latest.
        """
        while self.layouts.is_current(course):
            if self.clock() - self.layouts.asked_at >= _LOOK_SECONDS:
                # Without an answer, what is known is used as long as its lease lasts.
                with contextlib.suppress(RoutingUnavailableError):
                    yield from self.layouts.refresh()
                if not self.layouts.is_current(course):
                    return
            yield Pause(next(pauses))
            if not is_over or self.clock() >= deadline:
                return

    def refused(self, place: Place, outcome: Published) -> CoordError:
        """Return the error of a refusal."""
        return refused(outcome.word, outcome.detail, stream=self.keys.stream, shard=place.shard)

    def receipt(self, place: Place, outcome: Published) -> Receipt:
        """Return the receipt of an entry that is there."""
        return Receipt(outcome.detail, place.shard, outcome.word == "DUPLICATE")

    def unknown(self, error: CoordError, entry: Entry) -> PublishError:
        """Return the error for an entry of which nobody knows whether it was appended."""
        if self.is_repeatable(entry):
            hint = "Publish it again with the same event_id and key: that makes no duplicate."
        else:
            self._lost_count += 1
            hint = "Publishing it again may make a duplicate; an event_id, with fenced=True, prevents that."
        return PublishError(
            f"no answer from Redis: the entry may or may not have been published ({error.message})",
            stream=self.keys.stream,
            hint=hint,
            retriable=True,
        )

    def count(self, outcome: Receipt | CoordError, number: int = 1) -> None:
        """Count entries, once for each call, by what became of them in the end."""
        attributes = {telemetry.STREAM: self.keys.stream, telemetry.OUTCOME: outcome_word(outcome)}
        telemetry.publishes.add(number, attributes)

    # --- stopping -----------------------------------------------------------------------------------------------------

    def quiesced(self) -> Quiesced:
        """Return what nobody knows the outcome of, once no call is under way."""
        return Quiesced(self.attempts.event_ids(), self._lost_count)

    def resumed(self) -> None:
        """Let calls in again."""
        self._lost_count = 0
        self.gate.shut = False


_OUTCOMES: Sequence[tuple[type[CoordError], str]] = (
    (NotSentError, "NOT_SENT"),
    (PublishError, "UNKNOWN"),
    (NoShardError, "NO_SHARD"),
    (RoutingRegressionError, "ROUTING_REGRESSION"),
    (RoutingUnavailableError, "ROUTING_UNAVAILABLE"),
)


def outcome_word(outcome: Receipt | CoordError) -> str:
    """Return how metrics name what became of an entry."""
    if isinstance(outcome, Receipt):
        return "DUPLICATE" if outcome.duplicate else "OK"
    return outcome.word or next((word for kind, word in _OUTCOMES if isinstance(outcome, kind)), "ERROR")


def closed_pauses() -> Iterator[float]:
    """Yield the pauses between looks for another layout, in seconds: a cut-over takes some ten milliseconds."""
    yield from islice(_growing(0.001, 0.005), 50)
    yield from repeat(0.02)


def away_pauses() -> Iterator[float]:
    """Yield the pauses between tries while Redis is away, in seconds."""
    return _growing(0.01, 0.5)


def _growing(first: float, most: float) -> Iterator[float]:
    while True:
        yield first
        first = min(2 * first, most)


def key_bytes(key: Any) -> bytes:
    """Return a partition key as bytes. Raises: `ConfigError`."""
    try:
        return routing.partition_key(key)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
