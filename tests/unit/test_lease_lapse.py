"""A lease that lapses while the heartbeat that renews it is on its way."""

from __future__ import annotations

from redis_stream_coord.commands import HeartbeatReply, Holdings
from redis_stream_coord.models import Held, Timings
from redis_stream_coord.session import Claim, Lost, Session, ShardState


def reply(holdings: Holdings | None) -> HeartbeatReply:
    return HeartbeatReply(
        status="OK",
        now_ms=1,
        incarnation=1,
        version=2,
        group_epoch=1,
        assignment_epoch=1,
        epoch=2,
        timings=Timings(heartbeat_seconds=1, lease_seconds=10),
        last_event="0-0",
        holdings=holdings,
    )


ONE_SHARD = Holdings(assigned={0: 7}, revoking={}, pending=frozenset())


def test_what_lapsed_meanwhile_is_asked_for_again_and_claimed_again() -> None:
    session = Session("a", weight=1.0, draw_nonce=lambda: "n")
    held = Held(0, 7)
    assert session.accepted(session.request(), reply(ONE_SHARD), sent_at=0.0) == [Claim(held)]
    session.claimed(held)
    request = session.request()
    assert list(request.owned) == [held]

    lapsed = session.tick(9.5)
    assert isinstance(lapsed[0], Lost)
    # The answer was "unchanged": true of what the request said, not of what is left here.
    assert session.accepted(request, reply(None), sent_at=5.0) == []
    assert session.urgent
    assert session.delay(9.5) == 0
    again = session.request()
    assert list(again.owned) == []
    assert session.accepted(again, reply(ONE_SHARD), sent_at=9.5) == [Claim(held)]
    assert session.held(ShardState.CLAIMING) == {0: 7}


def test_an_unchanged_answer_to_an_unchanged_member_is_not_urgent() -> None:
    session = Session("a", weight=1.0, draw_nonce=lambda: "n")
    session.accepted(session.request(), reply(ONE_SHARD), sent_at=0.0)
    session.claimed(Held(0, 7))
    assert session.accepted(session.request(), reply(None), sent_at=1.0) == []
    assert not session.urgent
