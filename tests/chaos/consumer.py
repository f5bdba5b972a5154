"""One consumer of a chaos run, in a process of its own.

python -m tests.chaos.consumer FACE STREAM GROUP MEMBER RECORDS

FACE is ``plain`` or ``async``. Its handler does nothing but write down what it was given.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path

from examples.demo_support.processes import when_parent_ends
from examples.demo_support.records import Handled, Recorder
from redis_stream_coord import AsyncConsumer, Consumer, Message, RedisSettings


def main() -> None:
    face, stream, group, member, records = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    recorder = Recorder(Path(records))

    def handle(message: Message) -> None:
        started_ns = time.monotonic_ns()
        assert message.key is not None
        key, sequence = message.key.decode(), int(message.text("sequence"))
        place = {"shard": message.shard, "id": message.id, "key": key, "sequence": sequence}
        owner = {"member": member, "token": message.token}
        recorder.add(Handled(**place, **owner, started_ns=started_ns, ended_ns=time.monotonic_ns()))

    async def handle_async(message: Message) -> None:
        handle(message)

    if face == "plain":
        consumer = Consumer(stream, group=group, redis=RedisSettings.from_env(), member=member, handler=handle)
        when_parent_ends(consumer.request_stop)
        consumer.run()
    else:
        asyncio.run(
            _run(
                AsyncConsumer(stream, group=group, redis=RedisSettings.from_env(), member=member, handler=handle_async)
            )
        )


async def _run(consumer: AsyncConsumer) -> None:
    loop = asyncio.get_running_loop()
    when_parent_ends(lambda: loop.call_soon_threadsafe(consumer.request_stop))
    await consumer.run()


if __name__ == "__main__":
    main()
