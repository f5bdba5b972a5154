"""The face of a consumer for plain code; `AsyncConsumer`, in `async_consumer`, is the one for coroutines.

Both run `redis_stream_coord.engine.Engine`. `AsyncConsumer` runs it on the caller's event loop; `Consumer` on a private
loop in a thread of its own, and the user's functions in worker threads, so that a slow one cannot cost the lease.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import signal
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable
from types import FrameType, TracebackType
from typing import Any

from .async_consumer import NOT_STARTED, SIGNALS, Offer, end_at_once, finish, within
from .engine import Engine
from .errors import ConfigError, LifecycleError
from .handling import Withdrawn
from .models import Health, Lag, Message, Shards
from .options import Ack, Decode, Options
from .policies import Batch, DeadLetter, Poison, Retry
from .runner import check_process
from .settings import RedisSettings

_SIGNAL_SECONDS = 0.2  # at most so long until a signal is acted upon


class Consumer:
    """Consumes the shards of a stream that the group assigns to it; for plain functions.

    Entries of one shard are handed over one at a time and in order; those of different shards at the same time, in
    worker threads: the handler has to be thread-safe, or `handler_threads` be 1.

    Parameters:
        stream, group, redis, member, weight, concurrency, ack, decode, retry, poison, max_handler_seconds, prefetch,
            prefetch_bytes, shutdown_seconds: see `AsyncConsumer`.
        handler: plain function that takes a `Message`, or a `Batch`. Leave it out to iterate:
            ``for message in consumer``.
        handler_threads: at most so many handlers at once, over all shards of this consumer.
        on_assigned, on_revoked, on_lost: see `AsyncConsumer`; plain functions here.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        stream: str,
        *,
        group: str,
        redis: str | RedisSettings,
        handler: Callable[[Message], None] | Batch | None = None,
        handler_threads: int = 32,
        member: str | None = None,
        weight: float = 1.0,
        concurrency: int = 1,
        ack: Ack = "auto",
        decode: Decode | None = None,
        retry: Retry = Retry(),  # noqa: B008 - frozen
        poison: Poison | DeadLetter | None = None,
        max_handler_seconds: float | None = None,
        prefetch: int = 100,
        prefetch_bytes: int = 16 << 20,
        shutdown_seconds: float = 30.0,
        on_assigned: Callable[[Shards], None] | None = None,
        on_revoked: Callable[[Shards], None] | None = None,
        on_lost: Callable[[Shards], None] | None = None,
    ) -> None:
        if handler_threads < 1:
            raise ConfigError(f"handler_threads={handler_threads} must be positive")
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
        options.check(want_async=False)
        self._machine = RedisSettings.of(redis).machine
        self._threads = self._machine.threads(handler_threads, f"redis-stream-coord-{stream}")
        # A thread of their own: a callback never waits for slow handlers.
        self._callback_threads = self._machine.threads(1, f"redis-stream-coord-{stream}-callback")
        self._callbacks = [function for function in (on_assigned, on_revoked, on_lost) if function is not None]
        self._config = options.engine_config(self._in_thread, self._offer)
        self._handler = handler
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = False
        self._ready = threading.Event()
        self._over = threading.Event()
        self._last_thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._offers: queue.SimpleQueue[Offer | None] = queue.SimpleQueue()
        self._was_signalled = False
        self._pid = os.getpid()

    def _in_thread(self, function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        threads = self._callback_threads if function in self._callbacks else self._threads

        async def call(argument: Any) -> None:
            await threads.call(function, argument)

        return call

    @property
    def member(self) -> str:
        """Id of this member."""
        return self._config.member

    def run(self) -> None:
        """Consume until stopped. In the main thread SIGTERM and SIGINT stop it; a second one ends the process at once.

        Raises:
            NotFoundError: there is no such group.
            DuplicateMemberError: another live process uses the same member id.
            DrainTimeoutError: handlers did not finish in time after a stop.
            LifecycleError: it was started before, or there is no handler.
        """
        if self._handler is None:
            raise LifecycleError("run() needs a handler", hint="Pass handler=, or iterate over the consumer.")
        previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            previous = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        try:
            self.start()
            # Python runs signal handlers in this thread only, and a signal that another thread took, or that came just
            # before the waiting began, does not end the waiting.
            while not self.wait(_SIGNAL_SECONDS):
                pass
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        if self._engine is None or self._was_signalled:
            end_at_once(number)
        else:
            self._was_signalled = True
            self.request_stop()

    def start(self) -> None:
        """Begin to consume in the background. Raises: `LifecycleError` if it was started before."""
        if self._started:
            raise LifecycleError("a consumer can be started only once", hint="Make a new one.")
        check_process(self._pid)
        self._started = True
        self._loop = self._machine.acquire()
        future = self._machine.submit(self._run(), self._loop)
        future.add_done_callback(self._ended)
        self._machine.block(self._ready.wait, self._ready.is_set)

    async def _run(self) -> None:
        self._engine = Engine(self._config)
        running = asyncio.ensure_future(self._engine.run())
        # One turn of the loop, so that whoever called start() finds it running.
        await asyncio.sleep(0)
        self._ready.set()
        await running

    def _ended(self, future: concurrent.futures.Future[None]) -> None:
        self._failure = None if future.cancelled() else future.exception()
        self._ready.set()
        self._threads.close()
        self._callback_threads.close()
        self._offers.put(None)
        self._last_thread = self._machine.release()
        self._over.set()

    async def _offer(self, message: Message) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offers.put((message, done))
        await done

    def stop(self, *, hold: bool = False) -> None:
        """Hand out nothing more, finish, acknowledge, leave; see `AsyncConsumer.stop`."""
        self.request_stop(hold=hold)
        self.wait()

    def request_stop(self, *, hold: bool = False) -> None:
        """Begin to stop, and return at once. May be called from a handler or a signal handler. `hold`: see `stop`."""

        def stop(engine: Engine) -> None:
            engine.stop(hold=hold)
            # What the loop has not taken: nobody may ever ask for it.
            while not self._over.is_set() and not self._offers.empty():
                with contextlib.suppress(queue.Empty):
                    if (offer := self._offers.get_nowait()) is not None:
                        finish(offer[1], Withdrawn(taken=False))

        self._soon(stop)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until it has stopped; see `AsyncConsumer.wait`.

        Raises:
            LifecycleError: called from the consumer's own threads, where it would wait for itself.
            what `run` raises.
        """
        check_process(self._pid)
        if not self._started:
            return True
        own = (*self._threads.threads, *self._callback_threads.threads)
        if threading.current_thread() in own:
            raise LifecycleError("a handler cannot wait for its own consumer", hint="Call request_stop().")
        over = self._machine.block(self._over.wait, self._over.is_set, timeout_seconds)
        if not over:
            return False
        if self._last_thread is not None and self._last_thread is not threading.current_thread():
            self._last_thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return True

    def __enter__(self) -> Consumer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def __iter__(self) -> Generator[Message, None, None]:
        """Iterate over messages until stopped. With ``ack="auto"`` asking for the next one acknowledges the last."""
        if self._handler is not None:
            raise LifecycleError("a consumer with a handler cannot be iterated over")
        began_here = not self._started
        if began_here:
            self.start()
        assert self._loop is not None
        done: asyncio.Future[None] | None = None
        try:
            while (offer := self._next_offer()) is not None:
                message, done = offer
                yield message
                self._finish(done, None)
        finally:
            if done is not None:
                self._finish(done, Withdrawn(taken=True))
            if began_here:
                self.request_stop()
        self.wait()

    def _next_offer(self) -> Offer | None:
        return self._machine.block(lambda seconds: self._offers.get(timeout=seconds), lambda: not self._offers.empty())

    def _finish(self, done: asyncio.Future[None], error: Exception | None) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(finish, done, error)

    @property
    def assignment(self) -> Shards:
        """Shards that this member owns at this moment."""
        return frozenset() if self._engine is None else self._engine.assignment

    @property
    def health(self) -> Health:
        """How it is, and what it waits for."""
        return NOT_STARTED if self._engine is None else self._engine.health

    def pause(self, shards: Iterable[int] | None = None) -> None:
        """Hand out nothing more of these shards, and keep them; see `AsyncConsumer.pause`."""
        self._soon(lambda engine: engine.pause(shards))

    def resume(self, shards: Iterable[int] | None = None) -> None:
        """Undo `pause` for these shards; ``None``: for all."""
        self._soon(lambda engine: engine.resume(shards))

    def flush(self, *, timeout_seconds: float = 5.0) -> None:
        """Send all acknowledgements that are queued; see `AsyncConsumer.flush`."""
        self._in_loop(lambda engine: within(timeout_seconds, engine.flush()))

    def lag(self) -> Lag:
        """Return for each owned shard how many entries have not been received; see `AsyncConsumer.lag`."""
        lag: Lag | None = self._in_loop(lambda engine: engine.lag())
        return lag or {}

    def _soon(self, call: Callable[[Engine], None]) -> None:
        check_process(self._pid)
        if self._loop is not None and self._engine is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(call, self._engine)

    def _in_loop(self, call: Callable[[Engine], Any]) -> Any:
        check_process(self._pid)
        if self._loop is None or self._engine is None or self._over.is_set():
            return None
        future = self._machine.submit(call(self._engine), self._loop)
        return self._machine.block(future.result, future.done)
