"""A consumer in a process of its own, so that a test can suspend and kill it.

Run as ``python -m tests.integration.child`` with its options as one JSON object. It appends what happens to it to a
file, one JSON object per line: `kind` is assigned, revoked, lost, began, finished, refused or ended.

Options beside those of the consumer: `notes`: that file; `hold`: while this file exists, handlers wait, or only those
of the partition key `hold_key`; `manual`: let the handler acknowledge; `never`: and not even that; `handler_seconds`:
how long it takes at least; `deadly`: it ends the process when it meets an entry whose field ``n`` is this;
`concurrency`; `handler_threads`; `iterate`: no handler, but a loop that does the same; `protocol`: be another release,
whose scripts have another text and which speaks this version of the protocol.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import attrs

from redis_stream_coord import Consumer, CoordError, FencedError, Message, RedisSettings
from redis_stream_coord.commands import base
from redis_stream_coord.scripts import catalogue


def be_another_release(protocol: int) -> None:
    """Send scripts of another text, and speak another version of the protocol."""
    others = {}
    for name, script in catalogue().items():
        source = script.source + "\n-- of another release"
        others[name] = attrs.evolve(script, source=source, sha=hashlib.sha1(source.encode()).hexdigest())
    base.catalogue = lambda: others  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith("redis_stream_coord.commands") and hasattr(module, "PROTOCOL"):
            module.PROTOCOL = protocol


def main(given: dict[str, Any]) -> None:
    if "protocol" in given:
        be_another_release(given["protocol"])
    notes = os.open(given["notes"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    hold = Path(given["hold"])
    manual = given.get("manual", False)
    hold_key = given["hold_key"].encode() if "hold_key" in given else None

    def note(kind: str, **fields: Any) -> None:
        # One write, so that a line is never half there.
        os.write(notes, (json.dumps({"kind": kind, "at": time.monotonic(), **fields}) + "\n").encode())

    def handle(message: Message) -> None:
        fields = {"shard": message.shard, "id": message.id, "token": message.token[1]}
        note("began", deliveries=message.deliveries, **fields)
        time.sleep(given.get("handler_seconds", 0.0))
        if message.fields.get("n", b"").decode() == given.get("deadly"):
            os._exit(1)
        while hold.exists() and hold_key in (None, message.key):
            time.sleep(0.002)
        if manual and not given.get("never"):
            try:
                message.ack()
            except FencedError:
                note("refused", **fields)
                return
        note("finished", owned=message.owned, **fields)

    consumer = Consumer(
        given["stream"],
        group=given["group"],
        redis=RedisSettings(given["url"], timeout_seconds=1.0),
        member=given["member"],
        handler=None if given.get("iterate") else handle,
        handler_threads=given.get("handler_threads", 32),
        concurrency=given.get("concurrency", 1),
        ack="manual" if manual else "auto",
        shutdown_seconds=5.0,
        on_assigned=lambda shards: note("assigned", shards=sorted(shards)),
        on_revoked=lambda shards: note("revoked", shards=sorted(shards)),
        on_lost=lambda shards: note("lost", shards=sorted(shards)),
    )
    try:
        if given.get("iterate"):
            for message in consumer:
                handle(message)
        else:
            consumer.run()
    except CoordError as error:
        note("ended", error=type(error).__name__)
        raise SystemExit(3) from error
    note("ended", error=None)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
