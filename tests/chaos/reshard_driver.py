"""A driver of a resharding in a process of its own, which kills itself after so many commands.

python -m tests.chaos.reshard_driver URL STREAM COMMANDS
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from redis_stream_coord import CoordError, RedisSettings
from redis_stream_coord.commands import Pause, Together
from redis_stream_coord.keys import StreamKeys
from redis_stream_coord.reshard import drive
from redis_stream_coord.runner import SyncRunner


def main(url: str, stream: str, commands: int) -> None:
    """Drive; after `commands` commands this process is gone, in the midst of what it sends together too."""
    runner = SyncRunner(RedisSettings(url))
    left = commands

    def run(command: Any) -> Any:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        try:
            return runner.run(command)
        except CoordError as error:
            return error

    saga = drive(StreamKeys(stream))
    result: Any = None
    while True:
        try:
            step = saga.throw(result) if isinstance(result, CoordError) else saga.send(result)
        except StopIteration:
            return
        if isinstance(step, Pause):
            result = None
        elif isinstance(step, Together):
            result = [run(command) for command in step.commands]
        else:
            result = run(step)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
