"""What a consumer says about itself."""

from __future__ import annotations

import time

import pytest

from redis_stream_coord import RedisSettings, Timings
from tests.integration.kit import FAST, GROUP, Bench, Crew
from tests.proxy import LossyProxy
from tests.waiting import eventually

pytestmark = pytest.mark.parametrize("server", ["redis7"], indirect=True)


def test_health_tells_of_a_stuck_handler_and_of_a_shard_that_cannot_be_read(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=Timings(heartbeat_seconds=0.15, lease_seconds=1.5, rebalance_seconds=30.0))
    a = crew.start("a", max_handler_seconds=0.5)
    a.owns(0, 1)
    a.recorder.hold(lambda message: message.shard == 0)
    (stuck,) = bench.fill(0)
    eventually(lambda: not a.consumer.health.ok, what="that it is told")
    assert f"shard 0: the handler has not returned from entry {stuck}" in a.consumer.health.waits_for
    assert a.consumer.health.state == "member"
    # Also when the shard is somebody else's meanwhile, or nobody's.
    bench.heartbeats_pass("a", 5)
    assert stuck in a.consumer.health.waits_for
    a.recorder.release()
    health = eventually(lambda: (h := a.consumer.health).ok and h, what="well again")
    assert stuck not in health.waits_for
    a.owns(0, 1)
    bench.redis.delete(bench.stream_key(1))
    bench.redis.set(bench.stream_key(1), "no stream")
    eventually(lambda: not a.consumer.health.ok, within_seconds=20, what="that the shard cannot be read")
    assert "shard 1: " in a.consumer.health.waits_for
    bench.redis.delete(bench.stream_key(1))
    bench.redis.xgroup_create(bench.stream_key(1), GROUP, "0", mkstream=True)
    eventually(lambda: a.consumer.health.ok, within_seconds=20, what="well again")


def test_health_counts_progress_from_when_there_was_something_to_do(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    a = crew.start("a")
    a.finishes(*bench.fill(0))
    time.sleep(1.0)  # idle, and nothing is wrong with that
    a.recorder.hold()
    bench.fill(0)
    health = eventually(lambda: (h := a.consumer.health).progress_age_seconds > 0 and h, what="an entry in the handler")
    assert health.progress_age_seconds < 0.8
    a.consumer.pause()
    assert a.consumer.health.progress_age_seconds == 0
    assert a.consumer.health.waits_for == "resume() of shards [0]"
    assert a.consumer.health.ok


def test_health_tells_of_silence_before_the_timeout(bench: Bench, crew: Crew, proxy: LossyProxy) -> None:
    bench.create(shards=1, timings=Timings(heartbeat_seconds=0.2, lease_seconds=30.0, rebalance_seconds=30.0))
    a = crew.start("a", redis=RedisSettings(proxy.url, timeout_seconds=20.0))
    a.owns(0)
    assert a.consumer.health.ok
    proxy.pause()
    health = eventually(lambda: not (h := a.consumer.health).ok and h, within_seconds=5, what="that it is told")
    assert "no answer from Redis to its heartbeats" in health.waits_for
    proxy.resume()
    eventually(lambda: a.consumer.health.ok, what="well again")


def test_health_tells_the_truth(bench: Bench, crew: Crew, proxy: LossyProxy) -> None:
    bench.create(shards=1)
    proxy.refuse()
    a = crew.start("a", redis=RedisSettings(proxy.url, timeout_seconds=0.5))
    eventually(lambda: "no answer from Redis" in a.consumer.health.waits_for, what="joining, Redis away")
    health = a.consumer.health
    assert (health.ok, health.state, health.lease_remaining_seconds) == (False, "joining", 0.0)
    proxy.accept()
    eventually(lambda: a.consumer.health.ok, what="a member")
    a.owns(0)
    health = eventually(lambda: (h := a.consumer.health).waits_for == "" and h, what="nothing to wait for")
    assert (health.ok, health.state) == (True, "member")
    assert 0 < health.lease_remaining_seconds <= FAST.lease_seconds
    b = crew.start("b")
    eventually(lambda: b.consumer.health.ok, what="b is a member")
    assert "assign it shards" in b.consumer.health.waits_for
    a.recorder.hold()
    bench.fill(0)
    eventually(lambda: a.recorder.ids(), what="the entry in the handler")
    eventually(lambda: a.consumer.health.progress_age_seconds > 0.2, what="no progress")
    a.consumer.request_stop()
    health = eventually(lambda: (h := a.consumer.health).state == "leaving" and h, what="leaving")
    assert not health.ok
    eventually(lambda: a.consumer.health.waits_for == "handlers of shards [0] to finish", what="the handler")
    a.recorder.release()
    assert a.consumer.wait(10)
    health = a.consumer.health
    assert (health.ok, health.lease_remaining_seconds) == (False, 0.0)
    b.owns(0)
    bench.delete(force=True)
    eventually(lambda: not b.consumer.health.ok, what="that the group is gone")
    assert "no such group" in b.consumer.health.waits_for or "GROUP_NOT_FOUND" in b.consumer.health.waits_for
