"""The real scripts and real sessions under random schedules of faults, judged from outside after every step.

Two phases: whatever goes wrong, the invariants hold; and when nothing goes wrong any more, every shard is read, by the
member that it is meant for, within the promised time. More schedules: `REDIS_STREAM_COORD_SCHEDULES=5000`.

Below them, word for word, what such schedules have found.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import attrs
import pytest

from redis_stream_coord import commands
from redis_stream_coord.commands import HeartbeatReply, HeartbeatRequest, Holdings
from redis_stream_coord.errors import CoordError
from redis_stream_coord.models import Held, Timings
from tests.unit.fake import FakeGroup, fake_group
from tests.unit.world import World

SCHEDULES = int(os.environ.get("REDIS_STREAM_COORD_SCHEDULES", "50"))
STEPS = int(os.environ.get("REDIS_STREAM_COORD_STEPS", "60"))
_TIMINGS = Timings(heartbeat_seconds=3, lease_seconds=15, rebalance_seconds=20)


def run(seed: int) -> None:
    """Run one schedule; on failure show what happened."""
    rng = random.Random(seed)
    with fake_group(shards=rng.randint(1, 5), timings=_TIMINGS) as group:
        world = World(group, rng)
        try:
            world.run(rng.randint(STEPS // 2, STEPS * 3 // 2))
            world.heal()
        except BaseException:
            print(f"schedule {seed}:", *world.trace[-60:], sep="\n")
            raise


def test_random_schedules(seed: int) -> None:
    for number in range(SCHEDULES):
        run(seed + number)


# --- what they have found -------------------------------------------------------------------------------------------


class Peer:
    """Speaks for one session word by word, where a real one would know better."""

    def __init__(self, group: FakeGroup, member: str, nonce: str, weight: float = 1.0) -> None:
        self.group = group
        self.next = HeartbeatRequest(
            member=member,
            nonce=nonce,
            epoch=0,
            incarnation=0,
            version=0,
            assignment_epoch=0,
            weight=weight,
            replaces=None,
            leaving=False,
            owned=[],
            revoked=[],
            refused=[],
        )

    def send(self, request: HeartbeatRequest) -> HeartbeatReply:
        return self.group.run(commands.heartbeat(self.group.keys, request))

    def beat(self, **changes: object) -> HeartbeatReply:
        """Send the next heartbeat, and own from then on what the answer assigns."""
        reply = self.send(attrs.evolve(self.next, **changes))
        self.next = attrs.evolve(
            self.next,
            epoch=reply.epoch,
            incarnation=reply.incarnation,
            version=reply.version,
            assignment_epoch=reply.assignment_epoch,
        )
        if reply.holdings is not None:
            holdings = {**reply.holdings.assigned, **reply.holdings.revoking}
            self.next = attrs.evolve(self.next, owned=[Held(*pair) for pair in sorted(holdings.items())])
        return reply

    def drain(self) -> HeartbeatReply:
        """Report everything as drained that is to be given up."""
        revoking = self.group.view().members[self.next.member].revoking
        owned = [held for held in self.next.owned if held.shard not in revoking]
        self.next = attrs.evolve(self.next, owned=owned)
        return self.beat(revoked=[Held(*pair) for pair in revoking.items()])


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    with fake_group(shards=4, timings=_TIMINGS) as group:
        yield group


def waiting(group: FakeGroup) -> Peer:
    """Make a member that has one shard, has to drain another one, and waits for a third one that is free."""
    peers = {name: Peer(group, name, name) for name in "abc"}
    peers["a"].beat()
    peers["b"].beat()
    peers["a"].beat()
    peers["a"].drain()
    peers["b"].beat()
    peers["c"].beat()
    drainer, other = sorted("ab", key=lambda name: not group.view().members[name].revoking)
    peers[drainer].beat()
    # The other one leaves: some of its shards go to the drainer, as soon as that has drained.
    peers[other].beat(leaving=True)
    peers[other].next = attrs.evolve(peers[other].next, leaving=True)
    peers[other].drain()
    mine = group.view().members[drainer]
    assert all((mine.assigned, mine.revoking, mine.pending))
    return peers[drainer]


def test_a_restart_gets_what_waited_for_the_drain_of_its_predecessor(group: FakeGroup) -> None:
    """It stayed free until the deadline of the drain that the restart had ended."""
    peer = waiting(group)
    restarted = Peer(group, peer.next.member, "z")
    restarted.beat(replaces=peer.next.nonce)
    view = group.view()
    assert view.owners == {index: shard.target for index, shard in view.shards.items()}


@pytest.mark.parametrize("shards", range(3, 9))
def test_who_keeps_a_shard_in_exchange_gets_what_waited_for_its_drain(shards: int) -> None:
    """It stayed free until the deadline of the drain that the exchange had cancelled."""
    with fake_group(shards=shards, timings=_TIMINGS) as group:
        peer = waiting(group)
        shard, token = min(group.view().members[peer.next.member].assigned.items())
        owned = [held for held in peer.next.owned if held.shard != shard]
        peer.beat(owned=owned, refused=[(shard, token, 0)])  # its handler is stuck
        view = group.view()
        assert view.violations() == []
        free = [one for one in view.shards.values() if one.state == "free"]
        assert not [one for one in free if not view.members[one.target or ""].revoking], free


def test_of_two_shards_with_stuck_handlers_neither_comes_straight_back(group: FakeGroup) -> None:
    """The first one was what came back in exchange for the second one."""
    a, b = Peer(group, "a", "a"), Peer(group, "b", "b")
    a.beat()
    b.beat()
    a.beat()
    a.drain()
    b.beat()
    mine = group.view().members["a"].assigned
    a.beat(owned=[], refused=[(shard, token, 0) for shard, token in sorted(mine.items())])
    view = group.view()
    assert {view.shards[shard].target for shard in mine} == {"b"}
    assert view.violations() == []


def test_an_exchange_does_not_hide_another_change_of_the_same_heartbeat(group: FakeGroup) -> None:
    a, b = Peer(group, "a", "a"), Peer(group, "b", "b")
    a.beat()
    b.beat()
    a.beat()
    a.drain()
    b.beat()
    (shard, token), *rest = sorted(group.view().members["a"].assigned.items())
    a.beat(owned=[Held(*pair) for pair in rest], refused=[(shard, token, 0)], weight=3.0)
    targets = [one.target for one in group.view().shards.values()]
    assert sorted(targets) == ["a", "a", "a", "b"]


def test_a_late_copy_of_a_join_does_not_swallow_a_change(group: FakeGroup) -> None:
    """The member learned nothing of a revoke that was cancelled, and drained a shard for nothing."""
    a, b = Peer(group, "a", "a"), Peer(group, "b", "b")
    join = a.next
    a.beat()
    b.beat()
    assert a.beat().status == "REVOKE_PENDING"
    given = {**group.view().members["a"].assigned, **group.view().members["a"].revoking}
    b.beat(leaving=True)  # never got anything: gone at once, and everything is `a`'s again
    a.send(join)
    answer = a.beat()
    assert answer.holdings == Holdings(assigned=given, revoking={}, pending=frozenset())


def test_a_leaving_member_changes_nothing_by_its_weight(group: FakeGroup) -> None:
    a = Peer(group, "a", "a")
    a.beat()
    a.beat(leaving=True)
    before = group.view()
    a.beat(leaving=True, weight=2.0)
    assert group.view().group_epoch == before.group_epoch


@pytest.mark.parametrize("word", ["UNKNOWN_MEMBER_ID", "FENCED_MEMBER_EPOCH"])
def test_a_session_that_was_fenced_and_began_anew_by_a_late_copy_of_its_join_is_still_over(
    group: FakeGroup, word: str
) -> None:
    a, b = Peer(group, "a", "a"), Peer(group, "b", "b")
    join = a.next
    a.beat()
    b.beat()
    a.beat()
    for _ in range(3):
        group.clock.advance(7)
        b.beat()
    if word == "FENCED_MEMBER_EPOCH":
        a.send(join)
    with pytest.raises(CoordError) as refused:
        a.beat()
    assert refused.value.word == word


# --- what Redis lost, or was away for -------------------------------------------------------------------------------


def test_whoever_comes_back_first_fences_nobody_who_could_not_report(group: FakeGroup) -> None:
    """The leases began anew, but the time to drain had passed for a member that could not say it was done."""
    a, b = Peer(group, "a", "a"), Peer(group, "b", "b")
    a.beat()
    b.beat()
    a.beat()
    group.clock.advance(600)
    b.beat()
    group.clock.advance(3)
    b.beat()
    assert set(group.view().members) == {"a", "b"}
    a.drain()
    assert group.view().owners == {0: "a", 1: "a", 2: "b", 3: "b"}


def test_who_does_not_drain_after_redis_was_away_is_fenced_one_lease_later(group: FakeGroup) -> None:
    a, b = Peer(group, "a", "a"), Peer(group, "b", "b")
    a.beat()
    b.beat()
    a.beat()
    group.clock.advance(600)
    for _ in range(5):
        b.beat()
        a.beat()
        group.clock.advance(3)
    b.beat()
    with pytest.raises(CoordError):
        a.beat()
    assert set(group.view().members) == {"b"}


def test_a_lease_of_nobody_does_not_hide_that_one_is_missing(group: FakeGroup) -> None:
    a, b = Peer(group, "a", "a"), Peer(group, "b", "b")
    a.beat()
    b.beat()
    group.client.zrem(group.keys.leases, "b")
    group.client.zadd(group.keys.leases, {"nobody": group.clock.ms + 1000})
    for _ in range(9):
        group.clock.advance(3)
        a.beat()
    assert set(group.view().members) == {"a"}
    assert group.client.zrange(group.keys.leases, 0, -1) == [b"a"]


def test_everybody_gets_a_full_lease_when_the_leases_are_lost(group: FakeGroup) -> None:
    a, b = Peer(group, "a", "a"), Peer(group, "b", "b")
    a.beat()
    b.beat()
    group.clock.advance(6)
    group.client.delete(group.keys.leases)
    a.beat()
    assert group.view().members["b"].lease_remaining_ms == 15_000
