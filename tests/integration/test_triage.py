"""Triage on live groups: each situation is planted, and has to be found, with member, shard and next step."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from redis_stream_coord import AsyncMonitor, Finding, Timings
from tests.integration.commandline import CommandLine
from tests.integration.kit import FAST, GROUP, SLOW, Bench, Crew, Peer
from tests.waiting import eventually

pytestmark = pytest.mark.parametrize("server", ["redis7"], indirect=True)

# A drain may last long here, and a lease not.
PATIENT = Timings(heartbeat_seconds=0.2, lease_seconds=1.2, rebalance_seconds=600.0)


def walk(bench: Bench, code: str, **where: str | int) -> Finding | None:
    """The finding of this kind, if the checklist has it now."""
    for one in bench.monitor.triage(bench.stream, group=GROUP):
        if one.code == code and all(getattr(one, name) == value for name, value in where.items()):
            return one
    return None


def finds(bench: Bench, code: str, **where: str | int) -> Finding:
    """Wait for a finding of this kind."""
    return eventually(lambda: walk(bench, code, **where), what=f"triage finds {code} {where}")


def finds_nothing_to_do(bench: Bench) -> None:
    found = bench.monitor.triage(bench.stream, group=GROUP)
    assert [one for one in found if one.level != "ok"] == []
    assert [one.step for one in found if one.checklist == "rebalance"] == [1, 2, 3, 4, 5]


def test_nothing_to_do_in_a_healthy_group(bench: Bench, crew: Crew) -> None:
    bench.create(shards=4)
    member = crew.start("a")
    member.owns(0, 1, 2, 3)
    member.finishes(*bench.fill(0, 3))
    eventually(lambda: bench.pending(0) == {}, what="all is acknowledged")
    finds_nothing_to_do(bench)


# --- 1: liveness ----------------------------------------------------------------------------------------------------


def test_no_members(bench: Bench) -> None:
    bench.create(shards=2)
    assert finds(bench, "NO_MEMBERS").level == "wait"
    bench.fill(1)
    found = finds(bench, "NO_MEMBERS")
    assert found.level == "act"
    assert "entries wait on shards 1" in found.text


def test_expired_member(bench: Bench, crew: Crew, tmp_path: Path) -> None:
    bench.create(shards=2, timings=FAST)
    child = crew.child("dead", tmp_path)
    child.notes_eventually("assigned", shards=[0, 1])
    child.signal(signal.SIGKILL)
    # Nobody else is alive: it stays in the record, overdue.
    found = finds(bench, "OVERDUE", member="dead")
    assert found.level == "act"
    assert "reconcile" in found.next
    crew.start("a").owns(0, 1)
    found = finds(bench, "EXPIRED", member="dead")
    assert "with shards 0,1" in found.text
    assert "its process died" in found.next


def test_member_that_is_late(bench: Bench) -> None:
    bench.create(shards=1, timings=SLOW)
    Peer(bench, "a").beat()
    seconds, _ = bench.redis.time()
    bench.redis.zadd(bench.keys.leases, {"a": seconds * 1000 + 10_000})
    found = finds(bench, "LATE", member="a")
    assert "last renewed its lease" in found.text
    bench.redis.delete(bench.keys.leases)
    assert finds(bench, "LEASE_LOST", member="a").level == "wait"


def test_two_processes_with_one_member_id(bench: Bench) -> None:
    bench.create(shards=1, timings=SLOW)
    Peer(bench, "a", "n0").beat()
    for n in range(1, 4):
        Peer(bench, "a", f"n{n}").beat(replaces=f"n{n - 1}")
    found = finds(bench, "REPLACED_OFTEN", member="a")
    assert "3 times" in found.text
    assert "give each its own member=" in found.next


# --- 2: assignment --------------------------------------------------------------------------------------------------


def test_who_waits_for_whose_drain(bench: Bench) -> None:
    bench.create(shards=4, timings=SLOW)
    a, b, c = Peer(bench, "a"), Peer(bench, "b"), Peer(bench, "c")
    a.beat()
    b.beat()
    a.beat(revoked=[a.held(shard) for shard in a.revoking])
    b.beat()
    c.beat()  # takes one from a or b, which now drains it
    (shard,) = c.pending
    drainer = next(peer for peer in (a, b) if shard in bench.view().members[peer.member].revoking)
    drainer.beat()
    bench.redis.hset(bench.keys.metadata, "group_epoch", str(bench.view().group_epoch + 1))
    found = finds(bench, "NOT_COMPUTED")
    assert found.level == "wait"
    assert finds(bench, "SLOW_DRAIN", shard=shard).member == drainer.member


def test_violated_invariant(bench: Bench) -> None:
    bench.create(shards=1, timings=SLOW)
    Peer(bench, "a").beat()
    bench.redis.hset(bench.keys.metadata, "grant_counter", "0")
    found = finds(bench, "INVARIANT")
    assert found.level == "act"
    assert "above the counter" in found.text


def test_ownership_violation(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    peer = Peer(bench, "a")
    peer.beat()
    peer.assigned[1] += 7
    with pytest.raises(Exception, match="fenced"):
        peer.beat()
    assert finds(bench, "OWNERSHIP_VIOLATION", member="a", shard=1).level == "act"


def test_round_of_correction(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    a, b = Peer(bench, "a"), Peer(bench, "b")
    a.beat()
    b.beat()
    a.beat(version=a.version + 100)
    found = finds(bench, "CORRECTION_ROUND")
    assert "waits for a, b" in found.text
    assert bench.monitor.health().status == "DEGRADED"


# --- 3: slow drains and stuck handlers ------------------------------------------------------------------------------


def test_slow_drain(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=PATIENT)
    one = crew.start("a")
    one.owns(0, 1)
    one.recorder.hold()
    ids = {shard: bench.fill(shard) for shard in (0, 1)}
    eventually(lambda: len(one.recorder.began) == 2, what="both handlers are busy")
    crew.start("b")
    found = finds(bench, "SLOW_DRAIN", member="a")
    assert found.shard is not None
    assert "1 entries are in its hands" in found.text
    assert ids[found.shard][0] in found.text
    assert "slow handler" in found.next
    assert finds(bench, "SLOW_DRAIN", member="a").level == "wait"
    one.recorder.release()
    eventually(lambda: walk(bench, "SLOW_DRAIN") is None, what="the drain is over")


def test_drain_that_is_not_answered(bench: Bench) -> None:
    bench.create(shards=2, timings=Timings(heartbeat_seconds=0.2, lease_seconds=30, rebalance_seconds=0.4))
    a = Peer(bench, "a")
    a.beat()
    Peer(bench, "b").beat()
    found = finds(bench, "TIMEOUT_PASSED", member="a")
    assert found.step == 4
    assert "reconcile" in found.next
    found = finds(bench, "SLOW_DRAIN", member="a")
    assert found.level == "act"
    assert "nothing of it is in its hands" in found.text
    assert "it should have been fenced" in found.text


def test_handler_that_hangs(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=Timings(heartbeat_seconds=0.1, lease_seconds=6.0, rebalance_seconds=0.3))
    member = crew.start("a")
    member.owns(0, 1)
    member.recorder.hold()
    (entry,) = bench.fill(1)
    found = finds(bench, "HANDLER_STUCK", member="a", shard=1)
    assert entry in found.text
    assert f"--shard 1 --to {entry}" in found.next


def test_shard_that_is_not_claimed(bench: Bench) -> None:
    bench.create(shards=1, timings=SLOW)
    Peer(bench, "a").beat()
    assert finds(bench, "NOT_CLAIMED", member="a", shard=0).level == "wait"


def test_fence_ahead_of_the_record(bench: Bench) -> None:
    bench.create(shards=1, timings=SLOW)
    Peer(bench, "a").beat()
    bench.redis.hset(
        bench.keys.fence(0), mapping={"incarnation": bench.view().incarnation + 1, "token": 1, "member": "a"}
    )
    found = finds(bench, "FENCE_AHEAD", shard=0)
    assert "Metadata" in found.next


def test_stream_that_is_gone(bench: Bench) -> None:
    bench.create(shards=1, timings=SLOW)
    Peer(bench, "a").beat()
    bench.redis.delete(bench.stream_key(0))
    assert "--exist-ok" in finds(bench, "STREAM_GONE", shard=0).next


# --- 4 and 5: fenced members ----------------------------------------------------------------------------------------


def test_fenced_member_that_does_not_come_back_and_then_does(bench: Bench) -> None:
    bench.create(shards=2, timings=Timings(heartbeat_seconds=0.2, lease_seconds=30, rebalance_seconds=0.3))
    a, b = Peer(bench, "a"), Peer(bench, "b")
    a.beat()
    b.beat()

    def fenced() -> bool:
        b.beat()
        return "a" not in bench.view().members

    eventually(fenced, what="a is fenced for its slow drain")
    found = finds(bench, "FENCED", member="a")
    assert found.step == 4
    assert "gave its shards" in found.text
    found = finds(bench, "NOT_REJOINED", member="a")
    assert "epoch 0" in found.next
    Peer(bench, "a", "n2").beat()
    assert finds(bench, "REJOINED", member="a").level == "ok"
    assert walk(bench, "NOT_REJOINED") is None


# --- for people and machines ----------------------------------------------------------------------------------------


def test_the_command_says_it_in_words_and_ends_with_a_code(bench: Bench) -> None:
    run = CommandLine(bench.url)
    bench.create(shards=1, timings=SLOW)
    peer = Peer(bench, "a")
    peer.beat()
    assert run("triage", bench.stream, GROUP).exit == 0
    bench.redis.zadd(bench.keys.leases, {"a": 1})
    answer = run("triage", bench.stream, GROUP)
    assert answer.exit == 10
    assert "1. ACT  the lease of member a passed" in answer.out
    assert "-> No other member is alive to remove it" in answer.out
    assert "4. ok   nobody was fenced" in answer.out
    document = run("triage", bench.stream, GROUP, "--json").document
    assert document["data"][0]["code"] == "OVERDUE"

    async def read() -> list[str]:
        async with AsyncMonitor(bench.url) as monitor:
            return [one.code for one in await monitor.triage(bench.stream, group=GROUP)]

    assert asyncio.run(read()) == [one["code"] for one in document["data"]]
