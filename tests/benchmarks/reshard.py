"""How long producers have to wait at the cut-over of a resharding, and how long the whole of it takes."""

from __future__ import annotations

import asyncio
import itertools
import threading
from multiprocessing.connection import Connection

from redis_stream_coord import Admin, AsyncConsumer, Message, Producer, Resharding
from tests.benchmarks.measuring import GROUP, Bench, Table, median, percentile
from tests.benchmarks.processes import Child, now_ms, received

_SHARDS = (64, 96)
_PROCESSES = 2
_PRODUCERS = 2  # in each process
_EVERY_SECONDS = 0.002
_KEYS = 1_000
_AIM_MS = 50.0


def run(bench: Bench) -> None:
    """Print the pauses of the producers, each the longest publish of one of them during one resharding."""
    with bench.group(_SHARDS[0]) as keys, Admin(bench.url, requested_by="benchmark") as admin:
        reader = Child(_consume, bench.url, keys.stream)
        writers = [Child(_produce, bench.url, keys.stream, number) for number in range(_PROCESSES)]
        reader.ask("ready")
        usual = [ms for writer in writers for ms in writer.ask("between", *_quiet())]
        pauses: list[float] = []
        closed: list[float] = []
        whole: list[float] = []
        for _, target in zip(range(2 * bench.rounds), itertools.cycle(reversed(_SHARDS)), strict=False):
            began = now_ms()
            seen: dict[str, float] = {}

            def note(found: Resharding, seen: dict[str, float] = seen) -> None:
                seen.setdefault(found.state, now_ms())

            admin.scale(keys.stream, shards=target, reason="benchmark", progress=note)
            ended = now_ms()
            whole.append(ended - began)
            closed.append(seen.get("DRAINING", ended) - seen.get("PREPARING", began))
            for writer in writers:
                pauses += writer.ask("longest", began, ended)
        for child in (*writers, reader):
            child.stop()
    table = Table(
        f"reshard: {_SHARDS[0]} to {_SHARDS[1]} shards and back under {_PROCESSES * _PRODUCERS} producers",
        "ms",
        "median",
        "p99",
        "longest",
    )
    for name, values in (
        ("a publish at other times", usual),
        ("pause of a producer at the cut-over", pauses),
        ("first step to the open routes", closed),
        ("whole resharding", whole),
    ):
        table.row(name, median(values), percentile(values, 99), max(values))
    met = percentile(pauses, 99) < _AIM_MS
    table.show(f"{len(pauses)} pauses; aim: p99 below {_AIM_MS:.0f} ms: {'met' if met else 'NOT met'}")


def _quiet() -> tuple[float, float]:
    """Let two seconds pass; return when they began and ended."""
    began = now_ms()
    threading.Event().wait(2)
    return began, now_ms()


async def _consume(pipe: Connection, url: str, stream: str) -> None:
    async def handle(message: Message) -> None:
        pass

    async with AsyncConsumer(stream, group=GROUP, redis=url, handler=handle) as consumer:
        while (words := await received(pipe)) != ("quit",):
            while words == ("ready",) and len(consumer.assignment) < _SHARDS[0]:
                await asyncio.sleep(0.01)
            pipe.send(True)


async def _produce(pipe: Connection, url: str, stream: str, number: int) -> None:
    stop = threading.Event()
    taken: list[list[tuple[float, float]]] = [[] for _ in range(_PRODUCERS)]

    def publish(which: int) -> None:
        with Producer(stream, redis=url) as producer:
            for n in itertools.count():
                if stop.wait(_EVERY_SECONDS):
                    return
                began = now_ms()
                producer.publish({"n": str(n)}, key=f"{number}-{which}-{n % _KEYS}", event_id=f"{number}-{which}-{n}")
                taken[which].append((began, now_ms()))

    threads = [threading.Thread(target=publish, args=(which,)) for which in range(_PRODUCERS)]
    for thread in threads:
        thread.start()
    while (words := await received(pipe)) != ("quit",):
        _, began, ended = words
        during = [[b - a for a, b in list(one) if b > began and a < ended] for one in taken]
        longest = [max(times) for times in during if times]
        pipe.send(longest if words[0] == "longest" else list(itertools.chain(*during)))
    stop.set()
    for thread in threads:
        thread.join()
