"""Backup, restore, recreate, repair and verify on real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from redis_stream_coord import (
    AsyncAdmin,
    Backup,
    ConfigError,
    CoordError,
    CorruptMetadataError,
    Discrepancy,
    MetadataRegressionError,
    NotFoundError,
    UnsupportedSchemaError,
)
from redis_stream_coord.keys import GroupKeys, StreamKeys
from tests.integration.kit import GROUP, STEADY, Bench, Crew, Peer, two_servers
from tests.waiting import eventually


def lost(bench: Bench) -> None:
    bench.redis.delete(bench.keys.metadata)


def restore(bench: Bench, backup: Backup, **options: str) -> None:
    bench.admin.restore(backup, bench.stream, group=GROUP, reason="OPS-1", **options)


@two_servers
def test_a_lost_record_is_restored_and_its_members_go_on(bench: Bench, crew: Crew, tmp_path: Path) -> None:
    bench.create(shards=4, timings=STEADY)
    a, b = crew.start("a"), crew.start("b")
    bench.settled(["a", "b"])
    bench.admin.backup(bench.stream).save(tmp_path / "orders.json")
    lost(bench)
    backup = Backup.load(tmp_path / "orders.json")
    restore(bench, backup, request_id="r1")
    restore(bench, backup, request_id="r1")
    bench.settled(["a", "b"])
    for shard in range(4):
        ids = bench.fill(shard, 3)
        eventually(lambda ids=ids: set(ids) <= {*a.recorder.done(), *b.recorder.done()}, what="all are handled")
    assert bench.admin.verify(bench.stream, group=GROUP) == []
    assert [entry["action"] for _, entry in bench.redis.xrange(bench.keys.audit)] == ["create", "restore"]


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_without_witnesses_any_backup_that_is_not_older_is_taken(bench: Bench, damage: str) -> None:
    bench.create(shards=2)
    before = bench.view()
    backup = bench.admin.backup()
    if damage == "missing":
        lost(bench)
    else:
        bench.redis.hset(bench.keys.metadata, "shard:0", "garbage")
    restore(bench, backup)
    assert (bench.view().incarnation, bench.view().shards) == (before.incarnation, before.shards)


def _joined(bench: Bench) -> None:
    Peer(bench, "late").beat()


def _claimed(bench: Bench) -> None:
    bench.redis.hset(bench.keys.fence(1), mapping={"incarnation": str(bench.view().incarnation), "token": "9" * 15})
    lost(bench)


def _later_lifecycle(bench: Bench) -> None:
    bench.redis.hset(bench.keys.fence(1), mapping={"incarnation": str(bench.view().incarnation + 1), "token": "0"})
    lost(bench)


def _seen_by_a_member(bench: Bench) -> None:
    peer = Peer(bench, "late")
    record = bench.redis.hgetall(bench.keys.metadata)
    peer.beat()
    bench.redis.delete(bench.keys.metadata)
    bench.redis.hset(bench.keys.metadata, mapping=record)
    bench.redis.xtrim(bench.keys.events, maxlen=0)
    with pytest.raises(CoordError):
        peer.beat()
    lost(bench)


def _deleted(bench: Bench) -> None:
    bench.delete()


@pytest.mark.parametrize(
    ("happens", "named"),
    [
        (_joined, "the stored record has incarnation"),
        (lambda bench: (_joined(bench), lost(bench)), "event .* member_joined"),
        (_claimed, "fence of shard 1"),
        (_later_lifecycle, "fence of shard 1"),
        (_seen_by_a_member, "member late has seen version"),
        (_deleted, "fence of shard|was deleted"),
    ],
)
def test_a_backup_that_a_witness_is_ahead_of_is_refused(
    bench: Bench, happens: Callable[[Bench], None], named: str
) -> None:
    bench.create(shards=2, timings=STEADY)
    backup = bench.admin.backup(bench.stream, group=GROUP)
    happens(bench)
    before = bench.redis.dump(bench.keys.metadata)
    with pytest.raises(MetadataRegressionError, match=named):
        restore(bench, backup)
    assert bench.redis.dump(bench.keys.metadata) == before
    entry = bench.redis.xrevrange(bench.keys.audit, count=1)[0][1]
    assert (entry["action"], entry["word"]) == ("restore", "BACKUP_BEHIND")


def test_a_stream_record_is_restored_unless_a_route_is_ahead(bench: Bench) -> None:
    bench.create(shards=2)
    backup = bench.admin.backup(bench.stream)
    bench.redis.delete(bench.record)
    bench.admin.restore(backup, bench.stream, reason="OPS-1")
    bench.fill(0, 1)
    assert bench.admin.verify(bench.stream) == []
    bench.redis.hset(StreamKeys(bench.stream).shard(1).route, "epoch", "7")
    bench.redis.delete(bench.record)
    with pytest.raises(MetadataRegressionError, match="route of shard 1"):
        bench.admin.restore(backup, bench.stream, reason="OPS-1")


def test_a_backup_that_was_changed_is_noticed(bench: Bench, tmp_path: Path) -> None:
    bench.create(shards=1)
    path = tmp_path / "backup.json"
    bench.admin.backup().save(path)
    assert Backup.load(path) == Backup.loads(path.read_text())
    path.write_text(path.read_text().replace('"epoch": "1"', '"epoch": "2"'))
    with pytest.raises(CorruptMetadataError, match="checksum"):
        Backup.load(path)
    path.write_text(path.read_text().replace('"version": 1\n', '"version": 2\n'))
    with pytest.raises(UnsupportedSchemaError):
        Backup.load(path)
    for text in ("", "{}", "[]", '{"format": "other"}'):
        with pytest.raises(CorruptMetadataError):
            Backup.loads(text)
    bench.redis.hset(bench.keys.metadata, "shard:0", "garbage")
    with pytest.raises(CorruptMetadataError):
        bench.admin.backup()
    with pytest.raises(NotFoundError):
        bench.admin.restore(Backup(0, {}), bench.stream, group=GROUP, reason="OPS-1")


@two_servers
def test_a_recreated_group_is_a_new_lifecycle_that_goes_on_where_the_old_one_was(bench: Bench, crew: Crew) -> None:
    first = bench.create(shards=2, timings=STEADY)
    a = crew.start("a")
    a.owns(0, 1)
    ids = bench.fill(0, 5)
    a.finishes(*ids)
    # What was finished and not acknowledged comes again by right.
    eventually(lambda: not bench.pending(0), what="all is acknowledged")
    bench.admin.freeze(bench.stream, group=GROUP, reason="OPS-1")
    bench.redis.hset(bench.keys.metadata, "shard:0", "garbage")
    view = bench.admin.recreate(bench.stream, group=GROUP, reason="OPS-1", timings=STEADY)
    assert view.incarnation > first.incarnation
    assert view.frozen_ms is None
    for shard in range(2):
        eventually(
            lambda shard=shard: bench.fence(shard)["incarnation"] == str(view.incarnation), what="it is claimed anew"
        )
    a.owns(0, 1)
    more = bench.fill(0, 5)
    a.finishes(*more)
    assert a.recorder.done(0) == [*ids, *more], "nothing twice, nothing lost"
    assert bench.admin.verify(bench.stream, group=GROUP) == []


# --- verify and repair ----------------------------------------------------------------------------------------------


def found(bench: Bench, **options: str) -> list[Discrepancy]:
    return list(bench.admin.verify(bench.stream, **options))


@pytest.mark.parametrize(
    ("key", "field", "value", "error", "section"),
    [
        ("metadata", None, None, "NotFoundError", "the-record-is-missing"),
        ("metadata", "shard:0", "garbage", "CorruptMetadataError", "the-record-is-damaged"),
        ("metadata", "schema", "2", "UnsupportedSchemaError", "the-record-is-of-a-newer-release"),
        ("fence", "token", "9" * 15, "MetadataRegressionError", "the-record-is-older-than-what-was-seen"),
        ("record", None, None, "NotFoundError", "the-record-is-missing"),
        ("record", "schema", "2", "UnsupportedSchemaError", "the-record-is-of-a-newer-release"),
        ("route", None, None, "RoutingUnavailableError", "a-route-is-missing"),
        ("route", "epoch", "9", "MetadataRegressionError", "the-record-is-older-than-what-was-seen"),
    ],
)
def test_what_is_missing_damaged_newer_or_rolled_back_is_named_with_its_page(
    bench: Bench, key: str, field: str | None, value: str | None, error: str, section: str
) -> None:
    bench.create(shards=1)
    assert found(bench) == []
    keys = {
        "metadata": bench.keys.metadata,
        "fence": bench.keys.fence(0),
        "record": bench.record,
        "route": StreamKeys(bench.stream).shard(0).route,
    }
    if field is None:
        bench.redis.delete(keys[key])
    elif key == "fence":
        bench.redis.hset(keys[key], mapping={"incarnation": str(bench.view().incarnation), "token": value})
    else:
        bench.redis.hset(keys[key], field, value)
    findings = [one for one in found(bench, group=GROUP) if one.error]
    assert {(one.error, one.section) for one in findings} == {(error, section)}
    page = (Path(__file__).parents[2] / "docs/guide/backup-and-repair.md").read_text("utf-8")
    assert f"## {section.replace('-', ' ')}" in page.lower()


def test_a_whole_redis_that_went_back_is_found_against_a_backup(bench: Bench) -> None:
    bench.create(shards=1)
    old = bench.record_of()
    Peer(bench, "a").beat()
    backup = bench.admin.backup()
    assert bench.admin.verify(against=backup) == []
    # As it was before, with the shards that were claimed by nobody yet.
    bench.redis.delete(bench.keys.metadata)
    bench.redis.hset(bench.keys.metadata, mapping=old)
    assert bench.admin.verify() == []
    (one,) = bench.admin.verify(against=backup)
    assert (one.kind, one.error) == ("witness", "MetadataRegressionError")
    assert "the record went backwards" in one.message


def test_index_routes_and_leases_are_rebuilt(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=STEADY)
    bench.admin.create(bench.stream, group="other", reason="a test")
    a = crew.start("a")
    a.owns(0, 1)
    bench.redis.srem("redis-stream:coord:groups", f"{bench.stream}:{GROUP}")
    bench.redis.sadd("redis-stream:coord:groups", f"{bench.stream}:ghost")
    assert {one.kind for one in bench.admin.verify()} == {"index"}
    done = bench.admin.repair("index", reason="OPS-1")
    assert done == [f"{bench.stream}:{GROUP} added", f"{bench.stream}:ghost removed"]
    assert bench.monitor.groups() == [(bench.stream, GROUP), (bench.stream, "other")]

    bench.redis.delete(StreamKeys(bench.stream).shard(1).route)
    assert bench.admin.repair("routes", stream=bench.stream, reason="OPS-2") == ["shard 1 made anew"]
    assert bench.admin.repair("routes", stream=bench.stream, reason="OPS-2") == []
    a.finishes(*bench.fill(1, 2))
    bench.redis.hset(StreamKeys(bench.stream).shard(1).route, "epoch", "9")
    with pytest.raises(MetadataRegressionError):
        bench.admin.repair("routes", stream=bench.stream, reason="OPS-2")

    bench.redis.zadd(bench.keys.leases, {"ghost": 1})
    assert bench.admin.repair("leases", stream=bench.stream, group=GROUP, reason="OPS-3")
    bench.heartbeats_pass("a", 2)
    assert bench.redis.zrange(bench.keys.leases, 0, -1) == ["a"]
    for wrong in ({"what": "routes"}, {"what": "leases", "stream": bench.stream}, {"what": "all"}):
        with pytest.raises(ConfigError):
            bench.admin.repair(**wrong, reason="OPS-4")  # type: ignore[arg-type]


def test_the_same_from_coroutines(bench: Bench) -> None:
    async def main() -> None:
        async with AsyncAdmin(bench.url, requested_by="tests") as admin:
            await admin.create(bench.stream, group=GROUP, shards=2, reason="a test")
            backup = await admin.backup()
            lost(bench)
            await admin.restore(backup, bench.stream, group=GROUP, reason="a test")
            bench.redis.delete(GroupKeys(bench.stream, GROUP).leases)
            assert await admin.repair("index", reason="a test") == []
            assert await admin.verify() == []
            await admin.freeze(bench.stream, group=GROUP, reason="a test")
            view = await admin.recreate(bench.stream, group=GROUP, reason="a test")
            assert view.frozen_ms is None

    asyncio.run(main())
