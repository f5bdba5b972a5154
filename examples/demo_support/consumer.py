"""One consumer of the demo, in a process of its own.

python -m demo_support.consumer STREAM GROUP MEMBER RECORDS WORK_MS
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from redis_stream_coord import Consumer, Message, RedisSettings

from .processes import when_parent_ends
from .records import Handled, Recorder


def main() -> None:
    stream, group, member, records, work_ms = sys.argv[1:]
    recorder = Recorder(Path(records))
    work_seconds = float(work_ms) / 1000

    def handle(message: Message) -> None:
        started_ns = time.monotonic_ns()
        time.sleep(work_seconds * random.uniform(0.5, 1.5))  # the application's work
        recorder.add(
            Handled(
                shard=message.shard,
                id=message.id,
                key=(message.key or b"").decode(),
                sequence=int(message.text("sequence")),
                member=member,
                token=message.token,
                started_ns=started_ns,
                ended_ns=time.monotonic_ns(),
            )
        )

    consumer = Consumer(
        stream, group=group, redis=RedisSettings.from_env(), member=member, handler=handle, shutdown_seconds=5
    )
    when_parent_ends(consumer.request_stop)
    consumer.run()  # until SIGTERM: it finishes, acknowledges and leaves


if __name__ == "__main__":
    main()
