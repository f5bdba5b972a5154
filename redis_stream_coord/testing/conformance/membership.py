"""Joining, staying, leaving, dying and coming back; revoke before assign."""

from __future__ import annotations

from ...models import Held
from .bench import Bench, refusal
from .catalogue import case


@case
def first_member_gets_everything(bench: Bench) -> None:
    """A member alone gets every shard, each under a token of its own."""
    bench.create()
    a = bench.peer("a")
    assert a.beat().status == "OK"
    assert set(a.assigned) == {0, 1, 2, 3}
    assert len(set(a.assigned.values())) == 4
    assert bench.view().violations() == []


@case
def repeated_join_is_one_join(bench: Bench) -> None:
    """A join whose reply was lost, sent again, gives the same epoch and the same tokens."""
    bench.create()
    a = bench.peer("a")
    first = a.send(a.request())
    again = a.beat()
    assert (again.epoch, again.holdings) == (first.epoch, first.holdings)


@case
def lost_reply_fences_nobody(bench: Bench) -> None:
    """A heartbeat at the epoch before the stored one is accepted: the last reply was lost."""
    bench.create(shards=2)
    a, b = bench.peer("a"), bench.peer("b")
    a.beat()
    b.beat()
    lost = a.send(a.request())
    assert lost.epoch == a.epoch + 1
    again = a.beat()
    assert (again.epoch, again.holdings) == (lost.epoch, lost.holdings)


@case
def unchanged_answer_is_short(bench: Bench) -> None:
    """Nothing has changed: the answer says no more than that, and the record stays as it is."""
    bench.create()
    a = bench.peer("a")
    a.beat()
    before = bench.record()
    assert a.beat().holdings is None
    assert bench.record() == before


@case
def revoke_comes_before_assign(bench: Bench) -> None:
    """A newcomer gets a shard only after its holder reported it drained, and under a higher token."""
    bench.create(shards=2)
    a, b = bench.peer("a"), bench.peer("b")
    a.beat()
    assert b.beat().status == "OK"
    assert b.assigned == {}
    assert b.pending == frozenset({1})
    assert a.beat().status == "REVOKE_PENDING"
    b.beat()
    assert b.assigned == {}
    token = a.revoking[1]
    assert a.drain().status == "OK"
    b.beat()
    assert set(a.assigned) == {0}
    assert set(b.assigned) == {1}
    assert b.assigned[1] > token
    assert bench.view().violations() == []


@case
def report_counts_only_with_its_token(bench: Bench) -> None:
    """A report of another shard or token changes nothing, nor does a shard's absence from a report."""
    bench.create(shards=2)
    a, b = bench.peer("a"), bench.peer("b")
    a.beat()
    b.beat()
    a.beat()
    before = bench.record()
    token = a.revoking[1]
    for revoked in ([Held(1, token - 1)], [Held(1, token + 1)], [Held(0, token)], [Held(7, token)]):
        a.beat(revoked=revoked)
    for owned in ([], [a.held(0)]):
        a.beat(owned=owned)
    assert bench.record() == before


@case
def delayed_report_frees_nothing(bench: Bench) -> None:
    """A copy of a report that comes late does not free a shard that came back."""
    bench.create(shards=2)
    a, b = bench.peer("a"), bench.peer("b")
    a.beat()
    b.beat()
    a.beat()
    old = a.held(1)
    a.beat(revoked=[old])
    b.beat()
    b.beat(leaving=True, revoked=[b.held(1)])
    a.beat()
    assert set(a.assigned) == {0, 1}
    assert a.assigned[1] > old.token
    before = bench.record()
    a.beat(revoked=[old])
    assert bench.record() == before


@case
def revoke_is_cancelled_under_the_same_token(bench: Bench) -> None:
    """If the newcomer leaves before the shard was drained, its holder keeps it under its token."""
    bench.create(shards=2)
    a, b = bench.peer("a"), bench.peer("b")
    a.beat()
    before = dict(a.assigned)
    b.beat()
    a.beat()
    assert set(a.revoking) == {1}
    assert b.beat(leaving=True).status == "LEFT"
    a.beat()
    assert a.assigned == before


@case
def leaving_frees_what_is_drained(bench: Bench) -> None:
    """A member that leaves is gone when all it held is drained; the others have everything at once."""
    bench.create()
    a, b = bench.peer("a"), bench.peer("b")
    a.beat()
    b.beat()
    a.beat()
    a.drain()
    b.beat()
    assert b.beat(leaving=True, revoked=[b.held(2)]).status == "REVOKE_PENDING"
    assert b.beat(leaving=True, revoked=[b.held(3)]).status == "LEFT"
    a.beat()
    assert set(a.assigned) == {0, 1, 2, 3}
    assert set(bench.view().members) == {"a"}


@case
def silent_member_expires(bench: Bench) -> None:
    """A member not heard of for a lease is gone, and its shards with another; it is unknown when it comes back."""
    bench.create()
    a, b = bench.peer("a"), bench.peer("b")
    a.beat()
    b.beat()
    a.beat()
    a.drain()
    b.beat()
    for _ in range(3):
        bench.pass_time(bench.timings.lease_seconds * 0.45)
        b.beat()
    assert set(b.assigned) == {0, 1, 2, 3}
    assert a.refused().word == "UNKNOWN_MEMBER_ID"
    old = a.epoch
    assert a.beat(epoch=0, owned=[]).epoch > old
    assert bench.view().violations() == []


@case
def nobody_expires_after_an_outage(bench: Bench) -> None:
    """When Redis was away longer than the leases, the first member that is back does not expire the others."""
    bench.create()
    a, b = bench.peer("a"), bench.peer("b")
    a.beat()
    b.beat()
    bench.pass_time(bench.timings.lease_seconds * 2)
    a.beat()
    assert set(bench.view().members) == {"a", "b"}
    b.beat()


@case
def lost_leases_expire_nobody(bench: Bench) -> None:
    """If the leases vanish, every member gets a full one."""
    bench.create()
    a, b = bench.peer("a"), bench.peer("b")
    a.beat()
    b.beat()
    bench.raw("DEL", bench.keys.leases)
    a.beat()
    view = bench.view()
    assert set(view.members) == {"a", "b"}
    lease = view.members["b"].lease_remaining_ms
    assert lease is not None
    assert lease > 0


@case
def rebalance_timeout_fences(bench: Bench) -> None:
    """A member that does not drain in time loses its shards, though it sends heartbeats."""
    bench.create(shards=2)
    a, b = bench.peer("a"), bench.peer("b")
    a.beat()
    b.beat()
    # In small steps: after a long silence Redis is taken to have been away, and everybody gets more time.
    step, passed = bench.timings.lease_seconds / 5, 0.0
    while passed < bench.timings.rebalance_seconds - 2 * step:
        assert a.beat().status == "REVOKE_PENDING"
        bench.pass_time(step)
        b.beat()
        passed += step
    for _ in range(3):
        bench.pass_time(step)
        b.beat()
    assert set(b.assigned) == {0, 1}
    assert a.refused().word == "UNKNOWN_MEMBER_ID"


@case
def living_session_is_replaced_only_by_name(bench: Bench) -> None:
    """A second process under the same member id is told of the first, and replaces it only by naming it."""
    bench.create()
    first, second = bench.peer("a", "first"), bench.peer("a", "second")
    first.beat()
    error = second.refused()
    assert (error.word, error.detail) == ("SESSION_EXISTS", "first")
    assert first.beat().status == "OK"
    second.beat(replaces="first")
    assert set(second.assigned) == {0, 1, 2, 3}
    assert min(second.assigned.values()) > max(first.assigned.values())
    assert first.refused().word == "FENCED_MEMBER_EPOCH"


@case
def wrong_beliefs_are_fenced(bench: Bench) -> None:
    """Another session, an older lifecycle, or a shard or token that it does not hold: fenced, and nothing changes."""
    bench.create()
    a = bench.peer("a")
    a.beat()
    assert a.refused(nonce="other").word == "FENCED_MEMBER_EPOCH"
    assert a.refused(incarnation=a.incarnation - 1).word == "FENCED_MEMBER_EPOCH"
    assert a.refused(owned=[Held(0, 99)]).word == "FENCED_MEMBER_EPOCH"
    assert a.beat().status == "OK"


@case
def weights_divide_the_shards(bench: Bench) -> None:
    """A member of three times the weight gets three times the shards; with equal weights they differ by one at most."""
    bench.create(shards=8)
    a, b = bench.peer("a"), bench.peer("b")
    a.beat(weight=3.0)
    b.beat()
    targets = [shard.target for shard in bench.view().shards.values()]
    assert (targets.count("a"), targets.count("b")) == (6, 2)
    a.beat()
    targets = [shard.target for shard in bench.view().shards.values()]
    assert (targets.count("a"), targets.count("b")) == (4, 4)


@case
def no_group_no_member(bench: Bench) -> None:
    """A heartbeat to a group that does not exist makes nothing."""
    error = refusal(bench.peer("a").beat)
    assert error.word == "GROUP_NOT_FOUND"
    assert bench.record() == {}
