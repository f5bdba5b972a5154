"""What a handler or a callback raises or waits for at the end: the consumer stops and says so, and nothing stalls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from redis_stream_coord import AsyncConsumer, LifecycleError, Message, RedisSettings
from tests.integration.kit import GROUP, Bench, Call, Crew, Recorder
from tests.integration.test_shutdown import GENEROUS_SECONDS
from tests.proxy import LossyProxy
from tests.waiting import aeventually, eventually

pytestmark = pytest.mark.parametrize("server", ["redis7"], indirect=True)


class BodyError(Exception):
    """What a callback raises."""


@pytest.mark.parametrize("kind", ["assigned", "revoked", "lost"])
def test_callback_that_fails_stops_the_consumer_and_is_raised(
    bench: Bench, crew: Crew, proxy: LossyProxy, kind: str
) -> None:
    bench.create(shards=2)

    def fail(call: Call) -> None:
        if call.kind == kind:
            raise BodyError(kind)

    a = crew.prepare("a", redis=RedisSettings(proxy.url, timeout_seconds=0.5))
    a.on_call = fail
    a.consumer.start()
    if kind != "assigned":
        a.owns(0, 1)
    if kind == "revoked":
        crew.start("b")
    if kind == "lost":
        proxy.pause()
        eventually(lambda: a.kinds(0)[-1:] == ["lost"], what="the loss")
        proxy.resume()
    with pytest.raises(BodyError, match=kind):
        a.consumer.wait(GENEROUS_SECONDS)
    # It left in order, and others do not wait for its lease.
    eventually(lambda: "a" not in bench.view().members, within_seconds=3, what="a left")


@pytest.mark.parametrize("kind", ["on_assigned", "on_revoked", "on_lost"])
def test_async_callback_that_fails_or_is_cancelled_within_stops_the_consumer(bench: Bench, kind: str) -> None:
    bench.create(shards=1)

    async def fail(_: frozenset[int]) -> None:
        raise BodyError(kind)

    async def handle(_: Message) -> None: ...

    async def main() -> None:
        consumer = AsyncConsumer(bench.stream, group=GROUP, redis=bench.url, handler=handle, **{kind: fail})
        await consumer.start()
        if kind != "on_assigned":
            await aeventually(lambda: consumer.assignment == {0}, what="the shard")
        if kind == "on_revoked":
            consumer.request_stop()
        if kind == "on_lost":
            bench.delete(force=True)
        with pytest.raises(BodyError, match=kind):
            assert await consumer.wait(GENEROUS_SECONDS)

    asyncio.run(main())


def test_callback_in_which_a_cancellation_escapes_stops_the_consumer(bench: Bench) -> None:
    """It would else end the task of the callbacks without a word, and every shard would wait for it for ever."""
    bench.create(shards=1)

    async def fail(_: frozenset[int]) -> None:
        raise asyncio.CancelledError

    async def handle(_: Message) -> None: ...

    async def main() -> None:
        consumer = AsyncConsumer(bench.stream, group=GROUP, redis=bench.url, handler=handle, on_assigned=fail)
        await consumer.start()
        with pytest.raises(LifecycleError, match="cancelled"):
            assert await consumer.wait(GENEROUS_SECONDS)

    asyncio.run(main())
    assert bench.view().members == {}


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError()])
def test_whatever_a_handler_raises_is_a_failure_and_stalls_nothing(
    bench: Bench, crew: Crew, raised: BaseException
) -> None:
    bench.create(shards=1)
    failed: list[str] = []

    def fail_once(message: Message) -> None:
        if not failed:
            failed.append(message.id)
            raise raised

    a = crew.start("a", Recorder(fail_once))
    ids = bench.fill(0, 3)
    a.finishes(*ids)
    assert failed == ids[:1]
    assert a.recorder.ids() == [ids[0], *ids]
    a.consumer.stop()
    assert bench.pending(0) == {}


def test_cancellation_that_escapes_an_async_handler_is_a_failure_and_stalls_nothing(bench: Bench) -> None:
    bench.create(shards=1)
    ids = bench.fill(0, 3)
    handled: list[str] = []

    async def handle(message: Message) -> None:
        handled.append(message.id)
        if len(handled) == 1:
            inner = asyncio.ensure_future(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(inner.cancel)
            await inner

    async def main() -> None:
        async with AsyncConsumer(bench.stream, group=GROUP, redis=bench.url, handler=handle):
            await aeventually(lambda: len(handled) == 4, what="all entries")

    asyncio.run(main())
    assert handled == [ids[0], *ids]
    assert bench.pending(0) == {}


def test_handler_may_ask_for_the_stop_and_not_wait_for_it(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2)
    refused: list[Exception] = []

    def act(_: Message) -> None:
        a.consumer.request_stop()
        try:
            a.consumer.wait()
        except LifecycleError as error:
            refused.append(error)

    a = crew.start("a", Recorder(act))
    a.owns(0, 1)
    (entry_id,) = bench.fill(1)
    assert a.consumer.wait(GENEROUS_SECONDS)
    assert len(refused) == 1
    assert "request_stop" in str(refused[0])
    assert a.recorder.done() == [entry_id]
    assert bench.pending(1) == {}


# An async handler that waits for its own consumer waits until it is abandoned; it is told so instead.
def test_async_handler_cannot_wait_for_its_own_consumer(bench: Bench) -> None:
    bench.create(shards=1)
    bench.fill(0)
    refused: list[Exception] = []

    async def handle(_: Message) -> None:
        try:
            await consumer.stop()
        except LifecycleError as error:
            refused.append(error)

    async def main() -> None:
        nonlocal consumer
        consumer = AsyncConsumer(bench.stream, group=GROUP, redis=bench.url, handler=handle, shutdown_seconds=3)
        await consumer.run()

    consumer: Any = None
    asyncio.run(main())
    assert len(refused) == 1
    assert bench.pending(0) == {}
