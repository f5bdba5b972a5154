"""The fixtures in the projects of others: beside other plugins, and when a test fails in whatever way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# As pytest-asyncio and anyio do: each runs coroutine tests on an event loop of its own.
_OTHERS = {
    "one that replaces the function": """
import functools
import inspect
import pytest


class Item(pytest.Function):
    def runtest(self):
        coroutine_function = self.obj

        @functools.wraps(coroutine_function)
        def elsewhere(**given):
            raise AssertionError("run by the other plugin")

        self.obj = elsewhere
        super().runtest()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name, obj):
    items = yield
    for item in items if isinstance(items, list) else []:
        if inspect.iscoroutinefunction(item.obj):
            item.__class__ = Item
    return items
""",
    "one that calls it first": """
import inspect
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        raise AssertionError("run by the other plugin")
""",
}
_TESTS = """
from unittest import mock

import pytest

from redis_stream_coord import AsyncConsumer, AsyncProducer
from redis_stream_coord.testing import AsyncRecorder


@pytest.fixture
def env(async_coord_env):
    async_coord_env.run(async_coord_env.create("orders", group="billing", shards=2))
    return async_coord_env


async def story(env):
    handled = AsyncRecorder()
    async with AsyncConsumer("orders", group="billing", redis=env.redis, handler=handled):
        async with AsyncProducer("orders", redis=env.redis) as producer:
            await producer.publish({"n": "1"}, key="k")
        await env.settle()
    assert handled.texts("n") == ["1"]


async def test_function(env):
    await story(env)


@pytest.mark.parametrize("number", [1, 2])
async def test_parameters(env, number):
    await story(env)


class TestOfAClass:
    async def test_method(self, env):
        await story(env)


@mock.patch("os.getcwd", return_value="here")
async def test_patched(getcwd, env):
    await story(env)


def test_plain(env):
    env.run(story(env))
"""


def run(folder: Path, text: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "-W", "error"]
    return subprocess.run(
        [*command, f"--rootdir={folder}", *arguments, "test_it.py"],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("other", _OTHERS)
def test_coroutine_tests_run_here_whatever_plugins_there_are(other: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(_OTHERS[other])
    done = run(tmp_path, _TESTS)
    assert "6 passed" in done.stdout, done.stdout + done.stderr


def test_failures_of_all_kinds_are_shown_as_they_are_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import threading\n\n\n"
        "def pytest_runtest_logfinish(nodeid):\n"
        "    assert threading.active_count() == 1, threading.enumerate()\n"
    )
    done = run(
        tmp_path,
        "import asyncio\n\n"
        "import pytest\n\n"
        "from redis_stream_coord import AsyncConsumer, AsyncProducer, Consumer, Producer\n\n\n"
        "@pytest.fixture\n"
        "def env(coord_env):\n"
        "    coord_env.create('orders', group='billing', shards=2)\n"
        "    stuck = lambda message: coord_env.sleep(1000)\n"
        "    Consumer('orders', group='billing', redis=coord_env.redis, handler=stuck).start()\n"
        "    with Producer('orders', redis=coord_env.redis) as producer:\n"
        "        producer.publish({}, key='k')\n"
        "    coord_env.advance(1)\n"
        "    return coord_env\n\n\n"
        "def damage(env):\n"
        "    env.client.hdel('redis-stream:coord:{orders:billing}:metadata', 'version')\n\n\n"
        "def test_fails(env):\n    damage(env)\n    assert 1 == 2\n\n\n"
        "@pytest.mark.xfail(strict=True)\ndef test_has_to_fail(env):\n    damage(env)\n    assert 1 == 2\n\n\n"
        "def test_is_skipped(env):\n    damage(env)\n    pytest.skip('later')\n\n\n"
        "def test_exits(env):\n    damage(env)\n    raise SystemExit(3)\n\n\n"
        "async def test_coroutine_fails(async_coord_env):\n"
        "    await async_coord_env.create('orders', group='billing', shards=1)\n"
        "    handler = lambda message: asyncio.sleep(1000)\n"
        "    async def stuck(message):\n        await asyncio.sleep(1000)\n"
        "    await AsyncConsumer('orders', group='billing', redis=async_coord_env.redis, handler=stuck).start()\n"
        "    async with AsyncProducer('orders', redis=async_coord_env.redis) as producer:\n"
        "        await producer.publish({}, key='k')\n"
        "    await async_coord_env.advance(1)\n"
        "    assert 3 == 4\n",
    )
    assert "3 failed, 1 skipped, 1 xfailed in" in done.stdout, done.stdout + done.stderr
    assert "During handling of the above exception" not in done.stdout
    assert "CorruptMetadataError" not in done.stdout


def test_options_and_seed(tmp_path: Path) -> None:
    text = (
        "import pytest\n\n\n"
        "@pytest.fixture\n"
        "def coord_env_options():\n"
        "    return {'key_prefix': 'shop'}\n\n\n"
        "def test_plain(coord_env):\n"
        "    assert (coord_env.key_prefix, coord_env.seed) == ('shop', 7)\n\n\n"
        "async def test_coroutine(async_coord_env):\n"
        "    assert (async_coord_env.key_prefix, async_coord_env.seed) == ('shop', 7)\n"
    )
    done = run(tmp_path, text, REDIS_STREAM_COORD_SEED="7")
    assert "2 passed" in done.stdout, done.stdout + done.stderr
