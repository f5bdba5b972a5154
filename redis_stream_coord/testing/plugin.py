"""Fixtures for pytest, found by entry point. Nothing of the extra ``testing`` is imported before a test asks for it.

Coroutine tests that take `async_coord_env` run on its event loop; no other plugin is needed for them.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from ..settings import RedisSettings
    from . import AsyncEnvironment, Environment

_Env = TypeVar("_Env", "Environment", "AsyncEnvironment")

SEED_VARIABLE = "REDIS_STREAM_COORD_SEED"
URL_VARIABLE = "REDIS_STREAM_COORD_TEST_URL"


def _seed() -> int:
    return int(os.environ.get(SEED_VARIABLE, "0"))


def _failed(request: pytest.FixtureRequest) -> bool:
    return bool(request.node.stash.get(_failed_key, False))


_failed_key = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if call.when == "call":
        item.stash[_failed_key] = report.failed
    return report


def _lend(env: _Env, request: pytest.FixtureRequest) -> Iterator[_Env]:
    """Check it after a test that did not fail, and end it."""
    try:
        yield env
        if not _failed(request):
            env.check()
    finally:
        env.close()


@pytest.fixture
def coord_env(request: pytest.FixtureRequest) -> Iterator[Environment]:
    """Groups in memory on a virtual clock, for plain code; checked and ended after the test."""
    from . import Environment

    yield from _lend(Environment(seed=_seed()), request)


@pytest.fixture
def async_coord_env(request: pytest.FixtureRequest) -> Iterator[AsyncEnvironment]:
    """Groups in memory on a virtual clock, for coroutines; checked and ended after the test."""
    from . import AsyncEnvironment

    yield from _lend(AsyncEnvironment(seed=_seed()), request)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if "async_coord_env" not in pyfuncitem.fixturenames or not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = pyfuncitem.funcargs
    names = pyfuncitem._fixtureinfo.argnames
    env: Any = given["async_coord_env"]
    env.run(pyfuncitem.obj(**{name: given[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def _coord_server_url() -> Iterator[str]:
    url = os.environ.get(URL_VARIABLE)
    if url:
        yield url
        return
    from .real import RealServer, find_server

    binary = find_server()
    if binary is None:
        pytest.skip(f"no redis-server or valkey-server on the PATH, and {URL_VARIABLE} is not set")
    with RealServer(binary) as server:
        yield server.url


@pytest.fixture
def coord_server(_coord_server_url: str) -> RedisSettings:
    """A real server: that of REDIS_STREAM_COORD_TEST_URL, which is never emptied, or one started for this test run. The
    test is skipped if there is none. Use stream names that no other test uses.
    """
    from ..settings import RedisSettings

    return RedisSettings(_coord_server_url)
