"""Who may speak for a shard that came back under the same token while an earlier worker was still there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from redis_stream_coord import AsyncConsumer, Consumer, Message, Producer
from redis_stream_coord.engine import Engine
from redis_stream_coord.models import Held
from redis_stream_coord.session import ShardState
from redis_stream_coord.testing import Environment
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


def test_a_shard_that_is_asked_back_twice_while_one_handler_runs_waits_for_that_handler() -> None:
    """The later worker of the same token had nothing in hand, and reported the shard as drained."""
    spans: list[tuple[str, str, float, float]] = []
    with Environment(seed=3) as env:
        env.create("orders", group="billing", shards=2)

        def consumer(name: str, seconds: float) -> Consumer:
            def handle(message: Message) -> None:
                began = env.now
                env.sleep(seconds)
                spans.append((name, message.id, began, env.now))

            return Consumer("orders", group="billing", redis=env.redis, handler=handle, member=name)

        slow = consumer("a", 40)
        slow.start()
        with Producer("orders", redis=env.redis) as producer:
            for number in range(20):
                producer.publish({"n": str(number)}, key=f"k{number}")
        env.advance(5)  # both shards have an entry in a handler
        passing = consumer("b", 0)
        passing.start()
        env.advance(5)  # one is asked back
        passing.stop()
        env.advance(5)  # and kept
        staying = consumer("c", 0)
        staying.start()
        env.advance(20)  # and asked back again, before its handler returns
        assert [name for name, *_ in spans] == []
        env.advance(60)
        firsts = [span for span in spans if span[0] == "a"][:2]
        others = [span for span in spans if span[0] == "c"]
        assert others
        assert min(began for *_, began, _ in others) >= min(ended for *_, ended in firsts)
        for one in (slow, staying):
            one.stop()
