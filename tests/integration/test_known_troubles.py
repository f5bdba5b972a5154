"""What has gone wrong elsewhere for people who run this job, where no other file has its test."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from redis_stream_coord import Consumer, RedisSettings
from redis_stream_coord.commands import ack, claim, read
from redis_stream_coord.runner import AsyncRunner, SyncRunner
from redis_stream_coord.tasks import end
from redis_stream_coord.waiting import Waiter
from redis_stream_coord.worker import Worker
from tests.integration.kit import FAST, GROUP, SLACK_SECONDS, SLOW, STEADY, Bench, Crew, Peer
from tests.proxy import FrameSplitter
from tests.servers import SentinelServers
from tests.waiting import eventually

redis7 = pytest.mark.parametrize("server", ["redis7"], indirect=True)


@redis7
def test_slow_owner_that_is_alive_loses_nothing(bench: Bench, crew: Crew) -> None:
    """Elsewhere an entry is taken from its owner when it has been idle for so long."""
    bench.create(shards=2, timings=FAST)
    a = crew.start("a")
    b = crew.start("b")
    bench.settled(["a", "b"])
    eventually(lambda: a.consumer.assignment | b.consumer.assignment == {0, 1}, what="claims")
    (shard,) = a.consumer.assignment
    a.recorder.hold(lambda message: message.shard == shard)
    ids = bench.fill(shard, 3)
    eventually(lambda: a.recorder.ids(shard) == ids[:1], what="the entry in its handler")
    token = a.recorder.began[-1].token
    began = time.monotonic()
    while time.monotonic() - began < 2 * FAST.lease_seconds:
        bench.heartbeats_pass("a")
        assert bench.pending(shard).keys() == set(ids)
    a.recorder.release()
    a.finishes(*ids)
    assert a.recorder.ids(shard) == ids
    assert b.recorder.ids(shard) == []
    assert {one.token for one in a.recorder.began if one.shard == shard} == {token}


@redis7
def test_lease_is_not_renewed_for_a_worker_that_is_dead(
    bench: Bench, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in the library must not leave a consumer that looks alive."""
    bench.create(shards=2, timings=STEADY)
    original = Worker._read

    async def broken(worker: Worker) -> bool:
        if worker.fence.member == "a" and worker.fence.shard == 0:
            raise ZeroDivisionError("a mistake")
        return await original(worker)

    monkeypatch.setattr(Worker, "_read", broken)
    a = crew.start("a")
    with pytest.raises(ZeroDivisionError):
        a.consumer.wait(20)
    assert bench.view().members == {}
    b = crew.start("b")
    b.owns(0, 1)
    b.finishes(*bench.fill(0), *bench.fill(1))


def _steps(bench: Bench, a: Peer, b: Peer) -> dict[str, Callable[[], Any]]:
    def drained() -> None:
        a.beat(revoked=[a.held(shard) for shard in a.revoking], owned=[a.held(shard) for shard in a.assigned])

    def claimed() -> None:
        for shard in b.assigned:
            bench.runner.run(claim(bench.keys, b.fence(shard)))

    def received() -> None:
        for shard in b.assigned:
            bench.runner.run(read(bench.keys, b.fence(shard), after="0-0", count=10))

    return {
        "b joined": b.beat,
        "a heard of the revoke": a.beat,
        "a reported the drain": drained,
        "b was granted": b.beat,
        "b claimed": claimed,
        "b read": received,
    }


@redis7
@pytest.mark.parametrize("last", range(6))
def test_crash_at_any_step_of_a_handoff_leaves_no_shard_unserved(bench: Bench, crew: Crew, last: int) -> None:
    bench.create(shards=2, timings=FAST)
    a, b = Peer(bench, "a"), Peer(bench, "b")
    a.beat()
    ids = {shard: bench.fill(shard, 3) for shard in range(2)}
    for shard in a.assigned:
        bench.runner.run(claim(bench.keys, a.fence(shard)))
        bench.runner.run(read(bench.keys, a.fence(shard), after="0-0", count=2))
    for step in list(_steps(bench, a, b).values())[: last + 1]:
        step()
    # Both are dead from here on.
    began = time.monotonic()
    c = crew.start("c")
    bound = FAST.lease_seconds + FAST.rebalance_seconds + 2 * FAST.heartbeat_seconds + SLACK_SECONDS
    eventually(lambda: len(c.recorder.done()) == 6, within_seconds=bound, what="everything handled")
    assert time.monotonic() - began <= bound
    for shard, of_shard in ids.items():
        assert c.recorder.ids(shard) == of_shard
    c.owns(0, 1)


@redis7
def test_crash_repeats_no_more_than_the_last_acknowledgements(bench: Bench, crew: Crew, tmp_path: Path) -> None:
    bench.create(shards=1, timings=FAST)
    child = crew.child("child", tmp_path, handler_seconds=0.005)
    child.notes_eventually("assigned")
    ids = bench.fill(0, 400)
    child.notes_eventually("finished", 100)
    child.signal(signal.SIGKILL)
    child.process.wait()
    finished = [note["id"] for note in child.notes("finished")]
    b = crew.start("b")
    b.finishes(ids[-1], within_seconds=20)
    again = set(finished) & set(b.recorder.ids())
    assert set(finished) | set(b.recorder.ids()) == set(ids)
    # What was finished within ten milliseconds and the call that was on its way: two or three, and what a busy machine
    # adds to that; far from all that had been read.
    assert len(again) <= 25, len(again)


def test_reconnecting_is_not_a_flood(stream: str) -> None:
    """A server that closes each connection at once, as one whose clients are at their limit."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.1)
    over, count = threading.Event(), 0

    def refuse() -> None:
        nonlocal count
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            count += 1
            connection.close()

    thread = threading.Thread(target=refuse)
    thread.start()
    redis = RedisSettings(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=0.5)
    consumers = [
        Consumer(stream, group=GROUP, redis=redis, member=f"m{n}", handler=lambda _: None, shutdown_seconds=0.5)
        for n in range(3)
    ]
    try:
        for consumer in consumers:
            consumer.start()
        time.sleep(3.0)
        seen = count
        assert all("no answer from Redis" in consumer.health.waits_for for consumer in consumers)
    finally:
        for consumer in consumers:
            consumer.request_stop()
        assert all(consumer.wait(20) for consumer in consumers)
        over.set()
        thread.join()
        listener.close()
    # Each tries after 0.1, 0.2, 0.4 ... seconds; waiting for entries tries ten times a second.
    assert 3 <= seen <= 90, seen


def test_wait_that_is_never_answered_ends(stream: str) -> None:
    """Elsewhere a blocking read overran its time, and nobody noticed."""
    waits = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal waits
        frames = FrameSplitter()
        while data := await reader.read(65536):
            for request in frames.feed(data):
                if b"XREAD" in request:
                    waits += 1
                else:
                    writer.write(b":7\r\n" if request.endswith(b"ID\r\n") else b"+OK\r\n")
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            settings = RedisSettings(f"redis://127.0.0.1:{port}", timeout_seconds=0.2)
            control = AsyncRunner(settings)
            waiter = Waiter(settings, control)
            running = asyncio.create_task(waiter.run())
            # The time of the block, and the timeout as its margin.
            await asyncio.wait_for(waiter.wait(f"{stream}:0", "0-0"), 5)
            await end([running])
            await waiter.close()
            await control.close()

    asyncio.run(main())
    assert waits >= 1


def test_nothing_is_asked_of_a_replica(stream: str) -> None:
    """What a replica says may be old."""
    with SentinelServers("redis7") as servers, servers.replica.client(protocol=2) as replica:
        bench = Bench(servers.url, servers.primary.client(protocol=2), stream)
        crew = Crew(bench)
        try:
            replica.config_resetstat()
            bench.create(shards=2, timings=STEADY)
            a = crew.start("a", redis=servers.url)
            a.owns(0, 1)
            a.finishes(*bench.fill(0, 5), *bench.fill(1, 5))
            bench.heartbeats_pass("a", 2)
            bench.settled(["a"])
            asked = {name.removeprefix("cmdstat_").split("|")[0] for name in replica.info("commandstats")}
            ours = {"evalsha", "eval", "xread", "xinfo", "xrange", "xpending", "hgetall", "hmget", "hget", "zscore"}
            assert not asked & ours, asked & ours
        finally:
            crew.stop()
            bench.close()


@redis7
def test_owner_that_renews_and_acknowledges_at_the_same_time_is_not_fenced(bench: Bench) -> None:
    bench.create(shards=1, timings=STEADY)
    peer = Peer(bench, "a")
    peer.beat()
    fence = peer.fence(0)
    bench.runner.run(claim(bench.keys, fence))
    ids = bench.fill(0, 60)
    errors: list[Exception] = []
    over = threading.Event()

    def renew() -> None:
        try:
            while not over.is_set():
                peer.beat()
        except Exception as error:
            errors.append(error)

    # Each on a connection of its own, as the two of a consumer are.
    with closing(SyncRunner(RedisSettings.of(bench.url))) as data:
        renewing = threading.Thread(target=renew)
        renewing.start()
        try:
            after = "0-0"
            for entry_id in ids:
                page = data.run(read(bench.keys, fence, after=after, count=1))
                assert [entry.id for entry in page.entries] == [entry_id]
                assert data.run(ack(bench.keys, fence, [entry_id])) == 1
                after = entry_id
        finally:
            over.set()
            renewing.join()
    assert not errors
    assert peer.fence(0) == fence
    assert bench.pending(0) == {}


def _activity(bench: Bench) -> tuple[int, int]:
    """Commands that the server has carried out, and connections that it has accepted, so far."""
    stats = bench.redis.info("stats")
    return stats["total_commands_processed"], stats["total_connections_received"]


@redis7
def test_who_has_nothing_to_do_asks_for_little(bench: Bench, crew: Crew) -> None:
    """Elsewhere an idle consumer asked 8,000 times a second, or its connection timed out at each wait."""
    bench.create(shards=4, timings=SLOW)
    a = crew.start("a", redis=RedisSettings(bench.url, timeout_seconds=0.3))  # one wait for entries lasts longer
    a.finishes(*(entry_id for shard in range(4) for entry_id in bench.fill(shard)))
    eventually(lambda: not any(bench.pending(shard) for shard in range(4)), what="the acknowledgements")
    time.sleep(0.2)  # the waits for entries have begun anew
    before = _activity(bench)
    time.sleep(1.5)
    commands, connections = (after - earlier for after, earlier in zip(_activity(bench), before, strict=True))
    # A wait a second; and what others do on the server who were there before.
    assert commands <= 20, commands
    assert connections == 0
    a.finishes(*bench.fill(2))


@redis7
def test_shard_that_cannot_be_read_is_asked_for_seldom(bench: Bench, crew: Crew) -> None:
    """Elsewhere a consumer group that was gone brought 600 errors a second."""
    bench.create(shards=2, timings=SLOW)
    a = crew.start("a")
    a.owns(0, 1)
    bench.redis.delete(bench.stream_key(0))
    eventually(lambda: "shard 0" in a.consumer.health.waits_for, within_seconds=20, what="that it is noticed")
    before, _ = _activity(bench)
    time.sleep(1.5)
    commands = _activity(bench)[0] - before
    assert commands <= 20, commands
    a.finishes(*bench.fill(1))
