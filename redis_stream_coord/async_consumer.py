"""The face of a consumer for coroutines: runs the engine on the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any

from .engine import Engine
from .errors import RedisUnavailableError
from .logs import logger
from .models import Health, Lag, Message, Shards
from .options import Ack, Decode, Options, misuse
from .pauses import Pauses
from .policies import Batch, DeadLetter, Poison, Retry
from .runner import check_process
from .settings import RedisSettings
from .turns import Handle, Turn, Withdrawn

SIGNALS = (signal.SIGTERM, signal.SIGINT)
Offer = tuple[Turn, "asyncio.Future[None]"]


class AsyncConsumer:
    """Consumes the shards of a stream that the group assigns to it; for coroutines.

    Entries of one shard are handed over one at a time and in order; those of different shards at the same time.

    Parameters:
        stream, group, redis, member, weight, concurrency, ack, retry, poison, max_handler_seconds, prefetch,
            prefetch_bytes, shutdown_seconds: see `Consumer`.
        handler: coroutine function that takes a `Message`, or a `Batch`. Leave it out to iterate:
            ``async for message in consumer``.
        decode: see `Consumer`. A plain function here too; it runs on the event loop, so a quick one.
        on_assigned, on_revoked, on_lost: see `Consumer`; coroutine functions here.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        stream: str,
        *,
        group: str,
        redis: str | RedisSettings,
        handler: Callable[[Message], Awaitable[None]] | Batch[Awaitable[None]] | None = None,
        member: str | None = None,
        weight: float = 1.0,
        concurrency: int = 1,
        ack: Ack = "auto",
        decode: Decode | None = None,
        retry: Retry = Retry(),  # noqa: B008 - frozen
        poison: Poison[Awaitable[None]] | DeadLetter | None = None,
        max_handler_seconds: float | None = None,
        prefetch: int = 100,
        prefetch_bytes: int = 16 << 20,
        shutdown_seconds: float = 30.0,
        on_assigned: Callable[[Shards], Awaitable[None]] | None = None,
        on_revoked: Callable[[Shards], Awaitable[None]] | None = None,
        on_lost: Callable[[Shards], Awaitable[None]] | None = None,
    ) -> None:
        options = Options(
            stream=stream,
            group=group,
            redis=redis,
            handler=handler,
            member=member,
            weight=weight,
            concurrency=concurrency,
            ack=ack,
            decode=decode,
            retry=retry,
            poison=poison,
            max_handler_seconds=max_handler_seconds,
            prefetch=prefetch,
            prefetch_bytes=prefetch_bytes,
            shutdown_seconds=shutdown_seconds,
            callbacks={"on_assigned": on_assigned, "on_revoked": on_revoked, "on_lost": on_lost},
        )
        options.check(want_async=True)
        self._config = options.engine_config(lambda function: function, _on_loop, self._offer, handlers=None)
        self._handler = handler
        self._pauses = Pauses()
        self._engine: Engine | None = None
        self._task: asyncio.Task[None] | None = None
        self._offers: asyncio.Queue[Offer] = asyncio.Queue()
        self._was_signalled = False
        self._pid = os.getpid()

    @property
    def member(self) -> str:
        """Id of this member."""
        return self._config.member

    async def run(self) -> None:
        """Consume until stopped. SIGTERM and SIGINT stop it; a second one ends the process at once.

        Raises:
            NotFoundError: there is no such group.
            DuplicateMemberError: another live process uses the same member id.
            DrainTimeoutError: handlers did not finish in time after a stop.
            LifecycleError: it was started before, or there is no handler.
        """
        if self._handler is None:
            raise misuse(self._config, "run() needs a handler", "Pass handler=, or iterate over the consumer.")
        loop = asyncio.get_running_loop()
        installed = []
        for number in SIGNALS:
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, self._signalled, number)
                installed.append(number)
        try:
            await self.start()
            await self.wait()
        except asyncio.CancelledError:
            await self.stop()
            raise
        finally:
            for number in installed:
                loop.remove_signal_handler(number)

    def _signalled(self, number: signal.Signals) -> None:
        if self._engine is None or self._was_signalled:
            end_at_once(number)
        else:
            self._was_signalled = True
            self._engine.stop()

    async def start(self) -> None:
        """Begin to consume in the background. Raises: `LifecycleError` if it was started before."""
        if self._task is not None:
            raise misuse(self._config, "a consumer can be started only once", "Make a new one.")
        check_process(self._pid)
        self._engine = Engine(self._config, self._pauses)
        self._task = self._config.settings.machine.spawn(self._engine.run())

    async def stop(self, *, hold: bool = False) -> None:
        """Hand out nothing more, finish, acknowledge, leave; see `Consumer.stop`."""
        self.request_stop(hold=hold)
        await self.wait()

    def request_stop(self, *, hold: bool = False) -> None:
        """Begin to stop, and return at once. `hold`: see `stop`."""
        if self._engine is not None:
            self._engine.stop(hold=hold)

    async def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until it has stopped; see `Consumer.wait`.

        Raises:
            LifecycleError: called from a handler or callback of the consumer, where it would wait for itself.
            what `run` raises.
        """
        if self._task is None or self._engine is None:
            return True
        if self._engine.runs_in(asyncio.current_task()):
            raise misuse(self._config, "a handler cannot wait for its own consumer", "Call request_stop().")
        done, _ = await asyncio.wait([self._task], timeout=timeout_seconds)
        if not done:
            return False
        self._task.result()
        return True

    async def __aenter__(self) -> AsyncConsumer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def __aiter__(self) -> AsyncGenerator[Message, None]:
        """Iterate over messages until stopped. With ``ack="auto"`` asking for the next one acknowledges the last.

        Without ``async with`` leaving the loop also stops the consumer; the message in the loop's body goes back.
        """
        if self._handler is not None:
            raise misuse(self._config, "a consumer with a handler cannot be iterated over", "Leave the handler out.")
        began_here = self._task is None
        if began_here:
            await self.start()
        assert self._task is not None
        done: asyncio.Future[None] | None = None
        getting: asyncio.Future[Offer] | None = None
        over = False
        try:
            while True:
                getting = asyncio.ensure_future(self._offers.get())
                await asyncio.wait([getting, self._task], return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    break
                turn, done = getting.result()
                try:
                    await turn.begin()
                    message = turn.argument()
                except (Withdrawn, Exception) as error:  # noqa: BLE001 - what decode raised counts as a failure
                    finish(done, error)
                    continue
                yield message
                finish(done, None)
            over = True
        finally:
            if getting is not None and not getting.cancel():
                # The one in the loop's body, or one that came as this task was cancelled.
                finish(getting.result()[1], Withdrawn())
            if began_here and not over:
                await self._leave()
        await self.wait()

    async def _leave(self) -> None:
        """Stop, so that no ghost of a member stays in the group; nobody is there who could be told of a failure."""
        self.request_stop()
        try:
            await self.wait()
        except Exception as error:  # noqa: BLE001 - said, and not put in place of what ended the loop
            logger.warning("the loop over %s was left: %s", self._config.keys.stream, error)

    async def _offer(self, turn: Turn) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turn.wait_in(done)
        self._offers.put_nowait((turn, done))
        await done

    @property
    def assignment(self) -> Shards:
        """Shards that this member owns at this moment."""
        return frozenset() if self._engine is None else self._engine.assignment

    @property
    def health(self) -> Health:
        """How it is, and what it waits for."""
        return NOT_STARTED if self._engine is None else self._engine.health

    def pause(self, shards: Iterable[int] | None = None) -> None:
        """Hand out nothing more of these shards, and keep them; see `Consumer.pause`."""
        self._pauses.pause(shards)
        if self._engine is not None:
            self._engine.pauses_changed()

    def resume(self, shards: Iterable[int] | None = None) -> None:
        """Undo `pause` for these shards; ``None``: for all."""
        self._pauses.resume(shards)
        if self._engine is not None:
            self._engine.pauses_changed()

    async def flush(self, *, timeout_seconds: float = 5.0) -> None:
        """Send all acknowledgements that are queued; see `Consumer.flush`."""
        if self._engine is not None:
            await within(timeout_seconds, self._engine.flush())

    async def lag(self) -> Lag:
        """Return for each owned shard how many entries have not been received; see `Consumer.lag`."""
        return {} if self._engine is None else await self._engine.lag()


NOT_STARTED = Health(
    ok=False,
    state="joining",
    lease_remaining_seconds=0.0,
    progress_age_seconds=0.0,
    waits_for="to be started",
)


def _on_loop(function: Callable[[Any], Awaitable[None]]) -> Handle:
    """Make of a coroutine function what runs it for a turn."""

    async def handle(turn: Turn) -> None:
        await turn.begin()
        await function(turn.argument())

    return handle


def finish(done: asyncio.Future[None], error: Exception | None) -> None:
    """Give the outcome to whoever offered a message; only the first one counts."""
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


async def within(seconds: float, work: Awaitable[None]) -> None:
    """Wait for a flush. Raises: `RedisUnavailableError` after so many seconds."""
    try:
        await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:
        raise RedisUnavailableError(f"acknowledgements were not sent within {seconds} s") from None


def end_at_once(number: int) -> None:
    """End the process as the signal does by default."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
