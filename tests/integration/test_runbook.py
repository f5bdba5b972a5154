"""Each command and program of the runbook does what it says there, and both languages have the same ones."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from redis_stream_coord import Admin, Consumer, Message, Monitor, Producer, RoutingError
from redis_stream_coord.keys import GroupKeys, StreamKeys
from tests.servers import Server
from tests.waiting import eventually

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^ *```(sh|python)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_CELL = re.compile(r"\| `(redis-cli [^`]*)` \|$", re.MULTILINE)

pytestmark = [
    pytest.mark.parametrize("server", ["redis7"], indirect=True),
    pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed"),
]


def _blocks(page: str) -> list[tuple[str, str]]:
    text = (DOCS / page).read_text("utf-8")
    return [(kind, textwrap.dedent(code)) for kind, code in _BLOCK.findall(text)]


def _cells(page: str) -> list[str]:
    return _CELL.findall((DOCS / page).read_text("utf-8"))


class Operator:
    """Does what the page says, on one server."""

    def __init__(self, server: Server) -> None:
        self.environment = {
            **os.environ,
            "REDIS_STREAM_COORD_URL": server.url,
            "PYTHONPATH": str(DOCS.parent),
        }
        self.programs = {
            match[1]: code
            for kind, code in _blocks("runbook.md")
            if kind == "python" and (match := re.match(r"# (\w+)\.py\n", code))
        }
        self.commands = [code for kind, code in _blocks("runbook.md") if kind == "sh" and "export" not in code]

    def program(self, name: str) -> str:
        return self._run([sys.executable, "-W", "error", "-c", self.programs[name]])

    def command(self, containing: str) -> str:
        (code,) = (code for code in self.commands if containing in code)
        return self.line(code)

    def line(self, code: str) -> str:
        answer = self._run(["bash", "-euc", code])
        assert "ERR" not in answer
        assert "WRONGTYPE" not in answer
        return answer

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        return done.stdout


@pytest.fixture
def operator(server: Server) -> Operator:
    with Admin(server.url, requested_by="tests") as admin:
        admin.create("orders", group="billing", shards=8, reason="a test")
    return Operator(server)


@pytest.fixture
def handled() -> list[str]:
    return []


@pytest.fixture
def consumer(server: Server, operator: Operator, handled: list[str]) -> Iterator[Consumer]:
    def handle(message: Message) -> None:
        handled.append(message.text("n"))

    with Consumer("orders", group="billing", redis=server.url, handler=handle) as consumer:
        eventually(lambda: len(consumer.assignment) == 8, what="it owns all shards")
        yield consumer


def _publish(server: Server, prefix: str) -> list[str]:
    names = [f"{prefix}{n}" for n in range(16)]
    with Producer("orders", redis=server.url) as producer:
        for name in names:
            producer.publish({"n": name}, key=name)
    return names


def _wait_until_acknowledged(server: Server) -> None:
    """Acknowledgements follow a little later than the handlers return, and the position with them."""
    with server.client(protocol=2) as client:
        eventually(
            lambda: not any(client.xpending(f"orders:{shard}", "billing")["pending"] for shard in range(8)),
            what="all are acknowledged",
        )


def test_both_languages_have_the_same_commands(server: Server) -> None:
    assert _blocks("runbook.md") == _blocks("runbook.ko.md")
    assert _cells("runbook.md") == _cells("runbook.ko.md")


def test_looking(server: Server, operator: Operator, consumer: Consumer) -> None:
    _publish(server, "a")
    assert operator.command("PING").strip() == "PONG"
    assert operator.program("health") == "orders/billing: OK, 1 members\n"
    assert f"{consumer.member}: active" in operator.program("assignments")
    assert operator.command("XINFO GROUPS").count("billing") == 8
    for line in _cells("runbook.md"):
        assert operator.line(line).strip(), line


def test_health_names_what_is_wrong(server: Server, operator: Operator) -> None:
    assert "DEGRADED: shards [0, 1, 2, 3, 4, 5, 6, 7] have no owner" in operator.program("health")
    with server.client(protocol=2) as client:
        client.hset(GroupKeys("orders", "billing").metadata, "shard:3", "rubbish")
    assert "DEGRADED: the metadata is damaged" in operator.program("health")


def test_changes(server: Server, operator: Operator, consumer: Consumer, handled: list[str]) -> None:
    assert operator.program("apply").startswith("8 shards")
    names = _publish(server, "a")
    eventually(lambda: sorted(handled) == sorted(names), what="all are handled")
    _wait_until_acknowledged(server)
    operator.program("seek")
    eventually(lambda: sorted(handled) == sorted(names * 2), what="all are handled again")


@pytest.mark.parametrize("damage", ["lost", "damaged", "too old"])
def test_group_is_created_anew_and_keeps_its_positions(
    server: Server, operator: Operator, consumer: Consumer, handled: list[str], damage: str
) -> None:
    before = _publish(server, "before")
    eventually(lambda: sorted(handled) == sorted(before), what="all are handled")
    _wait_until_acknowledged(server)
    metadata = GroupKeys("orders", "billing").metadata
    with server.client(protocol=2) as client:
        if damage == "lost":
            client.delete(metadata)
        elif damage == "damaged":
            client.hdel(metadata, "shard:3")
        else:
            client.hset(metadata, "version", "1")
    eventually(lambda: not consumer.health.ok, what="the consumer notices")
    assert consumer.assignment == frozenset()
    during = _publish(server, "during")
    assert sorted(handled) == sorted(before)
    if damage != "lost":
        operator.command("RENAME")
    operator.program("recreate")
    eventually(lambda: sorted(handled) == sorted(before + during), what="what came meanwhile is handled, once")
    assert operator.program("health") == "orders/billing: OK, 1 members\n"


def test_stream_record_and_routes_are_made_together(
    server: Server, operator: Operator, consumer: Consumer, handled: list[str]
) -> None:
    with server.client(protocol=2) as client:
        client.delete(StreamKeys("orders").record)
    with pytest.raises(Exception, match="no such stream"):
        _publish(server, "lost")
    operator.program("reregister")
    with pytest.raises(RoutingError):
        _publish(server, "stale")
    operator.command("{orders}:stream")
    operator.program("reregister")
    names = _publish(server, "again")
    eventually(lambda: sorted(handled) == sorted(names), what="all are handled")
    with Monitor(server.url) as monitor:
        assert monitor.groups() == [("orders", "billing")]


def test_consumer_group_that_was_destroyed_is_made_anew_where_it_was(
    server: Server, operator: Operator, consumer: Consumer, handled: list[str]
) -> None:
    before = _publish(server, "before")
    eventually(lambda: sorted(handled) == sorted(before), what="all are handled")
    _wait_until_acknowledged(server)
    with server.client(protocol=2) as client:
        for shard in range(8):
            client.xgroup_destroy(f"orders:{shard}", "billing")
    after = _publish(server, "after")
    eventually(lambda: sorted(handled) == sorted(before + after), within_seconds=20, what="only what is new comes")
