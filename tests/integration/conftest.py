"""Fixtures of the integration tests: see `tests.integration.kit`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.kit import Bench, Crew
from tests.proxy import LossyProxy
from tests.servers import Server


@pytest.fixture
def bench(server: Server, stream: str) -> Iterator[Bench]:
    """A server and the names of a group, which the test has yet to create."""
    bench = Bench(server.url, server.client(protocol=2), stream)
    yield bench
    bench.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[LossyProxy]:
    """A lossy way to the same server."""
    with LossyProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def crew(bench: Bench, proxy: LossyProxy) -> Iterator[Crew]:
    """Consumers of the group, stopped at the end of the test; then their callbacks are checked."""
    crew = Crew(bench)
    yield crew
    proxy.resume()
    proxy.keep_replies()
    crew.stop()
