"""Triage of reshardings on live groups, and the commands about them."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from redis_stream_coord import Finding, Monitor
from redis_stream_coord.cli.exits import Exit
from tests.integration.commandline import WHO, CommandLine
from tests.integration.kit import GROUP, SLOW, STEADY, Bench, Crew, Peer
from tests.waiting import eventually

pytestmark = pytest.mark.parametrize("server", ["redis7"], indirect=True)


@pytest.fixture
def run(bench: Bench) -> CommandLine:
    return CommandLine(bench.url)


def walk(bench: Bench, code: str, **options: int | float) -> Finding | None:
    found = bench.monitor.triage(bench.stream, group=GROUP, **options)  # type: ignore[arg-type]
    return next((one for one in found if one.checklist == "resharding" and one.code == code), None)


def finds(bench: Bench, code: str, **options: int | float) -> Finding:
    return eventually(lambda: walk(bench, code, **options), what=f"triage finds {code}")


def begin(bench: Bench, shards: int) -> None:
    bench.admin.scale(bench.stream, shards=shards, reason="a test", wait=False)


def draining(bench: Bench) -> Finding:
    """Wait until it is decided, and waits for entries."""

    def look() -> Finding | None:
        found = walk(bench, "WAITS")
        return found if found is not None and "DRAINING" in found.text else None

    return eventually(look, what="it drains")


def test_nothing_under_way(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    found = [one for one in bench.monitor.triage(bench.stream, group=GROUP) if one.checklist == "resharding"]
    assert [(one.step, one.level) for one in found] == [(1, "ok"), (2, "ok"), (3, "ok"), (4, "ok")]
    assert finds(bench, "UNEXPECTED_COUNT", expected_shards=8).level == "act"


def test_stuck_resharding(bench: Bench, crew: Crew, run: CommandLine) -> None:
    """A handler hangs on a shard of the old layout: the resharding waits for it, and triage says for whom."""
    bench.create(shards=2, timings=STEADY)
    member = crew.start("a")
    member.owns(0, 1)
    member.recorder.hold()
    bench.fill(1, 3)
    begin(bench, 4)
    found = draining(bench)
    assert found.shard == 1
    assert found.member == "a"
    assert "2 -> 4 is DRAINING" in found.text
    assert "group billing: shard 1" in found.text
    assert "3 entries" in found.text
    assert "Member a has that shard" in found.next
    assert found.level == "wait"
    # Past the time that a drain is expected to take, somebody has to look.
    assert finds(bench, "WAITS", drain_seconds=0.0).level == "act"
    assert finds(bench, "CAN_GO_BACK", drain_seconds=0.0).level == "wait"
    assert run("triage", bench.stream, GROUP, "--drain-window", "0").exit == Exit.PROBLEMS
    migration = run.json("migrations", bench.stream)
    assert (migration["state"], migration["source"], migration["target"]) == ("DRAINING", 2, 4)
    assert migration["active"] is True
    assert [one["shard"] for one in migration["waits"]] == [1]
    assert run("wait", bench.stream, "--wait-timeout", "0.3").exit == Exit.UNFINISHED
    member.recorder.release()
    assert run.json("wait", bench.stream)["resharding"]["state"] == "COMPLETED"
    member.owns(0, 1, 2, 3)
    eventually(lambda: walk(bench, "WAITS") is None, what="nothing is in the way")
    assert finds(bench, "OK", expected_shards=4).step == 1


def test_group_without_members_is_in_the_way(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    bench.fill(0, 1)
    begin(bench, 3)
    assert finds(bench, "NOT_DECIDED").level == "wait"
    assert finds(bench, "NO_MEMBERS").level == "act"


def test_another_group_is_in_the_way(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=STEADY)
    bench.admin.create(bench.stream, group="shipping", timings=STEADY, reason="a test")
    crew.start("a").owns(0, 1)
    bench.fill(0, 2)
    begin(bench, 3)
    # The group that has a consumer is done soon; then it waits for the other one alone.
    eventually(lambda: "group shipping" in draining(bench).text, what="the group that is in the way")
    assert "triage <stream> shipping" in draining(bench).next


def test_nobody_carries_it_on(bench: Bench) -> None:
    bench.create(shards=2)  # leases of 1.2 s
    begin(bench, 3)
    # It was begun, and neither a member nor an administrator goes on with it.
    found = eventually(lambda: walk(bench, "NO_DRIVER"), within_seconds=20, what="nobody has for two leases")
    assert "redis-stream-coord wait" in found.next


def test_consumer_group_that_nobody_registered(bench: Bench, crew: Crew) -> None:
    bench.create(shards=3, timings=STEADY)
    crew.start("a").owns(0, 1, 2)
    bench.redis.xgroup_create(bench.stream_key(2), "legacy", "0")
    assert finds(bench, "UNREGISTERED_GROUP").level == "wait"
    bench.admin.scale(bench.stream, shards=2, reason="a test")
    found = finds(bench, "UNREGISTERED_GROUP")
    assert found.level == "act"
    assert "consumer group legacy is on shards 2" in found.text


def test_producer_that_writes_past_the_fence(bench: Bench, crew: Crew) -> None:
    bench.create(shards=3, timings=STEADY)
    member = crew.start("a")
    member.owns(0, 1, 2)
    member.recorder.hold()
    bench.fill(2, 1)
    begin(bench, 2)
    eventually(
        lambda: bench.redis.hget(f"redis-stream:coord:{{{bench.stream}:2}}:route", "state") == "closed",
        what="shard 2 is closed",
    )
    late = bench.redis.xadd(bench.stream_key(2), {"n": "late"})
    found = finds(bench, "STALE_PRODUCER")
    assert found.shard == 2
    assert late in found.text
    member.recorder.release()


def test_missing_route(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    bench.redis.delete(f"redis-stream:coord:{{{bench.stream}:1}}:route")
    found = finds(bench, "ROUTE")
    assert "shard 1 has no route" in found.text
    assert "repair" in found.next


# --- the commands ---------------------------------------------------------------------------------------------------


def test_scaling_from_the_command_line(bench: Bench, crew: Crew, run: CommandLine) -> None:
    bench.create(shards=2, timings=STEADY)
    member = crew.start("a")
    member.owns(0, 1)
    ids = bench.fill(0, 3)
    out = run.ok("scale", bench.stream, "--shards", "4", "--dry-run")
    assert "would change" in out
    assert "added 2-3" in out
    assert "50% of the keys move" in out
    assert run("scale", bench.stream, "--shards", "2", "--dry-run").exit == Exit.CONFLICT
    assert run("routing", bench.stream, "--expected-shards", "4").exit == Exit.PROBLEMS
    done = run.json("scale", bench.stream, "--shards", "4", *WHO, "--request-id", "OPS-23")
    assert done["resharding"]["state"] == "COMPLETED"
    assert run.json("scale", bench.stream, "--shards", "4", *WHO, "--request-id", "OPS-23")["resharding"] is not None
    assert run("routing", bench.stream, "--expected-shards", "4").exit == Exit.OK
    member.finishes(*ids)
    assert run("scale", bench.stream, "--shards", "4", *WHO).exit == Exit.CONFLICT
    assert "4 shards, COMPLETED" in run.ok("migrations", bench.stream)


def test_taking_a_resharding_back(bench: Bench, crew: Crew, run: CommandLine) -> None:
    bench.create(shards=2, timings=STEADY)
    assert "never resharded" in run.ok("migrations", bench.stream)
    assert run("rollback", bench.stream, "--yes", *WHO).exit == Exit.NOT_FOUND
    member = crew.start("a")
    member.owns(0, 1)
    member.recorder.hold()
    bench.fill(0, 2)
    run.ok("scale", bench.stream, "--shards", "4", "--no-wait", *WHO)
    draining(bench)
    assert "which is DRAINING" in run.ok("rollback", bench.stream, "--dry-run")
    assert run("rollback", bench.stream, *WHO).exit == Exit.ABORTED
    run.ok("rollback", bench.stream, "--no-wait", "--yes", *WHO)
    assert finds(bench, "GOES_BACK").step == 4
    member.recorder.release()
    assert run.json("wait", bench.stream)["resharding"]["state"] == "ROLLED_BACK"
    assert run.json("routing", bench.stream)["layout"]["shards"] == 2


def test_collector_reports_the_resharding(bench: Bench) -> None:
    from redis_stream_coord import Collector

    bench.create(shards=2, timings=SLOW)
    collector = Collector(bench.url)

    def gauges() -> dict[str, float]:
        collector.collect()
        return {name: value for name, value, _ in collector.readings() if name.startswith("migration")}

    assert gauges() == {"migration_active": 0}
    begin(bench, 3)
    found = gauges()
    assert found["migration_active"] == 1
    assert 0 <= found["migration_active_age_seconds"] < 60
    collector.close()


def test_members_and_the_monitor_agree(bench: Bench) -> None:
    bench.create(shards=1, timings=SLOW)
    Peer(bench, "a").beat()
    with Monitor(bench.url) as monitor:
        assert monitor.resharding(bench.stream) is None


def test_a_person_sees_how_far_it_is(bench: Bench, crew: Crew) -> None:
    """On a terminal a bar shows the state, and what is left to consume."""
    bench.create(shards=2, timings=STEADY)
    member = crew.start("a")
    member.owns(0, 1)
    member.recorder.hold()
    bench.fill(0, 5)
    command = [sys.executable, "-m", "redis_stream_coord.cli", "scale", bench.stream, "--shards", "3", *WHO]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*command, "--redis", bench.url],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "160", "TERM": "xterm"},
        cwd=Path(__file__).parents[2],
    )
    os.close(theirs)
    seen = b""
    while b"5 entries left" not in seen:
        seen += os.read(ours, 4096)
    assert b"DRAINING" in seen
    member.recorder.release()
    while process.poll() is None:
        with suppress(OSError):  # the terminal is gone when the program ends
            seen += os.read(ours, 4096)
    os.close(ours)
    assert process.returncode == 0
    assert process.stdout is not None
    assert b"COMPLETED" in process.stdout.read()
    process.stdout.close()
