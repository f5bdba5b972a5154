"""What Redis may answer instead of an answer, and what the library makes of it: said clearly, survived, mended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from redis_stream_coord import (
    AsyncMonitor,
    AsyncProducer,
    ConfigError,
    Consumer,
    LifecycleError,
    Monitor,
    PermissionDeniedError,
    Producer,
    PublishError,
    RedisSettings,
    RedisUnavailableError,
    Timings,
    clients,
)
from redis_stream_coord.commands import append_to
from redis_stream_coord.machine import MACHINE
from redis_stream_coord.runner import AsyncRunner
from tests.integration.kit import FAST, GROUP, SLOW, Bench, Crew, Recorder, two_servers
from tests.servers import SentinelServers, Server
from tests.waiting import aeventually, eventually

on_redis7 = pytest.mark.parametrize("server", ["redis7"], indirect=True)
# Heartbeats come soon, and the lease outlasts whatever a test does.
LONG = Timings(heartbeat_seconds=0.2, lease_seconds=30.0, rebalance_seconds=30.0)


@pytest.fixture
def own(stream: str) -> Iterator[tuple[Server, Bench, Crew]]:
    """A server that a test may spoil."""
    with Server("redis7", appendonly=True) as server:
        bench = Bench(server.url, server.client(protocol=2), stream)
        crew = Crew(bench)
        yield server, bench, crew
        crew.stop()
        bench.close()


# --- credentials and rights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["redis7", "redis8"])
def test_wrong_password_is_said_so(name: str, stream: str) -> None:
    with Server(name, config={"requirepass": "right"}) as server:
        for settings in (RedisSettings(server.url, password="wrong-secret"), RedisSettings(server.url)):
            with Monitor(settings) as monitor, pytest.raises(PermissionDeniedError) as caught:
                monitor.groups()
            assert "refused the credentials" in str(caught.value)
            assert "user name and password" in caught.value.hint
            assert "wrong-secret" not in str(caught.value) + repr(settings)
            assert not caught.value.retriable
        # A function is asked at every connect: a password that was changed is used from then on.
        secrets = ["wrong", "right"]
        with Monitor(RedisSettings(server.url, password=lambda: secrets[0])) as monitor:
            with pytest.raises(PermissionDeniedError):
                monitor.groups()
            secrets.pop(0)
            assert monitor.groups() == []


def test_consumer_with_a_wrong_password_says_so_and_goes_on_trying(own: tuple[Server, Bench, Crew]) -> None:
    server, bench, crew = own
    bench.create(shards=1)
    bench.redis.execute_command("ACL", "SETUSER", "app", "on", ">old", "~*", "&*", "+@all")
    a = crew.start("a", redis=RedisSettings(server.url, username="app", password="new"))
    eventually(lambda: "refused the credentials" in a.consumer.health.waits_for, what="that it is said")
    assert a.consumer.health.state == "joining"
    bench.redis.execute_command("ACL", "SETUSER", "app", ">new")
    a.owns(0)
    assert a.consumer.health.ok


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        (["~*", "+@all", "-evalsha", "-eval"], "evalsha"),
        (["~*", "+@all", "-xadd"], "can't run this command"),
        (["~somewhere-else", "+@all"], "key"),
    ],
    ids=["scripts", "command in a script", "key"],
)
def test_missing_right_is_named(own: tuple[Server, Bench, Crew], rules: list[str], named: str) -> None:
    server, bench, _ = own
    bench.create(shards=1)
    bench.redis.execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret", "&*", *rules)
    settings = RedisSettings(server.url, username="app", password="secret")
    with Producer(bench.stream, redis=settings) as producer, pytest.raises(PermissionDeniedError) as caught:
        producer.publish({"n": "1"}, key="k")
    assert named in str(caught.value).lower()
    assert "lacks the rule" in caught.value.hint
    assert not caught.value.retriable
    assert bench.redis.xlen(bench.stream_key(0)) == 0


def test_right_that_is_taken_away_stops_nothing_for_good(own: tuple[Server, Bench, Crew]) -> None:
    server, bench, crew = own
    bench.create(shards=1, timings=LONG)
    bench.redis.execute_command("ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all")
    a = crew.start("a", redis=RedisSettings(server.url, username="app", password="secret"))
    a.owns(0)
    bench.redis.execute_command("ACL", "SETUSER", "app", "-evalsha", "-eval")
    eventually(lambda: not a.consumer.health.ok, what="that it is noticed")
    assert "no permissions" in a.consumer.health.waits_for
    (entry_id,) = bench.fill(0)
    bench.redis.execute_command("ACL", "SETUSER", "app", "+evalsha", "+eval")
    a.finishes(entry_id)
    eventually(lambda: a.consumer.health.ok, what="that it is well again")


# --- states of the server ------------------------------------------------------------------------------------------


def test_out_of_memory_is_retriable_and_survived(own: tuple[Server, Bench, Crew]) -> None:
    _, bench, crew = own
    bench.create(shards=1, timings=FAST)
    a = crew.start("a")
    a.owns(0)
    bench.fill(0)
    bench.redis.config_set("maxmemory-policy", "noeviction")
    bench.redis.config_set("maxmemory", "1mb")
    with pytest.raises((RedisUnavailableError, PublishError)) as caught:
        bench.producer.publish({"n": "1"}, key="k")
    assert caught.value.retriable
    assert "OOM" in str(caught.value) or "memory" in str(caught.value)
    # Longer than a lease: either it keeps its lease, or it says that it has none.
    deadline = time.monotonic() + 2 * FAST.lease_seconds
    while time.monotonic() < deadline:
        health = a.consumer.health
        assert health.ok or health.waits_for
        if not health.ok:
            assert "OOM" in health.waits_for or "memory" in health.waits_for
        time.sleep(0.05)
    bench.redis.config_set("maxmemory", "0")
    receipt = eventually(
        lambda: bench.producer.publish({"n": "2"}, key="k"),
        what="publishing again",
        ignoring=(RedisUnavailableError, PublishError),
    )
    a.finishes(receipt.id)
    eventually(lambda: a.consumer.health.ok, what="that it is well again")


def test_loading_is_waited_for(own: tuple[Server, Bench, Crew]) -> None:
    server, bench, crew = own
    # Slows the loading down: so many microseconds for each key.
    bench.redis.config_set("key-load-delay", "0")
    bench.create(shards=2, timings=LONG)
    with bench.redis.pipeline(transaction=False) as pipe:
        for number in range(1_000):
            pipe.set(f"load:{number}", "x")
        pipe.execute()
    a = crew.start("a", redis=RedisSettings(server.url, timeout_seconds=0.5))
    a.owns(0, 1)
    bench.redis.execute_command("BGREWRITEAOF")
    eventually(lambda: bench.redis.info("persistence")["aof_rewrite_in_progress"] == 0, what="the rewritten file")
    with (server.directory / "server.conf").open("a") as config:
        config.write("key-load-delay 1500\nloading-process-events-interval-bytes 1024\n")
    server.kill()
    starting = threading.Thread(target=server.start)
    starting.start()
    try:
        eventually(lambda: "loading" in a.consumer.health.waits_for, within_seconds=20, what="that it is said")
        with Monitor(RedisSettings(server.url, timeout_seconds=0.1)) as monitor:
            with pytest.raises(RedisUnavailableError) as caught:
                monitor.groups()
            assert caught.value.retriable
    finally:
        starting.join()
    eventually(lambda: a.consumer.health.ok, within_seconds=20, what="that it is well again")
    a.finishes(*bench.fill(0), within_seconds=20)


def test_read_only_server_is_waited_for(own: tuple[Server, Bench, Crew]) -> None:
    _, bench, crew = own
    bench.create(shards=2, timings=FAST)
    a = crew.start("a")
    a.owns(0, 1)
    bench.fill(0)
    bench.redis.config_set("replica-serve-stale-data", "yes")
    bench.redis.execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises((RedisUnavailableError, PublishError)) as caught:
        bench.producer.publish({"n": "1"}, key="k")
    assert caught.value.retriable
    eventually(lambda: not a.consumer.assignment, what="the end of the lease")
    assert "READONLY" in a.consumer.health.waits_for or "read only" in a.consumer.health.waits_for
    bench.redis.execute_command("REPLICAOF", "NO", "ONE")
    a.finishes(*bench.fill(0), *bench.fill(1), within_seconds=20)
    eventually(lambda: a.consumer.health.ok, what="that it is well again")


@pytest.mark.parametrize("together", [False, True])
def test_connections_given_up_on_a_read_only_server_are_not_forgotten(
    own: tuple[Server, Bench, Crew], together: bool
) -> None:
    """The answer to one command says that the server is a replica while another command is on its way."""
    _, bench, _ = own
    bench.create(shards=1)
    known = {client["id"] for client in bench.redis.client_list()}
    bench.redis.execute_command("REPLICAOF", "127.0.0.1", "1")

    async def main() -> None:
        runner = AsyncRunner(RedisSettings(bench.url), together=together)
        for _ in range(10):
            calls = [runner.run(append_to("x", ["n", "1"]), retry=False) for _ in range(10)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(one, RedisUnavailableError) for one in outcomes), outcomes
        await runner.close()
        await aeventually(lambda: {one["id"] for one in bench.redis.client_list()} <= known, what="no connection left")

    try:
        asyncio.run(main())
    finally:
        bench.redis.execute_command("REPLICAOF", "NO", "ONE")


@two_servers
def test_forgotten_scripts_are_sent_again(bench: Bench, crew: Crew) -> None:
    bench.create(shards=4, timings=FAST)
    a, b = crew.start("a"), crew.start("b")
    bench.settled(["a", "b"])
    published: list[str] = []
    for _ in range(30):
        bench.redis.script_flush()
        published += [bench.fill(shard)[0] for shard in range(4)]
    eventually(lambda: len(a.recorder.done()) + len(b.recorder.done()) >= len(published), what="all entries")
    assert sorted(a.recorder.done() + b.recorder.done()) == sorted(published)
    # Sent with its source once, and known from then on; each member sends some scripts with its next heartbeat only.
    for member in ("a", "b"):
        bench.heartbeats_pass(member, 2)
    stats = bench.redis.info("commandstats")
    evals = stats["cmdstat_eval"]["calls"]
    bench.heartbeats_pass("a", 5)
    assert bench.redis.info("commandstats")["cmdstat_eval"]["calls"] <= evals + 2
    assert bench.view().members.keys() == {"a", "b"}


# --- what others do to its connections -----------------------------------------------------------------------------


@two_servers
def test_wait_ended_with_an_error_by_somebody_else_does_no_harm(
    bench: Bench, crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    bench.create(shards=2, timings=SLOW)
    a = crew.start("a")
    a.owns(0, 1)

    def unblock() -> bool:
        blocked = [one for one in bench.redis.client_list() if "b" in one["flags"]]
        return any(bench.redis.execute_command("CLIENT", "UNBLOCK", one["id"], "ERROR") for one in blocked)

    for _ in range(5):
        eventually(unblock, what="a wait to end")
        a.finishes(*bench.fill(0), *bench.fill(1), within_seconds=5)
    assert a.kinds(0) == ["assigned"]
    assert a.consumer.health.ok


@on_redis7
def test_each_connection_may_be_killed_in_turn(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=LONG)
    known = {client["id"] for client in bench.redis.client_list()}
    bench.producer.refresh()
    a = crew.start("a")
    a.owns(0, 1)
    (first,) = bench.fill(0)
    a.finishes(first)
    for _ in range(2):
        mine = [one["id"] for one in bench.redis.client_list() if one["id"] not in known]
        assert len(mine) == 4  # the producer's too
        for client_id in mine:
            bench.redis.execute_command("CLIENT", "KILL", "ID", client_id)
            entry_id = eventually(
                lambda: bench.producer.publish({"n": "1"}, key="k", event_id=str(client_id)).id,  # noqa: B023
                what="publishing",
                ignoring=(RedisUnavailableError, PublishError),
            )
            a.finishes(entry_id)
        bench.heartbeats_pass("a", 1)
    assert a.kinds(0) == ["assigned"]
    assert len(a.recorder.ids()) == len(set(a.recorder.ids()))


# --- clocks --------------------------------------------------------------------------------------------------------


@on_redis7
def test_clock_that_jumps_beyond_the_lease_stops_the_handing_out_until_the_next_heartbeat(
    bench: Bench, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a suspend of the machine: the lease is over by the local clock, whatever Redis says."""
    bench.create(shards=2, timings=SLOW)
    a = crew.start("a")
    a.owns(0, 1)
    first = bench.fill(0)
    a.finishes(*first)
    real, offset = MACHINE.clock, [0.0]
    monkeypatch.setattr(MACHINE, "clock", lambda: real() + offset[0])
    offset[0] = 2 * SLOW.lease_seconds
    assert a.consumer.assignment == frozenset()
    assert not a.consumer.health.ok
    eventually(lambda: a.kinds(0)[:2] == ["assigned", "lost"], what="the loss is told", within_seconds=15)
    a.finishes(*bench.fill(0), *bench.fill(1), within_seconds=20)
    assert a.consumer.health.ok
    assert a.kinds(0) == ["assigned", "lost", "assigned"]


@on_redis7
def test_wall_clock_of_the_client_does_not_matter(bench: Bench, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.create(shards=1)
    a = crew.start("a")
    a.owns(0)
    real = time.time
    for offset in (10 * 365 * 86_400.0, -10 * 365 * 86_400.0):
        monkeypatch.setattr(time, "time", lambda offset=offset: real() + offset)
        bench.heartbeats_pass("a", 3)
        a.finishes(*bench.fill(0))
    assert a.kinds(0) == ["assigned"]


# --- whatever the user's own client is like ------------------------------------------------------------------------


@pytest.mark.parametrize("server", ["redis7", "redis8"], indirect=True)
@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode", [False, True])
def test_options_of_the_users_client_change_nothing(bench: Bench, crew: Crew, protocol: int, decode: bool) -> None:
    bench.create(shards=1)
    with redis.Redis.from_url(bench.url, protocol=protocol, decode_responses=decode) as client:
        settings = RedisSettings.from_client(client)
    recorder = Recorder()
    with (
        Consumer(bench.stream, group=GROUP, redis=settings, handler=recorder),
        Producer(bench.stream, redis=settings) as producer,
        Monitor(settings) as monitor,
    ):
        receipt = producer.publish({"data": b"\xff\x00"}, key=b"\xfe", event_id="e")
        eventually(lambda: recorder.done() == [receipt.id], what="the entry")
        assert monitor.describe(bench.stream, group=GROUP).violations() == []
    assert recorder.began[0].key == b"\xfe"


# --- failover ------------------------------------------------------------------------------------------------------


def test_consumer_and_producer_go_on_after_a_failover(stream: str) -> None:
    with SentinelServers("redis7") as servers:
        settings = RedisSettings(servers.url, timeout_seconds=0.5)
        bench = Bench(servers.url, servers.replica.client(protocol=2), stream)
        crew = Crew(bench)
        try:
            bench.create(shards=2, timings=FAST)
            a = crew.start("a", redis=settings)
            a.owns(0, 1)
            with Producer(stream, redis=settings) as producer:
                before = producer.publish({"n": "1"}, key="k").id
                a.finishes(before)
                with servers.primary.client() as client:
                    client.wait(1, 5_000)
                servers.primary.kill()
                eventually(lambda: servers.current_primary() is servers.replica, within_seconds=60, what="the failover")
                after = eventually(
                    lambda: producer.publish({"n": "2"}, key="k").id,
                    within_seconds=60,
                    what="publishing to the new primary",
                    ignoring=(RedisUnavailableError, PublishError),
                )
            a.finishes(after, within_seconds=60)
            eventually(lambda: a.consumer.health.ok, within_seconds=30, what="that it is well again")
            assert "a" in bench.view().members
        finally:
            crew.stop()
            bench.close()


def test_nothing_is_left_of_the_connections_to_sentinel(stream: str) -> None:
    with SentinelServers("redis7") as servers, servers.sentinel.client(protocol=2) as sentinel:
        known = {client["id"] for client in sentinel.client_list()}

        def asked() -> bool:
            return bool({client["id"] for client in sentinel.client_list()} - known)

        bench = Bench(servers.url, servers.primary.client(protocol=2), stream)
        bench.create(shards=1)
        with Consumer(stream, group=GROUP, redis=servers.url, handler=lambda _: None) as consumer:
            eventually(lambda: consumer.assignment, what="the shard")
            assert asked()
        bench.close()
        eventually(lambda: not asked(), what="no connection to Sentinel left")


@on_redis7
def test_connection_to_a_primary_that_was_demoted_is_given_up(
    own: tuple[Server, Bench, Crew], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on answering. The next connection is made to the new primary, as Sentinel would name it."""
    server, demoted, _ = own
    demoted.redis.execute_command("REPLICAOF", "127.0.0.1", "1")
    made: list[str] = []
    original = clients.make

    def make(settings: RedisSettings, kinds: object, timeout_seconds: float) -> object:
        made.append(server.url if not made else bench.url)
        return original(RedisSettings(made[-1]), kinds, timeout_seconds)

    monkeypatch.setattr(clients, "make", make)
    key = bench.stream_key(0)

    async def main() -> None:
        for together in (False, True):
            made.clear()
            runner = AsyncRunner(RedisSettings(server.url), together=together)
            with pytest.raises(RedisUnavailableError, match="ReadOnlyError"):
                await runner.run(append_to(key, ["n", "1"]))
            await runner.run(append_to(key, ["n", "2"]))
            await runner.close()

    asyncio.run(main())
    assert bench.redis.xlen(key) == 2


# --- what cannot go well --------------------------------------------------------------------------------------------


@on_redis7
@pytest.mark.parametrize("scheme", ["redis+cluster", "redis+sentinel"])
def test_url_of_another_kind_of_server_is_said_to_be_wrong(bench: Bench, scheme: str) -> None:
    url = bench.url.replace("redis://", f"{scheme}://").removesuffix("/0")
    url += "/primary" if "sentinel" in scheme else ""
    said = "the URL does not fit Redis at"
    with pytest.raises(ConfigError, match=said), Monitor(url) as monitor:
        monitor.groups()
    with pytest.raises(ConfigError, match=said), Producer(bench.stream, redis=url) as producer:
        producer.publish({"n": "1"}, key="k")

    async def ask() -> None:
        async with AsyncMonitor(url) as monitor:
            await monitor.groups()

    with pytest.raises(ConfigError, match=said):
        asyncio.run(ask())


@on_redis7
def test_cluster_that_is_not_there_is_unavailable(bench: Bench) -> None:
    settings = RedisSettings("redis+cluster://127.0.0.1:1", timeout_seconds=0.2)
    with pytest.raises(RedisUnavailableError, match=r"at 127\.0\.0\.1:1"), Monitor(settings) as monitor:
        monitor.groups()


@on_redis7
def test_whoever_was_closed_says_so(bench: Bench) -> None:
    bench.create(shards=1)
    producer, monitor = Producer(bench.stream, redis=bench.url), Monitor(bench.url)
    producer.publish({"n": "1"}, key="k")
    monitor.groups()
    for one in (producer, monitor, producer, monitor):
        one.close()
    with pytest.raises(LifecycleError, match="has been closed; nothing was sent"):
        producer.publish({"n": "2"}, key="k")
    with pytest.raises(LifecycleError, match="has been closed"):
        monitor.groups()
    assert bench.redis.xlen(bench.stream_key(0)) == 1

    async def main() -> None:
        late = AsyncProducer(bench.stream, redis=bench.url)
        await late.publish({"n": "2"}, key="k")
        await late.close()
        with pytest.raises(LifecycleError, match="has been closed"):
            await late.publish({"n": "3"}, key="k")
        await late.close()

    asyncio.run(main())
    assert bench.redis.xlen(bench.stream_key(0)) == 2


@on_redis7
def test_whoever_belongs_to_another_event_loop_says_so(bench: Bench) -> None:
    bench.create(shards=1)
    made: list[AsyncProducer] = []

    async def first() -> None:
        made.append(AsyncProducer(bench.stream, redis=bench.url))
        await made[0].publish({"n": "1"}, key="k")

    async def second() -> None:
        for call in (made[0].publish({"n": "2"}, key="k"), made[0].close()):
            with pytest.raises(LifecycleError, match="belongs to another event loop"):
                await call

    async def main() -> None:
        await first()
        await asyncio.to_thread(asyncio.run, second())
        await made[0].publish({"n": "3"}, key="k")
        await made[0].close()

    asyncio.run(main())
    assert bench.redis.xlen(bench.stream_key(0)) == 2


# --- a script that hangs --------------------------------------------------------------------------------------------


def test_busy_server_is_waited_for(own: tuple[Server, Bench, Crew]) -> None:
    _, bench, crew = own
    bench.create(shards=1, timings=LONG)
    a = crew.start("a", redis=RedisSettings(bench.url, timeout_seconds=0.5))
    a.owns(0)
    bench.redis.config_set("lua-time-limit", "50")

    def hang() -> None:
        with pytest.raises(redis.RedisError), redis.Redis.from_url(bench.url, socket_timeout=60) as client:
            client.eval("while true do end", 0)

    hanging = threading.Thread(target=hang)
    hanging.start()
    try:
        with Monitor(RedisSettings(bench.url, timeout_seconds=0.5)) as monitor:
            with pytest.raises(RedisUnavailableError) as caught:
                eventually(lambda: monitor.groups() == [], within_seconds=5, what="a busy server")
            assert "BUSY" in str(caught.value)
            assert caught.value.retriable
        eventually(lambda: not a.consumer.health.ok, what="that it is noticed")
    finally:
        with redis.Redis.from_url(bench.url) as client:
            eventually(lambda: client.execute_command("SCRIPT", "KILL"), ignoring=(redis.RedisError,), what="its end")
        hanging.join()
    a.finishes(*bench.fill(0))
    eventually(lambda: a.consumer.health.ok, what="that it is well again")
