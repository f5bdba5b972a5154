"""The examples run as they are, and what README shows of them is what they say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from redis_stream_coord import Monitor
from tests.servers import ClusterServers, SentinelServers, Server, available
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# What each prints last.
LAST_LINES = {
    "first_program": "handled 20 entries",
    "async_consumer": "handled 20 entries",
    "batch": "handled 20 entries",
    "dead_letter": "handled 19 entries",
    "iterate": "handled 20 entries",
    "manual_ack": "stored 20 entries",
    "router_xadd": "handled 20 entries",
}
_SECONDS = 60.0

only_redis7 = pytest.mark.parametrize("server", ["redis7"], indirect=True)


def environment(url: str) -> dict[str, str]:
    # Without the checkout in PYTHONPATH, the package that is installed is used; here it is needed.
    return {**os.environ, "REDIS_STREAM_COORD_URL": url, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def _run(program: Path, url: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", program],
        env=environment(url),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"demo"} == set(LAST_LINES)


@only_redis7
@pytest.mark.parametrize("name", sorted(LAST_LINES))
def test_example_handles_everything_and_ends(server: Server, name: str) -> None:
    for _ in range(2):  # the second time everything exists
        lines = _run(EXAMPLES / f"{name}.py", server.url)
        assert lines[-1] == LAST_LINES[name]
    with server.client(protocol=2) as client, Monitor(server.url) as monitor:
        for stream, group in monitor.groups():
            assert monitor.describe(stream, group=group).members == {}
            for shard in range(8):
                assert client.xpending(f"{stream}:{shard}", group)["pending"] == 0


def _orders_by_key(lines: list[str]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for line in lines[:-1]:
        match = re.fullmatch(r"shard \d: number (\d+) of b'(customer-\d)'", line)
        assert match, line
        numbers.setdefault(match[2], []).append(int(match[1]))
    return numbers


def _check_first_program(url: str) -> None:
    numbers = _orders_by_key(_run(EXAMPLES / "first_program.py", url))
    assert numbers == {f"customer-{key}": [key, key + 5, key + 10, key + 15] for key in range(5)}


def test_first_program_keeps_the_order_of_keys_on_every_server(server: Server) -> None:
    _check_first_program(server.url)


def test_first_program_on_a_cluster(cluster: ClusterServers) -> None:
    _check_first_program(cluster.url)


def test_first_program_through_sentinel() -> None:
    if "redis7" not in available():
        pytest.skip("redis7 is not installed")
    with SentinelServers("redis7") as servers:
        _check_first_program(servers.url)


# --- code in the documentation --------------------------------------------------------------------------------------


def _blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_code_in_readme_is_that_of_the_examples() -> None:
    sources = {path.stem: path.read_text("utf-8") for path in EXAMPLES.glob("*.py")}
    blocks = _blocks(ROOT / "README.md")
    assert blocks[0] == sources["first_program"]
    for block in blocks:
        assert any(block in source for source in sources.values()), block


def _programs(page: Path, folder: Path) -> None:
    """Write the page's programs, each of which begins with its name in a comment, into a folder."""
    for block in _blocks(page):
        if match := re.match(r"# (\w+\.py)\n", block):
            (folder / match[1]).write_text(block, "utf-8")


@contextmanager
def _running(program: Path, url: str) -> Iterator[subprocess.Popen[str]]:
    output = program.with_suffix(f".{os.urandom(4).hex()}.out")
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, program], env=environment(url), stdout=file, stderr=subprocess.STDOUT, text=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@only_redis7
def test_programs_of_the_tutorial(server: Server, tmp_path: Path) -> None:
    _programs(ROOT / "docs" / "tutorial.md", tmp_path)
    create, publish, consume, look, delete = (
        tmp_path / f"{name}.py" for name in ("create", "publish", "consume", "look", "delete")
    )
    assert _run(create, server.url) == ["group billing of stream orders: 8 shards"]
    with Monitor(server.url) as monitor, server.client(protocol=2) as client:

        def owned() -> list[int]:
            view = monitor.describe("orders", group="billing")
            return sorted(len(member.assigned) for member in view.members.values())

        def printed(pattern: str) -> list[str]:
            text = "".join(path.read_text() for path in tmp_path.glob("consume.*.out"))
            return re.findall(pattern, text, flags=re.MULTILINE)

        def everything_handled() -> bool:
            published = sum(client.xlen(f"orders:{shard}") for shard in range(8))
            return len(printed(r"^shard \d: ")) == published > 0

        with _running(consume, server.url) as first:
            eventually(lambda: owned() == [8], what="the first consumer owns all shards")
            with _running(publish, server.url) as publisher:
                eventually(lambda: printed(r"^shard \d: "), what="something is handled")
                with _running(consume, server.url) as second:
                    eventually(lambda: owned() == [4, 4], what="the shards are shared")
                    assert _run(look, server.url)[0].startswith("8 shards, 2 members, version ")
                    second.send_signal(signal.SIGTERM)
                    assert second.wait(_SECONDS) == 0
                eventually(lambda: owned() == [8], what="the first consumer owns all shards again")
                publisher.send_signal(signal.SIGINT)
                assert publisher.wait(_SECONDS) == 0
            eventually(everything_handled, what="each entry is handled once")
            first.send_signal(signal.SIGINT)
            assert first.wait(_SECONDS) == 0
        assert owned() == []
        # In one line or in several: a shard is given up when its handler has returned.
        assert {4, 5, 6, 7} <= {int(shard) for line in printed(r"gives up (.*)") for shard in re.findall(r"\d", line)}
        _run(delete, server.url)
        assert monitor.groups() == []
        assert client.exists("orders:0")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_python_in_the_documentation_compiles(page: Path) -> None:
    for block in _blocks(page):
        compile(textwrap.dedent(block), str(page), "exec")
