"""Fixtures for pytest, found by entry point. Nothing of the extra ``testing`` is imported before a test asks for it.

Coroutine tests that take `async_coord_env` run on its event loop, whatever other plugins there are.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from ..settings import RedisSettings
    from . import AsyncEnvironment, Environment

_Env = TypeVar("_Env", "Environment", "AsyncEnvironment")

SEED_VARIABLE = "REDIS_STREAM_COORD_SEED"
URL_VARIABLE = "REDIS_STREAM_COORD_TEST_URL"


def _seed() -> int:
    given = os.environ.get(SEED_VARIABLE, "0")
    if not given.isdigit():
        raise pytest.UsageError(f"{SEED_VARIABLE}={given!r} is not a number")
    return int(given)


_failed_key = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    # Not by the report: there is none after KeyboardInterrupt, and an expected failure does not say that it failed.
    item.stash[_failed_key] = True
    result = yield
    item.stash[_failed_key] = False
    return result


def _lend(env: _Env, request: pytest.FixtureRequest) -> Iterator[_Env]:
    """Check it after a test that did not fail, and end it."""
    try:
        yield env
        if not request.node.stash.get(_failed_key, True):
            env.check()
    finally:
        env.close()


@pytest.fixture
def coord_env_options() -> Mapping[str, Any]:
    """What `Environment` is made with, such as ``{"key_prefix": "shop"}``. For a project's own ``conftest.py``."""
    return {}


@pytest.fixture
def coord_env(request: pytest.FixtureRequest, coord_env_options: Mapping[str, Any]) -> Iterator[Environment]:
    """Groups in memory on a virtual clock, for plain code; checked and ended after the test."""
    from . import Environment

    yield from _lend(Environment(**{"seed": _seed(), **coord_env_options}), request)


@pytest.fixture
def async_coord_env(request: pytest.FixtureRequest, coord_env_options: Mapping[str, Any]) -> Iterator[AsyncEnvironment]:
    """Groups in memory on a virtual clock, for coroutines; checked and ended after the test."""
    from . import AsyncEnvironment

    yield from _lend(AsyncEnvironment(**{"seed": _seed(), **coord_env_options}), request)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Put a plain function in the place of a coroutine test. As a wrapper, so that no other plugin runs it first."""
    # pytest-asyncio has put a plain one of its own there by now, which names what it wraps.
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        test = getattr(test, "__wrapped__", test)
    if "async_coord_env" not in pyfuncitem.fixturenames or not inspect.iscoroutinefunction(test):
        return (yield)
    env: Any = pyfuncitem.funcargs["async_coord_env"]
    replaced = pyfuncitem.obj
    pyfuncitem.obj = lambda **given: env.run(test(**given))
    try:
        return (yield)
    finally:
        pyfuncitem.obj = replaced


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
