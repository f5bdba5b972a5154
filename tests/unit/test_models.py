"""The values that the library takes and returns."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from redis_stream_coord.errors import ConfigError, FencedError
from redis_stream_coord.group_view import GroupView, MemberView, ShardView
from redis_stream_coord.models import Held, Message, Timings

# --- timings --------------------------------------------------------------------------------------------------------


def test_timings_by_default() -> None:
    assert attrs.asdict(Timings()) == {"heartbeat_seconds": 3.0, "lease_seconds": 15.0, "rebalance_seconds": 60.0}


@pytest.mark.parametrize(("heartbeat", "lease"), [(3, 9), (0.1, 0.3), (0.017, 0.051), (1, 3600)])
def test_timings_that_fit(heartbeat: float, lease: float) -> None:
    Timings(heartbeat_seconds=heartbeat, lease_seconds=lease, rebalance_seconds=0.1)


@pytest.mark.parametrize(("heartbeat", "lease"), [(3, 8.9), (0, 15), (0.01, 15), (3, 0)])
def test_timings_that_do_not_fit(heartbeat: float, lease: float) -> None:
    with pytest.raises(ConfigError, match="three heartbeats"):
        Timings(heartbeat_seconds=heartbeat, lease_seconds=lease)


@pytest.mark.parametrize("name", ["heartbeat_seconds", "lease_seconds", "rebalance_seconds"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 15_000, "3", None, True])
def test_timings_that_are_no_seconds(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* must be a number between 0.0 and 3600.0. These are seconds"):
        Timings(**{name: value})


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_rebalance_takes_time(seconds: float) -> None:
    with pytest.raises(ConfigError, match="rebalance_seconds"):
        Timings(rebalance_seconds=seconds)


# --- messages -------------------------------------------------------------------------------------------------------


def message(**changes: Any) -> Message:
    values: dict[str, Any] = {
        "stream": "orders",
        "shard": 1,
        "id": "5-0",
        "key": b"k",
        "fields": {"text": "häß".encode(), "bytes": b"\xff"},
        "event_id": None,
        "deliveries": 1,
        "token": (7, 3),
        "ack": lambda entry_id, delete: None,
        "owned": lambda: True,
    }
    return Message(**{**values, **changes})


def test_a_field_as_text() -> None:
    assert message().text("text") == "häß"
    assert message().text("bytes", "latin-1") == "ÿ"
    with pytest.raises(UnicodeDecodeError):
        message().text("bytes")
    with pytest.raises(KeyError):
        message().text("missing")


def test_acknowledging_is_handed_on() -> None:
    calls: list[tuple[str, bool]] = []
    one = message(ack=lambda entry_id, delete: calls.append((entry_id, delete)))
    one.ack()
    one.ack_delete()
    assert calls == [("5-0", False), ("5-0", True)]


def test_acknowledging_what_is_lost_says_so() -> None:
    def fenced(entry_id: str, delete: bool) -> None:
        raise FencedError("lost")

    lost = message(ack=fenced, owned=lambda: False)
    assert not lost.owned
    with pytest.raises(FencedError):
        lost.ack()


def test_a_refused_message_knows_its_delay_once() -> None:
    one = message()
    assert not one.was_refused
    assert one.taken_delay() is None
    one.nack(delay_seconds=1.5)
    assert one.was_refused
    assert one.taken_delay() == 1.5
    assert one.taken_delay() is None
    one.nack()
    assert one.taken_delay() == 0.0


def test_messages_are_compared_by_identity() -> None:
    one = message()
    assert one == one
    assert one != message()
    assert len({one, message()}) == 2


def test_the_text_of_a_message_shows_no_functions() -> None:
    assert "lambda" not in repr(message())


# --- the view of a group --------------------------------------------------------------------------------------------


def shard(index: int, target: str | None, **changes: Any) -> ShardView:
    values = {"holder": target, "token": index + 1, "state": "assigned", "deadline_ms": 0, "hold_until_ms": 0}
    return ShardView(index=index, target=target, **{**values, **changes})


def member(name: str, *shards: int, **changes: Any) -> MemberView:
    values: dict[str, Any] = {
        "nonce": name,
        "epoch": 1,
        "weight": 1.0,
        "state": "active",
        "joined_ms": 0,
        "lease_remaining_ms": 1000,
        "assigned": {index: index + 1 for index in shards},
        "revoking": {},
        "pending": frozenset(),
    }
    return MemberView(id=name, **{**values, **changes})


def view(members: list[MemberView], shards: list[ShardView], **changes: Any) -> GroupView:
    values: dict[str, Any] = {
        "stream": "orders",
        "group": "billing",
        "incarnation": 1,
        "version": 9,
        "group_epoch": 3,
        "assignment_epoch": 3,
        "grant_counter": 100,
        "timings": Timings(),
        "now_ms": 0,
    }
    return GroupView(
        members={one.id: one for one in members}, shards={one.index: one for one in shards}, **{**values, **changes}
    )


GOOD = ([member("a", 0, 1), member("b", 2)], [shard(0, "a"), shard(1, "a"), shard(2, "b")])


def test_a_good_view_has_no_violations() -> None:
    assert view(*GOOD).violations() == []
    assert view([], [shard(0, None, holder=None, state="free")]).violations() == []
    assert view(*GOOD).owners == {0: "a", 1: "a", 2: "b"}


def test_a_view_while_members_leave_has_no_violations() -> None:
    leaving = member("a", state="leaving", revoking={0: 1})
    assert view([leaving], [shard(0, None, holder="a", state="revoking")]).violations() == []
    moving = [shard(0, "b", holder="a", state="revoking"), shard(1, "a")]
    assert view([member("a", 1, revoking={0: 1}), member("b")], moving).violations() == []


@pytest.mark.parametrize(
    ("members", "shards", "changes", "said"),
    [
        ([member("a")], [shard(0, None, holder=None)], {}, "shard 0 has no target though there are 1 live members"),
        ([member("a", 0)], [shard(0, "x", holder="a")], {}, "shard 0 is meant for x, which is no member"),
        ([member("a", 0)], [shard(0, "a", token=101)], {}, "shard 0 has token 101 above the counter 100"),
        (
            [member("a", 0), member("b", 0)],
            [shard(0, "a")],
            {},
            "shard 0 is held by a and b",
        ),
        (
            [member("a", 0), member("b", revoking={0: 1})],
            [shard(0, "a")],
            {},
            "shard 0 is held by a and b",
        ),
        (*GOOD, {"assignment_epoch": 4}, "assignment epoch 4 above group epoch 3"),
        (
            [member("a", 0, 1, 2), member("b")],
            [shard(0, "a"), shard(1, "a"), shard(2, "a")],
            {},
            "the target is not balanced: 3 shards for a, and its share of weight 1 is 1.50",
        ),
    ],
)
def test_each_violation_is_found(
    members: list[MemberView], shards: list[ShardView], changes: dict[str, Any], said: str
) -> None:
    found = view(members, shards, **changes).violations()
    assert any(said in sentence for sentence in found), found


def test_a_target_that_is_not_computed_yet_may_be_unbalanced() -> None:
    unbalanced = [shard(0, "a"), shard(1, "a"), shard(2, None, holder=None, state="free")]
    assert view([member("a", 0, 1), member("b")], unbalanced, assignment_epoch=2).violations() == []


def test_unequal_weights_may_be_unbalanced() -> None:
    heavy = member("a", 0, 1, 2, weight=5.0)
    assert view([heavy, member("b")], [shard(0, "a"), shard(1, "a"), shard(2, "a")]).violations() == []


def test_values_can_be_compared_and_are_frozen() -> None:
    assert Held(1, 2) == Held(1, 2)
    assert len({Held(1, 2), Held(1, 2)}) == 1
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Held(1, 2).shard = 3  # type: ignore[misc]
