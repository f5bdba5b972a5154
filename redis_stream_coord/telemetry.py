"""Every OpenTelemetry instrument and attribute of the library. API only: without an SDK all of it does nothing.

Names are given as a Prometheus exporter prints them: it appends ``_total`` to counters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Protocol

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Observation

PREFIX = "redis_stream_coord_"

STREAM = "stream"
GROUP = "group"
MEMBER = "member"
SHARD = "shard"
STATUS = "status"
STATE = "state"
OUTCOME = "outcome"

Attributes = dict[str, str | int]

tracer = trace.get_tracer("redis_stream_coord")
_meter = metrics.get_meter("redis_stream_coord")


def _counter(name: str, description: str) -> metrics.Counter:
    return _meter.create_counter(PREFIX + name, description=description)


heartbeats = _counter("heartbeat", "Heartbeats by status: OK, REVOKE_PENDING, LEFT, an error word, or UNAVAILABLE.")
members_expired = _counter("member_expired", "Times this member found itself expired or unknown to its group.")
rebalances = _counter("rebalance", "Times the shards of this member changed.")
rebalance_duration = _meter.create_histogram(
    PREFIX + "rebalance_duration",
    description="Seconds from being asked to give up a shard to having drained it.",
)
invariant_violations = _counter("invariant_violation", "Violations of the protocol's invariants that were seen.")
state_conflicts = _counter("state_conflict", "Requests refused because the caller was fenced.")
metadata_regressions = _counter("metadata_regression", "Times stored metadata was older than what had been seen.")
handled = _counter(
    "handled", "Entries by outcome of the handler: ok, failed, refused (nack), poison, gone (deleted while pending)."
)
stuck_handlers = _counter("handler_stuck", "Times a shard was given up because its handler did not return.")
trimmed = _counter("trimmed", "Entries removed by retention.")
acknowledged = _counter("acknowledged", "Entries acknowledged.")
routing_requests = _counter("producer_routing_request", "Reads of the layout by producers, by status.")
rate_limited = _counter("rate_limited", "Mutations refused because their Redis user asked for too many.")
publishes = _counter("publish", "Entries published, by outcome.")
scale_requests = _counter("scale_request", "Reshardings and rollbacks asked for.")
scale_requests_failed = _counter("scale_request_failed", "Reshardings and rollbacks that were refused.")

Reading = tuple[str, float, Attributes]


class Observed(Protocol):
    """What reports gauges: a running consumer."""

    def readings(self) -> Iterable[Reading]: ...


_observed: weakref.WeakSet[Observed] = weakref.WeakSet()

GAUGES = {
    "up": "1 while the consumer runs.",
    "member_active": "1 while the consumer is a member of its group with a valid lease.",
    "member_lease_remaining_seconds": "Until this member stops trusting its ownership.",
    "member_heartbeat_age_seconds": "Since the last accepted heartbeat.",
    "member_current_shards": "Shards that this member owns.",
    "member_revoking_shards": "Shards that this member drains.",
    "revoke_pending": "1 while this member has something to drain.",
    "group_epoch": "Group epoch as last answered.",
    "assignment_epoch": "Assignment epoch as last answered.",
    "consumer_shard_pending": "Entries of a shard that this process has received and not acknowledged.",
    "consumer_shard_progress_age_seconds": "Since this process last finished an entry of a shard it has work for.",
    # What only somebody who reads whole groups can know: see `redis_stream_coord.collector`.
    "redis_reachable": "1 while the collector gets answers from Redis.",
    "group_healthy": "1 while nothing is wrong with a group, as far as its record shows it.",
    "members": "Members of a group by state: active, leaving, or overdue (lease passed, not removed yet).",
    "shard_lag": "Entries of a shard not delivered to the group yet; absent where Redis cannot tell.",
    "shard_pending": "Entries of a shard delivered to the group and not acknowledged.",
    "shard_stream_length": "Entries in the stream of a shard.",
    "shard_memory_usage_bytes": "Memory of the stream of a shard, as Redis estimates it.",
    "migration_active": "1 while the stream is being resharded.",
    "migration_active_age_seconds": "Since the resharding under way began; absent without one.",
}


def observe(source: Observed) -> None:
    """Report the gauges of `source` until `forget`, or until it is garbage."""
    _observed.add(source)


def forget(source: Observed) -> None:
    """Stop reporting the gauges of `source`."""
    _observed.discard(source)


def observed() -> list[Observed]:
    """Return what reports gauges at this moment."""
    return list(_observed)


def _readings(name: str) -> Iterator[Observation]:
    for source in list(_observed):
        for reading, value, attributes in source.readings():
            if reading == name:
                yield Observation(value, attributes)


def _gauge(name: str, description: str) -> None:
    def callback(_options: CallbackOptions) -> Iterable[Observation]:
        return list(_readings(name))

    _meter.create_observable_gauge(PREFIX + name, [callback], description=description)


for _name, _description in GAUGES.items():
    _gauge(_name, _description)
