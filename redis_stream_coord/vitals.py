"""How a consumer is: what `health` says, and its gauges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from . import telemetry
from .handling import Ledger
from .models import Health
from .pauses import Pauses
from .session import Session, ShardState, State
from .turns import Turn
from .worker import Worker

# Heartbeats that may be missed before it is said.
_MISSED_BEATS = 2


def health(
    session: Session, workers: Sequence[Worker], ledgers: Mapping[int, Ledger], pauses: Pauses, now: float
) -> Health:
    """Return how a consumer is, and what it waits for.

    Parameters:
        session: its membership.
        workers: of its shards.
        ledgers: what is in a handler, by shard; of shards that it has lost, too.
        pauses: which shards are paused.
        now: the time, on the clock of the machine.
    """
    wrong = [*_membership_wrong(session, now), *_shards_wrong(session, workers, ledgers, now)]
    progress = [w.last_progress for w in workers if w.received and not pauses.paused(w.held.shard)]
    return Health(
        ok=not wrong and session.state is State.MEMBER and now < session.lease_until,
        state=session.state.value,
        lease_remaining_seconds=0.0 if session.finished else max(0.0, session.lease_until - now),
        progress_age_seconds=max((now - at for at in progress), default=0.0),
        waits_for="; ".join(wrong or _awaited(session, ledgers, pauses, now)),
    )


def _membership_wrong(session: Session, now: float) -> Iterator[str]:
    if session.trouble is not None:
        yield str(session.trouble)
    elif session.state is State.MEMBER:
        silent = now - session.last_accepted
        if silent > _MISSED_BEATS * session.timings.heartbeat_seconds:
            yield f"no answer from Redis to its heartbeats for {silent:.1f} s"


def _shards_wrong(
    session: Session, workers: Sequence[Worker], ledgers: Mapping[int, Ledger], now: float
) -> Iterator[str]:
    for worker in workers:
        if worker.trouble is not None:
            yield f"shard {worker.held.shard}: {worker.trouble}"
    for shard, entry_id, turn, age in _handlers(ledgers, now):
        if turn.surrendered:
            yield f"shard {shard}: the handler has not returned from entry {entry_id} for {age:.1f} s"


def _handlers(ledgers: Mapping[int, Ledger], now: float) -> Iterator[tuple[int, str, Turn, float]]:
    """Yield shard, entry and call of each handler that runs, and for how long it does."""
    for shard, ledger in sorted(ledgers.items()):
        for entry_id, turn in list(ledger.busy.items()):
            if turn.began is not None:
                yield shard, entry_id, turn, now - turn.began


def _awaited(session: Session, ledgers: Mapping[int, Ledger], pauses: Pauses, now: float) -> Iterator[str]:
    if draining := session.held(ShardState.DRAINING):
        yield f"handlers of shards {sorted(draining)} to finish"
    elif claiming := session.held(ShardState.CLAIMING):
        yield f"claims of shards {sorted(claiming)}"
    elif session.state is State.MEMBER and not session.held():
        yield "the group to assign it shards"
    elif paused := [shard for shard in sorted(session.held()) if pauses.paused(shard)]:
        yield f"resume() of shards {paused}"
    for shard, entry_id, _, age in _handlers(ledgers, now):
        # Longer than a drain may take. Without ``max_handler_seconds`` nobody said that this is wrong.
        if age > session.timings.rebalance_seconds:
            yield f"shard {shard}: the handler to return from entry {entry_id}, for {age:.1f} s"


def readings(
    session: Session, workers: Sequence[Worker], attributes: telemetry.Attributes, now: float
) -> list[telemetry.Reading]:
    """Return the gauges of a consumer; see `health` for the parameters. `attributes`: those that all of them carry."""
    active = session.state is State.MEMBER and now < session.lease_until
    draining = len(session.held(ShardState.DRAINING))
    values = {
        "up": 1.0,
        "member_active": float(active),
        "member_lease_remaining_seconds": max(0.0, session.lease_until - now),
        "member_heartbeat_age_seconds": now - session.last_accepted if session.last_accepted else 0.0,
        "member_current_shards": float(len(session.held(ShardState.OWNED))),
        "member_revoking_shards": float(draining),
        "revoke_pending": float(draining > 0),
        "group_epoch": float(session.group_epoch),
        "assignment_epoch": float(session.assignment_epoch),
    }
    found: list[telemetry.Reading] = [(name, value, attributes) for name, value in values.items()]
    for worker in workers:
        of_shard = {**attributes, telemetry.SHARD: worker.held.shard}
        found.append(("consumer_shard_pending", float(worker.received), of_shard))
        age = now - worker.last_progress if worker.received else 0.0
        found.append(("consumer_shard_progress_age_seconds", max(0.0, age), of_shard))
    return found
