"""Iterating over the messages of a consumer, and leaving the loop."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from redis_stream_coord import AsyncConsumer, Consumer, DeadLetter, Message
from tests.integration.kit import GROUP, SLOW, STEADY, Bench, taking_at_most
from tests.waiting import aeventually, eventually


def make(bench: Bench, **options: Any) -> Consumer:
    return Consumer(bench.stream, group=GROUP, redis=bench.url, member="a", shutdown_seconds=5, **options)


def test_loop_acknowledges_the_last_message_when_it_asks_for_the_next(bench: Bench) -> None:
    bench.create(shards=1, timings=STEADY)
    ids = bench.fill(0, 3)
    consumer = make(bench)
    seen = []
    for message in consumer:
        seen.append(message.id)
        if len(seen) == 3:
            eventually(lambda: list(bench.pending(0)) == ids[2:], what="the acknowledgements of the first two")
            consumer.request_stop()
    assert seen == ids
    assert bench.pending(0) == {}
    assert bench.view().members == {}


Place = tuple[int, str]  # ids are unique in a shard only


def place(message: Message) -> Place:
    return message.shard, message.id


def all_pending(bench: Bench, shards: int) -> set[Place]:
    return {(shard, entry_id) for shard in range(shards) for entry_id in bench.pending(shard)}


@pytest.mark.parametrize("opened", ["by the loop", "by with"])
def test_loop_that_is_left_gives_back_what_it_did_not_finish(
    bench: Bench, opened: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench.create(shards=3, timings=SLOW)
    published = [(shard, entry_id) for shard in range(3) for entry_id in bench.fill(shard, 3)]
    # Leaving is no failure: nothing of it is poison.
    consumer = make(bench, poison=DeadLetter("dead", after_deliveries=1))
    done: list[Place] = []

    def take_two() -> None:
        for message in consumer:
            if len(done) == 2:
                break
            done.append(place(message))

    with taking_at_most(2.0, "leaving the loop"):
        if opened == "by the loop":
            take_two()
            assert consumer.wait(3)
        else:
            with consumer:
                take_two()
    assert bench.view().members == {}
    assert not all_pending(bench, 3) & set(done)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    assert not bench.redis.exists("dead")
    with make(bench) as second:
        for message in second:
            done.append(place(message))
            if len(done) == len(published):
                second.request_stop()
    assert sorted(done) == published
    for shard in range(3):
        of_shard = [one for one in done if one[0] == shard]
        assert of_shard == sorted(of_shard)


def test_loop_with_manual_acknowledgement(bench: Bench) -> None:
    bench.create(shards=1, timings=STEADY)
    ids = bench.fill(0, 3)
    consumer = make(bench, ack="manual")
    for number, message in enumerate(consumer):
        if number == 1:
            message.ack()
        if number == 2:
            consumer.request_stop()
    assert list(bench.pending(0)) == [ids[0], ids[2]]


def test_async_loop_and_async_handler(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    published = [(shard, entry_id) for shard in range(2) for entry_id in bench.fill(shard, 3)]
    done: list[Place] = []

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.001)
        done.append(place(message))

    async def main() -> None:
        consumer = AsyncConsumer(bench.stream, group=GROUP, redis=bench.url, member="a", shutdown_seconds=5)
        async for message in consumer:
            if len(done) == 4:
                break
            done.append(place(message))
        with taking_at_most(2.0, "leaving the loop"):
            assert await consumer.wait(3)
        second = AsyncConsumer(bench.stream, group=GROUP, redis=bench.url, member="b", handler=handle)
        async with second:
            await aeventually(lambda: len(done) == 6, what="the rest")
            assert second.assignment == {0, 1}

    asyncio.run(main())
    assert sorted(done) == published
    for shard in range(2):
        of_shard = [one for one in done if one[0] == shard]
        assert of_shard == sorted(of_shard)
    assert all_pending(bench, 2) == set()
    assert bench.view().members == {}


def test_async_loop_whose_task_is_cancelled_loses_nothing(bench: Bench) -> None:
    bench.create(shards=2, timings=SLOW)
    bench.fill(0)

    async def main() -> None:
        consumer = AsyncConsumer(bench.stream, group=GROUP, redis=bench.url, member="a", shutdown_seconds=5)
        seen: list[Place] = []

        async def loop() -> None:
            async for message in consumer:
                seen.append(place(message))

        task = asyncio.get_running_loop().create_task(loop())
        await aeventually(lambda: len(seen) == 1, what="the first message")
        # Once in the middle of waiting, with one that comes at the very same moment.
        (late,) = bench.fill(1)
        await aeventually(lambda: bench.pending(1), what="the entry read")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with taking_at_most(2.0, "stopping"):
            assert await consumer.wait(3)
        assert (1, late) in seen or set(bench.pending(1)) == {late}

    asyncio.run(main())
    assert bench.view().members == {}
