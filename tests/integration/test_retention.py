"""How long entries are kept: no group ever loses one that it has not finished."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from redis_stream_coord import Outgoing
from tests.integration.kit import FAST, Bench, Crew, Recorder, two_servers
from tests.waiting import eventually

pytestmark = two_servers

ROUND_SECONDS = 0.1


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redis_stream_coord.engine.RETENTION_SECONDS", ROUND_SECONDS)


@pytest.fixture
def _small_nodes(bench: Bench) -> Iterator[None]:
    """Nodes of a stream that hold few entries: only whole ones are trimmed to a number."""
    before = bench.redis.config_get("stream-node-max-entries")
    bench.redis.config_set("stream-node-max-entries", 5)
    yield
    bench.redis.config_set("stream-node-max-entries", before["stream-node-max-entries"])


def publish_many(bench: Bench, count: int) -> list[str]:
    many = [Outgoing(fields={"n": str(n)}, key=bench.key_of(0)) for n in range(count)]
    return [receipt.id for receipt in bench.producer.publish_many(many)]


def left(bench: Bench) -> list[str]:
    return [entry_id for entry_id, _ in bench.redis.xrange(bench.stream_key(0))]


def trims(bench: Bench) -> int:
    return int(bench.redis.info("commandstats").get("cmdstat_xtrim", {"calls": 0})["calls"])


def rounds_pass(bench: Bench, count: int = 3) -> None:
    """Wait until an owner has read how long to keep entries so many times."""

    def looks() -> int:
        return int(bench.redis.info("commandstats")["cmdstat_evalsha"]["calls"])

    before = looks()
    eventually(lambda: looks() >= before + 4 * count, what="rounds of trimming")


def retain(bench: Bench, retention: str | int) -> None:
    bench.admin.retain(bench.stream, retention=retention, reason="a test")  # type: ignore[arg-type]


def test_everything_is_kept_unless_told_otherwise(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    a = crew.start("a")
    ids = publish_many(bench, 20)
    a.finishes(*ids)
    rounds_pass(bench)
    assert left(bench) == ids
    assert trims(bench) == 0 or left(bench) == ids


def test_consumed_entries_go_but_not_what_is_in_a_handler(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    retain(bench, "consumed")
    a = crew.start("a")
    ids = publish_many(bench, 20)
    a.recorder.hold(lambda message: message.id == ids[12])
    eventually(lambda: a.recorder.ids()[-1:] == ids[12:13], what="one in its handler")
    eventually(lambda: left(bench) in (ids[11:], ids[12:]), what="the finished ones gone")
    rounds_pass(bench)
    assert left(bench) in (ids[11:], ids[12:])
    a.recorder.release()
    a.finishes(*ids)
    eventually(lambda: len(left(bench)) <= 1, what="all gone but the last")
    assert a.recorder.ids() == ids
    retain(bench, "all")
    rounds_pass(bench)
    more = publish_many(bench, 5)
    a.finishes(*more)
    rounds_pass(bench)
    assert left(bench)[-5:] == more


def test_slower_group_decides(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    bench.admin.create(bench.stream, group="other", reason="a test", timings=FAST, start="oldest")
    retain(bench, "consumed")
    a = crew.start("a")
    ids = publish_many(bench, 20)
    a.finishes(*ids)
    rounds_pass(bench)
    # The other one has received nothing yet.
    assert left(bench) == ids
    recorder = Recorder()
    recorder.hold(lambda message: message.id == ids[7])
    other = crew.start("b", recorder, group="other")
    eventually(lambda: recorder.ids() == ids[:8], what="one in the other's handler")
    eventually(lambda: left(bench) in (ids[6:], ids[7:]), what="what both have finished gone")
    rounds_pass(bench)
    assert left(bench) in (ids[6:], ids[7:])
    recorder.release()
    other.finishes(*ids)
    assert recorder.ids() == ids
    eventually(lambda: len(left(bench)) <= 1, what="all gone but the last")


def test_group_that_nobody_registered_counts_too(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    retain(bench, "consumed")
    bench.redis.xgroup_create(bench.stream_key(0), "by-hand", "0")
    a = crew.start("a")
    ids = publish_many(bench, 10)
    a.finishes(*ids)
    rounds_pass(bench)
    assert left(bench) == ids
    bench.redis.xgroup_destroy(bench.stream_key(0), "by-hand")
    eventually(lambda: len(left(bench)) <= 1, what="all gone but the last")


def test_registered_group_that_is_missing_blocks_trimming(
    bench: Bench, crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    bench.create(shards=1)
    bench.admin.create(bench.stream, group="other", reason="a test", timings=FAST, start="oldest")
    bench.redis.xgroup_destroy(bench.stream_key(0), "other")
    retain(bench, "consumed")
    a = crew.start("a")
    ids = publish_many(bench, 10)
    a.finishes(*ids)
    eventually(
        lambda: any("group other is missing there" in one.getMessage() for one in list(caplog.records)),
        what="a record that names the group",
    )
    rounds_pass(bench)
    assert left(bench) == ids
    # Its own members bring it back, and then nothing is missing to it.
    other = crew.start("b", group="other")
    other.finishes(*ids)
    eventually(lambda: len(left(bench)) <= 1, what="all gone but the last")
    assert [one.levelno for one in caplog.records if one.levelno > logging.WARNING] == []


@pytest.mark.usefixtures("_small_nodes")
def test_number_keeps_at_least_so_many_and_everything_unread(bench: Bench, crew: Crew) -> None:
    bench.create(shards=1)
    retain(bench, 10)
    a = crew.prepare("a", prefetch=5)
    ids = publish_many(bench, 60)
    a.recorder.hold(lambda message: message.id == ids[20])
    a.consumer.start()
    eventually(lambda: a.recorder.ids()[-1:] == ids[20:21], what="one in its handler")
    eventually(lambda: len(left(bench)) < 60, what="trimmed")
    rounds_pass(bench)
    assert set(ids[20:]) <= set(left(bench))
    a.recorder.release()
    a.finishes(*ids)
    eventually(lambda: len(left(bench)) < 20, what="trimmed roughly to the number")
    rounds_pass(bench)
    assert 10 <= len(left(bench)) < 20
    assert left(bench) == ids[-len(left(bench)) :]
    assert a.recorder.ids() == ids


def test_only_the_owner_trims(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2)
    retain(bench, "consumed")
    a, b = crew.start("a"), crew.start("b")
    bench.settled(["a", "b"])
    ids = [*publish_many(bench, 5), *bench.fill(1, 5)]
    eventually(lambda: set(a.recorder.done()) | set(b.recorder.done()) == set(ids), what="everything")
    eventually(lambda: bench.redis.xlen(bench.stream_key(0)) <= 1, what="shard 0 trimmed")
    eventually(lambda: bench.redis.xlen(bench.stream_key(1)) <= 1, what="shard 1 trimmed")
