"""The same on a Redis Cluster: the shards lie on all nodes, and no command or script names two slots."""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redis_stream_coord import (
    AsyncAdmin,
    AsyncMonitor,
    AsyncProducer,
    ConfigError,
    Message,
    Outgoing,
    Producer,
    Timings,
)
from redis_stream_coord.keys import StreamKeys
from tests.integration.kit import GROUP, SLACK_SECONDS, Bench, Crew, Recorder
from tests.servers import ClusterServers
from tests.waiting import eventually

SHARDS = 12
TIMINGS = Timings(heartbeat_seconds=0.2, lease_seconds=1.5, rebalance_seconds=3.0)


@pytest.fixture
def bench(cluster: ClusterServers, stream: str) -> Iterator[Bench]:
    """A group with a shard on every node."""
    bench = Bench(cluster.url, cluster.client(), stream)
    bench.create(shards=SHARDS, timings=TIMINGS)
    yield bench
    bench.close()


@pytest.fixture
def crew(bench: Bench) -> Iterator[Crew]:
    crew = Crew(bench)
    yield crew
    crew.stop()


def nodes_of_shards(bench: Bench) -> set[int]:
    client: Any = bench.redis
    return {client.get_node_from_key(bench.stream_key(shard)).port for shard in range(SHARDS)}


def owned_by_all(crew: Crew) -> None:
    eventually(
        lambda: frozenset().union(*(w.consumer.assignment for w in crew.members)) == frozenset(range(SHARDS)),
        what="every shard claimed",
    )


def test_url_of_a_single_server_is_said_to_be_wrong(bench: Bench, cluster: ClusterServers) -> None:
    def ask() -> None:
        for node in cluster.nodes:  # at least one of them has not the slot
            with Producer(bench.stream, redis=f"redis://127.0.0.1:{node.port}") as producer:
                producer.publish({"n": "1"}, key="k")

    with pytest.raises(ConfigError, match="which is a node of a Cluster") as caught:
        ask()
    assert "redis+cluster://" in caught.value.hint


def test_members_share_shards_of_all_nodes_and_keep_the_order_of_each_key(
    bench: Bench, crew: Crew, cluster: ClusterServers, caplog: pytest.LogCaptureFixture
) -> None:
    assert nodes_of_shards(bench) == {node.port for node in cluster.nodes}
    handled: dict[bytes, list[int]] = defaultdict(list)

    def note(message: Message) -> None:
        assert message.key is not None
        handled[message.key].append(int(message.text("n")))

    recorder = Recorder(note)
    first = crew.start("a", recorder)
    first.owns(*range(SHARDS))
    entries = [Outgoing(fields={"n": str(n)}, key=f"key-{n % 50}") for n in range(1000)]
    receipts = bench.producer.publish_many(entries[:500])
    # In the middle of it one joins, and in the middle of the rest one leaves.
    second = crew.start("b", recorder)
    receipts = [*receipts, *bench.producer.publish_many(entries[500:])]
    view = bench.settled(["a", "b"])
    assert {len(member.assigned) for member in view.members.values()} == {SHARDS // 2}
    first.consumer.stop()
    second.owns(*range(SHARDS))
    eventually(lambda: sum(map(len, handled.values())) >= 1000, within_seconds=20, what="all entries")
    assert len(receipts) == 1000
    assert {receipt.shard for receipt in receipts} == set(range(SHARDS))
    for key in range(50):
        assert handled[f"key-{key}".encode()] == list(range(key, 1000, 50))
    eventually(lambda: not any(bench.pending(shard) for shard in range(SHARDS)), what="all acknowledgements")
    assert "CROSSSLOT" not in caplog.text
    assert [record.getMessage() for record in caplog.records if record.levelname not in ("DEBUG", "INFO")] == []


def test_shards_of_a_killed_member_are_taken_over(bench: Bench, crew: Crew, tmp_path: Path) -> None:
    survivor = crew.start("survivor")
    child = crew.child("victim", tmp_path)
    victims = bench.settled(["survivor", "victim"]).members["victim"].assigned
    child.notes_eventually("assigned")
    child.hold()
    shard = max(victims)
    ids = bench.fill(shard, 3)
    child.notes_eventually("began", id=ids[0])
    killed = child.signal(signal.SIGKILL)
    survivor.finishes(*ids)
    assert survivor.recorder.ids(shard) == ids
    took = survivor.recorder.began[-1].began - killed
    assert took <= TIMINGS.lease_seconds + 2 * TIMINGS.heartbeat_seconds + 2 * SLACK_SECONDS
    assert bench.settled(["survivor"]).violations() == []
    eventually(lambda: not bench.pending(shard), what="all acknowledgements")
    assert bench.consumers(shard) == {"survivor"}


def test_idle_shards_notice_an_entry_at_once(bench: Bench, crew: Crew) -> None:
    a = crew.start("a")
    owned_by_all(crew)
    for shard in range(SHARDS):
        (entry_id,) = bench.fill(shard)
        a.finishes(entry_id, within_seconds=2.0)


def test_entries_of_others_duplicates_and_missing_streams(bench: Bench, crew: Crew) -> None:
    a = crew.start("a")
    first = bench.producer.publish({}, key="k", event_id="e")
    assert bench.producer.publish({}, key="k", event_id="e").id == first.id
    plain = bench.redis.xadd(bench.stream_key(3), {"n": "1"})
    a.finishes(first.id, plain)

    async def main() -> None:
        async with AsyncProducer(bench.stream, redis=bench.url) as producer:
            entries = [Outgoing(fields={}, key=f"k{n}", event_id=f"many-{n}") for n in range(100)]
            once = await producer.publish_many(entries)
            again = await producer.publish_many(entries)
            assert [receipt.id for receipt in once] == [receipt.id for receipt in again]
            assert all(receipt.duplicate for receipt in again)

    asyncio.run(main())
    eventually(lambda: len(a.recorder.done()) == 102, what="all entries")


def test_group_is_deleted_on_every_node(bench: Bench, crew: Crew) -> None:
    a = crew.start("a")
    a.owns(*range(SHARDS))
    a.consumer.stop()
    bench.delete()
    for shard in range(SHARDS):
        assert bench.redis.xinfo_groups(bench.stream_key(shard)) == []
        assert bench.fence(shard)["member"] == "-"
    again = bench.create(shards=SHARDS, timings=TIMINGS)
    assert again.incarnation > max(int(bench.fence(shard)["incarnation"]) for shard in range(SHARDS))
    b = crew.start("b")
    b.owns(*range(SHARDS))
    b.finishes(bench.producer.publish({}, key="k").id)


def test_shards_that_went_are_trimmed_on_every_node(bench: Bench, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redis_stream_coord.duties.REMOVED_SECONDS", 0.2)
    a = crew.start("a")
    owned_by_all(crew)
    entries = [Outgoing(fields={"n": str(n)}, key=f"key-{n % 50}") for n in range(600)]
    a.finishes(*(receipt.id for receipt in bench.producer.publish_many(entries)))
    bench.admin.scale(bench.stream, shards=3, reason="a test")

    async def look(trim: bool) -> list[int]:
        async with AsyncAdmin(bench.url, requested_by="tests") as admin, AsyncMonitor(bench.url) as monitor:
            if trim:
                assert (await admin.trim(bench.stream, reason="a test")).waits == ()
            return [one.entries for one in await monitor.removed(bench.stream)]

    assert len(asyncio.run(look(trim=False))) == SHARDS - 3
    assert sum(asyncio.run(look(trim=False))) > SHARDS
    bench.admin.retain(bench.stream, retention="consumed", reason="a test")
    eventually(lambda: max(asyncio.run(look(trim=False))) == 1, what="the duty has trimmed them")
    assert set(asyncio.run(look(trim=True))) == {1}


def test_records_of_all_nodes_are_verified_backed_up_repaired_and_restored(bench: Bench, crew: Crew) -> None:
    """Looking for them asks every node; each mutation stays in one slot."""
    crew.start("a")
    owned_by_all(crew)
    assert bench.admin.verify() == []
    backup = bench.admin.backup()
    assert set(backup.streams) == {bench.stream}
    bench.redis.delete("redis-stream:coord:groups")
    assert {one.kind for one in bench.admin.verify()} == {"index"}
    assert len(bench.admin.repair("index", reason="a test")) == 1
    bench.redis.delete(StreamKeys(bench.stream).shard(5).route)
    assert bench.admin.repair("routes", stream=bench.stream, reason="a test") == ["shard 5 made anew"]
    bench.redis.delete(bench.keys.metadata)
    bench.admin.restore(backup, bench.stream, group=GROUP, reason="a test")
    bench.admin.freeze(bench.stream, group=GROUP, reason="a test")
    bench.admin.recreate(bench.stream, group=GROUP, reason="a test", timings=TIMINGS)
    assert bench.admin.verify() == []

    async def verify() -> None:
        async with AsyncAdmin(bench.url, requested_by="tests") as admin:
            assert await admin.verify() == []
            assert set((await admin.backup()).streams) == {bench.stream}

    asyncio.run(verify())
    bench.delete(force=True)
