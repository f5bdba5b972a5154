"""The published suite, in memory and on every kind of server; and that it can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import attrs
import pytest

from redis_stream_coord import RedisSettings
from redis_stream_coord.testing import Environment
from redis_stream_coord.testing.conformance import Bench, Case, MemoryBench, cases
from redis_stream_coord.testing.conformance.__main__ import main
from redis_stream_coord.testing.conformance.wire import compare, send_with
from tests.servers import ClusterServers, Server

every_case = pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)


@every_case
def test_in_memory(case: Case, seed: int) -> None:
    bench = MemoryBench(seed=seed)
    try:
        case.run(bench)
    finally:
        bench.close()


@every_case
def test_on_a_server(case: Case, server: Server) -> None:
    client = server.client(protocol=2)
    bench = Bench(RedisSettings(server.url))
    try:
        case.run(bench)
    finally:
        bench.close()
    with client:
        assert client.keys() == []


@pytest.mark.parametrize("pattern", ["reading.*", "publishing.*", "consuming.handoff*", "wire.*"])
def test_command_on_a_cluster(cluster: ClusterServers, pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--redis", cluster.url, "--only", pattern]) == 0, capsys.readouterr().out


def test_random_commands_answer_as_in_memory(server: Server, seed: int) -> None:
    client = server.client(protocol=2)
    bench = Bench(RedisSettings(server.url))
    keys = ("{x}:stream", "{x}:hash", "{x}:zset")
    for number in range(seed, seed + 15):
        with Environment() as env:
            compare(number, keys, send_with(bench.runner, keys[0]), send_with(env.monitor._runner, keys[0]))
        client.delete(*keys)
    bench.close()
    client.close()


def test_each_case_promises_something_of_its_own() -> None:
    promises = [case.promise for case in cases()]
    assert len(set(promises)) == len(promises) == len({case.name for case in cases()})
    assert all(promise.endswith(".") for promise in promises)


# --- the command ----------------------------------------------------------------------------------------------------


def test_command_prints_a_table_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "reading.*"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    chosen = [case.name for case in cases() if case.name.startswith("reading.")]
    assert [row.split()[0] for row in rows] == chosen
    assert all(row.split()[1] == "ok" for row in rows)
    assert last == f"{len(chosen)} of {len(chosen)} passed"


def test_command_says_what_failed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Bench) -> None:
        raise AssertionError("on purpose")

    broken = [attrs.evolve(case, run=fail) for case in cases()[:1]]
    monkeypatch.setattr("redis_stream_coord.testing.conformance.__main__.cases", lambda: broken)
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert "AssertionError: on purpose" in out
    assert broken[0].promise in out


def test_command_lists_and_refuses_what_matches_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(cases())
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])


def test_server_that_cannot_be_used_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    for url, why in (("redis://127.0.0.1:1", "127.0.0.1:1"), ("nonsense", "URL scheme"), ("http://x", "'http'")):
        assert main(["--redis", url, "--timeout", "0.2"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert why in err
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_password_that_is_missing_or_wrong_is_said_once(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    # A user who may do everything with what is named as the suite's keys are, and nothing with others.
    with server.client(protocol=2) as client:
        client.acl_setuser("tester", enabled=True, passwords=["+right"], keys=["conformance-*"], commands=["+@all"])
        url = server.url.replace("//", "//tester:{}@")
        assert main(["--redis", url.format("wrong")]) == 2
        assert "Check user name and password" in capsys.readouterr().err
        assert main(["--redis", url.format("right"), "--only", "[pw]*"]) == 0, capsys.readouterr().out
        client.acl_deluser("tester")


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_command_leaves_what_is_there_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_on_the_way(bench: Bench) -> None:
        bench.create()
        bench.fill()
        with Environment() as env:
            keys = (bench.dead, f"{bench.stream}:{{x}}", f"{bench.stream}:{{y}}")
            bench.others.update(keys)
            compare(1, keys, send_with(bench.runner, keys[0]), lambda _: env.monitor.groups())

    broken = [attrs.evolve(case, run=fail_on_the_way) for case in cases()[:1]]
    monkeypatch.setattr("redis_stream_coord.testing.conformance.__main__.cases", lambda: broken)
    with server.client(protocol=2) as client:
        client.set("mine", "1")
        client.xadd("conformance-mine:0", {"n": "1"})
        client.sadd("redis-stream:coord:groups", "orders:billing")
        before = {key: client.dump(key) for key in client.scan_iter()}
        assert main(["--redis", server.url]) == 1
        assert {key: client.dump(key) for key in client.scan_iter()} == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_command_that_is_ended_deletes_its_keys(
    server: Server, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(bench: Bench) -> None:
        bench.create()
        bench.start("a", print)
        os.kill(os.getpid(), number)
        bench.pass_time(20)

    broken = [attrs.evolve(case, run=ended) for case in cases()[:3]]
    monkeypatch.setattr("redis_stream_coord.testing.conformance.__main__.cases", lambda: broken)
    before = signal.getsignal(number)
    assert main(["--redis", server.url]) == 128 + number
    assert signal.getsignal(number) is before
    assert "deleted" in capsys.readouterr().out
    with server.client(protocol=2) as client:
        assert client.keys() == []


def test_command_does_not_pass_without_assertions() -> None:
    command = [sys.executable, "-O", "-m", "redis_stream_coord.testing.conformance", "--only", "damage.missing_h*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "assertions are switched off" in done.stderr


def test_command_shows_what_was_there_instead(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fakeredis._socket import FakeSocket

    real = FakeSocket._run_command

    def run(self: object, func: object, sig: object, args: object, from_script: bool) -> object:
        if from_script and sig.name.upper() == "XDEL":  # type: ignore[attr-defined]
            return 0
        return real(self, func, sig, args, from_script)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeSocket, "_run_command", run)
    assert main(["--only", "reading.deleted_entries_are_named"]) == 1
    out = capsys.readouterr().out
    assert "reading.py:" in out
    assert "assert list(first.gone) == [entries[1]]" in out
    assert "entries = ['" in out


# --- it can fail: servers that lack something -------------------------------------------------------------------------


def first_failing(monkeypatch: pytest.MonkeyPatch, command: str, answer: object) -> str | None:
    """The first case that fails when a command of the server in memory always gives one answer."""
    from fakeredis._socket import FakeSocket

    with monkeypatch.context() as patched:
        real = FakeSocket._run_command

        def run(self: object, func: object, sig: object, args: object, from_script: bool) -> object:
            if from_script and sig.name.upper() == command:  # type: ignore[attr-defined]
                return answer
            return real(self, func, sig, args, from_script)  # type: ignore[arg-type]

        patched.setattr(FakeSocket, "_run_command", run)
        for case in cases():
            if case.name.startswith(("consuming.", "wire.")):
                continue
            bench = MemoryBench()
            try:
                case.run(bench)
            except Exception:
                return case.name
            finally:
                bench.close()
    return None


@pytest.mark.parametrize(
    ("command", "answer"),
    [("XACK", 0), ("XDEL", 0), ("XTRIM", 0), ("HDEL", 0), ("ZADD", 0), ("XCLAIM", []), ("XGROUP DELCONSUMER", 0)],
)
def test_command_that_does_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch, command: str, answer: object) -> None:
    assert first_failing(monkeypatch, command, answer)
