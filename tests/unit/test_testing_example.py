"""The tests that docs/testing-your-consumer.md shows run as they are, and fast."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "testing"
DOCS = ROOT / "docs" / "testing-your-consumer.md"
# Of the processor, so that other programs of the machine do not matter. They take about one; this is for slow machines.
_MOST_SECONDS = 10.0
_MEASURE = """
import time

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop():
    began = time.process_time()
    outcome = yield
    print(f"took {time.process_time() - began:.2f} s")
    return outcome
"""


def _run(*arguments: str, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    # Only the plugins of this package, and no settings of this project: as in a project that has just begun.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(FOLDER), str(ROOT)])}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-W", "error", "-p", "no:cacheprovider", "-q"]
    plugin = ["-p", "redis_stream_coord.testing.plugin"]
    return subprocess.run(
        [*command, *plugin, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_ten_tests_never_wait(tmp_path: Path) -> None:
    (tmp_path / "measure.py").write_text(_MEASURE)
    done = _run("-p", "measure", str(FOLDER / "test_billing.py"), "--durations=0", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b10 passed\b", done.stdout), done.stdout
    (took,) = re.findall(r"took ([\d.]+) s", done.stdout)
    assert 0 < float(took) < _MOST_SECONDS, done.stdout


def test_page_shows_the_file_as_it_is() -> None:
    page = DOCS.read_text("utf-8")
    shown = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert (FOLDER / "test_billing.py").read_text("utf-8") in shown
    assert (FOLDER / "billing.py").read_text("utf-8") in shown


def test_fixtures_come_by_entry_point_and_import_nothing_of_the_extra(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n\n\n"
        "def test_nothing_is_imported_yet() -> None:\n"
        "    assert not {'fakeredis', 'lupa'} & set(sys.modules)\n\n\n"
        "def test_fixture(coord_env) -> None:\n"
        "    coord_env.create('orders', group='billing', shards=1)\n\n\n"
        "async def test_coroutine(async_coord_env) -> None:\n"
        "    await async_coord_env.create('orders', group='billing', shards=1)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "-W", "error"]
    done = subprocess.run([*command, "test_it.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_failed_test_shows_its_own_failure_and_not_that_of_the_check(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from redis_stream_coord.keys import GroupKeys\n\n\n"
        "def test_broken(coord_env) -> None:\n"
        "    coord_env.create('orders', group='billing', shards=1)\n"
        "    coord_env._world.server.do('HDEL', GroupKeys('orders', 'billing').metadata, 'version')\n"
        "    assert 1 == 2\n\n\n"
        "def test_unnoticed(coord_env) -> None:\n"
        "    coord_env.create('orders', group='billing', shards=1)\n"
        "    coord_env._world.server.do('HDEL', GroupKeys('orders', 'billing').metadata, 'version')\n"
    )
    done = _run("test_it.py", folder=tmp_path)
    assert "1 failed, 1 passed, 1 error" in done.stdout, done.stdout
    assert "CorruptMetadataError" in done.stdout


def test_without_the_extra_only_its_own_fixtures_fail(tmp_path: Path) -> None:
    (tmp_path / "fakeredis.py").write_text("raise ImportError('not installed')\n")
    (tmp_path / "test_it.py").write_text(
        "def test_other() -> None:\n    pass\n\n\ndef test_fixture(coord_env) -> None:\n    pass\n"
    )
    done = _run("test_it.py", folder=tmp_path)
    assert "1 passed, 1 error" in done.stdout, done.stdout
    assert "redis-stream-coord[testing]" in done.stdout


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_real_server_by_url(server: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_it.py").write_text(
        "from redis_stream_coord import Monitor\n\n\n"
        "def test_server(coord_server) -> None:\n"
        "    with Monitor(coord_server) as monitor:\n"
        "        assert monitor.groups() == []\n"
    )
    monkeypatch.setenv("REDIS_STREAM_COORD_TEST_URL", server.url)  # type: ignore[attr-defined]
    done = _run("test_it.py", folder=tmp_path)
    assert "1 passed" in done.stdout, done.stdout


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_real_server_of_its_own_or_none(server: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_STREAM_COORD_TEST_URL", raising=False)
    (tmp_path / "test_it.py").write_text(
        "import redis\n\n\n"
        "def test_server(coord_server) -> None:\n"
        "    print(coord_server.url)\n"
        "    assert redis.Redis.from_url(coord_server.url).ping()\n"
    )
    done = _run("test_it.py", "-s", "-W", "default", folder=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    done = _run("test_it.py", folder=tmp_path)
    assert "1 skipped" in done.stdout, done.stdout + done.stderr
