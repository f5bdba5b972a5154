"""The command line against a live group: what it prints, for people and for machines, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from redis_stream_coord.cli.app import cli
from redis_stream_coord.cli.exits import Exit
from redis_stream_coord.keys import StreamKeys
from tests.integration.commandline import WHO, Answer, CommandLine
from tests.integration.kit import GROUP, SLOW, Bench, Crew, Peer
from tests.servers import free_port
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
SHAPES = Path(__file__).with_name("cli_shapes.json")
REWRITE = "REDIS_STREAM_COORD_REWRITE_SHAPES"

pytestmark = pytest.mark.parametrize("server", ["redis7"], indirect=True)


@pytest.fixture
def run(bench: Bench) -> CommandLine:
    return CommandLine(bench.url)


@pytest.fixture
def group(bench: Bench) -> Bench:
    """A group with two members in the middle of a rebalance, and entries: something of everything."""
    bench.create(shards=2, timings=SLOW, request_id="OPS-1")
    one = Peer(bench, "a")
    one.beat()
    bench.producer.publish({"n": "1"}, key=bench.key_of(0), event_id="payment-7")
    bench.fill(1, 2)
    bench.redis.xreadgroup(GROUP, "a", {bench.stream_key(0): ">"}, count=1)
    Peer(bench, "b").beat()
    bench.admin.retain(bench.stream, retention="consumed", reason="a test")
    return bench


# --- for machines ---------------------------------------------------------------------------------------------------


def shape(value: Any) -> Any:
    """The names and the kinds of what is in a document, without its values."""
    if isinstance(value, dict):
        if value and all(re.fullmatch(r"\d+", name) for name in value):
            return {"<number>": shape(next(iter(value.values())))}
        return {name: shape(one) for name, one in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return {type(None): "null", bool: "bool", str: "text"}.get(type(value), "number")


def _reads(bench: Bench) -> dict[str, Sequence[str]]:
    names = (bench.stream, GROUP)
    return {
        "health": ["health"],
        "groups": ["groups"],
        "describe": ["describe", *names],
        "members": ["members", *names],
        "assignments": ["assignments", *names],
        "routing": ["routing", bench.stream],
        "shards": ["shards", *names],
        "removed": ["removed", bench.stream],
        "messages": ["messages", bench.stream, "--group", GROUP],
        "audit": ["audit", *names],
        "events": ["events", *names],
        "triage": ["triage", *names],
        "migrations": ["migrations", bench.stream],
        "compatibility": ["compatibility"],
        "verify": ["verify"],
        "acl": ["acl", "MEMBER"],
    }


def _mutations(bench: Bench) -> dict[str, Sequence[str]]:
    names = (bench.stream, GROUP)
    return {
        "create": ["create", *names, "--exist-ok"],
        "retain": ["retain", bench.stream, "--retention", "all"],
        "scale": ["scale", bench.stream, "--shards", "3", "--no-wait"],
        "rollback": ["rollback", bench.stream, "--yes", "--no-wait"],
        "wait": ["wait", bench.stream],
        "trim": ["trim", bench.stream, "--yes"],
        "freeze": ["freeze", *names],
        "unfreeze": ["unfreeze", *names],
        "reconcile": ["reconcile", *names],
        "repair": ["repair", "index"],
        "recreate": ["recreate", *names, "--yes"],
        "limit": ["limit", *names, "--mutations", "1000"],
        "seek": ["seek", *names, "--to", "oldest", "--yes"],
        "delete": ["delete", *names, "--force", "--yes"],
    }


def test_json_documents_keep_their_shape(group: Bench, run: CommandLine) -> None:
    """What scripts rely on. New names may come; REDIS_STREAM_COORD_REWRITE_SHAPES=1 writes the file anew."""
    found = {name: shape(run(*words, "--json").data) for name, words in _reads(group).items()}
    found |= {name: shape(run.json(*words, *_who(name))) for name, words in _mutations(group).items()}
    if os.environ.get(REWRITE):
        SHAPES.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert lost(json.loads(SHAPES.read_text()), found) == []


def _who(command: str) -> Sequence[str]:
    """Waiting for what somebody has begun needs no reason."""
    return () if command == "wait" else WHO


def lost(before: Any, now: Any, at: str = "") -> list[str]:
    """What was in a document and is not, or is of another kind."""
    if isinstance(before, dict) and isinstance(now, dict):
        gone = [f"{at}.{name}" for name in before if name not in now]
        return gone + [one for name in before if name in now for one in lost(before[name], now[name], f"{at}.{name}")]
    if isinstance(before, list) and isinstance(now, list):
        return lost(before[0], now[0], f"{at}[]") if before and now else []
    return [] if before == now or "null" in (before, now) else [at]


def test_every_command_has_a_document_and_its_envelope(group: Bench, run: CommandLine) -> None:
    assert set(cli.commands) - set(_reads(group)) - set(_mutations(group)) == {
        "completion",
        "plan",
        "apply",
        "backup",
        "restore",
    }
    for name, words in _reads(group).items():
        document = run(*words, "--json").document
        assert (document["schema"], document["command"], document["ok"]) == (1, name, True)
        assert set(document) == {"schema", "command", "ok", "data"}


def test_values_are_those_of_the_group(group: Bench, run: CommandLine) -> None:
    names = (group.stream, GROUP)
    assert run.json("groups") == [{"stream": group.stream, "group": GROUP}]
    assignment = run.json("assignments", *names)
    assert assignment["current"] == {"0": "a", "1": "a"}
    assert assignment["converged"] is False
    (revoke,) = assignment["revokes"]
    assert (revoke["holder"], revoke["target"]) == ("a", "b")
    assert [one["status"] for one in run.json("members", *names)] == ["active", "active"]
    by_shard = {one["shard"]: one for one in run.json("shards", *names)}
    assert by_shard[0]["reading"]["pending"] == 1
    assert by_shard[1]["reading"]["lag"] == 2
    (entry,) = run.json("messages", group.stream, "--event-id", "payment-7", "--group", GROUP)
    assert entry["fields"] == {"n": "1"}
    assert entry["pending"]["consumer"] == "a"
    assert [one["action"] for one in run.json("audit", group.stream)] == ["retain"]
    assert run.json("events", *names, "--count", "1")[0]["type"] in ("shard_revoking", "target_changed")


def test_bytes_that_are_no_text_come_as_base64(group: Bench, run: CommandLine) -> None:
    group.producer.publish({"n": b"\xff\x00"}, key=group.key_of(0))
    entry = run.json("messages", group.stream, "--shard", "0", "--newest", "--count", "1")[0]
    assert entry["fields"] == {"n": {"base64": "/wA="}}


# --- for people -----------------------------------------------------------------------------------------------------


def test_people_get_tables(group: Bench, run: CommandLine) -> None:
    names = (group.stream, GROUP)
    assert re.search(rf"{group.stream}\s+{GROUP}\s+OK\s+2\s+2", run.ok("health"))
    assert re.search(r"a\s+active\s+\d+\.\d s\s+1\s+0\s+1\s+-", run.ok("members", *names))
    assert "not converged" in run.ok("assignments", *names)
    assert re.search(r"1\s+a\s+b\s+\d\.\d s\s+(59|60)\.\d s", run.ok("assignments", *names))
    assert re.search(r"0\s+a\s+assigned\s+1\s+1\s+0\s+\d+\.\d s\s+\d+\.\d KiB\s+\d+\s+open", run.ok("shards", *names))
    assert re.search(r"create\s+accepted\s+\d+\s+tests\s+default\s+a test\s+OPS-1", run.ok("audit", *names))
    assert "member_joined" in run.ok("events", *names)
    assert "2 shards by jump-v1" in run.ok("routing", group.stream)
    assert "n=1" in run.ok("messages", group.stream)
    assert "incarnation" in run.ok("describe", *names)


def test_what_looks_like_markup_is_printed_as_it_is(group: Bench, run: CommandLine) -> None:
    reason = "[red]not[/red] a colour"
    run.ok("retain", group.stream, "--retention", "all", "--requested-by", "[bold]me", "--reason", reason)
    out = run.ok("audit", group.stream)
    assert reason in out
    assert "[bold]me" in out


def test_watch_goes_on_until_it_is_interrupted(group: Bench) -> None:
    command = [sys.executable, "-m", "redis_stream_coord.cli", "groups", "--json", "--watch", "--interval", "0.05"]
    process = subprocess.Popen([*command, "--redis", group.url], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    documents = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert all(document["data"][0]["stream"] == group.stream for document in documents)


# --- exit codes and errors ------------------------------------------------------------------------------------------


def test_exit_codes_are_those_that_are_documented(bench: Bench) -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (ROOT / "docs" / "cli.md").read_text("utf-8"), re.MULTILINE)
    assert {name: int(number) for number, name in rows} == {code.name: int(code) for code in Exit}


def _error(answer: Answer, code: Exit) -> dict[str, Any]:
    assert answer.exit == code, answer
    document = answer.document
    assert document["ok"] is False
    assert document["exit"] == code
    found: dict[str, Any] = document["error"]
    return found


def test_errors_have_their_exit_codes(group: Bench, run: CommandLine) -> None:
    names = (group.stream, GROUP)
    assert _error(run("describe", group.stream, "none", "--json"), Exit.NOT_FOUND)["word"] == "GROUP_NOT_FOUND"
    assert _error(run("routing", "none", "--json"), Exit.NOT_FOUND)["hint"].startswith("Check its name")
    assert run("messages", group.stream, "--event-id", "none", "--json").exit == Exit.NOT_FOUND
    assert _error(run("create", *names, *WHO, "--json"), Exit.CONFLICT)["type"] == "AlreadyExistsError"
    assert _error(run("create", *names, "--shards", "5", *WHO, "--json"), Exit.CONFLICT)["type"] == "ConflictError"
    assert _error(run("delete", *names, "--yes", *WHO, "--json"), Exit.CONFLICT)["word"] == "NOT_EMPTY"
    assert _error(run("describe", "a{b}", GROUP, "--json"), Exit.USAGE)["type"] == "ConfigError"
    group.redis.hset(group.keys.metadata, "shard:0", "rubbish")
    assert _error(run("describe", *names, "--json"), Exit.METADATA)["word"] == "CORRUPT_METADATA"
    assert run("health", "--json").exit == Exit.PROBLEMS
    nobody = ("--redis", f"redis://127.0.0.1:{free_port()}", "--timeout", "0.2", "--json")
    assert _error(run("groups", *nobody), Exit.UNAVAILABLE)["retriable"] is True
    assert run("health", *nobody).exit == Exit.UNAVAILABLE


def test_an_error_says_what_to_do_next(group: Bench, run: CommandLine) -> None:
    answer = run("describe", group.stream, "none")
    assert answer.exit == Exit.NOT_FOUND
    assert answer.out == ""
    assert answer.err.startswith("error: there is no such group")
    assert "To create it:" in answer.err


def test_a_missing_right_is_named(group: Bench, run: CommandLine) -> None:
    line = run.ok("acl", "READ", "--user", "looker").strip()
    group.redis.execute_command(*line.split())
    as_reader = {"REDIS_STREAM_COORD_USERNAME": "looker", "REDIS_STREAM_COORD_PASSWORD": "change-me"}
    assert run("groups", **as_reader).exit == Exit.OK
    answer = run("retain", group.stream, "--retention", "all", *WHO, **as_reader)
    assert answer.exit == Exit.DENIED
    assert "hint: The Redis user lacks the rule" in answer.err
    assert "+xadd" in answer.err


def test_usage_errors_say_what_is_missing(group: Bench, run: CommandLine) -> None:
    answer = run("retain", group.stream, "--retention", "all")
    assert answer.exit == Exit.USAGE
    assert "--requested-by and --reason must be given" in answer.err
    answer = run("retain", group.stream, "--retention", "all", "--requested-by", "me")
    assert "--reason must be given" in answer.err
    answer = run("groups", REDIS_STREAM_COORD_URL="")
    assert answer.exit == Exit.USAGE
    assert "REDIS_STREAM_COORD_URL" in answer.err
    assert run("seek", group.stream, GROUP, "--to", "10:99", *WHO).exit == Exit.USAGE


def test_health_may_require_members(bench: Bench, run: CommandLine) -> None:
    bench.create(shards=1)
    assert run("health").exit == Exit.OK
    assert run("health", "--members-required").exit == Exit.PROBLEMS


# --- changes --------------------------------------------------------------------------------------------------------


def test_changes_are_made_with_their_request(bench: Bench, run: CommandLine) -> None:
    names = (bench.stream, GROUP)
    answer = run("create", *names, "--shards", "3", "--lease", "20", *WHO, "--request-id", "OPS-7")
    assert answer.exit == 0
    assert "3 shards" in answer.out
    assert "request id OPS-7" in answer.err
    assert bench.view().timings.lease_seconds == 20
    again = run.json("create", *names, "--shards", "3", "--lease", "20", *WHO, "--request-id", "OPS-7")
    assert again["request_id"] == "OPS-7"
    (entry,) = run.json("audit", *names)
    assert (entry["request_id"], entry["requested_by"], entry["reason"]) == ("OPS-7", "tests", "a test")
    ids = bench.fill(0, 3)
    run.ok("seek", *names, "--to", ids[1], "--shard", "0", "--yes", *WHO)
    assert {one["shard"]: one["reading"]["delivered_id"] for one in run.json("shards", *names)}[0] == ids[1]
    run.ok("retain", bench.stream, "--retention", "1000", *WHO)
    assert run.json("routing", bench.stream)["layout"]["retention"] == "keep:1000"
    run.ok("delete", *names, "--yes", *WHO)
    assert run.json("groups") == []


def test_dry_runs_change_nothing(group: Bench, run: CommandLine) -> None:
    names = (group.stream, GROUP)
    before = group.state()
    for words, expected in (
        (["create", *names], "be refused: the group exists"),
        (["create", *names, "--exist-ok"], "accept the group"),
        (["create", group.stream, "other"], "create group other on the 2 shards"),
        (["create", group.stream, "other", "--shards", "3"], "be refused: the stream has 2 shards"),
        (["create", "new", "other"], "be refused: the stream is new"),
        (["create", "new", "other", "--shards", "3"], "and stream new of 3 shards"),
        (["delete", *names], "with 2 members, 2 shards and 1 pending"),
        (["retain", group.stream, "--retention", "all"], "from consumed to all"),
        (["seek", *names, "--to", "oldest", "--shard", "1"], "on shards 1 to oldest"),
    ):
        assert expected in run.ok(*words, "--dry-run")
        assert run.json(*words, "--dry-run")["dry_run"] is True
    assert group.state() == before
    assert run.json("groups") == [{"stream": group.stream, "group": GROUP}]
    assert group.redis.exists(StreamKeys("new").record) == 0


def test_nothing_is_destroyed_without_a_yes(group: Bench, run: CommandLine) -> None:
    answer = run("delete", group.stream, GROUP, "--force", *WHO)
    assert answer.exit == Exit.ABORTED
    assert "Say so with --yes." in answer.err
    assert group.view().members


def test_a_person_is_asked(group: Bench) -> None:
    """On a terminal: no leaves everything, yes deletes."""
    command = [sys.executable, "-m", "redis_stream_coord.cli", "delete", group.stream, GROUP, "--force", *WHO]
    for said, code in (("n\n", Exit.ABORTED), ("y\n", Exit.OK)):
        assert group.view().members
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [*command, "--redis", group.url],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        os.write(ours, said.encode())
        _, err = process.communicate(timeout=20)
        os.close(ours)
        os.close(theirs)
        assert f"Delete group {GROUP} of stream {group.stream} with 2 members" in err
        assert process.returncode == code
    assert group.monitor.groups() == []


# --- the program ----------------------------------------------------------------------------------------------------


def test_without_the_extra_it_says_so_in_one_sentence(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise ImportError('no click', name='click')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "redis_stream_coord.cli", "groups"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "redis-stream-coord needs the extra 'cli' (click is not installed): pip install 'redis-stream-coord[cli]'\n"
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed(bench: Bench, run: CommandLine, shell: str) -> None:
    assert "_REDIS_STREAM_COORD_COMPLETE" in run.ok("completion", shell)


def test_completion_completes(bench: Bench) -> None:
    environment = {
        **os.environ,
        "_REDIS_STREAM_COORD_COMPLETE": "bash_complete",
        "COMP_WORDS": "redis-stream-coord as",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "redis_stream_coord.cli"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "plain,assignments"


def test_every_option_is_explained(bench: Bench) -> None:
    for name, command in cli.commands.items():
        assert command.help, name
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                # Names that say it themselves.
                named = parameter.name in ("start", "heartbeat", "lease", "rebalance", "routing")
                assert parameter.help or named, f"{name} {parameter.name}"


def test_it_looks_at_a_live_group(bench: Bench, crew: Crew, run: CommandLine) -> None:
    bench.create(shards=2)
    crew.start("a").owns(0, 1)
    assert run.json("assignments", bench.stream, GROUP)["converged"] is True
    eventually(lambda: run("health", "--members-required").exit == 0, what="it is healthy")
