"""Looking at groups without changing anything."""

from __future__ import annotations

from types import TracebackType

from . import commands
from .keys import GroupKeys
from .models import GroupView
from .runner import AsyncRunner, SyncRunner
from .settings import RedisSettings


class Monitor:
    """Reads what is stored of groups. Parameters: redis: URL or settings."""

    def __init__(self, redis: str | RedisSettings) -> None:
        self._settings = RedisSettings.of(redis)
        self._runner = SyncRunner(self._settings)

    def groups(self) -> list[tuple[str, str]]:
        """Return (stream, group) of every group in the index, sorted."""
        return self._runner.run(commands.groups(self._settings.key_prefix))

    def describe(self, stream: str, *, group: str) -> GroupView:
        """Return the whole record of a group of a stream. Raises: `NotFoundError`, `MetadataError`."""
        return self._runner.run(commands.describe(GroupKeys(stream, group, self._settings.key_prefix)))

    def close(self) -> None:
        """Close the connections."""
        self._runner.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncMonitor:
    """Reads what is stored of groups, from coroutines. Parameters: redis: URL or settings."""

    def __init__(self, redis: str | RedisSettings) -> None:
        self._settings = RedisSettings.of(redis)
        self._runner = AsyncRunner(self._settings)

    async def groups(self) -> list[tuple[str, str]]:
        """Return (stream, group) of every group in the index, sorted."""
        return await self._runner.run(commands.groups(self._settings.key_prefix))

    async def describe(self, stream: str, *, group: str) -> GroupView:
        """Return the whole record of a group of a stream. Raises: `NotFoundError`, `MetadataError`."""
        return await self._runner.run(commands.describe(GroupKeys(stream, group, self._settings.key_prefix)))

    async def close(self) -> None:
        """Close the connections."""
        await self._runner.close()

    async def __aenter__(self) -> AsyncMonitor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
