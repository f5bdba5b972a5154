"""The producer of the demo, in a process of its own.

python -m demo_support.producer STREAM RECORDS RATE [FILE FIELD]
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from redis_stream_coord import Outgoing, Producer, RedisSettings

from .processes import when_parent_ends
from .records import Published, Recorder

_TICK_SECONDS = 0.005
_BATCH = 500
_CUSTOMERS = 300

Event = tuple[str, dict[str, str]]  # key and fields


def invented() -> Iterator[Event]:
    """Yield orders of customers for ever."""
    while True:
        customer = f"customer-{random.randrange(_CUSTOMERS):03}"
        yield customer, {"customer": customer, "amount": f"{random.uniform(1, 500):.2f}"}


def from_file(path: Path, field: str) -> Iterator[Event]:
    """Yield the lines of a file, each one JSON object whose `field` is the key.

    Raises:
        ValueError: a line is something else; the message says which and why.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(found, dict):
                raise ValueError(f"{path}, line {number}: not a JSON object")  # noqa: TRY004 - a wrong file
            if found.get(field) is None:
                raise ValueError(f"{path}, line {number}: has no field {field!r}")
            key = found[field]
            yield key if isinstance(key, str) else json.dumps(key), {"line": line.rstrip("\r\n")}


def main() -> None:
    stream, records, rate, *file = sys.argv[1:]
    events = enumerate(from_file(Path(file[0]), file[1]) if file else invented())
    recorder = Recorder(Path(records))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    when_parent_ends(stop.set)

    numbers: Counter[str] = Counter()
    started, sent = time.monotonic(), 0
    with Producer(stream, redis=RedisSettings.from_env()) as producer:
        while not stop.wait(_TICK_SECONDS):
            due = min(_BATCH, int((time.monotonic() - started) * float(rate)) - sent)
            batch, entries = [], []
            for number, (key, fields) in itertools.islice(events, max(due, 0)):
                batch.append((key, numbers[key]))
                # With an event id, publishing again after a lost reply makes no second entry.
                outgoing = {**fields, "sequence": str(numbers[key])}
                entries.append(Outgoing(fields=outgoing, key=key, event_id=f"event-{number}"))
                numbers[key] += 1
            if due > 0 and not batch:
                return  # the end of the file
            receipts = producer.publish_many(entries) if entries else []
            sent += len(batch)
            recorder.add(
                *(Published(got.shard, got.id, *which) for got, which in zip(receipts, batch, strict=True)),
            )


if __name__ == "__main__":
    main()
