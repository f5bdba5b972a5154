"""Plausible mistakes of whoever uses the library: each is named where it is made, and loses nothing."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest

from redis_stream_coord import (
    Admin,
    AsyncConsumer,
    Batch,
    ConfigError,
    Consumer,
    DeadLetter,
    LifecycleError,
    Message,
    Poison,
    Producer,
    Retry,
)
from redis_stream_coord.testing import Environment

STREAM, GROUP = "orders", "billing"


def plain(_: Any) -> None: ...


async def coroutine(_: Any) -> None: ...


def make(kind: Any = Consumer, **options: Any) -> Any:
    return kind(STREAM, group=GROUP, redis="redis://localhost:1", **options)


# --- functions ------------------------------------------------------------------------------------------------------


class Callable1:
    def __call__(self, _: Any) -> None: ...


@pytest.mark.parametrize(
    "handler",
    [plain, lambda _: None, print, Callable1(), functools.partial(lambda _, __: None, 1), [].append, {}.get],
    ids=["function", "lambda", "builtin", "object", "partial", "method in C", "without a signature"],
)
def test_handlers_that_fit(handler: Any) -> None:
    make(handler=handler)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"handler": "handle"}, "handler='handle' cannot be called. Pass the function itself."),
        ({"handler": lambda: None}, "handler cannot be called with one argument: .* It is given a Message"),
        ({"handler": lambda a, b: None}, "handler cannot be called with one argument: .*'b'.* It is given a Message"),
        ({"handler": Batch(lambda: None)}, "It is given a list of Message"),
        ({"handler": Batch(plain, max_size=200)}, "max_size=200 never fills: prefetch=100 .* Pass prefetch=200 too"),
        ({"handler": coroutine}, "handler must be a plain function here. Use AsyncConsumer"),
        ({"handler": functools.partial(coroutine)}, "handler must be a plain function here"),
        ({"handler": Batch(coroutine)}, "handler must be a plain function here"),
        ({"poison": Poison(coroutine, after_deliveries=3)}, "poison must be a plain function here"),
        ({"poison": plain}, r"poison=.* must be of type Poison or DeadLetter. Poison\(function"),
        ({"retry": 3}, "retry=3 must be of type Retry"),
        ({"retry": None}, "retry=None must be of type Retry"),
        ({"decode": "json"}, "decode='json' cannot be called"),
        ({"decode": coroutine}, "decode must be a plain function"),
        ({"on_lost": coroutine}, "on_lost must be a plain function"),
        ({"on_lost": lambda: None}, "on_lost cannot be called with one argument: .* It is given a frozenset of shards"),
        ({"handler": plain, "handler_threads": "4"}, "handler_threads='4' must be a whole number between 1 and"),
        ({"concurrency": 1.5}, "concurrency=1.5 must be a whole number between 1 and 1000"),
        ({"weight": "2"}, "weight='2' must be a number between 0.001 and 1000"),
        ({"shutdown_seconds": None}, "shutdown_seconds=None must be a number of at least 0.0"),
        ({"poison": DeadLetter("orders:3", after_deliveries=3)}, "cannot go to its own shard 'orders:3'"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:40],
)
def test_mistakes_of_a_consumer(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(**options)


def test_mistakes_of_a_consumer_of_coroutines() -> None:
    for options in ({"handler": plain}, {"handler": coroutine, "poison": Poison(plain, after_deliveries=1)}):
        with pytest.raises(ConfigError, match=r"must be a coroutine function here\. Use Consumer"):
            make(AsyncConsumer, **options)


def test_dead_letters_may_go_to_another_stream_with_a_similar_name() -> None:
    for name in ("orders:dead", "orders", "other:0", "orders:0:dead"):
        make(handler=plain, poison=DeadLetter(name, after_deliveries=1))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: DeadLetter("", after_deliveries=1),
        lambda: DeadLetter("dead", after_deliveries="3"),  # type: ignore[arg-type]
        lambda: Batch(plain, max_size="3"),  # type: ignore[arg-type]
        lambda: Retry(backoff_seconds=None),  # type: ignore[arg-type]
        lambda: Retry(backoff_seconds=60),
    ],
)
def test_mistakes_of_policies(wrong: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        wrong()


# --- shards and messages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [0, "0", [-1], [1.0], [None]])
def test_shards_to_pause_are_indexes(shards: Any) -> None:
    consumer = make(handler=plain)
    for call in (consumer.pause, consumer.resume):
        with pytest.raises(ConfigError, match="shards="):
            call(shards)


@pytest.mark.parametrize("delay", [-1, "5", None, float("inf"), float("nan")])
def test_delay_of_a_refusal_is_a_time(coord_env: Environment, delay: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In the handler: a wrong one is a failure of the handler, and not of the library."""
    coord_env.create(STREAM, group=GROUP, shards=1)
    failures: list[BaseException | None] = []

    def handle(message: Message) -> None:
        failures.append(message.error)
        if message.deliveries == 1:
            message.nack(delay_seconds=delay)

    consumer = Consumer(STREAM, group=GROUP, redis=coord_env.redis, handler=handle)
    consumer.start()
    with Producer(STREAM, redis=coord_env.redis) as producer:
        producer.publish({}, key="k")
    with caplog.at_level(logging.CRITICAL):
        coord_env.advance(5)
    assert [type(failure) for failure in failures] == [type(None), ConfigError]
    assert coord_env.pending(STREAM, group=GROUP) == {}


@pytest.mark.parametrize("ack", ["auto", "manual"])
def test_refusal_that_comes_too_late_is_said(coord_env: Environment, ack: Any) -> None:
    coord_env.create(STREAM, group=GROUP, shards=1)
    seen: list[Message] = []
    consumer = Consumer(STREAM, group=GROUP, redis=coord_env.redis, handler=seen.append, ack=ack)
    consumer.start()
    with Producer(STREAM, redis=coord_env.redis) as producer:
        producer.publish({}, key="k")
    coord_env.settle()
    with pytest.raises(LifecycleError, match=r"nack\(\) of entry .* comes too late"):
        seen[0].nack()
    if ack == "manual":
        seen[0].ack()
        coord_env.settle()
    assert coord_env.pending(STREAM, group=GROUP) == {}


def test_nothing_to_roll_back(coord_env: Environment) -> None:
    """`Monitor.resharding` returns None where there never was one."""
    with Admin(coord_env.redis, requested_by="tests") as admin:
        for call in (admin.wait, functools.partial(admin.rollback, reason="a test")):
            with pytest.raises(ConfigError, match="resharding=None must be of type Resharding"):
                call(None)  # type: ignore[arg-type]


# --- functions that only look plain ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["handler", "batch"])
def test_handler_that_hides_a_coroutine_loses_nothing(
    coord_env: Environment, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody awaits it, so nothing was handled: neither acknowledged nor poison."""
    coord_env.create(STREAM, group=GROUP, shards=1)
    ids = []
    with Producer(STREAM, redis=coord_env.redis) as producer:
        ids += [producer.publish({"n": str(n)}, key="k").id for n in range(3)]

    def handle(what: Any) -> Any:
        return coroutine(what)

    consumer = Consumer(
        STREAM,
        group=GROUP,
        redis=coord_env.redis,
        handler=handle if how == "handler" else Batch(handle),  # type: ignore[arg-type]
        poison=DeadLetter("dead", after_deliveries=1),
    )
    consumer.start()
    with caplog.at_level(logging.CRITICAL), pytest.raises(ConfigError, match="handler of a Consumer returned a corou"):
        consumer.wait(60)
    assert list(coord_env.pending(STREAM, group=GROUP)[0]) == ids


def test_callback_that_hides_a_coroutine_is_said(coord_env: Environment, caplog: pytest.LogCaptureFixture) -> None:
    coord_env.create(STREAM, group=GROUP, shards=1)
    consumer = Consumer(
        STREAM,
        group=GROUP,
        redis=coord_env.redis,
        handler=plain,
        on_assigned=lambda shards: coroutine(shards),  # type: ignore[arg-type, return-value]
    )
    consumer.start()
    with caplog.at_level(logging.CRITICAL), pytest.raises(ConfigError, match="callback of a Consumer returned a corou"):
        consumer.wait(60)
