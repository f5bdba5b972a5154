"""Who lost a shard can do nothing with it any more, whatever it believes; and it notices in time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from redis_stream_coord import CoordError, FencedError, MetadataRegressionError, RedisSettings, Timings
from redis_stream_coord.acks import Acks
from redis_stream_coord.commands import Command, Fence, ack, claim, read
from tests.integration.kit import FAST, GROUP, SLOW, STEADY, Bench, Crew, Peer, sha, two_servers
from tests.proxy import LossyProxy
from tests.waiting import eventually


def shard_state(bench: Bench, shard: int) -> tuple[Any, ...]:
    """Everything on the shard's slot that a read, a claim or an acknowledgement could change."""
    stream = bench.stream_key(shard)
    return (
        bench.fence(shard),
        bench.pending(shard),
        bench.redis.xinfo_groups(stream),
        [info["name"] for info in bench.redis.xinfo_consumers(stream, GROUP)],
        bench.redis.xlen(stream),
    )


# --- zombies --------------------------------------------------------------------------------------------------------


@two_servers
def test_process_that_wakes_up_after_its_lease_reads_and_acknowledges_nothing(
    bench: Bench, crew: Crew, tmp_path: Path
) -> None:
    bench.create(shards=1, timings=FAST)
    zombie = crew.child("zombie", tmp_path, manual=True)
    zombie.notes_eventually("assigned")
    token = bench.view().shards[0].token
    # It has one in its handler, and has read the others ahead.
    zombie.hold()
    ids = bench.fill(0, 5)
    zombie.notes_eventually("began", id=ids[0])
    eventually(lambda: set(bench.pending(0)) == set(ids), what="all of them read")
    heir = crew.start("heir")
    heir.recorder.hold()
    stopped = zombie.signal(signal.SIGSTOP)
    eventually(lambda: heir.recorder.ids() == ids[:1], what="the first entry with the heir")
    assert bench.view().shards[0].token > token
    assert set(bench.pending(0).values()) == {"heir"}
    state = shard_state(bench, 0)
    zombie.release()
    zombie.signal(signal.SIGCONT)
    zombie.notes_eventually("refused", id=ids[0], token=token)
    zombie.notes_eventually("lost")
    # It came back as a member, which gets nothing: there is one shard only.
    eventually(lambda: set(bench.view().members) == {"heir", "zombie"}, what="the zombie as a new member")
    bench.heartbeats_pass("zombie")
    assert shard_state(bench, 0) == state
    heir.recorder.release()
    heir.finishes(*ids)
    assert heir.recorder.ids() == ids
    assert [note["id"] for note in zombie.notes("began")] == ids[:1]
    assert all(note["at"] <= stopped for note in zombie.notes("began"))


@two_servers
def test_zombie_between_two_entries_does_not_go_on_to_the_next(bench: Bench, crew: Crew, tmp_path: Path) -> None:
    bench.create(shards=1, timings=FAST)
    zombie = crew.child("zombie", tmp_path, handler_seconds=0.02)
    zombie.notes_eventually("assigned")
    ids = bench.fill(0, 100)
    zombie.notes_eventually("finished", count=5)
    heir = crew.start("heir")
    # In the middle of a handler: between the last look at the lease and the first line of a handler nothing can help.
    for _ in range(50):
        zombie.notes_eventually("began", count=len(zombie.notes("began")) + 1)
        stopped = zombie.suspend()
        if len(zombie.notes("began")) > len(zombie.notes("finished")):
            break
        zombie.signal(signal.SIGCONT)
    else:
        raise AssertionError("it was never met in a handler")
    heir.finishes(ids[-1])
    zombie.signal(signal.SIGCONT)
    zombie.notes_eventually("lost")
    eventually(lambda: "zombie" in bench.view().members, what="the zombie as a new member")
    bench.heartbeats_pass("zombie", 2)
    assert [note for note in zombie.notes("began") if note["at"] > stopped] == []
    # Nothing is missing, and what both had is no more than what was finished and not yet acknowledged.
    finished = [note["id"] for note in zombie.notes("finished") if note["at"] <= stopped]
    assert heir.recorder.ids() == ids[ids.index(heir.recorder.ids()[0]) :]
    assert set(finished) | set(heir.recorder.ids()) == set(ids)


# --- the scripts ----------------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Fence], Fence]] = {
    "lower token": lambda fence: attrs.evolve(fence, token=fence.token - 1),
    "other nonce": lambda fence: attrs.evolve(fence, nonce="other"),
    "lower incarnation": lambda fence: attrs.evolve(fence, incarnation=fence.incarnation - 1),
    "lower incarnation, higher token": lambda fence: attrs.evolve(
        fence, incarnation=fence.incarnation - 1, token=fence.token + 1
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_session_that_is_not_the_fences_is_refused_and_changes_nothing(bench: Bench, change: str) -> None:
    bench.create(shards=1, timings=STEADY)
    ids = bench.fill(0, 4)
    peer = Peer(bench, "a")
    peer.beat()
    # A second session of the same member, so that there is a token below the one that counts.
    peer = Peer(bench, "a", "n2")
    peer.beat(replaces="n1")
    fence = peer.fence(0)
    bench.runner.run(claim(bench.keys, fence))
    bench.runner.run(read(bench.keys, fence, after="0-0", count=2))
    state = shard_state(bench, 0)
    wrong = CHANGES[change](fence)
    calls: list[Command[Any]] = [
        claim(bench.keys, wrong),
        read(bench.keys, wrong, after="0-0", count=10),
        read(bench.keys, wrong, after=ids[1], count=10),
        ack(bench.keys, wrong, ids[:2]),
    ]
    for call in calls:
        with pytest.raises(CoordError) as caught:
            bench.runner.run(call)
        if call.name == "claim" and "incarnation" in change:
            assert caught.value.word == "AHEAD"
        else:
            assert isinstance(caught.value, FencedError)
            assert caught.value.word == "FENCED"
            assert caught.value.detail.split() == [str(fence.incarnation), str(fence.token), "a"]
        assert shard_state(bench, 0) == state, call.name
    # A repeated claim, as after a lost reply, is no second one.
    bench.runner.run(claim(bench.keys, fence))
    assert shard_state(bench, 0) == state
    assert bench.runner.run(ack(bench.keys, fence, ids[:2])) == 2


def test_delayed_claim_of_an_earlier_owner_comes_too_late(bench: Bench) -> None:
    bench.create(shards=1, timings=STEADY)
    old = Peer(bench, "a")
    old.beat()
    early = old.fence(0)
    new = Peer(bench, "a", "n2")
    new.beat(replaces="n1")
    bench.runner.run(claim(bench.keys, new.fence(0)))
    with pytest.raises(FencedError):
        bench.runner.run(claim(bench.keys, early))
    assert bench.fence(0)["nonce"] == "n2"


# --- fences that were lost, or are ahead ----------------------------------------------------------------------------


def test_owner_claims_again_when_its_fence_was_lost(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=SLOW)
    a = crew.start("a")
    ids = bench.fill(0, 2)
    a.finishes(*ids)
    eventually(lambda: not bench.pending(0), what="acknowledgements")
    fence = bench.fence(0)
    bench.redis.delete(bench.keys.fence(0))
    ids += bench.fill(0, 2)
    a.finishes(*ids)
    assert a.recorder.ids(0) == ids
    again = bench.fence(0)
    assert {**again, "position": ""} == {**fence, "position": ""}
    a.owns(0, 1)
    assert a.kinds(0) == ["assigned"]


def test_grant_below_the_fence_is_drawn_anew_above_it(bench: Bench, crew: Crew) -> None:
    """The grant counter was lost in a failover, and the fence on another node was not."""
    view = bench.create(shards=2, timings=FAST)
    token = (int(time.time()) + 86400) * 1_000_000  # tokens follow the server's clock, which has gone back too
    ahead = {"incarnation": str(view.incarnation), "token": str(token), "member": "ghost", "nonce": "gone"}
    bench.redis.hset(bench.keys.fence(0), mapping=ahead)
    ids = bench.fill(0, 2)
    a = crew.start("a")
    a.finishes(*ids)
    assert [event["fence_token"] for event in bench.events("claim_refused")] == [str(token)]
    assert [event["witness"] for event in bench.events("metadata_regression")] == ["fence"]
    assert bench.view().shards[0].token == token + 1
    assert bench.fence(0)["token"] == str(token + 1)
    assert a.kinds(0) == ["assigned"]


def test_fence_of_a_later_lifecycle_is_not_forced(bench: Bench, crew: Crew, caplog: pytest.LogCaptureFixture) -> None:
    view = bench.create(shards=2, timings=STEADY)
    later = {"incarnation": str(view.incarnation + 1), "token": "1", "member": "x", "nonce": "y"}
    bench.redis.hset(bench.keys.fence(0), mapping=later)
    ids = bench.fill(0)
    a = crew.start("a")
    a.finishes(*bench.fill(1))
    eventually(lambda: "ahead of the stored record" in caplog.text, what="a record that says so")
    bench.heartbeats_pass("a")
    assert {name: bench.fence(0)[name] for name in later} == later
    assert not set(ids) & set(a.recorder.ids())
    eventually(lambda: a.consumer.assignment == {1}, what="the other shard")
    assert not a.consumer.health.ok
    assert "ahead of the stored record" in a.consumer.health.waits_for


def test_record_of_an_earlier_lifecycle_is_not_used(bench: Bench) -> None:
    bench.create(shards=2, timings=STEADY)
    peer = Peer(bench, "a")
    peer.beat()
    error = peer.refusal(incarnation=peer.incarnation + 1)
    assert isinstance(error, MetadataRegressionError)
    peer.beat()


# --- the lease on the member's own clock ----------------------------------------------------------------------------


@two_servers
def test_consumer_gives_up_before_its_lease_ends_in_redis_and_comes_back_by_itself(
    bench: Bench, crew: Crew, proxy: LossyProxy
) -> None:
    timings = Timings(heartbeat_seconds=0.2, lease_seconds=2.0, rebalance_seconds=2.0)
    bench.create(shards=1, timings=timings)
    left: list[float | None] = []
    a = crew.prepare("a", redis=RedisSettings(proxy.url, timeout_seconds=1.0))
    a.recorder.action = lambda _: time.sleep(0.05)
    a.on_call = lambda call: left.append(bench.lease_ms("a")) if call.kind == "lost" else None
    a.consumer.start()
    a.owns(0)
    ids = bench.fill(0, 60)
    a.finishes(ids[2])
    proxy.pause()
    eventually(lambda: left, what="on_lost")
    (lost,) = [call for call in a.calls if call.kind == "lost"]
    assert left[0] is not None
    assert left[0] > 0
    assert a.consumer.assignment == frozenset()
    assert not a.consumer.health.ok
    handed_out = len(a.recorder.began)
    assert handed_out < len(ids)
    eventually(lambda: (bench.lease_ms("a") or 0) < 0, what="the end of the lease in Redis")
    assert len(a.recorder.began) == handed_out
    assert a.recorder.began[-1].began <= lost.began
    proxy.resume()
    a.finishes(*ids)
    a.owns(0)
    eventually(lambda: not bench.pending(0), what="all acknowledgements")
    again = a.recorder.ids()[handed_out:]
    assert again == ids[ids.index(again[0]) :]


@two_servers
def test_lost_replies_of_reads_and_acknowledgements_cost_nothing(bench: Bench, crew: Crew, proxy: LossyProxy) -> None:
    bench.create(shards=2, timings=STEADY)
    bench.load_scripts()
    a = crew.start("a", redis=RedisSettings(proxy.url, timeout_seconds=0.5))
    a.owns(0, 1)
    for script in ("read", "ack"):
        proxy.drop_next_reply(sha(script), count=3)
    ids = bench.fill(0, 20)
    a.finishes(*ids)
    assert a.recorder.ids(0) == ids
    eventually(lambda: not bench.pending(0), what="all acknowledgements")
    assert a.kinds(0) == ["assigned"]
    assert bench.events("member_expired", "member_rejoined") == []
    assert proxy.dropped > 0


@two_servers
def test_acknowledgements_of_a_lost_shard_are_not_tried_for_ever(
    bench: Bench, crew: Crew, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    send = Acks._send

    async def counted(acks: Acks) -> None:
        tries.append(time.monotonic())
        await send(acks)

    monkeypatch.setattr(Acks, "_send", counted)
    bench.create(shards=1, timings=FAST)
    a = crew.start("a", redis=RedisSettings(proxy.url, timeout_seconds=0.3))
    a.owns(0)
    a.recorder.hold()
    (entry_id,) = bench.fill(0)
    eventually(lambda: a.recorder.ids() == [entry_id], what="the entry in the handler")
    proxy.pause()
    a.recorder.release()
    a.finishes(entry_id)
    a.called("lost")
    lost = time.monotonic()
    eventually(lambda: time.monotonic() > lost + 1.0, what="a second after the loss")
    assert len([at for at in tries if at > lost + 0.5]) <= 2
    proxy.resume()
    eventually(lambda: not bench.pending(0), what="the acknowledgement after all")
    assert a.recorder.ids() == [entry_id]


@two_servers
def test_server_that_hangs_and_goes_on_expires_nobody(bench: Bench, crew: Crew, server: Any) -> None:
    bench.create(shards=2, timings=FAST)
    settings = RedisSettings(bench.url, timeout_seconds=0.5)
    a, b = crew.start("a", redis=settings), crew.start("b", redis=settings)
    before = bench.settled(["a", "b"])
    a.owns(*before.members["a"].assigned)
    b.owns(*before.members["b"].assigned)
    server.suspend()
    try:
        for watched in (a, b):
            watched.called("lost")
        gone = time.monotonic() + FAST.lease_seconds
        eventually(lambda: time.monotonic() > gone, what="more than a lease")
    finally:
        server.resume()
    after = bench.settled(["a", "b"])
    assert after.owners == before.owners
    assert {s.index: s.token for s in after.shards.values()} == {s.index: s.token for s in before.shards.values()}
    assert bench.events("member_expired") == []
    for watched in (a, b):
        watched.owns(*after.members[watched.consumer.member].assigned)
