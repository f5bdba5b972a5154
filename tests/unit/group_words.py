"""What a group can say to a session, made by hand."""

from __future__ import annotations

import itertools
from typing import Any

from redis_stream_coord.commands import HeartbeatReply, HeartbeatRequest, Holdings
from redis_stream_coord.errors import CoordError, RedisUnavailableError, refused
from redis_stream_coord.models import Held, Timings
from redis_stream_coord.session import Action, Input, Session, ShardInput, ShardState, State, _Shard

TIMINGS = Timings(heartbeat_seconds=3, lease_seconds=15, rebalance_seconds=60)
LEASE_SECONDS = 13.5  # what a member trusts of it

AWAY = RedisUnavailableError("no answer")
REPLACED = refused("FENCED_MEMBER_EPOCH", "replaced by another session of the same member id")
RECREATED = refused("FENCED_MEMBER_EPOCH", "the group was deleted and created anew")
UNKNOWN = refused("UNKNOWN_MEMBER_ID", "a")
NO_GROUP = refused("GROUP_NOT_FOUND")
CORRUPT = refused("CORRUPT_METADATA", "member:a")
REGRESSION = refused("METADATA_REGRESSION", "stored version 3")


def exists(nonce: str) -> CoordError:
    return refused("SESSION_EXISTS", nonce)


def reply(
    status: Any = "OK",
    *,
    epoch: int = 5,
    assigned: dict[int, int] | None = None,
    revoking: dict[int, int] | None = None,
    short: bool = False,
    **changes: Any,
) -> HeartbeatReply:
    holdings = Holdings(assigned=assigned or {}, revoking=revoking or {}, pending=frozenset())
    values: dict[str, Any] = {
        "status": "REVOKE_PENDING" if revoking and status == "OK" else status,
        "now_ms": 0,
        "incarnation": 77,
        "version": 9,
        "group_epoch": 4,
        "assignment_epoch": 4,
        "epoch": epoch,
        "timings": TIMINGS,
        "last_event": "0-0",
        "holdings": None if short or status == "LEFT" else holdings,
    }
    return HeartbeatReply(**{**values, **changes})


class Recorded(Session):
    """A session that notes which rows of the tables it went through, with its time and its answers in one call."""

    def __init__(self, **options: Any) -> None:
        numbers = itertools.count(1)
        super().__init__("a", **{"weight": 1.0, "draw_nonce": lambda: f"n{next(numbers)}", **options})
        self.moves: list[tuple[State, Input]] = []
        self.shard_moves: list[tuple[ShardState, ShardInput]] = []
        self.now = 100.0

    def _move(self, given: Input) -> None:
        self.moves.append((self.state, given))
        super()._move(given)

    def _move_shard(self, held: Held, given: ShardInput) -> _Shard | None:
        before = self._shards.get(held.shard)
        state = before.state if before is not None else None
        moved = super()._move_shard(held, given)
        if moved is not None and state is not None:
            self.shard_moves.append((state, given))
        return moved

    def hear(self, answer: HeartbeatReply | CoordError) -> list[Action]:
        """Send a heartbeat and take its answer."""
        return self.take(self.request(), answer)

    def take(self, request: HeartbeatRequest, answer: HeartbeatReply | CoordError) -> list[Action]:
        if isinstance(answer, CoordError):
            return self.refused(answer, now=self.now)
        return self.accepted(request, answer, sent_at=self.now)

    def own(self, **tokens: int) -> Recorded:
        """Get shards, as s0=11, and claim them."""
        assigned = {int(name[1:]): token for name, token in tokens.items()}
        self.hear(reply(assigned=assigned))
        for shard, token in assigned.items():
            self.claimed(Held(shard, token))
        return self

    def state_of(self, shard: int) -> ShardState | None:
        return self._shards[shard].state if shard in self._shards else None
