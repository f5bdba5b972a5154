"""The producer of a chaos run, in a process of its own: python -m tests.chaos.producer --help

It publishes so many events in about so many seconds, and then ends. With a file for receipts each event has an id, what
failed is published again until it succeeds, and what Redis accepted is written down.
"""

from __future__ import annotations

import argparse
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from examples.demo_support.processes import when_parent_ends
from examples.demo_support.records import Published, Recorder
from redis_stream_coord import CoordError, Outgoing, PartialPublishError, Producer, Receipt, RedisSettings

_TICK_SECONDS = 0.05


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stream")
    parser.add_argument("events", type=int)
    parser.add_argument("seconds", type=int)
    parser.add_argument("keys", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--receipts", type=Path, help="file for what Redis accepted; publish again what failed")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    draw = random.Random(given.seed)
    stop = threading.Event()
    when_parent_ends(stop.set)
    recorder = None if given.receipts is None else Recorder(given.receipts)
    sequence: Counter[str] = Counter()
    began, sent = time.monotonic(), 0
    with Producer(given.stream, redis=RedisSettings.from_env()) as producer:
        while sent < given.events and not stop.wait(_TICK_SECONDS):
            due = min(given.events, int((time.monotonic() - began) / given.seconds * given.events))
            batch = []
            for _ in range(sent, due):
                key = f"key-{draw.randrange(given.keys)}"
                event_id = None if recorder is None else f"{key}-{sequence[key]}"
                batch.append(Outgoing(fields={"sequence": str(sequence[key])}, key=key, event_id=event_id))
                sequence[key] += 1
            if batch and recorder is None:
                producer.publish_many(batch)
            elif batch:
                _until_accepted(producer, batch, recorder, stop)
            sent = max(sent, due)


def _until_accepted(producer: Producer, batch: list[Outgoing], recorder: Recorder, stop: threading.Event) -> None:
    """Publish in order, and again what failed, before anything that comes after it."""
    while batch:
        try:
            _write_down(recorder, batch, producer.publish_many(batch))
            return
        except PartialPublishError as error:
            _write_down(recorder, batch, error.receipts)
            for reason in error.failed.values():
                if not reason.retriable:
                    raise reason from error
            batch = [batch[position] for position in sorted(error.failed)]
        except CoordError as error:
            if not error.retriable:
                raise
        if stop.wait(_TICK_SECONDS):
            return


def _write_down(recorder: Recorder, batch: Sequence[Outgoing], receipts: Sequence[Receipt | None]) -> None:
    recorder.add(
        *(
            Published(receipt.shard, receipt.id, str(one.key), int(one.fields["sequence"]))
            for one, receipt in zip(batch, receipts, strict=True)
            if receipt is not None
        )
    )


if __name__ == "__main__":
    main()
