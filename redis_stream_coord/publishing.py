"""What both producers decide, as sagas: checks, batches, what is safe to repeat; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from opentelemetry import propagate

from . import commands, routing, telemetry
from .commands import Pause, Published, Saga
from .errors import ConfigError, CoordError, PartialPublishError, PublishError, RedisUnavailableError, refused
from .keys import StreamKeys
from .layouts import Layouts
from .models import EVENT_ID_FIELD, KEY_FIELD, RESERVED_PREFIX, Layout, Outgoing, Receipt
from .settings import RedisSettings

# Event ids are remembered by each shard for this long, and so many of them; beyond it a duplicate is possible.
EVENT_ID_WINDOW_SECONDS = 3600.0
EVENT_ID_WINDOW_COUNT = 100_000

_CLOSED_PAUSE_SECONDS = 0.005
_BATCH = 100  # entries per script call: Redis does nothing else meanwhile
_PIPELINE = 64  # script calls per round trip
_MAX_FIELDS = 3500  # Lua hands at most 8,000 values to one call, and would fail in the midst of a batch


@attrs.frozen
class Entry:
    """An entry ready to send."""

    key: bytes
    event_id: str | None
    flat: Sequence[str | bytes]


class _NotSentError(PublishError):
    """An entry that was not even sent."""


class Publishing:
    """What both producers do, as sagas."""

    def __init__(self, stream: str, settings: RedisSettings, *, fenced: bool, lease_seconds: float) -> None:
        if lease_seconds <= 0:
            raise ConfigError(f"lease_seconds={lease_seconds} must be positive")
        self.keys = StreamKeys(stream, settings.key_prefix)
        self.clock = settings.machine.clock
        self.layouts = Layouts(self.keys, lease_seconds, self.clock)
        self.fenced = fenced
        self.timeout_seconds = settings.timeout_seconds

    def prepare(self, outgoing: Outgoing) -> Entry:
        """Check an entry and add the reserved fields. Raises: `ConfigError`."""
        key = key_bytes(outgoing.key)
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
        return Entry(key, outgoing.event_id, flat)

    def publish(self, entry: Entry) -> Saga[Receipt]:
        """Append one entry."""
        deadline = self.clock() + self.timeout_seconds
        while True:
            layout = self.layouts.current(self.clock())
            if layout is None:
                layout = yield from self.layouts.refresh()
            shard = self.layouts.shard(layout, entry.key)
            outcome = yield from self._append(layout, shard, entry)
            if outcome.word in ("OK", "DUPLICATE"):
                self._count(outcome.word)
                return Receipt(outcome.detail, shard, outcome.word == "DUPLICATE")
            error = refused(outcome.word, outcome.detail, stream=self.keys.stream, shard=shard)
            if not error.retriable or self.clock() > deadline:
                self._count(outcome.word)
                raise error
            yield Pause(_CLOSED_PAUSE_SECONDS)
            yield from self.layouts.refresh()

    def _append(self, layout: Layout, shard: int, entry: Entry) -> Saga[Published]:
        try:
            if self.fenced:
                outcomes = yield self.command(layout, shard, [entry])
                return outcomes[0]  # type: ignore[no-any-return]
            entry_id = yield commands.append(self.keys, shard, entry.flat)
            return Published("OK", entry_id) if entry_id else Published("STREAM_MISSING", self.keys.shard(shard).stream)
        except RedisUnavailableError as error:
            self._count("UNKNOWN")
            raise self.unknown(error, shard) from error

    def command(self, layout: Layout, shard: int, entries: Sequence[Entry]) -> commands.Command[list[Published]]:
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

    def batches(self, layout: Layout, entries: Sequence[Entry]) -> list[tuple[int, list[int]]]:
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

    def again(self, entries: Sequence[Entry], failed: Mapping[int, CoordError]) -> Iterator[int]:
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


def key_bytes(key: Any) -> bytes:
    """Return a partition key as bytes. Raises: `ConfigError`."""
    try:
        return routing.partition_key(key)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def windows(
    publishing: Publishing, layout: Layout, entries: Sequence[Entry]
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
    publishing: Publishing, layout: Layout, shard: int, entries: list[Entry]
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
