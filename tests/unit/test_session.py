"""The life of a member, told answer by answer."""

from __future__ import annotations

import pytest

from redis_stream_coord.errors import CoordError, DuplicateMemberError
from redis_stream_coord.models import Held, Timings
from redis_stream_coord.session import ANOTHER_TOKEN, Claim, Drain, Lost, ShardState, State
from tests.unit.group_words import (
    AWAY,
    CORRUPT,
    LEASE_SECONDS,
    NO_GROUP,
    RECREATED,
    REGRESSION,
    REPLACED,
    UNKNOWN,
    Recorded,
    exists,
    reply,
)

S0, S1 = Held(0, 11), Held(1, 12)


@pytest.fixture
def session() -> Recorded:
    return Recorded()


# --- joining --------------------------------------------------------------------------------------------------------


def test_the_first_request_joins(session: Recorded) -> None:
    request = session.request()
    assert (request.member, request.nonce, request.epoch, request.incarnation) == ("a", "n1", 0, 0)
    assert (request.version, request.assignment_epoch, request.replaces, request.leaving) == (0, 0, None, False)
    assert (request.owned, request.revoked, request.refused) == ([], [], [])


def test_an_accepted_join_brings_shards_to_claim(session: Recorded) -> None:
    assert session.hear(reply(assigned={0: 11, 1: 12})) == [Claim(S0), Claim(S1)]
    assert session.state is State.MEMBER
    assert session.held(ShardState.CLAIMING) == {0: 11, 1: 12}
    assert not session.reads(S0, session.now)
    session.claimed(S0)
    assert session.reads(S0, session.now)
    assert not session.reads(Held(0, 10), session.now)
    request = session.request()
    assert (request.epoch, request.incarnation, request.version, request.assignment_epoch) == (5, 77, 9, 4)
    assert request.owned == [S0, S1]


def test_a_join_without_an_answer_is_the_same_join_again(session: Recorded) -> None:
    first = session.request()
    assert session.take(first, AWAY) == []
    assert session.request() == first


def test_an_existing_session_is_replaced_only_by_name(session: Recorded) -> None:
    assert session.hear(exists("old")) == []
    assert session.delay(session.now) == 0
    request = session.request()
    assert (request.nonce, request.epoch, request.replaces) == ("n1", 0, "old")
    # Meanwhile a third one has come.
    session.take(request, exists("third"))
    assert session.request().replaces == "third"
    session.hear(reply(assigned={0: 11}))
    assert session.request().replaces is None


def test_weight_is_said_each_time() -> None:
    session = Recorded(weight=2.5)
    assert session.request().weight == 2.5


# --- fenced ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [UNKNOWN, REPLACED], ids=lambda e: e.word)
def test_a_fenced_session_joins_anew(session: Recorded, error: CoordError) -> None:
    session.own(s0=11, s1=12)
    actions = session.hear(error)
    assert actions == [Lost((S0, S1), str(error))]
    assert session.held() == {}
    assert session.state is State.JOINING
    assert session.delay(session.now) == 0
    request = session.request()
    assert (request.nonce, request.epoch, request.version, request.assignment_epoch) == ("n2", 0, 0, 0)
    assert request.incarnation == 77


def test_the_incarnation_is_forgotten_only_when_the_group_was_created_anew(session: Recorded) -> None:
    session.own(s0=11)
    session.hear(RECREATED)
    assert session.request().incarnation == 0
    session.own(s0=11)
    session.hear(UNKNOWN)
    assert session.request().incarnation == 77


def test_a_living_twin_is_recognised(session: Recorded) -> None:
    for _ in range(2):
        session.own(s0=11)
        session.hear(REPLACED)
        assert session.state is State.JOINING
    session.own(s0=11)
    assert session.hear(REPLACED) == [Lost((S0,), str(REPLACED))]
    assert session.state is State.FAILED
    assert session.finished
    assert isinstance(session.failure, DuplicateMemberError)
    assert session.failure.member == "a"


def test_restarts_far_apart_are_no_twin(session: Recorded) -> None:
    for _ in range(10):
        session.own(s0=11)
        session.hear(REPLACED)
        session.now += 76  # more than half of ten leases
    assert session.failure is None


def test_being_unknown_is_no_twin(session: Recorded) -> None:
    for _ in range(10):
        session.own(s0=11)
        session.hear(UNKNOWN)
    assert session.failure is None


# --- the lease ------------------------------------------------------------------------------------------------------


def test_nothing_happens_while_redis_is_away_until_the_lease_is_over(session: Recorded) -> None:
    session.own(s0=11)
    since = session.now
    while session.now < since + LEASE_SECONDS - 1:
        session.now += 1
        assert session.hear(AWAY) == []
        assert session.tick(session.now) == []
        assert session.reads(S0, session.now)
    assert not session.reads(S0, since + LEASE_SECONDS)
    assert not session.owns(S0, since + LEASE_SECONDS)
    assert session.tick(since + LEASE_SECONDS) == [Lost((S0,), "the lease ran out without an answer from Redis")]
    assert session.tick(since + LEASE_SECONDS) == []
    assert session.state is State.MEMBER


def test_the_lease_counts_from_sending(session: Recorded) -> None:
    request = session.request()
    session.accepted(request, reply(assigned={0: 11}), sent_at=100.0)
    # The answer took ten seconds; that is not seen here, and must not be.
    assert session.lease_until == pytest.approx(100.0 + LEASE_SECONDS)


def test_the_lease_is_that_of_the_group(session: Recorded) -> None:
    timings = Timings(heartbeat_seconds=1, lease_seconds=4, rebalance_seconds=5)
    session.hear(reply(timings=timings))
    assert session.lease_until == pytest.approx(100.0 + 3.6)
    assert session.delay(100.0) == 1


def test_after_a_lost_lease_the_same_token_is_claimed_again(session: Recorded) -> None:
    session.own(s0=11)
    session.now += 20
    session.tick(session.now)
    assert session.request().owned == []
    assert session.hear(reply(assigned={0: 11})) == [Claim(S0)]


def test_a_lost_lease_does_not_bring_back_a_token_that_was_given_up(session: Recorded) -> None:
    """The heartbeat that said so was delayed: it freed the shard while a handler ran under the very token."""
    session.own(s0=11)
    session.surrender(S0)
    session.take(session.request(), AWAY)
    session.now += LEASE_SECONDS
    assert session.tick(session.now) == []
    assert session.hear(reply(assigned={0: 11})) == []
    assert session.request().refused == [(0, 11, 0)]
    assert session.hear(reply(assigned={0: 13})) == [Claim(Held(0, 13))]


def test_what_is_asked_back_and_not_held_is_reported_at_once(session: Recorded) -> None:
    session.own(s0=11)
    session.tick(session.now + 20)
    session.now += 20
    assert session.hear(reply(revoking={0: 11})) == []
    assert session.state_of(0) is ShardState.REVOKED
    assert session.delay(session.now) == 0
    assert session.request().revoked == [S0]


# --- giving up shards -----------------------------------------------------------------------------------------------


def test_a_drained_shard_is_reported_until_it_is_answered(session: Recorded) -> None:
    session.own(s0=11, s1=12)
    assert session.hear(reply(assigned={0: 11}, revoking={1: 12})) == [Drain((S1,))]
    assert session.owns(S1, session.now)
    assert not session.reads(S1, session.now)
    assert session.request().owned == [S0, S1]
    session.drained(S1)
    assert not session.owns(S1, session.now)
    assert session.delay(session.now) == 0
    for _ in range(3):
        request = session.request()
        assert (request.owned, request.revoked) == ([S0], [S1])
        session.take(request, AWAY)
    assert session.take(session.request(), reply(assigned={0: 11})) == []
    assert session.request().revoked == []
    assert session.held() == {0: 11}


def test_a_short_answer_takes_back_exactly_what_was_reported_in_its_request(session: Recorded) -> None:
    session.own(s0=11, s1=12)
    session.hear(reply(revoking={0: 11, 1: 12}))
    session.drained(S0)
    request = session.request()
    session.drained(S1)  # while the heartbeat is under way
    session.take(request, reply(short=True))
    assert session.held() == {1: 12}
    assert session.request().revoked == [S1]


def test_a_short_answer_changes_nothing_else(session: Recorded) -> None:
    session.own(s0=11, s1=12)
    assert session.hear(reply(short=True)) == []
    assert session.held(ShardState.OWNED) == {0: 11, 1: 12}


def test_the_same_revoke_begins_one_drain(session: Recorded) -> None:
    session.own(s0=11)
    assert session.hear(reply(revoking={0: 11})) == [Drain((S0,))]
    assert session.hear(reply(revoking={0: 11})) == []


def test_a_claim_under_way_is_not_read_after_a_revoke(session: Recorded) -> None:
    session.hear(reply(assigned={0: 11}))
    assert session.hear(reply(revoking={0: 11})) == [Drain((S0,))]
    session.claimed(S0)
    assert not session.reads(S0, session.now)
    session.drained(S0)
    assert session.request().revoked == [S0]


def test_while_something_is_drained_nothing_new_is_read(session: Recorded) -> None:
    session.own(s0=11)
    assert session.hear(reply(assigned={1: 12}, revoking={0: 11})) == [Drain((S0,))]
    assert session.held() == {0: 11}
    session.drained(S0)
    assert session.hear(reply(assigned={1: 12})) == [Claim(S1)]


def test_what_the_group_gave_away_is_lost(session: Recorded) -> None:
    session.own(s0=11, s1=12)
    lost = Lost((S0,), "the group gave it to another member")
    assert session.hear(reply(assigned={1: 12})) == [lost]
    assert session.hear(reply(assigned={1: 20})) == [
        Lost((S1,), "the group gave it to another member"),
        Claim(Held(1, 20)),
    ]


def test_a_cancelled_revoke_claims_again_under_the_same_token(session: Recorded) -> None:
    session.own(s0=11)
    session.hear(reply(revoking={0: 11}))
    assert session.hear(reply(assigned={0: 11})) == [Claim(S0)]
    session.drained(S0)  # of the drain before: too late
    session.claimed(S0)
    assert session.reads(S0, session.now)


def test_a_token_once_reported_as_drained_is_never_read_under_again(session: Recorded) -> None:
    session.own(s0=11)
    session.hear(reply(revoking={0: 11}))
    session.drained(S0)
    assert session.hear(reply(assigned={0: 11})) == []
    assert session.state_of(0) is ShardState.UNCLAIMABLE
    assert session.delay(session.now) == 0
    request = session.request()
    # No other fence is ahead, it just needs another token.
    assert (request.owned, request.revoked, request.refused) == ([], [], [(0, 11, ANOTHER_TOKEN)])
    session.claimed(S0)
    assert not session.reads(S0, session.now)
    assert session.take(request, reply(assigned={0: 21})) == [Claim(Held(0, 21))]


# --- claims ---------------------------------------------------------------------------------------------------------


def test_a_refused_claim_is_reported_until_it_is_answered(session: Recorded) -> None:
    session.hear(reply(assigned={0: 11, 1: 12}))
    session.claimed(S1)
    lost = Lost((S0,), "its fence is ahead of the token that was granted")
    assert session.claim_refused(S0, fence_token=30) == [lost]
    assert session.delay(session.now) == 0
    for _ in range(2):
        request = session.request()
        assert (request.owned, request.refused) == ([S1], [(0, 11, 30)])
        session.take(request, AWAY)
    assert session.hear(reply(assigned={1: 12})) == []
    assert session.request().refused == []


def test_a_refused_claim_that_is_asked_back_is_reported_as_drained(session: Recorded) -> None:
    session.hear(reply(assigned={0: 11}))
    session.claim_refused(S0, fence_token=30)
    session.request()
    assert session.take(session.request(), reply(revoking={0: 11})) == []
    assert session.delay(session.now) == 0
    request = session.request()
    assert (request.revoked, request.refused) == ([S0], [])


def test_a_refusal_while_draining_means_drained(session: Recorded) -> None:
    session.hear(reply(assigned={0: 11}))
    session.hear(reply(revoking={0: 11}))
    session.claim_refused(S0, fence_token=30)
    assert session.request().revoked == [S0]


def test_a_lost_fence_is_claimed_again(session: Recorded) -> None:
    session.own(s0=11)
    assert session.unfenced(S0) == [Claim(S0)]
    assert session.unfenced(S0) == []
    assert not session.reads(S0, session.now)
    assert session.owns(S0, session.now)
    session.claimed(S0)
    assert session.reads(S0, session.now)


def test_a_shard_with_a_stuck_handler_is_for_somebody_else(session: Recorded) -> None:
    session.own(s0=11, s1=12)
    assert session.surrender(S0) == [Lost((S0,), "its handler is stuck")]
    request = session.request()
    assert (request.owned, request.refused) == ([S1], [(0, 11, 0)])


# --- the end --------------------------------------------------------------------------------------------------------


def test_stopped_before_it_ever_asked(session: Recorded) -> None:
    assert session.leave(hold=False) == []
    assert session.state is State.GONE


def test_stopped_after_a_join_that_may_have_arrived(session: Recorded) -> None:
    session.hear(AWAY)
    session.leave(hold=False)
    assert session.state is State.LEAVING
    assert session.delay(session.now) == 0
    request = session.request()
    assert (request.epoch, request.leaving) == (0, True)
    session.take(request, reply("LEFT"))
    assert session.state is State.GONE


def test_leaving_during_a_join_that_somebody_else_has_made(session: Recorded) -> None:
    session.hear(AWAY)
    session.leave(hold=False)
    session.hear(exists("other"))
    assert session.state is State.GONE


def test_a_member_drains_everything_and_leaves(session: Recorded) -> None:
    session.own(s0=11, s1=12)
    assert session.leave(hold=False) == [Drain((S0, S1))]
    assert session.request().leaving
    assert session.hear(reply(revoking={0: 11, 1: 12})) == []
    session.drained(S0)
    request = session.request()
    assert (request.owned, request.revoked, request.leaving) == ([S1], [S0], True)
    session.take(request, reply(revoking={1: 12}))
    session.drained(S1)
    assert session.hear(reply("LEFT")) == []
    assert session.state is State.GONE
    assert session.leave(hold=False) == []


def test_who_leaves_takes_nothing_new(session: Recorded) -> None:
    session.own(s0=11)
    request = session.request()
    session.leave(hold=False)
    assert session.take(request, reply(assigned={0: 11, 1: 12})) == []
    assert session.held() == {0: 11}
    assert session.state_of(0) is ShardState.DRAINING


def test_holding_leaves_without_a_word(session: Recorded) -> None:
    session.own(s0=11)
    assert session.leave(hold=True) == [Drain((S0,))]
    assert not session.request().leaving
    assert session.hear(reply(assigned={0: 11})) == []
    assert session.state is State.LEAVING
    session.drained(S0)
    assert session.hear(reply(assigned={0: 11})) == []
    assert session.state is State.GONE


def test_holding_ends_at_once_with_nothing_to_drain(session: Recorded) -> None:
    session.hear(reply())
    session.leave(hold=True)
    session.hear(reply(short=True))
    assert session.state is State.GONE


def test_a_hold_is_not_undone_by_a_stop_that_follows(session: Recorded) -> None:
    session.own(s0=11)
    session.leave(hold=True)
    assert session.leave(hold=False) == []
    assert not session.request().leaving


@pytest.mark.parametrize("error", [UNKNOWN, REPLACED, NO_GROUP], ids=lambda e: e.word)
def test_who_leaves_and_is_not_known_is_gone(session: Recorded, error: CoordError) -> None:
    session.own(s0=11)
    session.leave(hold=False)
    actions = session.hear(error)
    assert [action.held for action in actions if isinstance(action, Lost)] == [(S0,)]
    assert session.state is State.GONE


def test_abandoning_reports_what_is_not_drained_as_drained(session: Recorded) -> None:
    session.own(s0=11, s1=12)
    session.leave(hold=False)
    session.drained(S0)
    assert session.abandon() == [S1]
    assert session.abandon() == []
    assert session.request().revoked == [S0, S1]


# --- trouble --------------------------------------------------------------------------------------------------------


def test_a_member_of_a_group_that_is_gone_begins_anew(session: Recorded) -> None:
    session.own(s0=11)
    assert session.hear(NO_GROUP) == [Lost((S0,), "the group does not exist any more")]
    assert session.state is State.JOINING
    request = session.request()
    assert (request.nonce, request.incarnation, request.version) == ("n2", 0, 0)
    assert session.take(request, NO_GROUP) == []
    assert session.request().nonce == "n2"
    assert session.delay(session.now) > 0


@pytest.mark.parametrize("error", [CORRUPT, REGRESSION], ids=lambda e: e.word)
def test_metadata_that_cannot_be_used_stops_the_work_and_keeps_the_witness(
    session: Recorded, error: CoordError
) -> None:
    session.own(s0=11)
    actions = session.hear(error)
    assert [type(action) for action in actions] == [Lost]
    assert session.state is State.MEMBER
    request = session.request()
    assert (request.nonce, request.epoch, request.incarnation, request.version) == ("n1", 5, 77, 9)
    assert session.trouble is error
    assert session.take(request, reply(assigned={0: 11})) == [Claim(S0)]
    assert session.trouble is None


def test_trouble_is_asked_after_again_soon_and_then_at_the_interval(session: Recorded) -> None:
    session.hear(reply())
    assert session.delay(session.now) == 3
    assert session.delay(session.now + 1) == 2
    assert session.delay(session.now + 99) == 0
    delays = []
    for _ in range(12):
        session.hear(AWAY)
        delays.append(session.delay(session.now))
    assert delays == sorted(delays)
    assert delays[0] == pytest.approx(0.1)
    assert delays[-1] == 3
    session.hear(reply(short=True))
    assert session.delay(session.now) == 3


def test_what_is_urgent_waits_for_nothing_but_redis(session: Recorded) -> None:
    assert session.delay(session.now) == 0  # a new session
    session.own(s0=11)
    session.hear(reply(revoking={0: 11}))
    assert session.delay(session.now) > 0
    session.drained(S0)
    assert session.delay(session.now) == 0
    session.hear(AWAY)
    assert session.delay(session.now) > 0


def test_a_stop_is_urgent_even_while_redis_is_away(session: Recorded) -> None:
    session.own(s0=11)
    session.hear(AWAY)
    session.leave(hold=False)
    assert session.delay(session.now) == 0


def test_what_is_drained_while_a_heartbeat_is_under_way_is_said_right_after(session: Recorded) -> None:
    session.own(s0=11)
    session.hear(reply(revoking={0: 11}))
    request = session.request()
    session.drained(S0)
    session.take(request, reply(revoking={0: 11}))
    assert session.delay(session.now) == 0
    assert session.request().revoked == [S0]
