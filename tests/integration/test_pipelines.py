"""Desired groups from a file: plan, apply, two operators at once; and the examples of GitOps and Terraform."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from redis_stream_coord import Admin, AsyncAdmin, ConflictError, Desired
from redis_stream_coord.cli.exits import Exit
from tests.integration.commandline import WHO, CommandLine
from tests.integration.kit import GROUP, SLOW, Bench, Crew, Peer

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.parametrize("server", ["redis7"], indirect=True)


@pytest.fixture
def run(bench: Bench) -> CommandLine:
    return CommandLine(bench.url)


def desired(stream: str, shards: int, *groups: str) -> Desired:
    return Desired.parse(json.dumps({"version": 1, "streams": {stream: {"shards": shards, "groups": list(groups)}}}))


def write(folder: Path, stream: str, shards: int, *groups: str) -> str:
    file = folder / "groups.json"
    file.write_text(json.dumps({"version": 1, "streams": {stream: {"shards": shards, "groups": list(groups)}}}))
    return str(file)


# --- plan and apply -------------------------------------------------------------------------------------------------


def test_what_is_missing_is_created_and_nothing_else_is_done(bench: Bench, run: CommandLine, tmp_path: Path) -> None:
    file = write(tmp_path, bench.stream, 4, "billing", "shipping")
    assert f"+ create group billing of {bench.stream} and the stream, with 4 shards" in run.ok("plan", file)
    assert run("plan", file, "--detailed-exitcode").exit == Exit.DRIFT
    assert run.json("groups") == []
    run.ok("apply", file, *WHO, "--request-id", "OPS-17")
    assert [one["group"] for one in run.json("groups")] == ["billing", "shipping"]
    assert run.json("routing", bench.stream)["layout"]["shards"] == 4
    assert "nothing has drifted" in run.ok("plan", file)
    assert run("plan", file, "--detailed-exitcode").exit == Exit.OK
    before = bench.redis.xlen(f"redis-stream:coord:{{{bench.stream}}}:audit")
    assert "nothing has drifted" in run.ok("apply", file, *WHO)
    assert bench.redis.xlen(f"redis-stream:coord:{{{bench.stream}}}:audit") == before
    # Each change is in the audit log, under the request id of the whole.
    (entry,) = run.json("audit", bench.stream, "billing")
    assert (entry["action"], entry["request_id"], entry["reason"]) == ("create", "OPS-17/create", "a test")
    assert [one["action"] for one in run.json("audit", bench.stream)] == ["apply"]


def test_the_number_of_shards_follows_the_file(bench: Bench, crew: Crew, run: CommandLine, tmp_path: Path) -> None:
    bench.create(shards=2)
    member = crew.start("a")
    member.owns(0, 1)
    ids = bench.fill(0, 3)
    file = write(tmp_path, bench.stream, 4, GROUP)
    assert "2 -> 4 shards" in run.ok("plan", file)
    run.ok("apply", file, *WHO)
    member.owns(0, 1, 2, 3)
    member.finishes(*ids)
    assert "nothing has drifted" in run.ok("plan", file)


def test_what_is_not_declared_is_left_alone_unless_it_is_asked_for(
    bench: Bench, run: CommandLine, tmp_path: Path
) -> None:
    bench.create(shards=2)
    bench.admin.create(bench.stream, group="old", reason="a test")
    file = write(tmp_path, bench.stream, 2, GROUP)
    assert f"not declared, and left alone: group old of {bench.stream}" in run.ok("plan", file)
    run.ok("apply", file, *WHO)
    assert len(run.json("groups")) == 2
    assert f"- delete group old of {bench.stream}" in run.ok("plan", file, "--prune")
    assert run("apply", file, "--prune", *WHO).exit == Exit.ABORTED
    run.ok("apply", file, "--prune", "--yes", *WHO)
    assert run.json("groups") == [{"stream": bench.stream, "group": GROUP}]


def test_two_operators_at_once_one_wins_and_the_other_is_told_both_versions(bench: Bench) -> None:
    bench.create(shards=2)
    wanted = desired(bench.stream, 3, GROUP)
    with Admin(bench.url, requested_by="one") as one, Admin(bench.url, requested_by="two") as two:
        first, second = one.plan(wanted), two.plan(wanted)
        version = first.revisions[bench.stream]
        one.apply(first, reason="a test", wait=False)
        with pytest.raises(ConflictError) as caught:
            two.apply(second, reason="a test", wait=False)
    stored = re.search(r"stored (\d+), planned on (\d+)", str(caught.value))
    assert stored is not None
    assert int(stored[2]) == version
    assert int(stored[1]) > version
    refused = [one for one in bench.monitor.audit(bench.stream) if one.outcome == "refused"]
    assert [(one.action, one.requested_by, one.word) for one in refused] == [("apply", "two", "REVISION_CONFLICT")]


def test_a_reviewed_plan_is_not_applied_to_something_else(bench: Bench, run: CommandLine, tmp_path: Path) -> None:
    bench.create(shards=2)
    file, plan = write(tmp_path, bench.stream, 3, GROUP), str(tmp_path / "plan.json")
    run.ok("plan", file, "--out", plan)
    bench.admin.retain(bench.stream, retention="consumed", reason="meanwhile")
    answer = run("apply", file, "--plan", plan, *WHO, "--json")
    assert answer.exit == Exit.CONFLICT
    assert answer.document["error"]["word"] == "REVISION_CONFLICT"
    assert run.json("routing", bench.stream)["layout"]["shards"] == 2
    run.ok("plan", file, "--out", plan)
    run.ok("apply", file, "--plan", plan, "--no-wait", *WHO)
    assert run.json("migrations", bench.stream)["target"] == 3
    other = write(tmp_path, "another", 3, GROUP)
    assert run("apply", other, "--plan", plan, *WHO).exit == Exit.USAGE


def test_the_same_request_goes_on_where_it_stopped(bench: Bench) -> None:
    wanted = desired(bench.stream, 2, "one", "two")
    with Admin(bench.url, requested_by="tests") as admin:
        plan = admin.plan(wanted)
        # It stopped after the first group.
        admin.create(bench.stream, group="one", shards=2, reason="a test", request_id="r/create")
        admin.apply(admin.plan(wanted), reason="a test", request_id="r")
        assert [name for _, name in bench.monitor.groups()] == ["one", "two"]
        assert admin.plan(wanted).changes == ()
        assert plan.revisions == {bench.stream: 0}


def test_apply_from_coroutines(bench: Bench) -> None:
    async def work() -> list[str]:
        async with AsyncAdmin(bench.url, requested_by="tests") as admin:
            plan = await admin.plan(desired(bench.stream, 2, "one"))
            return [str(change) for change in await admin.apply(plan, reason="a test")]

    assert asyncio.run(work()) == [f"create group one of {bench.stream} and the stream, with 2 shards"]


def test_what_runs_is_left_alone(bench: Bench, run: CommandLine, tmp_path: Path) -> None:
    bench.create(shards=2, timings=SLOW)
    peer = Peer(bench, "a")
    peer.beat()
    bench.fill(0, 3)
    bench.redis.xreadgroup(GROUP, "a", {bench.stream_key(0): ">"}, count=2)
    before, pending = bench.state(), bench.pending(0)
    run.ok("apply", write(tmp_path, bench.stream, 2, GROUP), *WHO)
    assert bench.state() == before
    assert bench.pending(0) == pending


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "is not JSON"),
        ('{"version": 2, "streams": {}}', "version 2"),
        ('{"version": 1, "streams": []}', "must be an object"),
        ('{"version": 1, "streams": {"a": {"shards": 0, "groups": ["g"]}}}', "from 1 to"),
        ('{"version": 1, "streams": {"a": {"shards": 2, "groups": []}}}', "one at least"),
        ('{"version": 1, "streams": {"a": {"shards": 2, "groups": ["g", "g"]}}}', "stands twice"),
        ('{"version": 1, "streams": {"a": {"shards": 2, "groups": ["g"], "concurrency": 4}}}', "'concurrency'"),
        ('{"version": 1, "streams": {"a{b}": {"shards": 2, "groups": ["g"]}}}', "cannot name a stream"),
    ],
)
def test_a_file_that_says_something_else_is_refused(
    bench: Bench, run: CommandLine, tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "groups.json"
    file.write_text(text)
    answer = run("plan", str(file), "--json")
    assert answer.exit == Exit.USAGE
    assert says in answer.document["error"]["message"]


# --- the examples ---------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(bench: Bench, tmp_path: Path) -> dict[str, str]:
    """With the program in the PATH, whether or not the package is installed as a user would."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "redis-stream-coord"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m redis_stream_coord.cli "$@"\n')
    program.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(EXAMPLES.parent),
        "REDIS_STREAM_COORD_URL": bench.url,
        "CHANGE": "commit-1",
        "CHANGED_BY": "tests",
    }


def shell(
    command: list[str], folder: Path, environment: dict[str, str], **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False, **options
    )


def test_gitops_pipeline(bench: Bench, run: CommandLine, environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "gitops"
    shutil.copytree(EXAMPLES / "gitops", folder)
    planned = shell(["./pipeline.sh", "plan"], folder, environment)
    assert planned.returncode == 0, planned.stderr
    assert "create group billing of orders and the stream, with 8 shards" in planned.stdout
    assert run.json("groups") == []
    applied = shell(["./pipeline.sh", "apply"], folder, environment)
    assert applied.returncode == 0, applied.stderr
    assert len(run.json("groups")) == 3
    (entry, *_) = run.json("audit", "orders", "billing")
    assert (entry["requested_by"], entry["reason"]) == ("pipeline for tests", "change commit-1")
    # Nothing to do any more.
    assert shell(["./pipeline.sh", "plan"], folder, environment).stdout.strip() == "nothing has drifted"


def test_terraform_example(bench: Bench, run: CommandLine, environment: dict[str, str], tmp_path: Path) -> None:
    """What terraform would run, run as it would: the program of the data source, and the command of the provisioner."""
    folder = tmp_path / "terraform"
    shutil.copytree(EXAMPLES / "terraform", folder)
    text = (folder / "main.tf").read_text()
    program = json.loads(re.search(r"program = (\[.*\])", text)[1].replace("${path.module}", "."))  # type: ignore[index]
    query = json.dumps({"file": "./groups.json"})

    def ask() -> dict[str, str]:
        done = shell(program, folder, environment, input=query)
        assert done.returncode == 0, done.stderr
        answer: dict[str, str] = json.loads(done.stdout)
        assert all(isinstance(value, str) for value in answer.values())
        return answer

    before = ask()
    assert before["changes"] == "1"
    command = json.loads(re.search(r'command = (".*")\n', text)[1])  # type: ignore[index]
    done = shell(["sh", "-c", command], folder, {**environment, "FILE": "./groups.json"})
    assert done.returncode == 0, done.stderr
    assert run.json("groups") == [{"stream": "orders", "group": "billing"}]
    after = ask()
    assert (after["changes"], after["summary"]) == ("0", "nothing has drifted")
    assert after["trigger"] != before["trigger"]
    (entry,) = run.json("audit", "orders", "billing")
    assert entry["requested_by"] == "terraform for tests"
    # Redis is not there: terraform is told why.
    failed = shell(program, folder, {**environment, "REDIS_STREAM_COORD_URL": "redis://127.0.0.1:1"}, input=query)
    assert failed.returncode != 0
    assert "got no answer from Redis" in failed.stderr
