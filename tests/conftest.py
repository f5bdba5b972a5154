"""Fixtures for all the tests: real servers, started when first needed, and the seed of the run."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Iterator

import pytest

from tests import servers
from tests.servers import ClusterServers, Server

SEED_VARIABLE = "REDIS_STREAM_COORD_SEED"

_CLUSTER_NAMES = ("redis7", "valkey9")
_seed_key = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    given = os.environ.get(SEED_VARIABLE)
    config.stash[_seed_key] = int(given) if given else random.SystemRandom().randrange(2**32)


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [
        f"seed: {SEED_VARIABLE}={config.stash[_seed_key]}",
        f"servers: {', '.join(servers.available()) or 'none'}",
    ]


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of the run: from the environment, or random. pytest shows the line when the test fails."""
    chosen = request.config.stash[_seed_key]
    print(f"{SEED_VARIABLE}={chosen}")
    return chosen


@pytest.fixture
def stream() -> str:
    """A stream prefix that no other test uses."""
    return f"orders-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def _started() -> Iterator[dict[str, Server]]:
    started: dict[str, Server] = {}
    yield started
    for server in started.values():
        server.stop()


@pytest.fixture(params=servers.NAMES)
def server(request: pytest.FixtureRequest, _started: dict[str, Server]) -> Server:
    """An empty server of each kind in turn. A test that killed or suspended it need not bring it back.

    Emptied by FLUSHALL: scripts loaded, users made and settings changed by another test are still there.
    For some kinds only: `@pytest.mark.parametrize("server", ["redis7"], indirect=True)`.
    """
    name: str = request.param
    _need(name)
    server = _started.get(name) or _started.setdefault(name, Server(name))
    server.start()
    server.resume()
    server.flush()
    return server


@pytest.fixture(scope="session")
def _cluster() -> Iterator[ClusterServers]:
    name = next((name for name in _CLUSTER_NAMES if name in servers.available()), _CLUSTER_NAMES[0])
    _need(name)
    with ClusterServers(name) as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: ClusterServers) -> ClusterServers:
    """An empty Cluster of three nodes. A test that killed or suspended one need not bring it back."""
    for node in _cluster.nodes:
        node.start()
        node.resume()
    # At once when nothing happened; a node that was killed or suspended needs a moment to be trusted again.
    _cluster.wait_until_ok()
    _cluster.flush()
    return _cluster


def _need(name: str) -> None:
    if name in servers.available():
        return
    if name in servers.required():
        pytest.fail(f"{name} is required by {servers.REQUIRE_VARIABLE}, but not installed", pytrace=False)
    pytest.skip(f"{name} is not installed")
