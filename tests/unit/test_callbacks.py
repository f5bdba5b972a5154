"""The user's callbacks: one at a time, in order, each shard in turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from redis_stream_coord.callbacks import Callbacks
from redis_stream_coord.models import Shards
from redis_stream_coord.tasks import end

Calls = list[tuple[str, set[int]]]


class Recorder:
    """Callbacks that note their calls, and block while `gate` is closed."""

    def __init__(self) -> None:
        self.calls: Calls = []
        self.failures: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = 0
        self.raising: Exception | None = None

    def function(self, kind: str) -> Callable[[Shards], Awaitable[None]]:
        async def call(shards: Shards) -> None:
            assert isinstance(shards, frozenset)
            self.running += 1
            assert self.running == 1, "callbacks overlap"
            self.calls.append((kind, set(shards)))
            try:
                await self.gate.wait()
                if self.raising is not None:
                    raise self.raising
            finally:
                self.running -= 1

        return call


@contextlib.asynccontextmanager
async def callbacks(*kinds: str) -> AsyncIterator[tuple[Callbacks, Recorder]]:
    recorder = Recorder()
    functions = [recorder.function(kind) if kind in kinds else None for kind in ("assigned", "revoked", "lost")]
    tested = Callbacks(*functions, recorder.failures.append)
    task = asyncio.ensure_future(tested.run())
    try:
        yield tested, recorder
    finally:
        await end([task])


ALL = ("assigned", "revoked", "lost")


def test_shards_that_come_together_share_a_call() -> None:
    async def scenario() -> None:
        async with callbacks(*ALL) as (tested, recorder):
            await asyncio.gather(*(tested.assigned(shard) for shard in range(3)))
            assert recorder.calls == [("assigned", {0, 1, 2})]
            await asyncio.gather(*(tested.revoked(shard) for shard in range(2)))
            assert recorder.calls[1:] == [("revoked", {0, 1})]

    asyncio.run(scenario())


def test_they_come_in_order_and_one_at_a_time() -> None:
    async def scenario() -> None:
        async with callbacks(*ALL) as (tested, recorder):
            recorder.gate.clear()
            first = asyncio.ensure_future(tested.assigned(0))
            while not recorder.calls:
                await asyncio.sleep(0)
            waiting = [asyncio.ensure_future(tested.assigned(1)), asyncio.ensure_future(tested.revoked(0))]
            await asyncio.sleep(0)
            tested.lost(frozenset({1}))
            waiting.append(asyncio.ensure_future(tested.assigned(2)))
            await asyncio.sleep(0)
            assert recorder.calls == [("assigned", {0})]
            recorder.gate.set()
            await asyncio.gather(first, *waiting)
            assert recorder.calls == [
                ("assigned", {0}),
                ("assigned", {1}),
                ("revoked", {0}),
                ("lost", {1}),
                ("assigned", {2}),
            ]

    asyncio.run(scenario())


def test_who_asks_waits_until_the_callback_has_returned() -> None:
    async def scenario() -> None:
        async with callbacks(*ALL) as (tested, recorder):
            recorder.gate.clear()
            asking = asyncio.ensure_future(tested.assigned(0))
            while not recorder.calls:
                await asyncio.sleep(0)
            assert not asking.done()
            recorder.gate.set()
            await asking

    asyncio.run(scenario())


def test_a_second_claim_of_a_shard_waits_for_the_first_ones_callback() -> None:
    """Otherwise its entries would be handed out before `on_assigned` has returned."""

    async def scenario() -> None:
        async with callbacks(*ALL) as (tested, recorder):
            recorder.gate.clear()
            asking = [asyncio.ensure_future(tested.assigned(0)) for _ in range(2)]
            while not recorder.calls:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not any(one.done() for one in asking)
            recorder.gate.set()
            await asyncio.gather(*asking)
            assert recorder.calls == [("assigned", {0})]

    asyncio.run(scenario())


def test_a_shard_takes_turns() -> None:
    async def scenario() -> None:
        async with callbacks(*ALL) as (tested, recorder):
            await tested.revoked(0)
            tested.lost(frozenset({0}))
            await tested.settle(1)
            assert recorder.calls == []
            await tested.assigned(0)
            await tested.assigned(0)
            await tested.revoked(0)
            tested.lost(frozenset({0}))
            await tested.revoked(0)
            await tested.assigned(0)
            tested.lost(frozenset({0, 7}))
            await tested.settle(1)
            assert recorder.calls == [("assigned", {0}), ("revoked", {0}), ("assigned", {0}), ("lost", {0})]

    asyncio.run(scenario())


def test_without_a_function_nobody_waits() -> None:
    async def scenario() -> None:
        async with callbacks("lost") as (tested, recorder):
            await asyncio.wait_for(tested.assigned(0), 1)
            await asyncio.wait_for(tested.settle(1), 1)
            tested.lost(frozenset({0}))
            await tested.settle(1)
            assert recorder.calls == [("lost", {0})]

    asyncio.run(scenario())


def test_an_exception_is_reported_and_ends_the_waiting() -> None:
    async def scenario() -> None:
        async with callbacks(*ALL) as (tested, recorder):
            recorder.raising = RuntimeError("of the user")
            await asyncio.wait_for(tested.assigned(0), 1)
            assert recorder.failures == [recorder.raising]
            recorder.raising = None
            await asyncio.wait_for(tested.revoked(0), 1)
            assert recorder.calls == [("assigned", {0}), ("revoked", {0})]

    asyncio.run(scenario())


def test_settling_waits_for_everything_but_not_for_ever() -> None:
    async def scenario() -> None:
        async with callbacks(*ALL) as (tested, recorder):
            await tested.settle(0.001)
            await tested.assigned(0)
            recorder.gate.clear()
            tested.lost(frozenset({0}))
            settling = asyncio.ensure_future(tested.settle(60))
            await asyncio.sleep(0.01)
            assert not settling.done()
            await tested.settle(0.001)
            recorder.gate.set()
            await asyncio.wait_for(settling, 1)

    asyncio.run(scenario())


def test_ended_while_one_runs_nobody_waits_for_ever() -> None:
    async def scenario() -> None:
        async with callbacks(*ALL) as (tested, recorder):
            recorder.gate.clear()
            asking = asyncio.ensure_future(tested.assigned(0))
            while not recorder.calls:
                await asyncio.sleep(0)
        await asyncio.wait_for(asking, 1)

    asyncio.run(scenario())
