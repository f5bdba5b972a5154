"""Clients of a server in memory, with as much of redis-py's interface as the library uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import redis

from .server import Connection

if TYPE_CHECKING:
    from .machine import Process


class _Client:
    """What both share.

    Parameters:
        process: to which it belongs.
        options: as redis-py takes them; the timeout and the database matter.
    """

    def __init__(self, process: Process, **options: Any) -> None:
        self.process = process
        self.timeout_seconds = float(options.get("socket_timeout") or 5.0)
        self._db = int(options.get("db") or 0)
        self._opened: Connection | None = None

    def opened(self) -> Connection:
        self.process.check_connected()
        if self._opened is None:
            self._opened = self.process.world.server.connect(self._db)
        return self._opened

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


class PlainClient(_Client):
    """For plain code. A command takes no time, unless its reply is lost."""

    def execute_command(self, *command: Any, **_: Any) -> Any:
        """Send a command. Raises: `redis.RedisError`."""
        answer = self.opened().send(*command)
        if self.process.world.loses(command):
            self.process.sleep(self.timeout_seconds)
            raise redis.TimeoutError("the reply was lost")
        return answer

    def scan_iter(self, match: str, count: int) -> Iterator[bytes]:
        """Yield the keys that fit a pattern."""
        cursor = 0
        while True:
            cursor, keys = self.execute_command("SCAN", cursor, "MATCH", match, "COUNT", count)
            yield from keys
            if not cursor:
                return

    def pipeline(self, transaction: bool = False) -> PlainPipeline:
        """Return what collects commands."""
        return PlainPipeline(self)

    def close(self) -> None:
        """Close the connection."""
        self._close()


class AsyncClient(_Client):
    """For coroutines. A command takes a part of a millisecond each way; how much, chance decides."""

    async def execute_command(self, *command: Any, **_: Any) -> Any:
        """Send a command. Raises: `redis.RedisError`."""
        latency = self.process.world.latency
        await asyncio.sleep(latency())
        block_ms = _block_ms(command)
        answer = self.opened().send(*command) if block_ms is None else await self._blocking(command, block_ms)
        if block_ms is None and self.process.world.loses(command):
            await asyncio.sleep(self.timeout_seconds)
            raise redis.TimeoutError("the reply was lost")
        await asyncio.sleep(latency())
        return answer

    async def _blocking(self, command: tuple[Any, ...], block_ms: int) -> Any:
        """XREAD with BLOCK: look, and look again whenever something was carried out."""
        loop = asyncio.get_running_loop()
        until = loop.time() + block_ms / 1000
        at = next(i for i, word in enumerate(command) if _is(word, b"BLOCK"))
        looking = (*command[:at], *command[at + 2 :])
        while True:
            connection = self.opened()
            answer = connection.send(*looking)
            if answer or loop.time() >= until:
                return answer or None
            ended = loop.create_future()
            blocked = self.process.world.server.blocked
            blocked[connection.number] = _ender(ended)
            try:
                if await asyncio.wait_for(ended, max(until - loop.time(), 0.0001)):
                    return None
            except asyncio.TimeoutError:
                return None
            finally:
                del blocked[connection.number]

    async def scan_iter(self, match: str, count: int) -> AsyncIterator[bytes]:
        """Yield the keys that fit a pattern."""
        cursor = 0
        while True:
            cursor, keys = await self.execute_command("SCAN", cursor, "MATCH", match, "COUNT", count)
            for key in keys:
                yield key
            if not cursor:
                return

    def pipeline(self, transaction: bool = False) -> AsyncPipeline:
        """Return what collects commands."""
        return AsyncPipeline(self)

    async def aclose(self) -> None:
        """Close the connection."""
        self._close()


def _ender(ended: asyncio.Future[bool]) -> Callable[[bool], None]:
    def end(time_is_up: bool) -> None:
        if not ended.done():
            ended.set_result(time_is_up)

    return end


class _Pipeline:
    def __init__(self) -> None:
        self.commands: list[tuple[Any, ...]] = []

    def execute_command(self, *command: Any, **_: Any) -> None:
        """Add a command."""
        self.commands.append(command)


class PlainPipeline(_Pipeline):
    """Sends commands one after another. If one reply is lost, so are those after it."""

    def __init__(self, client: PlainClient) -> None:
        super().__init__()
        self._client = client

    def execute(self, raise_on_error: bool = False) -> list[Any]:
        """Send them; errors of single commands stand in the list. Raises: `redis.ConnectionError`."""
        answers: list[Any] = []
        for command in self.commands:
            try:
                answers.append(self._client.execute_command(*command))
            except (redis.ConnectionError, redis.TimeoutError):
                raise
            except redis.RedisError as error:
                answers.append(error)
        return answers


class AsyncPipeline(_Pipeline):
    """As `PlainPipeline`."""

    def __init__(self, client: AsyncClient) -> None:
        super().__init__()
        self._client = client

    async def execute(self, raise_on_error: bool = False) -> list[Any]:
        """Send them; see `PlainPipeline.execute`."""
        client, latency = self._client, self._client.process.world.latency
        await asyncio.sleep(latency())
        answers: list[Any] = []
        for command in self.commands:
            try:
                answers.append(client.opened().send(*command))
            except redis.ConnectionError:
                raise
            except redis.RedisError as error:
                answers.append(error)
            if client.process.world.loses(command):
                await asyncio.sleep(client.timeout_seconds)
                raise redis.TimeoutError("the reply was lost")
        await asyncio.sleep(latency())
        return answers


def _is(word: Any, name: bytes) -> bool:
    return (
        (word.encode() if isinstance(word, str) else word).upper() == name if isinstance(word, (str, bytes)) else False
    )


def _block_ms(command: tuple[Any, ...]) -> int | None:
    if not _is(command[0], b"XREAD"):
        return None
    return next((int(command[i + 1]) for i, word in enumerate(command[:6]) if _is(word, b"BLOCK")), None)
