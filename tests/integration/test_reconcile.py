"""What time brings about is done without any heartbeat if an operator asks for it; freeze and limits by command."""

from __future__ import annotations

import pytest

from redis_stream_coord import FrozenError, RateLimitedError, Timings
from redis_stream_coord.cli.exits import Exit
from tests.integration.commandline import WHO, CommandLine
from tests.integration.kit import GROUP, SLOW, Bench, Crew, Peer
from tests.waiting import eventually


@pytest.fixture
def run(bench: Bench) -> CommandLine:
    return CommandLine(bench.url)


def test_nothing_is_done_where_nothing_is_due(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    Peer(bench, "a").beat()
    before = bench.state()
    assert bench.admin.reconcile(bench.stream, group=GROUP, reason="a test") == ()
    assert bench.state() == before


def test_who_is_overdue_is_expired_though_nobody_else_is_alive(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    Peer(bench, "a").beat()
    bench.redis.zadd(bench.keys.leases, {"a": 1})
    events = bench.admin.reconcile(bench.stream, group=GROUP, reason="a test")
    assert events[0] == "member_expired"
    view = bench.view()
    assert view.members == {}
    assert view.owners == {0: None, 1: None}
    # Whoever is alive after all joins again.
    assert Peer(bench, "a", "n2").beat().status == "OK"


def test_shards_go_to_who_is_alive(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    a, b = Peer(bench, "a"), Peer(bench, "b")
    a.beat()
    b.beat()
    a.beat(revoked=[a.held(shard) for shard in a.revoking])
    bench.redis.zadd(bench.keys.leases, {"a": 1})
    events = bench.admin.reconcile(bench.stream, group=GROUP, reason="a test")
    assert {"member_expired", "target_changed", "shard_granted"} <= set(events)
    assert set(bench.view().owners.values()) == {"b"}
    b.beat()
    assert set(b.assigned) == {0, 1}


def test_a_slow_drain_is_fenced_without_any_heartbeat(bench: Bench) -> None:
    bench.create(shards=2, timings=Timings(heartbeat_seconds=0.2, lease_seconds=60, rebalance_seconds=0.3))
    Peer(bench, "a").beat()
    Peer(bench, "b").beat()

    def fenced() -> bool:
        return "member_fenced" in bench.admin.reconcile(bench.stream, group=GROUP, reason="a test")

    eventually(fenced, what="a is fenced")
    assert set(bench.view().members) == {"b"}


def test_running_members_hear_of_it_and_are_not_disturbed(bench: Bench, crew: Crew) -> None:
    bench.create(shards=4)
    member = crew.start("a")
    member.owns(0, 1, 2, 3)
    for _ in range(3):
        bench.admin.reconcile(bench.stream, group=GROUP, reason="a test")
    member.finishes(*bench.fill(0, 2))
    assert member.kinds(0) == ["assigned"]


def test_the_same_request_gives_the_recorded_outcome(bench: Bench) -> None:
    bench.create(shards=1, timings=SLOW)
    Peer(bench, "a").beat()
    bench.redis.zadd(bench.keys.leases, {"a": 1})
    first = bench.admin.reconcile(bench.stream, group=GROUP, reason="a test", request_id="r")
    assert first
    assert bench.admin.reconcile(bench.stream, group=GROUP, reason="a test", request_id="r") == first
    (entry,) = [one for one in bench.monitor.audit(bench.stream, group=GROUP) if one.action == "reconcile"]
    assert entry.detail.split() == list(first)


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_freezing_by_command(bench: Bench, run: CommandLine) -> None:
    bench.create(shards=2, timings=SLOW)
    names = (bench.stream, GROUP)
    assert "would freeze" in run.ok("freeze", *names, "--dry-run")
    run.ok("freeze", *names, *WHO)
    Peer(bench, "a").beat()
    assert bench.view().owners == {0: None, 1: None}
    assert "frozen by an operator" in run("health").out
    assert "FROZEN" in {one["code"] for one in run("triage", *names, "--json").data}
    with pytest.raises(FrozenError):
        bench.admin.reconcile(bench.stream, group=GROUP, reason="a test")
    answer = run("reconcile", *names, *WHO)
    assert answer.exit == Exit.FROZEN
    run.ok("unfreeze", *names, *WHO)
    assert "shard_granted" in run.json("reconcile", *names, *WHO)["events"]
    assert set(bench.view().owners.values()) == {"a"}
    actions = [one["action"] for one in run.json("audit", *names) if one["outcome"] == "accepted"]
    assert actions == ["reconcile", "unfreeze", "freeze", "create"]


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_limits_by_command(bench: Bench, run: CommandLine) -> None:
    bench.create(shards=1, timings=SLOW)
    names = (bench.stream, GROUP)
    run.ok("limit", *names, "--mutations", "3", "--per-seconds", "600", *WHO)
    run.ok("reconcile", *names, *WHO)
    answer = run("reconcile", *names, *WHO, "--json")
    assert answer.exit == Exit.RATE_LIMITED
    assert 0 < answer.document["error"]["retry_after_seconds"] <= 600
    assert "retry after" in run("reconcile", *names, *WHO).err
    with pytest.raises(RateLimitedError):
        bench.admin.reconcile(bench.stream, group=GROUP, reason="a test")
    assert run("limit", *names, *WHO).exit == Exit.USAGE
    assert run("limit", *names, "--none", "--mutations", "1", *WHO).exit == Exit.USAGE
