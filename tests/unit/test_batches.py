"""Batches in memory: when they are handed out, and what one bad entry does to the others."""

from __future__ import annotations

import logging

import pytest

from redis_stream_coord import Batch, Consumer, Message, Outgoing, Poison, Producer
from redis_stream_coord.testing import Environment

STREAM, GROUP = "orders", "billing"


def fill(env: Environment, count: int) -> None:
    with Producer(STREAM, redis=env.redis) as producer:
        producer.publish_many(Outgoing(fields={"n": str(n)}, key="k") for n in range(count))


@pytest.mark.parametrize("within_seconds", [0.1, 0.3, 0.7, 1.1])
def test_batch_that_is_not_full_waits_no_longer_than_it_says(coord_env: Environment, within_seconds: float) -> None:
    """Sums of floats leave a rest; waiting for that has to end, too."""
    coord_env.create(STREAM, group=GROUP, shards=1)
    sizes: list[int] = []
    batch = Batch(lambda messages: sizes.append(len(messages)), within_seconds=within_seconds)
    Consumer(STREAM, group=GROUP, redis=coord_env.redis, handler=batch).start()
    coord_env.settle()
    fill(coord_env, 3)
    coord_env.advance(within_seconds / 2)
    assert sizes == []
    coord_env.advance(within_seconds / 2 + 0.01)
    assert sizes == [3]


def test_batch_fills_up_while_it_waits(coord_env: Environment) -> None:
    """What is read ahead does not keep more from coming as long as the batch is not full."""
    coord_env.create(STREAM, group=GROUP, shards=1)
    sizes: list[int] = []
    batch = Batch(lambda messages: sizes.append(len(messages)), max_size=100, within_seconds=60)
    Consumer(STREAM, group=GROUP, redis=coord_env.redis, handler=batch, prefetch=100).start()
    coord_env.settle()
    for _ in range(4):
        assert sizes == []
        fill(coord_env, 25)
        coord_env.advance(1)
    assert sizes == [100]


def test_batch_of_large_entries_does_not_wait_for_what_is_not_read(coord_env: Environment) -> None:
    coord_env.create(STREAM, group=GROUP, shards=1)
    sizes: list[int] = []
    batch = Batch(lambda messages: sizes.append(len(messages)), within_seconds=60)
    Consumer(STREAM, group=GROUP, redis=coord_env.redis, handler=batch, prefetch_bytes=1000).start()
    coord_env.settle()
    with Producer(STREAM, redis=coord_env.redis) as producer:
        producer.publish_many(Outgoing(fields={"n": "x" * 400}, key="k") for n in range(6))
    coord_env.advance(1)
    assert sum(sizes) == 6
    assert all(size >= 2 for size in sizes[:-1])


@pytest.mark.parametrize("after_deliveries", [1, 2, 3])
def test_one_bad_entry_does_not_take_its_batch_along(
    coord_env: Environment, after_deliveries: int, caplog: pytest.LogCaptureFixture
) -> None:
    """However few deliveries are enough: after a failed batch each entry is tried alone."""
    coord_env.create(STREAM, group=GROUP, shards=1)
    handled: list[str] = []

    def handle(messages: list[Message]) -> None:
        if any(message.text("n") == "1" for message in messages):
            raise ValueError("on purpose")
        handled.extend(message.text("n") for message in messages)

    dead: list[str] = []
    poison = Poison(lambda message: dead.append(message.text("n")), after_deliveries=after_deliveries)
    consumer = Consumer(STREAM, group=GROUP, redis=coord_env.redis, handler=Batch(handle), poison=poison)
    consumer.start()
    with Producer(STREAM, redis=coord_env.redis) as producer:
        for n in range(3):
            producer.publish({"n": str(n)}, key="k")
    with caplog.at_level(logging.CRITICAL):
        coord_env.advance(10)
    assert (handled, dead) == (["0", "2"], ["1"])
    assert coord_env.pending(STREAM, group=GROUP) == {}
