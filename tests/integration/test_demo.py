"""The demo as a user runs it, only shorter."""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests import servers
from tests.servers import Server
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
PROMISES = (
    "every published event was handled",
    "the order of each key held",
    "one owner at a time, one event at a time",
    "only what a SIGKILL left unacknowledged was repeated",
)
DEADLINE_SECONDS = 180

on_redis = pytest.mark.parametrize("server", ["redis7"], indirect=True)


def demo(*arguments: str | Path, output: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), *map(str, arguments)]
    environment: Mapping[str, str] = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    return subprocess.Popen(
        command, cwd="/", env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        # Its children end with it.
        process.kill()
        said, _ = process.communicate()
        pytest.fail(f"the demo did not end: {said}")
    return said


def read_terminal(terminal: int) -> Iterator[str]:
    while True:
        try:
            yield os.read(terminal, 65_536).decode(errors="replace")
        except OSError:  # the other side is closed
            return


@pytest.mark.skipif("valkey9" not in servers.available(), reason="valkey9 is not installed")
def test_with_a_server_of_its_own() -> None:
    process = demo("--seconds", "8")
    said = finish(process)
    assert process.returncode == 0, said
    assert [promise for promise in PROMISES if f"ok   {promise}: " not in said] == []
    for what in ("delta joins", "alpha has left", "bravo was killed (SIGKILL)", "bravo's lease ran out"):
        assert what in said
    assert said.endswith("Everything held.\n")


@on_redis
def test_with_a_file_and_a_server_on_a_terminal(server: Server, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    lines = [json.dumps({"user": draw.randrange(40), "text": f"äöü {number}"}) for number in range(3_000)]
    (tmp_path / "events.ndjson").write_text("\n".join(lines), encoding="utf-8")
    master, slave = pty.openpty()
    try:
        process = demo(
            "--seconds", "6", "--shards", "5", "--consumers", "2", "--redis", server.url,
            "--input", tmp_path / "events.ndjson", "--key", "user", output=slave,
        )  # fmt: skip
        os.close(slave)
        said = "".join(read_terminal(master))
    finally:
        os.close(master)
    assert process.wait(DEADLINE_SECONDS) == 0, said
    assert "behind" in said  # the table was shown
    assert "every published event was handled: 3,000 of 3,000" in said
    assert "the order of each key held: 40 keys" in said
    assert "Everything held." in said
    with server.client() as client:
        assert client.keys() == []


@on_redis
def test_interrupted_it_cleans_up(server: Server) -> None:
    process = demo("--redis", server.url)
    with server.client() as client:
        eventually(
            lambda: any(client.xlen(key) for key in client.scan_iter("demo-*", _type="stream")),
            within_seconds=90,
            what="events published",
        )
        process.send_signal(signal.SIGINT)
        said = finish(process)
        assert process.returncode == 130, said
        assert said.endswith("Interrupted: no verdict.\n")
        assert client.keys() == []
        eventually(lambda: len(client.client_list()) == 1, what="no process of it is connected any more")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nothing", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ('{"other": 1}', "line 2: has no field 'user'"),
    ],
)
def test_says_which_line_of_the_file_is_wrong(tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / "events.ndjson").write_text(f'{{"user": 1}}\n{line}\n')
    process = demo("--input", tmp_path / "events.ndjson", "--key", "user")
    said = finish(process)
    assert process.returncode == 2
    assert complaint in said
    assert "Traceback" not in said


@pytest.mark.parametrize("arguments", [["--seconds", "1"], ["--consumers", "1"], ["--key", "user"]])
def test_refuses_what_makes_no_demo(arguments: list[str]) -> None:
    process = demo(*arguments)
    finish(process)
    assert process.returncode == 2


def test_a_password_is_not_shown() -> None:
    process = demo("--redis", f"redis://user:hidden@{servers.HOST}:{servers.free_port()}")
    said = finish(process)
    assert process.returncode == 2
    assert "hidden" not in said
