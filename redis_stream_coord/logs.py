"""The logger of the library: ``redis_stream_coord``, with group, member and shard in every record's ``extra``."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("redis_stream_coord")
logger.addHandler(logging.NullHandler())


class Log:
    """Writes records in the name of one member.

    Parameters:
        stream, group, member: whom the records are about.
    """

    def __init__(self, stream: str, group: str, member: str) -> None:
        self._extra = {"stream": stream, "group": group, "member": member}
        self._where = f"[{stream}/{group}/{member}]"

    def _log(self, level: int, message: str, arguments: tuple[Any, ...], shard: int | None, exc_info: Any) -> None:
        where = self._where if shard is None else f"{self._where[:-1]}/{shard}]"
        logger.log(
            level,
            f"%s {message}",
            where,
            *arguments,
            extra={**self._extra, "shard": shard},
            exc_info=exc_info,
        )

    def info(self, message: str, *arguments: Any, shard: int | None = None) -> None:
        self._log(logging.INFO, message, arguments, shard, None)

    def warning(self, message: str, *arguments: Any, shard: int | None = None) -> None:
        self._log(logging.WARNING, message, arguments, shard, None)

    def error(self, message: str, *arguments: Any, shard: int | None = None, exc_info: Any = None) -> None:
        self._log(logging.ERROR, message, arguments, shard, exc_info)
