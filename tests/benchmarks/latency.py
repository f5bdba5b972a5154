"""From publish to handler, while there is next to nothing to do.

The consumer has a process of its own; this one publishes an entry every few milliseconds, and both use the clock of
the machine.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import redis
import redis.asyncio

from redis_stream_coord import AsyncConsumer, Consumer, Message
from tests.benchmarks.measuring import GROUP, Bench, Table, median, percentile, streams
from tests.benchmarks.processes import Child, now_ms, received

_SHARDS = 16
_ENTRIES = 500
_WARM_UP = 50
_PAUSE_SECONDS = 0.005
_DEADLINE_MS = 10_000.0


def run(bench: Bench) -> None:
    """Print percentiles."""
    table = Table("latency: publish to handler, idle", "form", "p50 ms", "p90 ms", "p99 ms", "max ms", "p50 vs plain")
    forms: dict[str, Callable[..., Awaitable[None]]] = {
        "plain XREADGROUP BLOCK, sync": _plain,
        "Consumer": _sync,
        "plain XREADGROUP BLOCK, asyncio": _plain_async,
        "AsyncConsumer": _async,
    }
    taken: dict[str, list[list[float]]] = {name: [] for name in forms}
    for _ in range(bench.rounds):
        for name, serve in forms.items():
            taken[name].append(_measure(bench, serve))
    base: list[float] = []
    for name, rounds in taken.items():
        halves = [percentile(delays, 50) for delays in rounds]
        base = halves if name.startswith("plain") else base
        ratio = median([mine / plain for mine, plain in zip(halves, base, strict=True)])
        columns = [median([percentile(delays, p) for delays in rounds]) for p in (50, 90, 99)]
        table.row(name, *columns, median([max(delays) for delays in rounds]), f"{ratio:.2f}")
    table.show(f"Medians of {bench.rounds} rounds of {_ENTRIES} entries, one every {_PAUSE_SECONDS * 1000:.0f} ms.")


def _measure(bench: Bench, serve: Callable[..., Awaitable[None]]) -> list[float]:
    with bench.group(_SHARDS) as keys, bench.client() as client:
        names = streams(keys, _SHARDS)
        child = Child(serve, bench.url, keys.stream, names)
        try:
            child.pipe.recv()
            sent = 0
            while sent < _WARM_UP + _ENTRIES:
                time.sleep(_PAUSE_SECONDS * random.uniform(0.5, 1.5))
                client.xadd(random.choice(names), {"at": repr(now_ms())})
                sent += 1
            delays: list[float] = []
            deadline = now_ms() + _DEADLINE_MS
            while len(delays) < sent:
                assert now_ms() < deadline, f"{len(delays)} of {sent} entries arrived"
                delays = child.ask("collect")
            return delays[_WARM_UP:]
        finally:
            child.stop()


async def _serve_until_quit(pipe: Connection, delays: list[float]) -> None:
    pipe.send("ready")
    while (await received(pipe))[0] != "quit":
        pipe.send(list(delays))


async def _sync(pipe: Connection, url: str, stream: str, names: list[str]) -> None:
    delays: list[float] = []

    def handler(message: Message) -> None:
        delays.append(now_ms() - float(message.fields["at"]))

    with Consumer(stream, group=GROUP, redis=url, handler=handler) as consumer:
        while len(consumer.assignment) < len(names):
            await asyncio.sleep(0.01)
        await _serve_until_quit(pipe, delays)


async def _async(pipe: Connection, url: str, stream: str, names: list[str]) -> None:
    delays: list[float] = []

    async def handler(message: Message) -> None:
        delays.append(now_ms() - float(message.fields["at"]))

    async with AsyncConsumer(stream, group=GROUP, redis=url, handler=handler) as consumer:
        while len(consumer.assignment) < len(names):
            await asyncio.sleep(0.01)
        await _serve_until_quit(pipe, delays)


async def _plain(pipe: Connection, url: str, _stream: str, names: list[str]) -> None:
    delays: list[float] = []

    def loop() -> None:
        client = redis.Redis.from_url(url, protocol=2)
        while True:
            for name, entries in client.xreadgroup(GROUP, "plain", dict.fromkeys(names, ">"), count=100, block=1_000):
                delays.extend(now_ms() - float(fields[b"at"]) for _, fields in entries)
                client.xack(name, GROUP, *(entry_id for entry_id, _ in entries))

    threading.Thread(target=loop, daemon=True).start()
    await _serve_until_quit(pipe, delays)


async def _plain_async(pipe: Connection, url: str, _stream: str, names: list[str]) -> None:
    delays: list[float] = []

    async def loop() -> None:
        client = redis.asyncio.Redis.from_url(url, protocol=2)
        after = dict.fromkeys(names, ">")
        while True:
            for name, entries in await client.xreadgroup(GROUP, "plain", after, count=100, block=1_000):
                delays.extend(now_ms() - float(fields[b"at"]) for _, fields in entries)
                await client.xack(name, GROUP, *(entry_id for entry_id, _ in entries))

    task = asyncio.get_running_loop().create_task(loop())
    await _serve_until_quit(pipe, delays)
    task.cancel()
