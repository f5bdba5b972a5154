"""Values that the library takes and returns. Frozen, except `Message`, which can be acknowledged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from .checks import check_number
from .errors import ConfigError, LifecycleError

Fields = Mapping[str, str | bytes]
Shards = frozenset[int]
Lag = Mapping[int, int | None]

# Fields of an entry that belong to the library. Everything else is the application's.
RESERVED_PREFIX = "rsc-"
KEY_FIELD = b"rsc-key"
EVENT_ID_FIELD = b"rsc-event"


# Whoever asks for more has taken milliseconds for seconds.
_LONGEST_SECONDS = 3600.0
_LONGEST_DELAY_SECONDS = 86_400.0


@attrs.frozen(kw_only=True)
class Timings:
    """How fast a group notices things. Stored in the group; every member gets them with each heartbeat.

    Parameters:
        heartbeat_seconds: how often a member renews its lease. Changes are heard of at once, not at this interval.
        lease_seconds: a member not heard of for so long has expired.
        rebalance_seconds: a member that has not drained a revoked shard for so long is fenced.

    Raises:
        ConfigError: not positive, more than an hour, or less than three heartbeats to a lease.
    """

    heartbeat_seconds: float = 3.0
    lease_seconds: float = 15.0
    rebalance_seconds: float = 60.0

    def __attrs_post_init__(self) -> None:
        for name in ("heartbeat_seconds", "lease_seconds", "rebalance_seconds"):
            check_number(name, getattr(self, name), 0.0, _LONGEST_SECONDS, hint="These are seconds, not milliseconds.")
        if not 0.05 <= self.heartbeat_seconds * 3 <= self.lease_seconds + 1e-9:  # 0.1 * 3 is more than 0.3
            raise ConfigError(
                f"heartbeat_seconds={self.heartbeat_seconds} does not fit lease_seconds={self.lease_seconds}",
                hint="A lease must last three heartbeats or more, or one lost reply expires a healthy member.",
            )
        if self.rebalance_seconds <= 0:
            raise ConfigError(f"rebalance_seconds={self.rebalance_seconds} must be positive")


@attrs.frozen
class Held:
    """A shard that a member holds.

    Attributes:
        shard: index of the shard.
        token: number of the grant, unique within a lifecycle of the group.
    """

    shard: int
    token: int


@attrs.define(eq=False, kw_only=True)
class Message:
    """One entry of a shard.

    Attributes:
        stream: name of the logical stream.
        shard: index of the shard it came from.
        id: id of the entry in the shard's stream.
        key: partition key, or ``None`` if the producer gave none.
        fields: the entry's own fields.
        event_id: id given by the producer for duplicate detection, or ``None``.
        deliveries: how many times it has been handed to a handler, this time included: tries in place and takeovers
            after a crash. Entries that were only read ahead do not count.
        token: (group incarnation, grant token) as a pair that only grows for a shard. A store that remembers the
            highest one it saw can refuse late writes of an owner that lost the shard.
        value: what ``decode`` made of the fields; ``None`` without it.
        error: what the last try in this process ended with, or ``None``.
        trace_context: OpenTelemetry context of the producer, if it sent one.
    """

    stream: str
    shard: int
    id: str
    key: bytes | None
    fields: Mapping[str, bytes]
    event_id: str | None
    deliveries: int
    token: tuple[int, int]
    value: Any = None
    error: BaseException | None = None
    trace_context: Any = attrs.field(default=None, repr=False)
    _ack: Callable[[str, bool], None] = attrs.field(repr=False)
    _owned: Callable[[], bool] = attrs.field(repr=False)
    _nack_delay: float | None = attrs.field(default=None, init=False, repr=False)
    _settled: bool = attrs.field(default=False, init=False, repr=False)

    @property
    def owned(self) -> bool:
        """Whether this member still owns the shard under the same token, as far as it knows."""
        return self._owned()

    def text(self, field: str, encoding: str = "utf-8") -> str:
        """Return a field as text of that encoding. Raises: `KeyError`, `UnicodeDecodeError`."""
        return self.fields[field].decode(encoding)

    def ack(self) -> None:
        """Acknowledge the entry. It is only queued, and sent within some ten milliseconds.

        Raises:
            FencedError: the shard is lost; the entry will be delivered to its new owner.
        """
        self._ack(self.id, False)

    def ack_delete(self) -> None:
        """Acknowledge the entry, and delete it from the stream unless another consumer group has yet to finish it.

        With ``ack="manual"``; with ``"auto"`` it is acknowledged a second time, which does no harm.

        Raises:
            FencedError: the shard is lost; the entry will be delivered to its new owner.
        """
        self._ack(self.id, True)

    def nack(self, *, delay_seconds: float = 0.0) -> None:
        """From within the handler: do not acknowledge, and hand it out again, in place, after a delay.

        Parameters:
            delay_seconds: how long later entries of the same lane wait with it; a day at most.

        Raises:
            LifecycleError: the handler has returned, and what becomes of the entry is decided.
            ConfigError: the delay is no such time.
        """
        check_number("delay_seconds", delay_seconds, 0.0, _LONGEST_DELAY_SECONDS)
        if self._settled:
            raise LifecycleError(
                f"nack() of entry {self.id} comes too late: its handler has returned",
                stream=self.stream,
                shard=self.shard,
                hint="Call it in the handler.",
            )
        self._nack_delay = delay_seconds

    @property
    def was_refused(self) -> bool:
        """Whether the handler called `nack`."""
        return self._nack_delay is not None

    def settle(self) -> None:
        """Its handler has returned, and it was not refused."""
        self._settled = True

    def taken_delay(self) -> float | None:
        """Return the delay given to `nack`, once."""
        delay, self._nack_delay = self._nack_delay, None
        return delay


@attrs.frozen(kw_only=True)
class Health:
    """How a consumer is.

    Attributes:
        ok: it is a member with a valid lease, and nothing is wrong.
        state: ``joining``, ``member``, ``leaving``, ``gone`` or ``failed``.
        lease_remaining_seconds: until it stops trusting its ownership; 0 if it already has.
        progress_age_seconds: longest time since anything was finished on a shard that has work; 0 if none has.
        waits_for: what it waits for or what is wrong, in words; empty if nothing.
    """

    ok: bool
    state: str
    lease_remaining_seconds: float
    progress_age_seconds: float
    waits_for: str


@attrs.frozen(kw_only=True)
class Outgoing:
    """One entry to publish.

    Parameters:
        fields: what the entry says; values are text (stored as UTF-8) or bytes.
        key: partition key. Entries of one key keep their order.
        event_id: if given, publishing the same id again yields no second entry, within the window of remembered ids.
    """

    fields: Fields
    key: str | bytes
    event_id: str | None = None


@attrs.frozen
class Receipt:
    """Where an entry went.

    Attributes:
        id: id of the entry in the shard's stream.
        shard: index of the shard.
        duplicate: the event id was known already; `id` is that of the entry published first.
    """

    id: str
    shard: int
    duplicate: bool


@attrs.frozen
class Quiesced:
    """What a producer that was quiesced does not know the outcome of. Nothing of it is under way any more.

    Attributes:
        event_ids: of entries whose last answer was lost, oldest first. Publish them again after `resume`, with the same
            key: that makes no duplicate.
        unknown_count: entries without event id, or of a producer that is not fenced, whose answer was lost since the
            last `resume`. They may or may not be there.
    """

    event_ids: tuple[str, ...]
    unknown_count: int


@attrs.frozen
class Layout:
    """Where the keys of a stream go at present.

    Attributes:
        version: version of the stream record.
        incarnation: lifecycle of the stream record.
        epoch: routing epoch; grows with every change of the layout.
        shards: number of shards.
        routing: name of the routing protocol.
        layout: identity of the whole layout, as the shards' routes compare it.
        state: ``creating`` until all shards are provisioned, then ``active``.
        retention: ``all``, ``consumed`` or ``keep:<count>``.
        groups: names of the registered groups.
        earlier: ids of layouts that ended lately, oldest first.
        resharding: state of the resharding under way or of the last one; ``-`` if there never was one.
    """

    version: int
    incarnation: int
    epoch: int
    shards: int
    routing: str
    layout: str
    state: str
    retention: str = "all"
    groups: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    resharding: str = "-"

    @property
    def keep(self) -> int | None:
        """So many entries of a shard stay though all groups have finished them; ``None``: all of them."""
        if self.retention == "all":
            return None
        return 0 if self.retention == "consumed" else int(self.retention.removeprefix("keep:"))


@attrs.frozen(kw_only=True)
class Waiting:
    """One thing that a resharding waits for.

    Attributes:
        what: in words.
        group, shard: whom or what it concerns; ``None`` where that does not apply.
        entries: how many entries are left there, as far as Redis can tell; ``None``: unknown, or that is not the point.
    """

    what: str
    group: str | None = None
    shard: int | None = None
    entries: int | None = None

    def __str__(self) -> str:
        where = "".join(
            f"{name} {value}: " for name, value in (("group", self.group), ("shard", self.shard)) if value is not None
        )
        count = "" if self.entries is None else f" ({self.entries} entries)"
        return f"{where}{self.what}{count}"


@attrs.frozen(kw_only=True)
class Resharding:
    """A change of the number of shards of a stream, at one moment.

    Attributes:
        id: its id; for `Admin.wait` and `Admin.rollback`.
        stream: name of the logical stream.
        state: ``PREPARING``, ``CUTOVER``, ``DRAINING``, ``COMPLETED``; ``REOPENING`` and ``ABANDONED`` or ``FAILED`` if
            it was given up before the decision; ``ROLLING_BACK`` and ``ROLLED_BACK`` if it was taken back after it.
        source, target: numbers of shards, as they were asked for: also while it goes back.
        epoch: routing epoch that it works under.
        ordered: the order of keys is kept across it.
        quiesce: producers wait until every group has consumed all.
        age_seconds: since it began.
        state_age_seconds: since it last came a step on.
        waits: what it waits for at present; empty if it only needs a driver, or is over.
        reason: why it failed or goes back; empty if it does neither.
    """

    id: str
    stream: str
    state: str
    source: int
    target: int
    epoch: int
    ordered: bool
    quiesce: bool
    age_seconds: float
    state_age_seconds: float
    waits: tuple[Waiting, ...] = ()
    reason: str = ""

    @property
    def active(self) -> bool:
        """Whether it has not come to its end."""
        return self.state in ("PREPARING", "CUTOVER", "DRAINING", "REOPENING", "ROLLING_BACK")

    @property
    def entries_left(self) -> int:
        """How many entries it waits for, as far as Redis can tell; an entry that two groups need counts twice."""
        return sum(waiting.entries or 0 for waiting in self.waits)


@attrs.frozen(kw_only=True)
class GroupDrain:
    """What a group has to consume before a resharding can end.

    Attributes:
        group: its name.
        entries: so many, pending ones included; ``None``: Redis cannot tell.
        members: how many live members it has.
    """

    group: str
    entries: int | None
    members: int


@attrs.frozen(kw_only=True)
class ScalePlan:
    """What another number of shards would bring; nothing has been changed.

    Attributes:
        stream: name of the logical stream.
        source, target: numbers of shards.
        added, removed: which shards come, and which go.
        moved_share: share of all keys that go to another shard, from 0 to 1.
        groups: what each has to consume before the resharding ends.
        refused: why it would be refused; ``None``: it would not.
        notes: what to know before.
    """

    stream: str
    source: int
    target: int
    added: tuple[int, ...]
    removed: tuple[int, ...]
    moved_share: float
    groups: tuple[GroupDrain, ...]
    refused: str | None
    notes: tuple[str, ...]


@attrs.frozen
class Route:
    """Where one key goes.

    Attributes:
        shard: index of the shard.
        stream_key: Redis key of the shard's stream.
        epoch: routing epoch of the layout it comes from.
    """

    shard: int
    stream_key: str
    epoch: int
