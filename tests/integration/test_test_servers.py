"""The tools of the tests, tested: what they promise about servers, the proxy and waiting."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests import servers
from tests.proxy import FrameSplitter, LossyProxy, command_name
from tests.servers import HOST, SLOT_COUNT, ClusterServers, SentinelServers, Server, ServerError
from tests.waiting import aeventually, eventually

installed = pytest.mark.parametrize("name", list(servers.available()))
one_server = pytest.mark.parametrize("server", ["redis7"], indirect=True)


@contextmanager
def impatient(port: int, **options: Any) -> Iterator[redis.Redis]:
    """A client that tries once: a lost reply is an error at once."""
    with redis.Redis(HOST, port, retry=Retry(NoBackoff(), 0), socket_timeout=5, **options) as client:
        yield client


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


# --- servers ----------------------------------------------------------------------------------------------


def test_each_server_starts_empty_and_can_be_written(server: Server, stream: str) -> None:
    with server.client() as client:
        assert client.dbsize() == 0
        client.xadd(stream, {"field": "value"})
        assert client.xlen(stream) == 1
    assert server.url == f"redis://127.0.0.1:{server.port}/0"


def test_what_another_test_wrote_or_killed_does_not_show(server: Server) -> None:
    with server.client() as client:
        assert client.dbsize() == 0
        client.set("left", "over")
    server.kill()


@installed
def test_append_only_data_survive_restart_and_kill(name: str) -> None:
    with Server(name, appendonly=True) as server:
        port = server.port
        for end in (server.restart, server.kill):
            with server.client() as client:
                client.incr("count")
            pid = server.pid
            end()
            server.start()
            assert server.port == port
            assert server.pid != pid
        with server.client() as client:
            assert client.get("count") == "2"


@installed
def test_stop_removes_the_directory_and_the_process(name: str) -> None:
    server = Server(name)
    server.start()
    directory, pid = server.directory, server.pid
    server.stop()
    assert not directory.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    server.stop()


def test_a_killed_test_process_leaves_no_server_behind() -> None:
    name = next(iter(servers.available()))
    program = (
        "from tests.servers import Server\n"
        f"server = Server({name!r})\n"
        "server.start()\n"
        "print(server.port, server.directory, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(servers.__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as victim:
        assert victim.stdout is not None
        port, directory = victim.stdout.readline().split()
        assert listens(int(port))
        victim.kill()
    eventually(lambda: not Path(directory).exists(), what="the directory is removed")
    eventually(lambda: not listens(int(port)), what="the server is gone")


def test_a_start_that_fails_shows_the_log() -> None:
    name = next(iter(servers.available()))
    server = Server(name, config={"no-such-directive": "1"})
    with pytest.raises(ServerError, match="no-such-directive"):
        server.start()
    assert not server.running


def test_a_port_lost_between_probe_and_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(iter(servers.available()))
    with socket.socket() as winner:
        winner.bind((HOST, 0))
        winner.listen()
        ports = iter([winner.getsockname()[1], servers.free_port()])
        monkeypatch.setattr(servers, "free_port", lambda **_: next(ports))
        with Server(name) as server:
            assert server.port != winner.getsockname()[1]


def test_a_server_with_a_password_and_users() -> None:
    name = next(iter(servers.available()))
    users = ["reader on >open ~* -@all +get +ping", "other off"]
    with Server(name, config={"requirepass": "secret", "user": users}) as server:
        with server.client() as client:
            client.set("key", "value")
        with server.client(username="reader", password="open") as client:
            assert client.get("key") == "value"
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.set("key", "other")


@one_server
def test_a_suspended_server_hangs_and_goes_on(server: Server) -> None:
    with server.client(socket_timeout=0.2) as client:
        client.ping()
        server.suspend()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        server.resume()
        assert eventually(client.ping, ignoring=(redis.TimeoutError,))


def test_an_unknown_name_in_the_required_servers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(servers.REQUIRE_VARIABLE, "redis7, valkey9,")
    assert servers.required() == {"redis7", "valkey9"}
    monkeypatch.setenv(servers.REQUIRE_VARIABLE, "redis5")
    with pytest.raises(ServerError, match="redis5"):
        servers.required()


# --- topologies -------------------------------------------------------------------------------------------


def test_the_cluster_covers_all_slots(cluster: ClusterServers, stream: str) -> None:
    for node in cluster.nodes:
        with node.client() as client:
            ranges = client.execute_command("CLUSTER", "SLOTS")
            assert len(ranges) == 3
            assert sum(int(last) - int(first) + 1 for first, last, *_ in ranges) == SLOT_COUNT
            assert client.dbsize() == 0
    with cluster.client() as client:
        for index in range(16):
            client.xadd(f"{stream}:{index}", {"field": "value"})
    sizes = []
    for node in cluster.nodes:
        with node.client() as client:
            sizes.append(client.dbsize())
    assert sum(sizes) == 16


@installed
def test_each_server_can_cluster(name: str) -> None:
    with ClusterServers(name, appendonly=True) as cluster:
        with cluster.client() as client:
            client.set("key", "value")
        cluster.nodes[1].restart()
        cluster.wait_until_ok()
        with cluster.client() as client:
            assert client.get("key") == "value"


@installed
def test_sentinel_fails_over(name: str) -> None:
    with SentinelServers(name) as group:
        assert group.current_primary() is group.primary
        with group.primary.client() as client:
            client.set("key", "value")
            assert client.wait(1, 5_000) == 1
        group.primary.kill()
        eventually(lambda: group.current_primary() is group.replica, within_seconds=30, what="failover")
        with group.replica.client() as client:
            assert client.get("key") == "value"
            client.set("key", "written after the failover")


# --- proxy ------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(server: Server) -> Iterator[LossyProxy]:
    with LossyProxy(server.port) as proxy:
        yield proxy


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_dropped_reply_was_carried_out(server: Server, proxy: LossyProxy, protocol: int) -> None:
    with impatient(proxy.port, protocol=protocol) as client:
        client.incr("count")
        proxy.drop_next_reply(b"INCR")
        assert client.get("count") == b"1"
        with pytest.raises(redis.ConnectionError):
            client.incr("count")
        assert proxy.dropped == 1
        assert client.incr("count") == 3


@one_server
def test_connection_set_up_is_not_the_next_request(proxy: LossyProxy) -> None:
    proxy.drop_next_reply(count=2)
    with impatient(proxy.port, db=1, client_name="tester") as client:
        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                client.incr("count")
        assert client.get("count") == b"2"
    assert proxy.dropped == 2


@one_server
def test_in_a_pipeline_what_follows_the_dropped_reply_is_lost(server: Server, proxy: LossyProxy) -> None:
    with impatient(proxy.port) as client:
        pipeline = client.pipeline(transaction=False)
        for key in ("first", "second", "third"):
            pipeline.set(key, "x" * 100_000)
        proxy.drop_next_reply(b"second")
        with pytest.raises(redis.ConnectionError):
            pipeline.execute()
        assert client.exists("first", "second", "third") == 2


@one_server
def test_requests_are_matched_across_segments(proxy: LossyProxy) -> None:
    proxy.drop_next_reply(b"needle")
    with socket.create_connection((HOST, proxy.port), timeout=5) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"PING\r\n*2\r\n$4\r\nECHO\r\n$6\r\nneedle\r\n":
            raw.sendall(bytes([byte]))
        received = b""
        while data := raw.recv(1_000):
            received += data
    assert received == b"+PONG\r\n"
    assert proxy.dropped == 1


@one_server
def test_large_replies_pass_whole(proxy: LossyProxy) -> None:
    with impatient(proxy.port, protocol=3) as client:
        client.set("large", b"\r\n" * 1_000_000)
        client.hset("hash", mapping={str(index): index for index in range(5_000)})
        assert client.get("large") == b"\r\n" * 1_000_000
        assert len(client.hgetall("hash")) == 5_000


@one_server
def test_paused_nothing_flows_and_resumed_it_goes_on(server: Server, proxy: LossyProxy) -> None:
    with socket.create_connection((HOST, proxy.port), timeout=5) as raw, server.client() as direct:
        raw.sendall(b"PING\r\n")
        assert raw.recv(100) == b"+PONG\r\n"
        proxy.pause()
        raw.sendall(b"INCR count\r\n")
        raw.settimeout(0.2)
        with pytest.raises(TimeoutError):
            raw.recv(100)
        assert direct.get("count") is None
        proxy.resume()
        raw.settimeout(5)
        assert raw.recv(100) == b":1\r\n"


@one_server
def test_cut_closes_and_refuse_keeps_out(proxy: LossyProxy) -> None:
    with impatient(proxy.port) as client, impatient(proxy.port) as late:
        client.ping()
        proxy.refuse()
        client.ping()
        with pytest.raises(redis.ConnectionError):
            late.ping()
        proxy.accept()
        late.ping()
        proxy.refuse()
        proxy.cut()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        proxy.accept()
        client.ping()


@one_server
def test_the_proxy_serves_async_clients(proxy: LossyProxy) -> None:
    async def run() -> None:
        once = AsyncRetry(NoBackoff(), 0)
        async with redis.asyncio.Redis(host=HOST, port=proxy.port, retry=once) as client:
            proxy.drop_next_reply(b"INCR")
            with pytest.raises(redis.ConnectionError):
                await client.incr("count")
            assert await aeventually(lambda: client.get("count")) == b"1"

    asyncio.run(run())


@pytest.mark.parametrize("size", [1, 2, 7, 1_000])
def test_frames_are_cut_wherever_segments_end(size: int) -> None:
    frames = [
        b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n",
        b"PING\r\n",
        b"*-1\r\n",
        b"$-1\r\n",
        b"*0\r\n",
        b"%1\r\n+key\r\n*2\r\n:1\r\n*1\r\n$0\r\n\r\n",
        b"|1\r\n+ttl\r\n:3\r\n~2\r\n#t\r\n_\r\n",
        b">2\r\n+message\r\n=5\r\ntxt:x\r\n",
        b"-ERR no\r\n",
    ]
    splitter = FrameSplitter()
    wire = b"".join(frames)
    found = [frame for start in range(0, len(wire), size) for frame in splitter.feed(wire[start : start + size])]
    assert found == frames
    assert splitter.rest() == b""


def test_command_names() -> None:
    assert command_name(b"*1\r\n$4\r\nping\r\n") == b"PING"
    assert command_name(b"get key\r\n") == b"GET"
    assert command_name(b"\r\n") == b""


# --- waiting ----------------------------------------------------------------------------------------------


def test_waiting_returns_the_answer_or_reports_the_last_one() -> None:
    answers = iter([0, 0, 3])
    assert eventually(lambda: next(answers)) == 3
    with pytest.raises(AssertionError, match=r"the moon: not within 0\.01 s; last seen: \[\]"):
        eventually(list, within_seconds=0.01, what="the moon")


def test_waiting_ignores_only_what_it_was_told_to() -> None:
    empty: dict[str, str] = {}
    with pytest.raises(AssertionError, match="KeyError"):
        eventually(lambda: empty["absent"], within_seconds=0.01, ignoring=(KeyError,))
    with pytest.raises(KeyError):
        eventually(lambda: empty["absent"], within_seconds=0.01)


def test_async_waiting_takes_plain_and_coroutine_functions() -> None:
    async def three() -> int:
        return 3

    async def run() -> None:
        assert await aeventually(three) == 3
        assert await aeventually(lambda: 4) == 4
        with pytest.raises(AssertionError, match="last seen: None"):
            await aeventually(lambda: None, within_seconds=0.01)

    asyncio.run(run())


def test_the_seed_can_be_given(seed: int) -> None:
    assert seed == int(os.environ.get("REDIS_STREAM_COORD_SEED", seed))
