"""One consumer of a chaos run, in a process of its own: python -m tests.chaos.consumer --help

Its handler writes down what it was given; if told so it fails and dawdles before that.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from examples.demo_support.processes import when_parent_ends
from examples.demo_support.records import Handled, Recorder
from redis_stream_coord import AsyncConsumer, Consumer, Message, RedisSettings, Retry
from tests.chaos.samples import Sampler
from tests.chaos.trouble import Trouble

SHUTDOWN_SECONDS = 8.0
_THREADS_END_SECONDS = 3.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("face", choices=("plain", "async"))
    parser.add_argument("stream")
    parser.add_argument("group")
    parser.add_argument("name", help="of this process, in the records")
    parser.add_argument("records", type=Path, help="file for what was handled")
    parser.add_argument("--member", help="member id; by default the name")
    parser.add_argument("--trouble", metavar="SEED", help="let handlers fail and dawdle")
    parser.add_argument("--handler-threads", type=int, default=32, help="of a plain consumer")
    parser.add_argument("--samples", type=Path, help="file for memory, threads and open files")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    recorder = Recorder(given.records)
    trouble = None if given.trouble is None else Trouble(f"{given.name} {given.trouble}")

    def record(message: Message, started_ns: int) -> None:
        assert message.key is not None
        key, sequence = message.key.decode(), int(message.text("sequence"))
        place = {"shard": message.shard, "id": message.id, "key": key, "sequence": sequence}
        owner = {"member": given.name, "token": message.token}
        recorder.add(Handled(**place, **owner, started_ns=started_ns, ended_ns=time.monotonic_ns()))

    def handle(message: Message) -> None:
        started_ns = time.monotonic_ns()
        if trouble is None or trouble.plain(message):
            record(message, started_ns)

    async def handle_async(message: Message) -> None:
        started_ns = time.monotonic_ns()
        if trouble is None or await trouble.coroutine(message):
            record(message, started_ns)

    options: dict[str, Any] = {
        "group": given.group,
        "redis": RedisSettings.from_env(),
        "member": given.member or given.name,
        "shutdown_seconds": SHUTDOWN_SECONDS,
        "retry": Retry(backoff_seconds=0.02, max_backoff_seconds=0.5),
    }
    if given.face == "plain":
        plain = Consumer(given.stream, **options, handler=handle, handler_threads=given.handler_threads)
        when_parent_ends(plain.request_stop)
        run = plain.run
    else:
        coroutine = _Loop(AsyncConsumer(given.stream, **options, handler=handle_async))
        when_parent_ends(coroutine.request_stop)
        run = coroutine.run
    sampler = None if given.samples is None else Sampler(given.name, given.samples)
    try:
        run()
    finally:
        if sampler is not None:
            sampler.stopped(within_seconds=_THREADS_END_SECONDS)


class _Loop:
    """Runs an `AsyncConsumer` on an event loop of its own, which another thread may ask to stop."""

    def __init__(self, consumer: AsyncConsumer) -> None:
        self._consumer = consumer
        self._running: Future[asyncio.AbstractEventLoop] = Future()

    def request_stop(self) -> None:
        self._running.result().call_soon_threadsafe(self._consumer.request_stop)

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        self._running.set_result(asyncio.get_running_loop())
        await self._consumer.run()


if __name__ == "__main__":
    main()
