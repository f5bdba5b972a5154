"""Entries per second of one consumer, against a plain XREADGROUP + XACK loop over the same entries.

Everything runs in this process, one form after the other, on shards that were filled before. The plain loops do what
is fastest: read a batch from all shards in one command, call the handler, acknowledge each batch in one command.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import redis.asyncio

from redis_stream_coord import AsyncConsumer, Consumer, Message
from redis_stream_coord.keys import GroupKeys
from tests.benchmarks.measuring import GROUP, Bench, Table, median, streams

_SHARDS = 16
_ENTRIES = 8_000
_FIELDS = {"rsc-key": "key-4711", "order": "4711", "amount": "19.90", "currency": "EUR"}
_DEADLINE_SECONDS = 120.0


def run(bench: Bench) -> None:
    """Print rates, and their ratios to the plain loop of the same kind."""
    forms: dict[str, tuple[Callable[[Bench, GroupKeys], float], str]] = {
        "plain loop, sync, COUNT 100": (lambda b, k: _plain(b, k, 100), ""),
        "Consumer, prefetch 100": (lambda b, k: _sync(b, k, 100), "plain loop, sync, COUNT 100"),
        "Consumer, 1 handler thread": (lambda b, k: _sync(b, k, 100, 1), "plain loop, sync, COUNT 100"),
        "Consumer, iterated": (lambda b, k: _iterated(b, k, 100), "plain loop, sync, COUNT 100"),
        "plain loop, sync, COUNT 10": (lambda b, k: _plain(b, k, 10), ""),
        "Consumer, prefetch 10": (lambda b, k: _sync(b, k, 10), "plain loop, sync, COUNT 10"),
        "plain loop, asyncio, COUNT 100": (lambda b, k: asyncio.run(_plain_async(b, k, 100)), ""),
        "AsyncConsumer, prefetch 100": (
            lambda b, k: asyncio.run(_async(b, k, 100)),
            "plain loop, asyncio, COUNT 100",
        ),
        "plain loop, asyncio, COUNT 10": (lambda b, k: asyncio.run(_plain_async(b, k, 10)), ""),
        "AsyncConsumer, prefetch 10": (
            lambda b, k: asyncio.run(_async(b, k, 10)),
            "plain loop, asyncio, COUNT 10",
        ),
    }
    taken: dict[str, list[float]] = {name: [] for name in forms}
    worked: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(bench.rounds):
        for name, (form, _) in forms.items():
            with bench.group(_SHARDS) as keys:
                _fill(bench, keys)
                cpu = time.process_time()
                taken[name].append(form(bench, keys))
                worked[name].append(time.process_time() - cpu)
    table = Table(
        f"consume: {_ENTRIES} small entries on {_SHARDS} shards",
        *("form", "entries/s", "us each", "vs plain", "CPU us each", "vs plain"),
    )
    for name, (_, plain) in forms.items():
        cells: list[float | str] = [_ENTRIES / median(taken[name])]
        for measured in (taken, worked):
            ratio = median([mine / base for mine, base in zip(measured[name], measured[plain or name], strict=True)])
            cells += [median(measured[name]) / _ENTRIES * 1e6, f"{ratio:.2f}" if plain else "1"]
        table.row(name, *cells)
    table.show(
        "From the first entry handed out to the last one acknowledged. vs plain: as a multiple of the plain loop.",
        "CPU: of this process, joining and leaving included; it hardly depends on what else the machine does.",
    )


def _fill(bench: Bench, keys: GroupKeys) -> None:
    names = streams(keys, _SHARDS)
    with bench.client() as client:
        pipe = client.pipeline(transaction=False)
        for i in range(_ENTRIES):
            pipe.xadd(names[i % _SHARDS], _FIELDS)
        pipe.execute()


class _Tally:
    """Counts entries; remembers when the first one came, and when all were there and acknowledged."""

    def __init__(self, bench: Bench, keys: GroupKeys) -> None:
        self._bench = bench
        self._keys = keys
        self._lock = threading.Lock()
        self.count = 0
        self.began = 0.0
        self.full = threading.Event()

    def note(self) -> None:
        with self._lock:
            self.count += 1
            if self.count == 1:
                self.began = time.perf_counter()
            if self.count == _ENTRIES:
                self.full.set()

    def acknowledged(self) -> bool:
        with self._bench.client() as client:
            pipe = client.pipeline(transaction=False)
            for name in streams(self._keys, _SHARDS):
                pipe.xpending(name, GROUP)
            return all(pending["pending"] == 0 for pending in pipe.execute())

    def finish(self) -> float:
        """Wait until all is acknowledged. Returns: seconds since the first entry."""
        while not self.acknowledged():
            time.sleep(0.001)
        assert self.count == _ENTRIES, f"{self.count} entries handled"
        return time.perf_counter() - self.began


def _sync(bench: Bench, keys: GroupKeys, prefetch: int, threads: int = 32) -> float:
    tally = _Tally(bench, keys)
    consumer = Consumer(
        keys.stream,
        group=GROUP,
        redis=bench.url,
        handler=lambda _message: tally.note(),
        handler_threads=threads,
        prefetch=prefetch,
    )
    with consumer:
        assert tally.full.wait(_DEADLINE_SECONDS), f"only {tally.count} entries in time"
        return tally.finish()


def _iterated(bench: Bench, keys: GroupKeys, prefetch: int) -> float:
    tally = _Tally(bench, keys)
    with Consumer(keys.stream, group=GROUP, redis=bench.url, prefetch=prefetch) as consumer:
        messages = iter(consumer)
        for _ in range(_ENTRIES):
            next(messages)
            tally.note()
        messages.close()
        # The loop was left before the last message was finished: it stays pending.
        return time.perf_counter() - tally.began


async def _async(bench: Bench, keys: GroupKeys, prefetch: int) -> float:
    tally = _Tally(bench, keys)
    full = asyncio.Event()

    async def handler(_message: Message) -> None:
        tally.note()
        if tally.count == _ENTRIES:
            full.set()

    async with AsyncConsumer(keys.stream, group=GROUP, redis=bench.url, handler=handler, prefetch=prefetch):
        await asyncio.wait_for(full.wait(), _DEADLINE_SECONDS)
        return await asyncio.to_thread(tally.finish)


def _plain(bench: Bench, keys: GroupKeys, count: int) -> float:
    tally = _Tally(bench, keys)
    after = dict.fromkeys(streams(keys, _SHARDS), ">")
    with bench.client() as client:
        while tally.count < _ENTRIES:
            for name, entries in client.xreadgroup(GROUP, "plain", after, count=count, block=1_000):
                for _id, fields in entries:
                    assert fields
                    tally.note()
                client.xack(name, GROUP, *(entry_id for entry_id, _ in entries))
    return tally.finish()


async def _plain_async(bench: Bench, keys: GroupKeys, count: int) -> float:
    tally = _Tally(bench, keys)
    after = dict.fromkeys(streams(keys, _SHARDS), ">")
    async with redis.asyncio.Redis.from_url(bench.url, protocol=2) as client:
        while tally.count < _ENTRIES:
            for name, entries in await client.xreadgroup(GROUP, "plain", after, count=count, block=1_000):
                for _id, fields in entries:
                    assert fields
                    tally.note()
                await client.xack(name, GROUP, *(entry_id for entry_id, _ in entries))
    return tally.finish()
