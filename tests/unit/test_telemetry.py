"""What a metrics reader sees: the names of section 10 of the protocol, as a Prometheus exporter prints them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import pytest
from opentelemetry import metrics
from opentelemetry.metrics import Counter, Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Metric, Sum

from redis_stream_coord import telemetry
from redis_stream_coord.telemetry import GAUGES, PREFIX, Reading

# Names of section 10 that exist so far, without the prefix. Others may be added; these must not be renamed: dashboards
# and alerts use them.
DOCUMENTED = {
    "up",
    "heartbeat_total",
    "member_active",
    "member_expired_total",
    "member_heartbeat_age_seconds",
    "member_lease_remaining_seconds",
    "member_current_shards",
    "member_revoking_shards",
    "group_epoch",
    "assignment_epoch",
    "revoke_pending",
    "rebalance_total",
    "rebalance_duration",
    "invariant_violation_total",
    "state_conflict_total",
    "metadata_regression_total",
    "consumer_shard_pending",
    "consumer_shard_progress_age_seconds",
    "producer_routing_request_total",
    "publish_total",
    "scale_request_total",
    "scale_request_failed_total",
    "members",
    "shard_lag",
    "shard_pending",
    "shard_stream_length",
    "shard_memory_usage_bytes",
    "migration_active",
    "migration_active_age_seconds",
}

COUNTERS = [value for value in vars(telemetry).values() if isinstance(value, Counter)]
HISTOGRAMS = [value for value in vars(telemetry).values() if isinstance(value, Histogram)]
WHERE: telemetry.Attributes = {telemetry.STREAM: "orders", telemetry.GROUP: "billing", telemetry.MEMBER: "a"}


class FakeObserved:
    """What a running consumer reports."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = list(readings)

    def readings(self) -> Iterable[Reading]:
        return self._readings


@pytest.fixture(scope="module")
def _reader() -> Iterator[InMemoryMetricReader]:
    # The provider of a process can be set once only. The instruments were made before, and find it nevertheless.
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    metrics.set_meter_provider(provider)
    if metrics.get_meter_provider() is not provider:
        pytest.skip("another meter provider is set")
    yield reader
    provider.shutdown()


@pytest.fixture
def reader(_reader: InMemoryMetricReader, monkeypatch: pytest.MonkeyPatch) -> InMemoryMetricReader:
    monkeypatch.setattr(telemetry, "_observed", type(telemetry._observed)())
    return _reader


def seen(reader: InMemoryMetricReader) -> dict[str, Metric]:
    """Every metric that has a value, by its name as an exporter prints it."""
    data = reader.get_metrics_data()
    found = {}
    for resource in data.resource_metrics if data is not None else []:
        for scope in resource.scope_metrics:
            if scope.scope.name != "redis_stream_coord":
                continue
            for metric in scope.metrics:
                counted = isinstance(metric.data, Sum) and metric.data.is_monotonic
                found[metric.name + "_total" * counted] = metric
    return found


def values(metric: Metric) -> dict[tuple[tuple[str, object], ...], float]:
    return {tuple(sorted((p.attributes or {}).items())): p.value for p in metric.data.data_points}  # type: ignore[union-attr]


def test_every_metric_is_seen_under_its_documented_name(reader: InMemoryMetricReader) -> None:
    for counter in COUNTERS:
        counter.add(1, WHERE)
    for histogram in HISTOGRAMS:
        histogram.record(0.5, WHERE)
    source = FakeObserved((name, 1.0, WHERE) for name in GAUGES)
    telemetry.observe(source)
    found = seen(reader)
    assert all(name.startswith(PREFIX) for name in found)
    names = {name.removeprefix(PREFIX) for name in found}
    assert names >= DOCUMENTED
    assert len(found) == len(COUNTERS) + len(HISTOGRAMS) + len(GAUGES)
    assert all(metric.description for metric in found.values())


def test_counters_keep_their_attributes(reader: InMemoryMetricReader) -> None:
    telemetry.heartbeats.add(2, {**WHERE, telemetry.STATUS: "TESTED"})
    counted = values(seen(reader)[f"{PREFIX}heartbeat_total"])
    assert counted[("group", "billing"), ("member", "a"), ("status", "TESTED"), ("stream", "orders")] == 2


def test_durations_are_distributions(reader: InMemoryMetricReader) -> None:
    telemetry.rebalance_duration.record(1.5, WHERE)
    assert isinstance(seen(reader)[f"{PREFIX}rebalance_duration"].data, HistogramData)


def test_gauges_are_those_of_all_that_run(reader: InMemoryMetricReader) -> None:
    shard = {**WHERE, telemetry.SHARD: 3}
    one = FakeObserved([("up", 1.0, WHERE), ("consumer_shard_pending", 7.0, shard)])
    other = FakeObserved([("up", 1.0, {**WHERE, telemetry.MEMBER: "b"})])
    telemetry.observe(one)
    telemetry.observe(one)
    telemetry.observe(other)
    found = seen(reader)
    assert len(values(found[f"{PREFIX}up"])) == 2
    assert list(values(found[f"{PREFIX}consumer_shard_pending"]).values()) == [7.0]
    assert f"{PREFIX}group_epoch" not in found

    telemetry.forget(other)
    telemetry.forget(other)
    assert len(values(seen(reader)[f"{PREFIX}up"])) == 1


def test_what_is_garbage_is_not_observed(reader: InMemoryMetricReader) -> None:
    source = FakeObserved([("up", 1.0, WHERE)])
    telemetry.observe(source)
    del source
    gc.collect()
    assert f"{PREFIX}up" not in seen(reader)


def test_a_gauge_is_read_each_time(reader: InMemoryMetricReader) -> None:
    source = FakeObserved([("group_epoch", 1.0, WHERE)])
    telemetry.observe(source)
    assert list(values(seen(reader)[f"{PREFIX}group_epoch"]).values()) == [1.0]
    source._readings = [("group_epoch", 2.0, WHERE)]
    assert list(values(seen(reader)[f"{PREFIX}group_epoch"]).values()) == [2.0]
