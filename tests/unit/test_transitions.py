"""The two tables of the session: every row can be reached through its public calls, and the others are refused.

Also: the diagrams of the documentation are drawn from these tables.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from docs import generate
from redis_stream_coord.models import Held
from redis_stream_coord.session import SHARD_TRANSITIONS, TRANSITIONS, Input, ShardInput, ShardState, State
from tests.unit.group_words import AWAY, CORRUPT, NO_GROUP, REPLACED, UNKNOWN, Recorded, exists, reply

S0 = Held(0, 11)


def joining() -> Recorded:
    return Recorded()


def member() -> Recorded:
    return Recorded().own(s0=11)


def leaving() -> Recorded:
    session = member()
    session.leave(hold=False)
    return session


def leaving_unheard() -> Recorded:
    """The join was sent, and nobody knows whether it arrived."""
    session = joining()
    session.hear(AWAY)
    session.leave(hold=False)
    return session


def displaced() -> Recorded:
    session = member()
    for _ in range(2):
        session.hear(REPLACED)
        session.own(s0=11)
    return session


def leave(session: Recorded) -> None:
    session.leave(hold=False)


ROWS: dict[tuple[State, Input], tuple[Callable[[], Recorded], Callable[[Recorded], object]]] = {
    (State.JOINING, Input.ACCEPTED): (joining, lambda s: s.hear(reply())),
    (State.JOINING, Input.EXISTS): (joining, lambda s: s.hear(exists("x"))),
    (State.JOINING, Input.FENCED): (joining, lambda s: s.hear(UNKNOWN)),
    (State.JOINING, Input.UNUSABLE): (joining, lambda s: s.hear(CORRUPT)),
    (State.JOINING, Input.STOP): (joining, leave),
    (State.JOINING, Input.LEAVE): (joining, lambda s: (s.hear(AWAY), leave(s))),
    (State.MEMBER, Input.ACCEPTED): (member, lambda s: s.hear(reply(short=True))),
    (State.MEMBER, Input.FENCED): (member, lambda s: s.hear(UNKNOWN)),
    (State.MEMBER, Input.UNUSABLE): (member, lambda s: s.hear(CORRUPT)),
    (State.MEMBER, Input.DISPLACED): (displaced, lambda s: s.hear(REPLACED)),
    (State.MEMBER, Input.LEAVE): (member, leave),
    (State.LEAVING, Input.ACCEPTED): (leaving, lambda s: s.hear(reply(revoking={0: 11}))),
    (State.LEAVING, Input.EXISTS): (leaving_unheard, lambda s: s.hear(exists("x"))),
    (State.LEAVING, Input.FENCED): (leaving, lambda s: s.hear(NO_GROUP)),
    (State.LEAVING, Input.UNUSABLE): (leaving, lambda s: s.hear(CORRUPT)),
    (State.LEAVING, Input.LEAVE): (leaving, leave),
    (State.LEAVING, Input.LEFT): (leaving, lambda s: s.hear(reply("LEFT"))),
}


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda row: f"{row[0].value}-{row[1].value}")
def test_every_row_is_reached(row: tuple[State, Input]) -> None:
    begin, happen = ROWS[row]
    session = begin()
    assert session.state is row[0]
    happen(session)
    assert row in session.moves
    assert session.state is TRANSITIONS[row]


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("given", Input)
def test_a_missing_row_is_a_mistake_in_the_library(state: State, given: Input) -> None:
    session = joining()
    session.state = state
    if (state, given) in TRANSITIONS:
        return
    with pytest.raises(KeyError):
        session._move(given)
    assert session.state is state


def test_the_ends_have_no_way_out() -> None:
    assert not [row for row in TRANSITIONS if row[0] in (State.GONE, State.FAILED)]
    assert set(TRANSITIONS.values()) == set(State)


# --- shards ---------------------------------------------------------------------------------------------------------


def claiming() -> Recorded:
    session = Recorded()
    session.hear(reply(assigned={0: 11}))
    return session


def draining() -> Recorded:
    session = member()
    session.hear(reply(revoking={0: 11}))
    return session


def revoked() -> Recorded:
    session = draining()
    session.drained(S0)
    return session


def unclaimable() -> Recorded:
    session = claiming()
    session.claim_refused(S0, fence_token=20)
    return session


def revoke(session: Recorded) -> None:
    session.hear(reply(revoking={0: 11}))


def cancel(session: Recorded) -> None:
    session.hear(reply(assigned={0: 11}))


SHARD_ROWS: dict[tuple[ShardState, ShardInput], tuple[Callable[[], Recorded], Callable[[Recorded], object]]] = {
    (ShardState.CLAIMING, ShardInput.CLAIMED): (claiming, lambda s: s.claimed(S0)),
    (ShardState.CLAIMING, ShardInput.REFUSED): (claiming, lambda s: s.claim_refused(S0, fence_token=20)),
    (ShardState.CLAIMING, ShardInput.REVOKE): (claiming, revoke),
    (ShardState.OWNED, ShardInput.CLAIMED): (member, lambda s: s.claimed(S0)),
    (ShardState.OWNED, ShardInput.UNFENCED): (member, lambda s: s.unfenced(S0)),
    (ShardState.OWNED, ShardInput.REVOKE): (member, revoke),
    (ShardState.OWNED, ShardInput.SURRENDER): (member, lambda s: s.surrender(S0)),
    (ShardState.DRAINING, ShardInput.CLAIMED): (draining, lambda s: s.claimed(S0)),
    (ShardState.DRAINING, ShardInput.REFUSED): (draining, lambda s: s.claim_refused(S0, fence_token=20)),
    (ShardState.DRAINING, ShardInput.UNFENCED): (draining, lambda s: s.unfenced(S0)),
    (ShardState.DRAINING, ShardInput.REVOKE): (draining, revoke),
    (ShardState.DRAINING, ShardInput.CANCEL): (draining, cancel),
    (ShardState.DRAINING, ShardInput.DRAINED): (draining, lambda s: s.drained(S0)),
    (ShardState.DRAINING, ShardInput.SURRENDER): (draining, lambda s: s.surrender(S0)),
    (ShardState.REVOKED, ShardInput.REVOKE): (revoked, revoke),
    (ShardState.REVOKED, ShardInput.CANCEL): (revoked, cancel),
    (ShardState.UNCLAIMABLE, ShardInput.CANCEL): (unclaimable, cancel),
    (ShardState.UNCLAIMABLE, ShardInput.REVOKE): (unclaimable, revoke),
}


@pytest.mark.parametrize("row", SHARD_TRANSITIONS, ids=lambda row: f"{row[0].value}-{row[1].value}")
def test_every_row_of_a_shard_is_reached(row: tuple[ShardState, ShardInput]) -> None:
    begin, happen = SHARD_ROWS[row]
    session = begin()
    assert session.state_of(0) is row[0]
    happen(session)
    assert row in session.shard_moves
    assert session.state_of(0) is SHARD_TRANSITIONS[row]


BEGIN = {
    ShardState.CLAIMING: claiming,
    ShardState.OWNED: member,
    ShardState.DRAINING: draining,
    ShardState.REVOKED: revoked,
    ShardState.UNCLAIMABLE: unclaimable,
}


@pytest.mark.parametrize("state", ShardState)
@pytest.mark.parametrize("given", ShardInput)
@pytest.mark.parametrize("held", [S0, Held(0, 10), Held(1, 11)], ids=["held", "another token", "another shard"])
def test_what_comes_too_late_moves_nothing(state: ShardState, given: ShardInput, held: Held) -> None:
    session = BEGIN[state]()
    if held == S0 and (state, given) in SHARD_TRANSITIONS:
        return
    assert session._move_shard(held, given) is None
    assert session.state_of(0) is state
    assert session.claim_refused(Held(0, 10), fence_token=30) == []
    assert session.unfenced(Held(0, 10)) == []
    assert session.surrender(Held(0, 10)) == []
    session.claimed(Held(0, 10))
    session.drained(Held(0, 10))
    assert session.state_of(0) is state


# --- the documentation ----------------------------------------------------------------------------------------------

_PAGE = Path(generate.__file__).parent / "protocol.md"


def test_the_diagrams_of_the_documentation_are_up_to_date() -> None:
    """If not: `python docs/generate.py`."""
    text = _PAGE.read_text("utf-8")
    assert generate.updated(text) == text


def test_each_row_is_an_arrow() -> None:
    for table, name in ((TRANSITIONS, "member"), (SHARD_TRANSITIONS, "shard")):
        drawn = generate.DIAGRAMS[name]()
        arrows = [line for line in drawn.splitlines() if "-->" in line and "[*]" not in line]
        assert sum(len(line.split(" : ")[1].split(", ")) for line in arrows) == len(table)


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no markers"):
        generate.updated("# Protocol\n")
