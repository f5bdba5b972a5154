"""The only place that talks to Redis.

A runner sends commands: EVALSHA, then EVAL where the server does not know the script (after a restart, a failover or
on a node of a cluster that is new). It retries what is idempotent. `clients` makes its client, and `translation` an
exception of this library of each that redis-py raises.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import redis.exceptions
import tenacity

from . import clients, telemetry
from .commands import Command, Pause, Saga, Scan, Together, text
from .errors import CoordError, LifecycleError, RedisUnavailableError
from .settings import RedisSettings
from .tasks import end
from .translation import translate

T = TypeVar("T")

# The last try has at least so long.
_LEAST_SECONDS = 0.01
# So many commands at most go in one round trip of a runner that sends them together.
_TOGETHER = 64


def _check_open(closed: bool) -> None:
    if closed:
        raise LifecycleError("this object has been closed; nothing was sent", hint="Make a new one.")


def check_process(pid: int) -> None:
    """Raise `LifecycleError` in another process than that in which an object was made: connections and threads do not
    survive a fork, and one connection used by two processes mixes up their answers.
    """
    if pid != os.getpid():
        raise LifecycleError(
            "this object was made before a fork",
            hint="Make it in the child process: its connections and threads do not survive a fork.",
        )


def _line(command: Command[Any], *, by_source: bool = False) -> tuple[Any, ...]:
    """Return the command as redis-py takes it. `by_source` also makes the server know the script from then on."""
    script = command.script
    if script is None:
        return (command.name, *command.arguments)
    head = ("EVAL", script.source) if by_source else ("EVALSHA", script.sha)
    return (*head, len(command.keys), *command.keys, *command.arguments)


def _outcome(command: Command[T], answer: Any, settings: RedisSettings) -> T | CoordError:
    if isinstance(answer, CoordError):
        return answer
    if isinstance(answer, Exception):
        return translate(answer, command.name, command, settings)
    try:
        return command.parse(answer)
    except CoordError as error:
        return error


def _retriable(error: BaseException) -> bool:
    return isinstance(error, RedisUnavailableError)


def _policy(settings: RedisSettings, until: float) -> dict[str, Any]:
    machine = settings.machine

    def wait(state: tenacity.RetryCallState) -> float:
        return machine.random.uniform(0, min(0.5, 0.02 * 2.0 ** min(state.attempt_number - 1, 10)))

    return {
        "retry": tenacity.retry_if_exception(_retriable),
        "wait": wait,
        "stop": lambda _: machine.clock() >= until,
        "reraise": True,
    }


class SyncRunner:
    """Sends commands from plain code. Thread-safe; connects at the first command.

    Parameters:
        settings: how to reach Redis.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self.settings = settings
        self._client: Any = None
        self._closed = False
        self._pid = os.getpid()

    def run(self, command: Command[T], *, retry: bool = True) -> T:
        """Send one command.

        Parameters:
            command: what to send.
            retry: send an idempotent command again while Redis is away, for up to ``timeout_seconds``.

        Returns:
            What the command's parser makes of the answer.

        Raises:
            RedisUnavailableError: no usable answer in time; a command that is not idempotent may have been carried out.
            CoordError: a refusal of the script, by its error word.
        """
        machine = self.settings.machine
        until = machine.clock() + self.settings.timeout_seconds
        with telemetry.tracer.start_as_current_span(f"redis_stream_coord {command.name}"):
            try:
                return self._once(command)
            except RedisUnavailableError:
                if not (retry and command.idempotent) or machine.clock() >= until:
                    raise
            retrying = tenacity.Retrying(sleep=machine.sleep, **_policy(self.settings, until))
            return cast(T, retrying(self._once_until, command, until))

    def drive(self, saga: Saga[T], *, retry: bool = True) -> T:
        """Run a saga to its end and return its result.

        Parameters:
            saga: what to run.
            retry: as in `run`, for each of its commands.
        """
        try:
            step = next(saga)
            while True:
                try:
                    result: Any = None
                    if isinstance(step, Pause):
                        self.settings.machine.sleep(step.seconds)
                    elif isinstance(step, Together):
                        result = self.pipeline(step.commands)
                    elif isinstance(step, Scan):
                        result = self.scan(step.pattern)
                    else:
                        result = self.run(step, retry=retry)
                except CoordError as error:
                    step = saga.throw(error)
                else:
                    step = saga.send(result)
        except StopIteration as over:
            return cast(T, over.value)

    def scan(self, pattern: str) -> list[str]:
        """Return every key that fits a glob-style pattern, sorted. Raises: `RedisUnavailableError`, `CoordError`."""
        try:
            found = {text(key) for key in self._connected().scan_iter(match=pattern, count=1000)}
        except CoordError:
            raise
        except Exception as error:
            self._after(error)
            raise translate(error, "SCAN", settings=self.settings) from error
        return sorted(found)

    def pipeline(self, commands: Sequence[Command[T]]) -> Sequence[T | CoordError]:
        """Send many commands in one go, where one server has all keys; on Cluster one after another.

        None is sent again.

        Parameters:
            commands: in the order in which Redis is to run them; a script that the server does not know may come later.

        Returns:
            For each its result, or why there is none.
        """
        if self.settings.address.topology == "cluster":
            return [self._caught(command) for command in commands]
        try:
            answers = self._send_many(self._connected(), commands)
        except CoordError:
            raise
        except Exception as error:  # noqa: BLE001 - translated
            self._after(error)
            answers = [error] * len(commands)
        return [_outcome(command, answer, self.settings) for command, answer in zip(commands, answers, strict=True)]

    def _send_many(self, client: Any, commands: Sequence[Command[Any]]) -> list[Any]:
        pipe = client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*_line(command))
        answers = list(pipe.execute(raise_on_error=False))
        for position, answer in enumerate(answers):
            if isinstance(answer, redis.exceptions.NoScriptError):
                try:
                    answers[position] = self._send(commands[position])
                except (redis.exceptions.RedisError, OSError) as error:
                    answers[position] = error
        return answers

    def _caught(self, command: Command[T]) -> T | CoordError:
        try:
            return self.run(command, retry=False)
        except CoordError as error:
            return error

    def _connected(self) -> Any:
        check_process(self._pid)
        _check_open(self._closed)
        if self._client is None:
            self._client = clients.make(self.settings, self.settings.machine.plain, self.settings.timeout_seconds)
        return self._client

    def _once(self, command: Command[T]) -> T:
        try:
            answer = self._send(command)
        except CoordError:
            raise
        except Exception as error:
            self._after(error)
            raise translate(error, command.name, command, self.settings) from error
        return command.parse(answer)

    def _once_until(self, command: Command[T], until: float) -> T:
        """Send a command with no more time than is left. Timeouts are of a connection, so this one has its own."""
        check_process(self._pid)
        left = max(until - self.settings.machine.clock(), _LEAST_SECONDS)
        client = None
        try:
            client = clients.make(self.settings, self.settings.machine.plain, left)  # that of a Cluster connects
            answer = self._send(command, client)
        except CoordError:
            raise
        except Exception as error:
            raise translate(error, command.name, command, self.settings) from error
        finally:
            if client is not None:
                clients.close(client)
        return command.parse(answer)

    def _send(self, command: Command[Any], client: Any = None) -> Any:
        client = client or self._connected()
        try:
            return client.execute_command(*_line(command))
        except redis.exceptions.NoScriptError:
            return client.execute_command(*_line(command, by_source=True))

    def _after(self, error: Exception) -> None:
        # After a failover the old primary answers READONLY: its connections must go, so that the new one is found.
        if isinstance(error, redis.exceptions.ReadOnlyError) and hasattr(self._client, "connection_pool"):
            self._client.connection_pool.disconnect()

    def close(self) -> None:
        """Close the connections, for good."""
        client, self._client, self._closed = self._client, None, True
        if client is not None:
            clients.close(client)


class AsyncRunner:
    """Sends commands from a coroutine, over one connection; on Cluster, over one per node and call.

    Parameters:
        settings: how to reach Redis.
        block_seconds: longest time that a blocking command sent through this runner may block.
        together: commands that come while others are on their way go in one round trip after them, in no order that
            anybody may count on. Otherwise they go one at a time.
    """

    def __init__(self, settings: RedisSettings, *, block_seconds: float = 0.0, together: bool = False) -> None:
        self.settings = settings
        self._together = together
        self._queue: list[tuple[Command[Any], asyncio.Future[Any]]] = []
        self._sender: asyncio.Task[None] | None = None
        self.is_cluster = settings.address.topology == "cluster"
        self._timeout_seconds = settings.timeout_seconds + block_seconds
        self._client: Any = None
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._pid = os.getpid()

    async def run(self, command: Command[T], *, retry: bool = True) -> T:
        """Send one command; see `SyncRunner.run`."""
        self._check_usable()
        clock = self.settings.machine.clock
        until = clock() + self.settings.timeout_seconds
        with telemetry.tracer.start_as_current_span(f"redis_stream_coord {command.name}"):
            try:
                return await self._once(command)
            except RedisUnavailableError:
                if not (retry and command.idempotent) or clock() >= until:
                    raise
            retrying = tenacity.AsyncRetrying(**_policy(self.settings, until))
            return cast(T, await retrying(self._once_until, command, until))

    def _check_usable(self) -> None:
        _check_open(self._closed)
        self.check_loop()

    def check_loop(self) -> None:
        """Raise `LifecycleError` on another event loop than that of the first command."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            # Whatever it waits for there would never come.
            raise LifecycleError(
                "this object belongs to another event loop, where its connections are",
                hint="Make one for each event loop, and so for each asyncio.run.",
            )

    async def _once_until(self, command: Command[T], until: float) -> T:
        try:
            left = max(until - self.settings.machine.clock(), _LEAST_SECONDS)
            return await asyncio.wait_for(self._once(command), left)
        except asyncio.TimeoutError:
            raise RedisUnavailableError(f"{command.name} got no answer from Redis in time") from None

    async def drive(self, saga: Saga[T], *, retry: bool = True) -> T:
        """Run a saga to its end and return its result; see `SyncRunner.drive`."""
        try:
            step = next(saga)
            while True:
                try:
                    result: Any = None
                    if isinstance(step, Pause):
                        await asyncio.sleep(step.seconds)
                    elif isinstance(step, Together):
                        result = await self.pipeline(step.commands)
                    elif isinstance(step, Scan):
                        result = await self.scan(step.pattern)
                    else:
                        result = await self.run(step, retry=retry)
                except CoordError as error:
                    step = saga.throw(error)
                else:
                    step = saga.send(result)
        except StopIteration as over:
            return cast(T, over.value)

    async def scan(self, pattern: str) -> list[str]:
        """Return every key that fits a glob-style pattern; see `SyncRunner.scan`."""
        self._check_usable()
        try:
            async with self._lock:
                client = await self._connected()
                found = {text(key) async for key in client.scan_iter(match=pattern, count=1000)}
        except CoordError:
            raise
        except Exception as error:
            raise translate(error, "SCAN", settings=self.settings) from error
        return sorted(found)

    async def pipeline(self, commands: Sequence[Command[T]]) -> Sequence[T | CoordError]:
        """Send many commands in one go; see `SyncRunner.pipeline`."""
        self._check_usable()
        if self.is_cluster:
            return [await self._caught(command) for command in commands]
        try:
            async with self._lock:
                answers = await self._send_many(await self._connected(), commands)
        except CoordError:
            raise
        except Exception as error:  # noqa: BLE001 - translated
            answers = [error] * len(commands)
        return [_outcome(command, answer, self.settings) for command, answer in zip(commands, answers, strict=True)]

    async def _caught(self, command: Command[T]) -> T | CoordError:
        try:
            return await self.run(command, retry=False)
        except CoordError as error:
            return error

    async def _once(self, command: Command[T]) -> T:
        try:
            if self.is_cluster:
                async with self._lock:
                    client = await self._connected()
                answer = await self._send(client, command)
            elif self._together:
                answer = await self._queued(command)
            else:
                async with self._lock:
                    answer = await self._send(await self._connected(), command)
        except CoordError:
            raise
        except Exception as error:
            if isinstance(error, redis.exceptions.ReadOnlyError):
                # Not under another command: it would connect anew, for a client that nobody closes any more.
                async with self._lock:
                    await self._disconnect()
            raise translate(error, command.name, command, self.settings) from error
        return command.parse(answer)

    async def _connected(self) -> Any:
        check_process(self._pid)
        if self._client is None:
            client = clients.make(self.settings, self.settings.machine.coroutine, self._timeout_seconds)
            if self.is_cluster:
                await client.initialize()
            self._client = client
        return self._client

    async def _send(self, client: Any, command: Command[Any]) -> Any:
        target: dict[str, Any] = {}
        if self.is_cluster and command.name == "XREAD":
            # redis-py would ask a node for the keys of an XREAD before each one.
            target["target_nodes"] = client.get_node_from_key(command.keys[0])
        try:
            return await client.execute_command(*_line(command), **target)
        except redis.exceptions.NoScriptError:
            return await client.execute_command(*_line(command, by_source=True))

    def _queued(self, command: Command[Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._queue.append((command, answer))
        if self._sender is None or self._sender.done():
            self._sender = loop.create_task(self._send_queued())
        return answer

    async def _send_queued(self) -> None:
        """Send what is queued. A task of its own: whoever is cancelled meanwhile leaves no answer unread."""
        while self._queue:
            batch, self._queue = self._queue[:_TOGETHER], self._queue[_TOGETHER:]
            # What they get if this task is cancelled: somebody waits for each.
            answers: list[Any] = [redis.exceptions.ConnectionError("the connection was closed")] * len(batch)
            try:
                async with self._lock:
                    answers = await self._send_many(await self._connected(), [command for command, _ in batch])
            except Exception as error:  # noqa: BLE001 - handed on to whoever waits
                answers = [error] * len(batch)
            finally:
                _hand_on(batch, answers)

    async def _send_many(self, client: Any, commands: Sequence[Command[Any]]) -> list[Any]:
        if len(commands) == 1:
            return [await self._send(client, commands[0])]
        pipe = client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*_line(command))
        answers = list(await pipe.execute(raise_on_error=False))
        for position, answer in enumerate(answers):
            if isinstance(answer, redis.exceptions.NoScriptError):
                try:
                    answers[position] = await self._send(client, commands[position])
                except (redis.exceptions.RedisError, OSError) as error:
                    answers[position] = error
        return answers

    async def close(self) -> None:
        """Close the connections, for good. Whoever still waits for an answer gets `RedisUnavailableError`."""
        self.check_loop()
        self._closed = True
        if self._sender is not None:
            await end([self._sender])
        left, self._queue = self._queue, []
        _hand_on(left, [redis.exceptions.ConnectionError("the connection was closed")] * len(left))
        await self._disconnect()

    async def _disconnect(self) -> None:
        """Close the connections; the next command makes new ones."""
        client, self._client = self._client, None
        if client is not None:
            for one in (*clients.sentinels(client), client):
                await one.aclose()


def _hand_on(batch: Sequence[tuple[Command[Any], asyncio.Future[Any]]], answers: Sequence[Any]) -> None:
    for (_, waiting), answer in zip(batch, answers, strict=True):
        if waiting.done():
            continue
        if isinstance(answer, Exception):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)
