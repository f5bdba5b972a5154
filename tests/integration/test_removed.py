"""Shards that the layout has no more: their memory comes back, and nothing else changes."""

from __future__ import annotations

import pytest

from redis_stream_coord import (
    Admin,
    ConflictError,
    Consumer,
    CoordError,
    Monitor,
    Outgoing,
    PermissionDeniedError,
    Receipt,
    RedisSettings,
    acl,
    commands,
)
from redis_stream_coord.keys import StreamKeys
from tests.integration.kit import FAST, GROUP, STEADY, Bench, Crew, Recorder
from tests.integration.test_resharding import over, scale
from tests.waiting import eventually

OTHER = "shipping"
# Several nodes of each shard's stream: only whole ones give memory back.
COUNT = 2000


def publish(bench: Bench, count: int, *, first: int = 0) -> list[str]:
    """Publish numbered entries with event ids, of as many keys as there is room for; return their event ids."""
    names = [f"event-{n}" for n in range(first, first + count)]
    rest = "x" * 200
    many = [
        Outgoing(fields={"n": name, "rest": rest}, key=f"key-{n % 40}", event_id=name) for n, name in enumerate(names)
    ]
    bench.producer.publish_many(many)
    return names


def again(bench: Bench, count: int) -> list[Receipt]:
    """Publish some of the first `count` once more."""
    chosen = range(0, count, 37)
    return [bench.producer.publish({"n": "again"}, key=f"key-{n % 40}", event_id=f"event-{n}") for n in chosen]


def lengths(bench: Bench, shards: int) -> list[int]:
    return [int(bench.redis.xlen(bench.stream_key(shard))) for shard in range(shards)]


def last_ids(bench: Bench, shards: int) -> list[tuple[int, ...]]:
    infos = [bench.redis.xinfo_stream(bench.stream_key(shard)) for shard in range(shards)]
    return [tuple(map(int, info["last-generated-id"].split("-"))) for info in infos]


def finish(bench: Bench, shards: int) -> None:
    """Let both groups have finished everything."""
    for shard in range(shards):
        for group in (GROUP, OTHER):
            bench.redis.xgroup_setid(bench.stream_key(shard), group, "$")


@pytest.fixture
def removed(bench: Bench) -> Bench:
    """A stream that was scaled down from 4 shards to 1. Two groups have finished what is there; nobody is alive."""
    bench.create(shards=4)
    bench.admin.create(bench.stream, group=OTHER, reason="a test", timings=FAST)
    publish(bench, COUNT)
    finish(bench, 4)
    assert scale(bench, 1).state == "COMPLETED"
    return bench


# --- on every server ------------------------------------------------------------------------------------------------


def test_an_operator_sees_what_lies_there_and_trims_it(removed: Bench) -> None:
    bench, keys = removed, StreamKeys(removed.stream)
    before, ids = lengths(bench, 4), last_ids(bench, 4)
    found = bench.monitor.removed(bench.stream)
    assert [(one.shard, one.entries, one.event_ids, one.route) for one in found] == [
        (shard, before[shard], before[shard], "closed") for shard in (1, 2, 3)
    ]
    assert all(one.memory_bytes is not None and one.memory_bytes > 5000 and not one.waits for one in found)
    # Somebody's own consumer group keeps what it has yet to read, and is named.
    bench.redis.xgroup_create(bench.stream_key(2), "by-hand", "0")
    trimmed = bench.admin.trim(bench.stream, reason="a test", request_id="OPS-1")
    assert (trimmed.entries, trimmed.waits) == (before[1] + before[3] - 2, ())
    assert lengths(bench, 4) == [before[0], 1, before[2], 1]
    assert [waiting.group for one in bench.monitor.removed(bench.stream) for waiting in one.waits] == ["by-hand"]
    bench.redis.xgroup_destroy(bench.stream_key(2), "by-hand")
    assert bench.admin.trim(bench.stream, reason="a test").entries == before[2] - 1
    # The same request again goes on where it was, and is one entry in the audit log.
    assert bench.admin.trim(bench.stream, reason="a test", request_id="OPS-1").entries == 0
    assert last_ids(bench, 4) == ids
    after = bench.monitor.removed(bench.stream)
    for then, now in zip(found, after, strict=True):
        assert (then.memory_bytes or 0) > 1.5 * (now.memory_bytes or 0)
        assert now.event_ids == then.event_ids
    entries = [one for one in bench.monitor.audit(bench.stream) if one.action == "trim"]
    assert [one.outcome for one in entries] == ["accepted"] * 2
    assert (entries[-1].request_id, entries[-1].detail) == ("OPS-1", f"{sum(before[1:])} entries on 3 shards")
    # The shards come back: ids go on, and what was published once is known.
    late = [commands.trim_removed(keys, shard, bench.runner.run(commands.resharding(keys)), keep=0) for shard in (1, 2)]
    scale(bench, 4)
    assert all(receipt.duplicate for receipt in again(bench, COUNT))
    publish(bench, 400, first=COUNT)
    assert all(now > then for now, then in zip(last_ids(bench, 4), ids, strict=True))
    finish(bench, 4)
    back = lengths(bench, 4)
    for command in late:
        with pytest.raises(CoordError) as caught:
            bench.runner.run(command)
        assert caught.value.word == "AHEAD"
    assert lengths(bench, 4) == back
    assert bench.monitor.removed(bench.stream) == []


@pytest.mark.parametrize("server", ["redis62", "valkey9"], indirect=True)  # without and with selectors
def test_each_role_may_do_its_part(removed: Bench) -> None:
    bench = removed
    for role in acl.ROLES:
        selectors = "lag" in bench.redis.xinfo_groups(bench.stream_key(0))[0]  # Redis 7 and later have both
        rules = acl.rules(role, stream=bench.stream, selectors=selectors)
        bench.redis.execute_command("ACL", "SETUSER", role.lower(), "reset", "on", ">change-me", *rules)
    bench.redis.execute_command("ACL", "LOG", "RESET")

    def settings(role: str) -> RedisSettings:
        return RedisSettings(bench.url, username=role.lower(), password="change-me")

    for role in ("READ", "WRITE"):
        with Monitor(settings(role)) as monitor:
            assert len(monitor.removed(bench.stream)) == 3
    for role in ("READ", "MEMBER", "PRODUCER"):
        with Admin(settings(role), requested_by="tests") as admin, pytest.raises(PermissionDeniedError):
            admin.trim(bench.stream, reason="a test")
    bench.redis.execute_command("ACL", "LOG", "RESET")
    bench.admin.retain(bench.stream, retention=1000, reason="a test")
    with Consumer(bench.stream, group=GROUP, redis=settings("MEMBER"), handler=lambda message: None) as consumer:
        eventually(lambda: consumer.assignment, what="it owns the shard that is left")
        bench.heartbeats_pass(consumer.member)
    with Admin(settings("WRITE"), requested_by="tests") as admin:
        assert admin.trim(bench.stream, reason="a test").entries > 0
    log = [entry["object"] for entry in bench.redis.acl_log()]
    assert [one for one in log if one not in ("client", "client|setinfo")] == []


# --- under live consumers -------------------------------------------------------------------------------------------

redis7 = pytest.mark.parametrize("server", ["redis7"], indirect=True)


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redis_stream_coord.duties.REMOVED_SECONDS", 0.2)
    monkeypatch.setattr("redis_stream_coord.engine.RETENTION_SECONDS", 0.2)


class Seen(Recorder):
    """Notes names as well."""

    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []
        super().__init__(lambda message: self.names.append((str(message.key, "ascii"), message.text("n"))))  # type: ignore[arg-type]

    def in_order(self, published: list[str]) -> None:
        """Each was handled once, those of a key in order."""
        assert sorted(name for _, name in self.names) == sorted(published)
        by_key: dict[str, list[int]] = {}
        for key, name in self.names:
            by_key.setdefault(key, []).append(int(name.partition("-")[2]))
        assert all(numbers == sorted(numbers) for numbers in by_key.values())


@redis7
@pytest.mark.usefixtures("_often")
def test_memory_comes_back_when_the_slower_group_is_done_and_the_shards_work_on_when_they_return(
    bench: Bench, crew: Crew
) -> None:
    bench.create(shards=4, timings=STEADY, retention="consumed")
    bench.admin.create(bench.stream, group=OTHER, reason="a test", timings=STEADY)
    quick, slow = Seen(), Seen()
    crew.start("a", quick)
    slow.hold(lambda message: message.shard > 0 and len(slow.names) >= 40)
    crew.start("b", slow, group=OTHER)
    names = publish(bench, 400)
    eventually(lambda: len(quick.names) == 400, what="the quick group is done")
    begun = scale(bench, 1, wait=False)
    eventually(lambda: bench.monitor.resharding(bench.stream).state == "DRAINING", what="it waits for the slow group")  # type: ignore[union-attr]
    publish(bench, 100, first=400)
    bench.heartbeats_pass("a", 6)
    # Everything that the slow group has not handled is there.
    assert len(slow.names) < 300
    there = {
        fields["n"]
        for shard in range(4)
        for _, fields in bench.redis.xrange(bench.stream_key(shard))
        if fields["n"] in names
    }
    assert set(names) - {name for _, name in list(slow.names)} <= there
    with pytest.raises(ConflictError, match="DRAINING"):
        bench.admin.trim(bench.stream, reason="a test")
    ids = last_ids(bench, 4)
    slow.release()
    assert over(bench).id == begun.id
    eventually(lambda: sum(lengths(bench, 4)[1:]) <= 3, what="the removed shards are trimmed")
    assert last_ids(bench, 4)[1:] == ids[1:]
    # They come back.
    scale(bench, 4, wait=False)
    assert over(bench).state == "COMPLETED"
    assert all(receipt.duplicate for receipt in again(bench, 400))
    publish(bench, 300, first=500)
    everything = [f"event-{n}" for n in range(800)]
    for one in (quick, slow):
        eventually(lambda one=one: len(one.names) >= 800, what="all are handled")
        one.in_order(everything)
    assert all(now > then for now, then in zip(last_ids(bench, 4)[1:], ids[1:], strict=True))


@redis7
@pytest.mark.usefixtures("_often")
def test_a_number_stays_on_removed_shards_too_and_without_a_retention_all(bench: Bench, crew: Crew) -> None:
    before = bench.redis.config_get("stream-node-max-entries")
    bench.redis.config_set("stream-node-max-entries", 5)
    try:
        bench.create(shards=3, timings=STEADY)
        a = crew.start("a", Seen())
        publish(bench, 300)
        eventually(lambda: len(a.recorder.ids()) == 300, what="all are handled")
        scale(bench, 1)
        whole = lengths(bench, 3)
        bench.heartbeats_pass("a", 4)
        assert lengths(bench, 3) == whole
        bench.admin.retain(bench.stream, retention=20, reason="a test")
        eventually(lambda: max(lengths(bench, 3)) < 30, what="trimmed roughly to the number")
        bench.heartbeats_pass("a", 3)
        assert min(lengths(bench, 3)) >= 20
    finally:
        bench.redis.config_set("stream-node-max-entries", before["stream-node-max-entries"])
