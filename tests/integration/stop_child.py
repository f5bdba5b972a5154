"""A program with one consumer of either face, for tests of signals and of what a process leaves behind when it ends.

Run as ``python -m tests.integration.stop_child`` with one JSON object: `url`, `stream`, `group`, `member`, `face` (sync
or async), `hold`: while this file exists, handlers wait. It prints one word per line: ready, began, finished, ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from redis_stream_coord import AsyncConsumer, Consumer, Message


def say(word: str) -> None:
    print(word, flush=True)


def run_sync(given: dict[str, Any], hold: Path) -> None:
    def handle(_: Message) -> None:
        say("began")
        while hold.exists():
            time.sleep(0.005)
        say("finished")

    def assigned(_: frozenset[int]) -> None:
        say("ready")

    Consumer(**given, handler=handle, on_assigned=assigned).run()


async def run_async(given: dict[str, Any], hold: Path) -> None:
    async def handle(_: Message) -> None:
        say("began")
        while hold.exists():
            await asyncio.sleep(0.005)
        say("finished")

    async def assigned(_: frozenset[int]) -> None:
        say("ready")

    await AsyncConsumer(**given, handler=handle, on_assigned=assigned).run()


def main(given: dict[str, Any]) -> None:
    face, hold = given.pop("face"), Path(given.pop("hold"))
    if face == "sync":
        run_sync(given, hold)
    else:
        for _ in range(2 if face == "async twice" else 1):
            asyncio.run(run_async(dict(given), hold))
    say("ended")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
