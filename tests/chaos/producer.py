"""The producer of a chaos run, in a process of its own.

python -m tests.chaos.producer STREAM EVENTS SECONDS KEYS SEED

It publishes so many events in about so many seconds, and then ends.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter

from examples.demo_support.processes import when_parent_ends
from redis_stream_coord import Outgoing, Producer, RedisSettings

_TICK_SECONDS = 0.05


def main() -> None:
    stream, *numbers = sys.argv[1:]
    events, seconds, keys, seed = map(int, numbers)
    draw = random.Random(seed)
    stop = threading.Event()
    when_parent_ends(stop.set)
    sequence: Counter[str] = Counter()
    began, sent = time.monotonic(), 0
    with Producer(stream, redis=RedisSettings.from_env()) as producer:
        while sent < events and not stop.wait(_TICK_SECONDS):
            due = min(events, int((time.monotonic() - began) / seconds * events))
            batch = []
            for _ in range(sent, due):
                key = f"key-{draw.randrange(keys)}"
                batch.append(Outgoing(fields={"sequence": str(sequence[key])}, key=key))
                sequence[key] += 1
            if batch:
                producer.publish_many(batch)
            sent = max(sent, due)


if __name__ == "__main__":
    main()
