"""A record that went backwards: how its members come into step with it, and what nobody may do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from redis_stream_coord import commands
from redis_stream_coord.commands import HeartbeatReply
from redis_stream_coord.errors import CoordError, MetadataRegressionError
from redis_stream_coord.models import Held, Timings
from redis_stream_coord.session import Claim, Drain, ShardState
from tests.unit.fake import FakeGroup, fake_group
from tests.unit.group_words import Recorded, reply
from tests.unit.test_protocol_model import Peer

_TIMINGS = Timings(heartbeat_seconds=3, lease_seconds=15, rebalance_seconds=20)
ROUND = "1700.n1"


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    with fake_group(shards=4, timings=_TIMINGS) as group:
        yield group


def copy(group: FakeGroup) -> dict[bytes, bytes]:
    return dict(group.client.hgetall(group.keys.metadata))


def restore(group: FakeGroup, record: dict[bytes, bytes]) -> None:
    group.client.delete(group.keys.metadata)
    group.client.hset(group.keys.metadata, mapping=record)
    group.clock.advance(1)


def events(group: FakeGroup, kind: str) -> list[dict[str, str]]:
    entries = [
        {k.decode(): v.decode() for k, v in fields.items()} for _, fields in group.client.xrange(group.keys.events)
    ]
    return [fields for fields in entries if fields["type"] == kind]


def moved(group: FakeGroup) -> tuple[Peer, Peer, dict[bytes, bytes]]:
    """`a` had all four shards when the copy was made; then `b` joined and got two of them."""
    a, b = Peer(group, "a", "a1"), Peer(group, "b", "b1")
    a.beat()
    record = copy(group)
    b.beat()
    a.beat()
    a.drain()
    b.beat()
    assert {len(group.view().members[name].assigned) for name in "ab"} == {2}
    return a, b, record


def step(peer: Peer, answer: HeartbeatReply, *, owned: list[Held], **said: Any) -> HeartbeatReply:
    """Answer for what the record gives: own it, or say that it is not held."""
    assert answer.holdings is not None
    given = {**answer.holdings.assigned, **answer.holdings.revoking}
    missing = [Held(*pair) for pair in sorted(given.items()) if Held(*pair) not in owned]
    peer.next = attrs.evolve(peer.next, owned=owned)
    return peer.beat(**{"round": answer.round, "not_held": missing, **said})


# --- the round, word by word ----------------------------------------------------------------------------------------


def test_a_report_of_more_than_is_stored_opens_a_round_and_grants_nothing(group: FakeGroup) -> None:
    a, _, record = moved(group)
    mine = list(a.next.owned)
    restore(group, record)
    answer = a.beat()
    assert (answer.status, answer.version) == ("SYNC_METADATA", group.view().version)
    view = group.view()
    assert view.round is not None
    assert view.round.waits_for == {"a"}
    assert any("correction round" in reason for reason in view.degraded())
    assert [event["witness"] for event in events(group, "metadata_regression")] == ["member"]
    # What it has given up since the copy is not taken from it by silence.
    answer = step(a, answer, owned=mine, not_held=[])
    assert answer.status == "SYNC_METADATA"
    assert set(group.view().members["a"].assigned) == {0, 1, 2, 3}
    before = group.view()
    answer = step(a, answer, owned=mine)
    after = group.view()
    assert answer.status == "OK"
    assert (after.round, after.group_epoch) == (None, before.group_epoch + 1)
    assert after.assignment_epoch == after.group_epoch
    assert after.shards[mine[0].shard].token == mine[0].token, "what it had stays under its token"
    assert all(s.holder == "a" for s in after.shards.values())
    assert after.degraded() == []


def test_whoever_is_not_in_the_record_makes_the_round_last_a_lease(group: FakeGroup) -> None:
    a, b, record = moved(group)
    mine = list(a.next.owned)
    restore(group, record)
    answer = a.beat()
    with pytest.raises(CoordError) as refused:
        b.beat()
    assert refused.value.word == "UNKNOWN_MEMBER_ID"
    assert "the metadata went backwards" in refused.value.detail
    assert [event["witness"] for event in events(group, "metadata_regression")] == ["member", "stranger"]
    assert step(a, answer, owned=mine).status == "REVOKE_PENDING"
    for _ in range(4):
        group.clock.advance(3)
        assert a.beat(round=answer.round).status == "REVOKE_PENDING"
        assert group.view().shards[3].holder is None
    group.clock.advance(3)
    assert a.beat(round=answer.round).status == "OK"
    assert group.view().shards[3].holder == "a"


def test_a_stranger_alone_opens_no_round(group: FakeGroup) -> None:
    """A zombie that wakes up after a round would open another one, and the next one another one."""
    _, b, record = moved(group)
    restore(group, record)
    with pytest.raises(CoordError):
        b.beat()
    assert group.view().round is None
    assert [event["witness"] for event in events(group, "metadata_regression")] == ["stranger"]


def test_what_it_has_in_hand_and_the_record_does_not_give_it_is_drained_first(group: FakeGroup) -> None:
    a, b = Peer(group, "a", "a1"), Peer(group, "b", "b1")
    a.beat()
    b.beat()
    record = copy(group)  # `b` has nothing yet
    a.beat()
    a.drain()
    b.beat()
    theirs = list(b.next.owned)
    assert len(theirs) == 2
    restore(group, record)
    answer = b.beat()
    assert answer.status == "SYNC_METADATA"
    assert step(b, answer, owned=theirs).status == "REVOKE_PENDING"
    assert group.view().round is not None
    assert "b" in (group.view().round.waits_for)  # type: ignore[union-attr]
    assert step(b, answer, owned=[], revoked=theirs).status == "REVOKE_PENDING"
    assert group.view().round.waits_for == {"a"}  # type: ignore[union-attr]
    assert events(group, "ownership_violation") == []


def test_a_lost_answer_is_repeated_until_the_round_is_named(group: FakeGroup) -> None:
    a, _, record = moved(group)
    said = a.next
    restore(group, record)
    first = a.send(said)
    again = a.send(said)
    assert (first.status, first.round, first.version) == (again.status, again.round, again.version)


def test_a_second_report_joins_the_open_round(group: FakeGroup) -> None:
    a, b = Peer(group, "a", "a1"), Peer(group, "b", "b1")
    a.beat()
    b.beat()
    record = copy(group)
    a.beat()
    a.drain()
    b.beat()
    a.beat()
    restore(group, record)
    assert a.beat().round == b.beat().round
    assert len(events(group, "metadata_regression")) == 1


@pytest.mark.parametrize("when", ["open", "before"])
def test_a_record_that_goes_back_once_more_is_noticed(group: FakeGroup, when: str) -> None:
    """To the middle of the round, when a member in step has seen its end; or to before the round."""
    a, _, record = moved(group)
    mine = list(a.next.owned)
    restore(group, record)
    answer = a.beat()
    in_the_round = copy(group)
    first = answer.round
    assert step(a, answer, owned=mine).status == "OK"
    if when == "open":
        # As if it had been in step already in that copy.
        in_the_round[b"round"] = in_the_round[b"round"].replace(b"waits=a", b"waits=-")
    restore(group, in_the_round if when == "open" else record)
    again = a.beat()
    assert again.status == "SYNC_METADATA"
    assert again.round != first


def test_a_round_that_the_record_does_not_know_opens_one(group: FakeGroup) -> None:
    a = Peer(group, "a", "a1")
    a.beat()
    assert a.beat(round="17.gone").status == "SYNC_METADATA"


def test_whoever_hears_late_that_the_round_is_over_opens_none(group: FakeGroup) -> None:
    a, _, record = moved(group)
    mine = list(a.next.owned)
    restore(group, record)
    answer = a.beat()
    step(a, answer, owned=mine)
    assert a.beat(round=answer.round).status == "OK"
    assert group.view().round is None


def test_joins_during_a_round_get_nothing_until_it_is_over(group: FakeGroup) -> None:
    a, _, record = moved(group)
    mine = list(a.next.owned)
    restore(group, record)
    answer = a.beat()
    c = Peer(group, "c", "c1")
    joined = c.beat()
    assert (joined.status, joined.round) == ("REVOKE_PENDING", answer.round)
    assert group.view().round.waits_for == {"a"}  # type: ignore[union-attr]
    assert c.beat(round=joined.round).status == "REVOKE_PENDING"
    assert group.view().members["c"].assigned == {}
    step(a, answer, owned=mine)
    assert group.view().round is None
    assert c.beat(round=joined.round).status == "OK"


def test_a_session_that_is_replaced_during_a_round_leaves_its_shards_free(group: FakeGroup) -> None:
    a, _, record = moved(group)
    restore(group, record)
    a.beat()
    Peer(group, "a", "a2").beat(replaces="a1")
    view = group.view()
    assert view.round is None, "nobody else had to answer"
    assert view.members["a"].nonce == "a2"
    tokens = {shard.token for shard in view.shards.values()}
    assert not tokens & {held.token for held in a.next.owned}


def test_who_is_not_in_step_after_a_rebalance_timeout_is_fenced(group: FakeGroup) -> None:
    a, b = Peer(group, "a", "a1"), Peer(group, "b", "b1")
    a.beat()
    b.beat()
    record = copy(group)
    a.beat()
    a.drain()
    b.beat()
    restore(group, record)
    theirs = list(b.next.owned)
    answer = b.beat()
    mine = a.beat()
    step(a, mine, owned=[held for held in a.next.owned if held.shard < 2])
    for _ in range(6):
        group.clock.advance(3)
        a.beat(round=mine.round)
        step(b, answer, owned=theirs)
        assert group.view().round is not None
    group.clock.advance(3)
    a.beat(round=mine.round)
    assert set(group.view().members) == {"a"}
    assert group.view().round is None
    assert [event["member"] for event in events(group, "member_fenced")] == ["b"]


def test_who_expires_is_waited_for_no_longer(group: FakeGroup) -> None:
    a, b = Peer(group, "a", "a1"), Peer(group, "b", "b1")
    a.beat()
    b.beat()
    record = copy(group)
    a.beat()
    a.drain()
    restore(group, record)
    answer = a.beat()
    answer = step(a, answer, owned=[held for held in a.next.owned if held.shard < 2])
    for _ in range(5):
        assert group.view().round is not None
        group.clock.advance(3)
        a.beat(round=answer.round)
    assert set(group.view().members) == {"a"}
    assert group.view().round is None


def test_who_leaves_during_a_round_drains_what_the_record_does_not_know_of(group: FakeGroup) -> None:
    a, b = Peer(group, "a", "a1"), Peer(group, "b", "b1")
    a.beat()
    b.beat()
    record = copy(group)
    a.beat()
    a.drain()
    b.beat()
    theirs = list(b.next.owned)
    restore(group, record)
    answer = b.beat()
    assert step(b, answer, owned=theirs, leaving=True).status == "REVOKE_PENDING"
    assert step(b, answer, owned=[], revoked=theirs, leaving=True).status == "LEFT"


def test_nobody_expires_by_the_leases_and_deadlines_of_an_old_record(group: FakeGroup) -> None:
    a, b = Peer(group, "a", "a1"), Peer(group, "b", "b1")
    a.beat()
    b.beat()
    a.beat()
    record = copy(group)  # `a` has to drain two shards
    a.drain()
    b.beat()
    for _ in range(20):
        group.clock.advance(3)
        a.beat()
        b.beat()
    restore(group, record)
    answer = b.beat()
    assert answer.status == "SYNC_METADATA"
    assert set(group.view().members) == {"a", "b"}
    assert a.beat().status == "SYNC_METADATA"


def test_no_token_is_given_twice_though_nobody_is_left_who_could_tell(group: FakeGroup) -> None:
    a = Peer(group, "a", "a1")
    record = copy(group)
    a.beat()
    before = {shard.token for shard in group.view().shards.values()}
    group.client.delete(group.keys.leases)
    restore(group, record)
    Peer(group, "b", "b1").beat()
    after = {shard.token for shard in group.view().shards.values()}
    assert min(after) > max(before)


@pytest.mark.parametrize("value", ["open", "open id=1 opened_ms=x due_ms=1 strangers=0 waits=-", "closed", "7", ""])
def test_a_round_that_cannot_be_read_is_damage(group: FakeGroup, value: str) -> None:
    group.client.hset(group.keys.metadata, "round", value)
    with pytest.raises(CoordError) as refused:
        Peer(group, "a", "a1").beat()
    assert refused.value.word == "CORRUPT_METADATA"


def test_a_refused_claim_whose_token_another_session_has_waits_one_lease(group: FakeGroup) -> None:
    a = Peer(group, "a", "a1")
    a.beat()
    (shard, token), *rest = sorted(group.view().members["a"].assigned.items())
    a.beat(owned=[Held(*pair) for pair in rest], refused=[(shard, token, token)])
    assert group.view().shards[shard].hold_until_ms == group.clock.ms + 15_000
    (shard, token), *rest = rest
    a.beat(owned=[Held(*pair) for pair in rest], refused=[(shard, token, -1)])
    assert group.view().shards[shard].holder == "a"


# --- the session ----------------------------------------------------------------------------------------------------


@pytest.fixture
def session() -> Recorded:
    return Recorded().own(s0=11, s1=12)


def sync(**changes: Any) -> HeartbeatReply:
    return reply("SYNC_METADATA", **{"round": ROUND, "version": 5, "epoch": 3, "assignment_epoch": 2, **changes})


def test_session_keeps_what_matches_drains_the_rest_and_names_what_it_does_not_have(session: Recorded) -> None:
    actions = session.hear(sync(assigned={0: 11, 2: 7}))
    assert actions == [Drain((Held(1, 12),))]
    assert (session.version, session.epoch, session.assignment_epoch) == (5, 3, 2)
    assert isinstance(session.trouble, MetadataRegressionError)
    assert session.delay(session.now) == 0
    request = session.request()
    assert (request.round, list(request.not_held)) == (ROUND, [Held(2, 7)])
    assert set(request.owned) == {Held(0, 11), Held(1, 12)}, "what it drains it still has in hand"
    session.take(request, reply("REVOKE_PENDING", round=ROUND, assigned={0: 11}))
    session.drained(Held(1, 12))
    request = session.request()
    assert (list(request.owned), list(request.revoked)) == ([Held(0, 11)], [Held(1, 12)])
    assert session.take(request, reply("REVOKE_PENDING", round=ROUND, assigned={0: 11})) == []
    assert session.state_of(1) is None
    assert session.hear(reply("OK", assigned={0: 11, 1: 20})) == [Claim(Held(1, 20))]
    assert (session.round, session.trouble) == (None, None)
    assert session.request().not_held == []


def test_session_claims_nothing_in_a_round(session: Recorded) -> None:
    assert session.hear(sync(assigned={0: 11, 1: 12, 3: 9})) == []
    assert list(session.request().not_held) == [Held(3, 9)]


def test_session_goes_on_draining_what_the_old_record_gives_it_back(session: Recorded) -> None:
    session.hear(reply(assigned={0: 11}, revoking={1: 12}))
    assert session.hear(sync(assigned={0: 11, 1: 12})) == []
    assert session.state_of(1) is ShardState.DRAINING
    session.drained(Held(1, 12))
    session.hear(sync(assigned={0: 11, 1: 12}))
    assert session.state_of(1) is None, "reported as drained, and never read under this token again"
    assert list(session.request().not_held) == [Held(1, 12)]


def test_session_takes_over_an_older_version_in_no_other_answer(session: Recorded) -> None:
    session.hear(reply(version=9, assigned={0: 11, 1: 12}))
    session.hear(reply(version=8, assigned={0: 11, 1: 12}))
    assert isinstance(session.trouble, MetadataRegressionError)
    assert session.version == 9


def test_describe_shows_the_round(group: FakeGroup) -> None:
    a, _, record = moved(group)
    restore(group, record)
    a.beat()
    view = group.run(commands.describe(group.keys))
    assert view.round is not None
    assert view.round.due_ms == view.round.opened_ms + 20_000
    assert not view.round.strangers
