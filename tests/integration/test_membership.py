"""Joining, staying, leaving, dying and coming back, against real servers."""

from __future__ import annotations

import itertools
import signal
import time
from pathlib import Path

import pytest

from redis_stream_coord import DuplicateMemberError, GroupView, RedisSettings, Timings
from tests.integration.kit import FAST, SLACK_SECONDS, SLOW, STEADY, Bench, Crew, Peer, sha, taking_at_most, two_servers
from tests.proxy import LossyProxy
from tests.waiting import eventually


def tokens(view: GroupView) -> dict[int, int]:
    return {index: shard.token for index, shard in view.shards.items()}


# --- joining and leaving --------------------------------------------------------------------------------------------


def test_members_share_the_shards_and_serve_all_of_them(bench: Bench, crew: Crew) -> None:
    bench.create(shards=5, timings=STEADY)
    a, b = crew.start("a"), crew.start("b")
    view = bench.settled(["a", "b"])
    a.owns(*view.members["a"].assigned)
    b.owns(*view.members["b"].assigned)
    assert {len(member.assigned) for member in view.members.values()} == {2, 3}
    for shard in range(5):
        ids = bench.fill(shard, 3)
        owner = a if shard in a.consumer.assignment else b
        owner.finishes(*ids)
        assert owner.recorder.ids(shard) == ids
    assert a.consumer.health.ok
    assert a.consumer.health.state == "member"


def test_change_is_heard_of_at_once_and_not_at_the_next_heartbeat(bench: Bench, crew: Crew) -> None:
    bench.create(shards=4, timings=SLOW)
    a = crew.start("a")
    a.owns(0, 1, 2, 3)
    with taking_at_most(SLOW.heartbeat_seconds / 3, "handing over to a newcomer"):
        b = crew.start("b")
        bench.settled(["a", "b"])
        b.owns(2, 3)
    with taking_at_most(SLOW.heartbeat_seconds / 3, "taking over from one that left"):
        b.consumer.stop()
        bench.settled(["a"])
        a.owns(0, 1, 2, 3)
    assert b.kinds(2) == ["assigned", "revoked"]
    ids = bench.fill(3)
    a.finishes(*ids)


def test_member_that_left_is_not_given_shards(bench: Bench, crew: Crew) -> None:
    bench.create(timings=STEADY)
    a = crew.start("a")
    a.owns(0, 1, 2, 3)
    a.consumer.stop()
    view = bench.view()
    assert view.members == {}
    assert set(view.owners.values()) == {None}
    assert view.violations() == []
    assert a.consumer.health.state == "gone"
    assert bench.state()[1] == []


def test_stop_while_joining_leaves_nothing_behind(bench: Bench, crew: Crew) -> None:
    bench.create(timings=STEADY)
    for number in range(10):
        member = crew.start(f"m{number}")
        member.consumer.request_stop()
        assert member.consumer.wait(5)
    view = bench.view()
    assert view.members == {}
    assert set(view.owners.values()) == {None}


# --- dying ----------------------------------------------------------------------------------------------------------


def test_shards_of_a_killed_member_are_served_within_lease_and_two_heartbeats(
    bench: Bench, crew: Crew, tmp_path: Path
) -> None:
    bench.create(timings=FAST)
    survivor = crew.start("survivor")
    child = crew.child("victim", tmp_path)
    victims = bench.settled(["survivor", "victim"]).members["victim"].assigned
    for shard in victims:
        child.notes_eventually("finished", id=bench.fill(shard)[0])
    killed = child.signal(signal.SIGKILL)
    ids = [bench.fill(shard)[0] for shard in victims]
    survivor.finishes(*ids)
    served = max(handled.began for handled, _ in survivor.recorder.ended if handled.id in ids) - killed
    assert served <= FAST.lease_seconds + 2 * FAST.heartbeat_seconds + SLACK_SECONDS
    assert [event["member"] for event in bench.events("member_expired")] == ["victim"]
    assert bench.view().violations() == []


def test_expired_member_is_unknown_and_joins_again_with_epoch_0(bench: Bench) -> None:
    bench.create(timings=FAST)
    gone, other = Peer(bench, "gone"), Peer(bench, "other")
    gone.beat()
    other.beat()

    def beat_until_expired() -> bool:
        other.beat()
        return "gone" not in bench.view().members

    eventually(beat_until_expired, what="expiry of a silent member")
    assert gone.refusal().word == "UNKNOWN_MEMBER_ID"
    before = gone.epoch
    gone.assigned, gone.revoking = {}, {}
    reply = gone.beat(epoch=0)
    assert reply.epoch > before
    assert "gone" in bench.view().members


def test_consumer_that_expired_comes_back_by_itself(bench: Bench, crew: Crew, proxy: LossyProxy) -> None:
    bench.create(timings=FAST)
    b = crew.start("b")
    a = crew.start("a", redis=RedisSettings(proxy.url, timeout_seconds=0.5))
    first = bench.settled(["a", "b"]).members["a"]
    a.owns(*first.assigned)
    proxy.pause()
    bench.settled(["b"])
    proxy.resume()
    again = bench.settled(["a", "b"]).members["a"]
    assert again.epoch > first.epoch
    assert again.nonce != first.nonce
    a.owns(*again.assigned)
    for shard in again.assigned:
        a.finishes(*bench.fill(shard))
    assert b.consumer.health.ok


@pytest.mark.parametrize("way", ["replaced", "claims what it does not hold", "wrong epoch"])
def test_fenced_session_joins_again_with_epoch_0(bench: Bench, way: str) -> None:
    bench.create(timings=STEADY)
    peer, other = Peer(bench, "a", "n1"), Peer(bench, "b")
    peer.beat()
    other.beat()
    peer.beat()
    other.beat(leaving=True)
    peer.beat()
    if way == "replaced":
        Peer(bench, "a", "n2").beat(replaces="n1")
        error = peer.refusal()
    elif way == "claims what it does not hold":
        peer.assigned[0] += 1
        error = peer.refusal()
        assert [event["shard"] for event in bench.events("ownership_violation")] == ["0"]
    else:
        error = peer.refusal(epoch=peer.epoch - 2)
    assert error.word == "FENCED_MEMBER_EPOCH"
    peer.nonce, peer.assigned, before = "n3", {}, peer.epoch
    exists = peer.refusal(epoch=0)
    assert exists.word == "SESSION_EXISTS"
    reply = peer.beat(epoch=0, replaces=exists.detail)
    assert reply.epoch > before
    assert set(peer.assigned) == {0, 1, 2, 3}


# --- lost replies and repeated requests -----------------------------------------------------------------------------


def test_lost_join_reply_leaves_one_session_and_moves_nothing(bench: Bench, crew: Crew, proxy: LossyProxy) -> None:
    bench.create(timings=STEADY)
    bench.load_scripts()
    crew.start("other").owns(0, 1, 2, 3)
    proxy.drop_next_reply(sha("heartbeat"))
    a = crew.start("a", redis=proxy.url)
    view = bench.settled(["a", "other"])
    a.owns(*view.members["a"].assigned)
    assert proxy.dropped == 1
    joins = [event for event in bench.events("member_joined", "member_rejoined") if event["member"] == "a"]
    assert [event["type"] for event in joins] == ["member_joined"]
    assert len(bench.events("shard_granted")) == 4 + 2  # all to the first, then half to the second
    assert a.kinds(min(view.members["a"].assigned)) == ["assigned"]


def test_repeated_join_is_the_same_session(bench: Bench) -> None:
    bench.create(timings=STEADY)
    peer = Peer(bench, "a")
    first = peer.beat()
    state = bench.record_of()
    again = peer.beat(epoch=0, owned=[])
    assert bench.record_of() == state
    assert (again.epoch, again.holdings) == (first.epoch, first.holdings)
    assert again.holdings is not None


def test_lost_replies_of_heartbeats_fence_nobody(bench: Bench, crew: Crew, proxy: LossyProxy) -> None:
    bench.create(timings=STEADY)
    bench.load_scripts()
    a = crew.start("a", redis=proxy.url)
    a.owns(0, 1, 2, 3)
    kept = tokens(bench.settled(["a"]))
    # In steady state, and again in the middle of a rebalance, where the member's epoch advances.
    for dropped, members in ((2, ["a"]), (4, ["a", "b"])):
        proxy.drop_next_reply(sha("heartbeat"), count=2)
        if "b" in members:
            crew.start("b")
        eventually(lambda dropped=dropped: proxy.dropped == dropped, what="lost replies")
        view = bench.settled(members)
        a.owns(*view.members["a"].assigned)
    for shard, token in view.members["a"].assigned.items():
        assert token == kept[shard]
        assert a.kinds(shard) == ["assigned"]
    assert bench.events("member_rejoined", "member_expired", "member_fenced", "ownership_violation") == []


def test_previous_epoch_is_accepted_without_a_further_step(bench: Bench) -> None:
    bench.create(timings=STEADY)
    a, b = Peer(bench, "a"), Peer(bench, "b")
    a.beat()
    b.beat()
    before = a.epoch
    reply = a.beat()
    assert reply.status == "REVOKE_PENDING"
    assert reply.epoch == before + 1
    a.beat(epoch=before)
    assert a.epoch == before + 1
    assert set(a.revoking) == {2, 3}
    # The last lost reply again, now while something has changed anew: still no second step.
    b.beat(leaving=True)
    again = a.beat(epoch=before)
    assert again.epoch == before + 1
    assert again.holdings is not None
    assert set(a.assigned) == {0, 1, 2, 3}
    assert a.beat().epoch == before + 2
    assert a.refusal(epoch=before).word == "FENCED_MEMBER_EPOCH"


def test_delayed_join_cannot_replace_a_living_session(bench: Bench) -> None:
    bench.create(timings=STEADY)
    living = Peer(bench, "a", "n1")
    living.beat()
    delayed = Peer(bench, "a", "n2")
    for replaces in (None, "n0"):
        error = delayed.refusal(replaces=replaces)
        assert (error.word, error.detail) == ("SESSION_EXISTS", "n1")
    living.beat()
    assert bench.view().members["a"].nonce == "n1"


# --- one id, two processes ------------------------------------------------------------------------------------------


def test_one_of_two_living_processes_with_one_member_id_gives_up(bench: Bench, crew: Crew, tmp_path: Path) -> None:
    bench.create(timings=FAST)
    child = crew.child("twin", tmp_path)
    child.notes_eventually("assigned")
    here = crew.start("twin")

    def one_gave_up() -> bool:
        return child.process.poll() is not None or here.consumer.health.state == "failed"

    eventually(one_gave_up, within_seconds=10 * FAST.lease_seconds, what="one of the twins gave up")
    ids = [bench.fill(shard)[0] for shard in range(4)]
    if child.process.poll() is None:
        with pytest.raises(DuplicateMemberError, match="another live process"):
            here.consumer.wait()
        for entry_id in ids:
            child.notes_eventually("finished", id=entry_id)
    else:
        assert [note["error"] for note in child.notes("ended")] == ["DuplicateMemberError"]
        here.finishes(*ids)
    assert set(bench.settled(["twin"]).owners.values()) == {"twin"}


@pytest.mark.parametrize("how", ["killed", "stopped with hold"])
@two_servers
def test_static_restart_moves_nothing_and_waits_for_no_lease(
    bench: Bench, crew: Crew, tmp_path: Path, how: str
) -> None:
    bench.create(timings=SLOW)
    other = crew.start("other")
    other.owns(0, 1, 2, 3)
    if how == "killed":
        child = crew.child("pod-0", tmp_path)
        before = bench.settled(["other", "pod-0"])
        child.notes_eventually("assigned")
        child.kill()
    else:
        first = crew.start("pod-0")
        before = bench.settled(["other", "pod-0"])
        first.owns(*before.members["pod-0"].assigned)
        first.consumer.stop(hold=True)
    assert set(bench.view().members) == {"other", "pod-0"}
    waiting = [bench.fill(shard)[0] for shard in before.members["pod-0"].assigned]
    with taking_at_most(SLOW.heartbeat_seconds / 3, "the restart"):
        again = crew.start("pod-0")
        again.finishes(*waiting)
    after = bench.settled(["other", "pod-0"])
    assert after.owners == before.owners
    assert after.group_epoch == before.group_epoch
    for index, shard in after.shards.items():
        if shard.holder == "other":
            assert shard.token == before.shards[index].token
        else:
            assert shard.token > before.grant_counter
    kept = min(before.members["other"].assigned)
    assert other.kinds(kept) == ["assigned"]


def test_new_session_of_a_member_has_its_shards_under_new_tokens_at_once(bench: Bench) -> None:
    bench.create(timings=STEADY)
    old, b = Peer(bench, "a", "n1"), Peer(bench, "b")
    old.beat()
    b.beat()
    old.beat()
    before = bench.view()
    new = Peer(bench, "a", "n2")
    new.beat(replaces="n1")
    # What was to be drained is free, because whoever had it in a handler is fenced.
    assert (set(new.assigned), new.revoking) == (set(old.assigned), {})
    b.beat()
    assert set(b.assigned) == set(old.revoking)
    for token in (*new.assigned.values(), *b.assigned.values()):
        assert token > before.grant_counter
    assert bench.view().group_epoch == before.group_epoch


# --- who gets what --------------------------------------------------------------------------------------------------


def test_newcomer_without_shards_is_a_member_and_gets_what_is_freed(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=STEADY)
    a, b = crew.start("a"), crew.start("b")
    bench.settled(["a", "b"])
    spare = crew.start("spare")
    view = bench.settled(["a", "b", "spare"])
    assert view.members["spare"].assigned == {}
    eventually(lambda: "assign it shards" in spare.consumer.health.waits_for, what="a reason for the idleness")
    bench.heartbeats_pass("spare")
    assert spare.consumer.health.ok
    assert tokens(bench.view()) == tokens(view)
    freed = min(a.consumer.assignment)
    a.consumer.stop()
    view = bench.settled(["b", "spare"])
    spare.owns(freed)
    spare.finishes(*bench.fill(freed))
    assert b.kinds(1 - freed) == ["assigned"]


def test_steady_heartbeats_change_no_epoch_and_no_version(bench: Bench, crew: Crew) -> None:
    bench.create(timings=Timings(heartbeat_seconds=0.05, lease_seconds=6.0, rebalance_seconds=60.0))
    a, b = crew.start("a"), crew.start("b")
    view = bench.settled(["a", "b"])
    a.owns(*view.members["a"].assigned)
    b.owns(*view.members["b"].assigned)
    # The last change is answered in one more heartbeat of each.
    bench.heartbeats_pass("a", 2)
    bench.heartbeats_pass("b", 2)
    record, events = bench.record_of(), bench.events()
    bench.heartbeats_pass("a", 20)
    bench.heartbeats_pass("b", 1)
    duty = record.pop("duty")
    assert {field: value for field, value in bench.record_of().items() if field != "duty"} == record
    assert bench.record_of()["duty"] != duty
    assert bench.events() == events
    view = bench.view()
    assert view.group_epoch == view.assignment_epoch


def test_kept_shards_keep_their_tokens_and_moved_ones_get_higher_ones(bench: Bench, crew: Crew) -> None:
    bench.create(shards=7, timings=STEADY)
    views = []
    members: dict[str, object] = {}
    for name in ("a", "b", "c"):
        members[name] = crew.start(name)
        views.append(bench.settled(list(members)))
    for watched in crew.members[1:2]:
        watched.consumer.stop()
    views.append(bench.settled(["a", "c"]))
    moved = 0
    for before, after in itertools.pairwise(views):
        for index, shard in after.shards.items():
            if shard.holder == before.shards[index].holder:
                assert shard.token == before.shards[index].token
            else:
                moved += 1
                assert shard.token > before.grant_counter
    # 7 -> 4,3 -> 3,2,2 -> 4,3: as few as these quotas allow.
    assert moved == 3 + 2 + 2
    a = crew.members[0]
    assert a.kinds(0) == ["assigned"]


def test_shards_follow_the_weights(bench: Bench, crew: Crew) -> None:
    bench.create(shards=8, timings=STEADY)
    crew.start("heavy", weight=3.0)
    crew.start("light", weight=1.0)
    view = bench.settled(["heavy", "light"])
    assert {member.id: len(member.assigned) for member in view.members.values()} == {"heavy": 6, "light": 2}
    assert view.members["heavy"].weight == 3.0


def test_new_weight_of_a_member_changes_its_share(bench: Bench) -> None:
    bench.create(shards=6, timings=STEADY)
    a, b = Peer(bench, "a"), Peer(bench, "b")
    a.beat()
    b.beat()
    a.beat()
    a.beat(revoked=[a.held(index) for index in a.revoking])
    b.beat()
    before = bench.view()
    assert {len(member.assigned) for member in before.members.values()} == {3}
    a.beat(weight=2.0)
    after = bench.view()
    assert after.group_epoch == before.group_epoch + 1
    assert sum(shard.target == "a" for shard in after.shards.values()) == 4
    a.beat(weight=2.0)
    assert bench.view().group_epoch == after.group_epoch


def test_expiry_counts_from_the_return_of_redis(bench: Bench) -> None:
    bench.create(timings=STEADY)
    a, b = Peer(bench, "a"), Peer(bench, "b")
    a.beat()
    b.beat()
    # As after a pause of the server: all leases are long over, nobody could renew.
    for member in ("a", "b"):
        bench.redis.zadd(bench.keys.leases, {member: time.time() * 1000 - 60_000})
    b.beat()
    assert set(bench.view().members) == {"a", "b"}
    a.beat()


@pytest.mark.parametrize("lost", ["all leases", "one lease", "none, but there is a strange one"])
def test_lost_leases_cost_nobody_the_membership(bench: Bench, lost: str) -> None:
    bench.create(timings=STEADY)
    a, b = Peer(bench, "a"), Peer(bench, "b")
    a.beat()
    b.beat()
    if lost == "all leases":
        bench.redis.delete(bench.keys.leases)
    elif lost == "one lease":
        bench.redis.zrem(bench.keys.leases, "a")
    else:
        bench.redis.zadd(bench.keys.leases, {"stranger": time.time() * 1000 + 60_000})
    b.beat()
    assert dict(bench.state()[1]).keys() == {"a", "b"}
    assert (bench.lease_ms("a") or 0) > STEADY.lease_seconds * 500
    a.beat()
