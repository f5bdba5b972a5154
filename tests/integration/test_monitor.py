"""What `Monitor` reads of live groups, on every server; and the gauges that a collector makes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from redis_stream_coord import (
    AsyncMonitor,
    Collector,
    ConfigError,
    LifecycleError,
    Monitor,
    NotFoundError,
    RedisSettings,
    ShardStatus,
)
from tests.integration.kit import GROUP, SLOW, Bench, Crew, Peer
from tests.servers import ClusterServers, free_port
from tests.waiting import eventually

only_redis7 = pytest.mark.parametrize("server", ["redis7"], indirect=True)


def _of(statuses: Any, shard: int) -> ShardStatus:
    return next(status for status in statuses if status.shard == shard)


# --- shards ---------------------------------------------------------------------------------------------------------


def test_shards_show_length_pending_lag_memory_and_owner(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    peer = Peer(bench, "a")
    peer.beat()
    ids = bench.fill(0, 5)
    bench.redis.xreadgroup(GROUP, "a", {bench.stream_key(0): ">"}, count=2)
    statuses = bench.monitor.shards(bench.stream, group=GROUP)
    reading = _of(statuses, 0).reading
    assert [status.shard for status in statuses] == [0, 1]
    assert _of(statuses, 0).owner == "a"
    assert (reading.length, reading.pending, reading.undelivered) == (5, 2, True)
    # Redis 6.2 does not say; unknown is not zero.
    assert reading.lag == (3 if bench.redis.info("server")["redis_version"] >= "7" else None)
    assert reading.memory_bytes is not None
    assert reading.memory_bytes > 100
    assert reading.delivered_id == ids[1]
    assert reading.last_id == ids[-1]
    assert reading.oldest is not None
    assert (reading.oldest.id, reading.oldest.consumer, reading.oldest.deliveries) == (ids[0], "a", 1)
    assert [(consumer.name, consumer.pending) for consumer in reading.consumers] == [("a", 2)]
    assert reading.groups == (GROUP,)
    assert reading.route.state == "open"
    empty = _of(statuses, 1).reading
    assert (empty.length, empty.pending, empty.undelivered, empty.oldest) == (0, 0, False, None)


@only_redis7
def test_lag_that_redis_cannot_tell_is_unknown_and_not_zero(bench: Bench) -> None:
    bench.create(shards=1, timings=SLOW)
    ids = bench.fill(0, 5)
    bench.redis.xreadgroup(GROUP, "a", {bench.stream_key(0): ">"}, count=1)
    bench.redis.xdel(bench.stream_key(0), ids[3])
    (status,) = bench.monitor.shards(bench.stream, group=GROUP)
    assert status.reading.lag is None
    assert status.reading.undelivered is True


def test_what_is_missing_on_a_shard_is_said(bench: Bench) -> None:
    bench.create(shards=3, timings=SLOW)
    bench.redis.delete(bench.stream_key(0))
    bench.redis.xgroup_destroy(bench.stream_key(1), GROUP)
    bench.redis.delete(f"redis-stream:coord:{{{bench.stream}:2}}:route")
    zero, one, two = (status.reading for status in bench.monitor.shards(bench.stream, group=GROUP))
    assert (zero.exists, zero.pending, zero.has_group, zero.last_id) == (False, None, False, None)
    assert (one.exists, one.has_group, one.pending, one.undelivered) == (True, False, None, None)
    assert two.route.state == "missing"
    assert len(bench.monitor.routing(bench.stream).problems) == 1


def test_slots_are_those_of_the_server(cluster: ClusterServers) -> None:
    url = cluster.url
    from redis_stream_coord import Admin

    with Admin(url, requested_by="tests") as admin, Monitor(url) as monitor:
        admin.create("orders", group=GROUP, shards=8, reason="a test")
        with cluster.client() as client:
            for status in monitor.shards("orders", group=GROUP):
                assert status.reading.slot == client.keyslot(f"orders:{status.shard}")
        assert monitor.routing("orders").problems == ()
        assert monitor.health().ok


# --- groups ---------------------------------------------------------------------------------------------------------


@only_redis7
def test_assignments_show_target_current_and_revoke_progress(bench: Bench) -> None:
    bench.create(shards=4, timings=SLOW)
    one, two = Peer(bench, "a"), Peer(bench, "b")
    one.beat()
    assert bench.monitor.assignments(bench.stream, group=GROUP).converged
    two.beat()
    view = bench.monitor.assignments(bench.stream, group=GROUP)
    assert not view.converged
    assert set(view.current.values()) == {"a"}
    assert set(view.target.values()) == {"a", "b"}
    assert {(revoke.holder, revoke.target) for revoke in view.revokes} == {("a", "b")}
    for revoke in view.revokes:
        assert 0 <= revoke.waited_ms < 30_000
        assert 30_000 < revoke.remaining_ms <= 60_000
        assert revoke.waited_ms + revoke.remaining_ms == 60_000
    one.beat(revoked=[one.held(revoke.shard) for revoke in view.revokes])
    two.beat()
    assert bench.monitor.assignments(bench.stream, group=GROUP).converged
    assert [member.id for member in bench.monitor.members(bench.stream, group=GROUP)] == ["a", "b"]


@only_redis7
def test_health_names_what_is_wrong(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    (group,) = bench.monitor.health().groups
    assert (group.status, group.members, group.unowned) == ("EMPTY", 0, {0, 1})
    peer = Peer(bench, "a")
    peer.beat()
    health = bench.monitor.health()
    assert health.ok
    assert health.latency_ms is not None
    assert health.groups[0].status == "OK"
    bench.redis.zadd(bench.keys.leases, {"a": 1})
    (group,) = bench.monitor.health().groups
    assert group.status == "DEGRADED"
    assert "member a is overdue" in group.problems[0]
    bench.redis.hset(bench.keys.metadata, "shard:0", "rubbish")
    health = bench.monitor.health()
    assert health.status == "DEGRADED"
    assert "the metadata is damaged: shard:0" in health.groups[0].problems[0]
    assert health.groups[0].members is None


def test_health_without_redis_is_an_answer() -> None:
    settings = RedisSettings(f"redis://127.0.0.1:{free_port()}", timeout_seconds=0.2)
    with Monitor(settings) as monitor:
        health = monitor.health()
    assert (health.status, health.latency_ms, health.groups) == ("UNAVAILABLE", None, ())
    assert "PING got no answer" in health.problems[0]


@only_redis7
def test_compatibility_names_what_this_release_cannot_work_with(bench: Bench) -> None:
    bench.create(shards=1, timings=SLOW)
    bench.admin.create(bench.stream, group="other", reason="a test")
    report = bench.monitor.compatibility()
    assert report.ok
    assert [(record.group, record.protocol) for record in report.records] == [
        (None, None),
        (GROUP, (1, 1)),
        ("other", (1, 1)),
    ]
    bench.redis.hset(bench.keys.metadata, mapping={"protocol_min": "7", "protocol_max": "9"})
    bench.redis.hset(bench.keys.metadata.replace(GROUP, "other"), "schema", "2")
    report = bench.monitor.compatibility()
    problems = {record.group: record.problem for record in report.records}
    assert problems[None] is None
    assert "accepts protocol 7 to 9, and this release speaks 1" in (problems[GROUP] or "")
    assert "unknown schema: 2" in (problems["other"] or "")
    assert not report.ok


# --- entries and histories ------------------------------------------------------------------------------------------


def test_messages_are_looked_at_and_not_delivered(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    ids = bench.fill(0, 3)
    other = bench.fill(1, 1)
    receipt = bench.producer.publish({"n": "x", "t": b"\xff"}, key=bench.key_of(1), event_id="payment-7")
    messages = bench.monitor.messages
    assert [entry.id for entry in messages(bench.stream)] == [*ids, *other, receipt.id]
    assert [entry.id for entry in messages(bench.stream, shard=0, count=2)] == ids[:2]
    assert [entry.id for entry in messages(bench.stream, shard=0, count=2, newest=True)] == [ids[2], ids[1]]
    assert [entry.id for entry in messages(bench.stream, shard=0, after=ids[0])] == ids[1:]
    (found,) = messages(bench.stream, event_id="payment-7")
    assert (found.shard, found.id, found.event_id, found.key) == (1, receipt.id, "payment-7", bench.key_of(1).encode())
    assert found.fields == {"n": b"x", "t": b"\xff"}
    # Another shard may have an entry of the same id.
    assert ids[1] in [entry.id for entry in messages(bench.stream, entry_id=ids[1]) if entry.shard == 0]
    assert messages(bench.stream, event_id="none") == []
    assert bench.pending(0) == {}
    bench.redis.xreadgroup(GROUP, "a", {bench.stream_key(0): ">"}, count=1)
    first, second, *_ = messages(bench.stream, group=GROUP, shard=0)
    assert first.pending is not None
    assert first.pending.consumer == "a"
    assert second.pending is None
    with pytest.raises(NotFoundError, match="no such shard"):
        messages(bench.stream, shard=9)
    with pytest.raises(ConfigError):
        messages(bench.stream, count=0)


@only_redis7
def test_audit_and_events_are_read_newest_first(bench: Bench) -> None:
    bench.create(shards=1, timings=SLOW, request_id="r-1")
    bench.admin.retain(bench.stream, retention="consumed", reason="to save memory")
    Peer(bench, "a").beat()
    (entry,) = bench.monitor.audit(bench.stream, group=GROUP)
    assert (entry.action, entry.outcome, entry.word, entry.request_id) == ("create", "accepted", "OK", "r-1")
    assert (entry.requested_by, entry.reason, entry.principal) == ("tests", "a test", "default")
    assert len(entry.fingerprint) == 64
    assert entry.client_address.startswith("127.0.0.1:")
    assert entry.duration_ms is not None
    assert [one.action for one in bench.monitor.audit(bench.stream)] == ["retain"]
    events = bench.monitor.events(bench.stream, group=GROUP)
    assert [event.type for event in events] == ["target_changed", "member_joined", "group_created"] or [
        event.type for event in events
    ] == ["shard_granted", "target_changed", "member_joined", "group_created"]
    joined = next(event for event in events if event.type == "member_joined")
    assert joined.member == "a"
    assert abs(joined.at_ms - bench.view().now_ms) < 60_000
    assert len(bench.monitor.events(bench.stream, group=GROUP, count=2)) == 2


@only_redis7
def test_both_faces_read_the_same(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    Peer(bench, "a").beat()
    bench.fill(0, 2)

    async def read() -> list[Any]:
        async with AsyncMonitor(bench.url) as monitor:
            return [
                await monitor.groups(),
                await monitor.routing(bench.stream),
                await monitor.messages(bench.stream, group=GROUP),
                await monitor.audit(bench.stream, group=GROUP),
                await monitor.events(bench.stream, group=GROUP),
                [status.reading.length for status in await monitor.shards(bench.stream, group=GROUP)],
                [member.id for member in await monitor.members(bench.stream, group=GROUP)],
                (await monitor.assignments(bench.stream, group=GROUP)).current,
                (await monitor.health()).groups,
            ]

    sync = bench.monitor
    assert asyncio.run(read()) == [
        sync.groups(),
        sync.routing(bench.stream),
        sync.messages(bench.stream, group=GROUP),
        sync.audit(bench.stream, group=GROUP),
        sync.events(bench.stream, group=GROUP),
        [status.reading.length for status in sync.shards(bench.stream, group=GROUP)],
        [member.id for member in sync.members(bench.stream, group=GROUP)],
        sync.assignments(bench.stream, group=GROUP).current,
        sync.health().groups,
    ]


# --- gauges ---------------------------------------------------------------------------------------------------------


def _gauges(collector: Collector, name: str) -> dict[Any, float]:
    return {
        attributes.get("shard", attributes.get("state", "")): value
        for reading, value, attributes in collector.readings()
        if reading == name
    }


@only_redis7
def test_collector_reports_what_it_reads(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2)
    member = crew.start("a")
    member.owns(0, 1)
    ids = bench.fill(0, 3)
    member.finishes(*ids)
    with Collector(bench.url, interval_seconds=0.05) as collector:
        eventually(lambda: _gauges(collector, "shard_pending") == {0: 0, 1: 0}, what="nothing is pending")
        assert _gauges(collector, "redis_reachable") == {"": 1}
        assert _gauges(collector, "group_healthy") == {"": 1}
        assert _gauges(collector, "members") == {"active": 1, "leaving": 0, "overdue": 0}
        assert _gauges(collector, "shard_stream_length") == {0: 3, 1: 0}
        eventually(lambda: _gauges(collector, "shard_lag") == {0: 0, 1: 0}, what="no lag")
        assert min(_gauges(collector, "shard_memory_usage_bytes").values()) > 0
        member.recorder.hold()
        bench.fill(0, 1)
        eventually(lambda: _gauges(collector, "shard_pending")[0] == 1, what="it sees what is pending")
        member.recorder.release()
        bench.redis.hset(bench.keys.metadata, "shard:0", "rubbish")
        eventually(lambda: _gauges(collector, "group_healthy") == {"": 0}, what="it sees the damage")


@only_redis7
def test_collector_counts_a_violation_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.create(shards=1, timings=SLOW)
    Peer(bench, "a").beat()
    counted: list[int] = []
    monkeypatch.setattr(
        "redis_stream_coord.collector.telemetry.invariant_violations.add", lambda n, where: counted.append(n)
    )
    bench.redis.hset(bench.keys.metadata, "grant_counter", "0")
    collector = Collector(bench.url, groups=[(bench.stream, GROUP)])
    for _ in range(3):
        collector.collect()
    collector.close()
    assert counted == [1]


def test_collector_without_redis_says_so() -> None:
    settings = RedisSettings(f"redis://127.0.0.1:{free_port()}", timeout_seconds=0.2)
    collector = Collector(settings)
    collector.collect()
    assert _gauges(collector, "redis_reachable") == {"": 0}
    collector.close()
    with pytest.raises(ConfigError):
        Collector(settings, interval_seconds=0)
    with pytest.raises(LifecycleError):
        collector.start()
