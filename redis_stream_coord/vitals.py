"""How a consumer is: what `health` says, and its gauges."""

from __future__ import annotations

from collections.abc import Sequence

from . import telemetry
from .models import Health
from .session import Session, ShardState, State
from .worker import Worker


def health(session: Session, workers: Sequence[Worker], now: float) -> Health:
    """Return how a consumer is, and what it waits for.

    Parameters:
        session: its membership.
        workers: of its shards.
        now: the time, on the clock of the machine.
    """
    holds = session.held()
    draining = session.held(ShardState.DRAINING)
    waits = ""
    unclaimed = [worker.unclaimed for worker in workers if worker.unclaimed is not None]
    behind = any(why.word == "AHEAD" for why in unclaimed)
    if session.trouble is not None:
        waits = str(session.trouble)
    elif unclaimed:
        waits = str(unclaimed[0])
    elif draining:
        waits = f"handlers of shards {sorted(draining)} to finish"
    elif session.held(ShardState.CLAIMING):
        waits = f"claims of shards {sorted(session.held(ShardState.CLAIMING))}"
    elif session.state is State.MEMBER and not holds:
        waits = "the group to assign it shards"
    progress = [w.last_progress for w in workers if w.received]
    return Health(
        ok=session.trouble is None and not behind and session.state is State.MEMBER and now < session.lease_until,
        state=session.state.value,
        lease_remaining_seconds=0.0 if session.finished else max(0.0, session.lease_until - now),
        progress_age_seconds=max((now - at for at in progress), default=0.0),
        waits_for=waits,
    )


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
