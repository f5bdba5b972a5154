"""Iterating over the messages of a consumer, and leaving the loop."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from redis_stream_coord import AsyncConsumer, Consumer, DeadLetter, Message, Poison
from tests.integration.kit import GROUP, QUICK_RETRY, SLOW, STEADY, Bench, taking_at_most
from tests.waiting import aeventually, eventually

pytestmark = pytest.mark.parametrize("server", ["redis7"], indirect=True)


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


# --- leaving the loop without ``with`` --------------------------------------------------------------------------------

_WAYS = {
    "break": "for message in consumer:\n    break\n",
    "return from a function": "def first():\n    for message in consumer:\n        return message\nfirst()\n",
    "an exception": "for message in consumer:\n    raise KeyError('on purpose')\n",
    "an exception that is kept": (
        "kept = None\ntry:\n    for message in consumer:\n        raise KeyError('on purpose')\n"
        "except KeyError as error:\n    kept = error\n"
    ),
    "a generator that is kept": "messages = iter(consumer)\nmessage = next(messages)\n",
    "async break": (
        "async def main():\n    async for message in consumer:\n        break\n"
        "    while consumer.health.state != 'gone':\n        await asyncio.sleep(0.01)\nasyncio.run(main())\n"
    ),
    "async break at the very end": (
        "async def main():\n    async for message in consumer:\n        break\nasyncio.run(main())\n"
    ),
    "async exception": (
        "async def main():\n    async for message in consumer:\n        raise KeyError('on purpose')\n"
        "asyncio.run(main())\n"
    ),
    "async aclose": (
        "async def main():\n    messages = consumer.__aiter__()\n    await messages.__anext__()\n"
        "    await messages.aclose()\n    assert consumer.health.state == 'gone'\nasyncio.run(main())\n"
    ),
}


@pytest.mark.parametrize("way", _WAYS)
def test_loop_that_is_left_leaves_no_ghost_in_the_group(bench: Bench, way: str) -> None:
    bench.create(shards=2, timings=SLOW)
    ids = [bench.fill(shard, 2) for shard in range(2)]
    face = "AsyncConsumer" if "async" in way else "Consumer"
    program = (
        "import asyncio\n"
        f"from redis_stream_coord import {face}\n"
        f"consumer = {face}({bench.stream!r}, group={GROUP!r}, redis={bench.url!r}, member='a', shutdown_seconds=10)\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program + _WAYS[way]],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (run.returncode == 0) is (not way.endswith("exception")), run.stderr
    assert "Exception ignored" not in run.stderr
    assert "never retrieved" not in run.stderr
    # The lease is a minute: it has said good-bye.
    assert bench.view().members == {}
    # And what it did not finish is there for the next one.
    assert [list(bench.pending(shard)) or ids[shard] for shard in range(2)] == ids


def test_body_that_hangs_does_not_keep_the_loop_from_being_left(bench: Bench) -> None:
    """Bounded by ``shutdown_seconds``: here the callback never returns."""
    bench.create(shards=1, timings=SLOW)
    bench.fill(0)
    released = threading.Event()
    consumer = Consumer(
        bench.stream,
        group=GROUP,
        redis=bench.url,
        member="a",
        shutdown_seconds=0.5,
        on_revoked=lambda _: released.wait(30) and None,
    )
    with taking_at_most(10.0, "leaving the loop"):
        for _ in consumer:
            break
    released.set()
    assert bench.view().members == {}


# --- decode -----------------------------------------------------------------------------------------------------------


def test_decode_runs_where_the_handler_runs(bench: Bench) -> None:
    bench.create(shards=1, timings=STEADY)
    threads: list[str] = []

    def decode(fields: dict[str, bytes]) -> str:
        threads.append(threading.current_thread().name)
        return fields["n"].decode()

    values: list[object] = []
    bench.fill(0, 2)
    with make(bench, decode=decode, handler=lambda message: values.append(message.value)):
        eventually(lambda: values == ["0", "1"], what="both")
    assert all(name.startswith(f"redis-stream-coord-{bench.stream}-") for name in threads), threads
    threads.clear()
    bench.fill(0)
    for message in (consumer := make(bench, decode=decode)):
        assert message.value == "0"
        consumer.request_stop()
    assert threads == [threading.current_thread().name]


@pytest.mark.parametrize("face", ["loop", "async loop", "handler", "async handler"])
def test_what_decode_raises_is_a_failure_of_the_entry(bench: Bench, face: str) -> None:
    bench.create(shards=1, timings=STEADY)
    bad, good = bench.fill(0, 2)
    given: list[tuple[str, int, str]] = []
    seen: list[str] = []

    def decode(fields: dict[str, bytes]) -> int:
        if fields["n"] == b"0":
            raise ValueError("cannot read it")
        return int(fields["n"])

    def give_up(message: Message) -> None:
        given.append((message.id, message.deliveries, repr(message.error)))

    async def give_up_async(message: Message) -> None:
        give_up(message)

    async def handle(message: Message) -> None:
        seen.append(message.id)

    options: dict[str, Any] = {
        "group": GROUP,
        "redis": bench.url,
        "member": "a",
        "decode": decode,
        "retry": QUICK_RETRY,
    }

    async def main() -> None:
        poison = Poison(give_up_async, after_deliveries=3)
        if face == "async handler":
            async with AsyncConsumer(bench.stream, handler=handle, poison=poison, **options):
                await aeventually(lambda: seen, what="the good one")
            return
        consumer = AsyncConsumer(bench.stream, poison=poison, **options)
        async for message in consumer:
            seen.append(message.id)
            consumer.request_stop()

    poison = Poison(give_up, after_deliveries=3)
    if face.startswith("async"):
        asyncio.run(main())
    elif face == "handler":
        with Consumer(bench.stream, poison=poison, handler=lambda message: seen.append(message.id), **options):
            eventually(lambda: seen, what="the good one")
    else:
        consumer = Consumer(bench.stream, poison=poison, **options)
        for message in consumer:
            seen.append(message.id)
            consumer.request_stop()
    assert seen == [good]
    assert given == [(bad, 3, "ValueError('cannot read it')")]
    assert bench.pending(0) == {}
