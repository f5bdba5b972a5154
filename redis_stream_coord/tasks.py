"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_SECONDS = 0.1


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until all have ended, whatever their outcome.

    Once is not always enough: a cancellation that meets an answer just arriving can get lost in the client library.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        ended, pending = await asyncio.wait(pending, timeout=_AGAIN_SECONDS)
        for task in ended:
            if not task.cancelled():
                task.exception()  # looked at, so that asyncio does not report it as never retrieved
