"""Who may speak for a shard that came back under the same token while an earlier worker was still there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from redis_stream_coord import AsyncConsumer, Message
from redis_stream_coord.engine import Engine
from redis_stream_coord.models import Held
from redis_stream_coord.session import ShardState
from tests.unit.group_words import reply

S0 = Held(0, 11)


async def _handle(message: Message) -> None: ...


def _engine() -> Engine:
    """A member that has to drain shard 0, for the second time under one token."""
    consumer: Any = AsyncConsumer("orders", group="billing", redis="redis://localhost", handler=_handle, member="a")
    engine = Engine(consumer._config, consumer._pauses)
    session = engine.session
    session.accepted(session.request(), reply(assigned={0: 11}), sent_at=engine._clock())
    session.claimed(S0)
    session.accepted(session.request(), reply(revoking={0: 11}), sent_at=engine._clock())
    assert session.held(ShardState.DRAINING) == {0: 11}
    return engine


def test_an_earlier_worker_does_not_speak_for_a_later_one_of_the_same_token() -> None:
    """It reported the shard as drained while the later one had entries in handlers: two owners at once."""
    engine = _engine()
    earlier, later = (cast(Any, SimpleNamespace(held=S0)) for _ in range(2))
    engine._workers[0] = later
    engine.drained(earlier)
    assert engine.session.held(ShardState.DRAINING) == {0: 11}
    engine.drained(later)
    assert engine.session.held(ShardState.REVOKED) == {0: 11}


def test_an_earlier_worker_does_not_claim_for_a_later_one_of_the_same_token() -> None:
    """The later one was refused, because the group had been moved in between, and nobody read the shard any more."""
    engine = _engine()
    session = engine.session
    session.accepted(session.request(), reply(assigned={0: 11}), sent_at=engine._clock())
    earlier, later = (cast(Any, SimpleNamespace(held=S0, look=lambda: None)) for _ in range(2))
    engine._workers[0] = later
    asyncio.run(engine.claimed(earlier))
    assert session.held(ShardState.CLAIMING) == {0: 11}
    asyncio.run(engine.claimed(later))
    assert session.held(ShardState.OWNED) == {0: 11}
