"""The face of a consumer for plain code; `AsyncConsumer`, in `async_consumer`, is the one for coroutines.

Both run `redis_stream_coord.engine.Engine`. `AsyncConsumer` runs it on the caller's event loop; `Consumer` on a private
loop in a thread of its own, and the user's functions in worker threads, so that a slow one cannot cost the lease.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable
from types import FrameType, TracebackType
from typing import Any

from .async_consumer import NOT_STARTED, SIGNALS, Offer, end_at_once, finish, within
from .checks import check_number
from .engine import Engine
from .logs import logger
from .models import Health, Lag, Message, Shards
from .options import Ack, Decode, Options, misuse
from .pauses import Pauses
from .policies import Batch, DeadLetter, Poison, Retry
from .runner import check_process
from .settings import RedisSettings
from .turns import Handle, Turn, Withdrawn, check_done

_SIGNAL_SECONDS = 0.2  # at most so long until a signal is acted upon
_LEAVE_SECONDS = 5.0  # what the end of an engine may take beyond ``shutdown_seconds``

# Consumers whose loop is not over: one that was left by an exception may still be there when the process ends.
_iterated: weakref.WeakSet[Consumer] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    for consumer in list(_iterated):
        consumer._leave()


class Consumer:
    """Consumes the shards of a stream that the group assigns to it; for plain functions.

    Entries of one shard are handed over one at a time and in order; those of different shards at the same time, in
    worker threads: the handler has to be thread-safe, or `handler_threads` be 1.
    An entry is acknowledged after its handler succeeded, and handed to it again, in place, after it failed.

    Parameters:
        stream: name of the logical stream.
        group: name of the consumer group.
        redis: URL or settings.
        handler: plain function that takes a `Message`, or a `Batch`. Leave it out to iterate:
            ``for message in consumer``.
        handler_threads: at most so many handlers at once, over all shards of this consumer.
        member: id of this member; of one process at a time. By default the pod's name where ``POD_NAME`` is set, else
            made of host name, process id and chance.
        weight: share of the shards, relative to the other members.
        concurrency: so many partition keys of a shard are handled at the same time; entries of one key never are.
        ack: ``auto``: after the handler succeeded, or when the loop asks for the next message; ``manual``: only by
            `Message.ack`.
        decode: makes `Message.value` of the fields, for example ``lambda fields: json.loads(fields["data"])``. A plain
            function that runs in the handler's thread. If it raises, the entry counts as failed.
        retry: what to do after a handler failed.
        poison: what to do with an entry that fails again and again: `Poison` or `DeadLetter`. ``None``: try for ever.
        max_handler_seconds: when a handler takes longer, its shard is given up, to another member if there is one.
            The lease and the other shards go on. What it waits for a free thread does not count. ``None``: never.
        prefetch: at most so many entries of a shard are read ahead, 1 to 1000.
        prefetch_bytes: and so many bytes, unless a single entry has more.
        shutdown_seconds: how long handlers may take to finish after a stop; then they are abandoned.
        on_assigned: called with shards before their first message.
        on_revoked: called with shards that are given up and still owned: finish and acknowledge. Also at a stop.
        on_lost: called with shards that are gone already.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(
        self,
        stream: str,
        *,
        group: str,
        redis: str | RedisSettings,
        handler: Callable[[Message], None] | Batch[None] | None = None,
        handler_threads: int = 32,
        member: str | None = None,
        weight: float = 1.0,
        concurrency: int = 1,
        ack: Ack = "auto",
        decode: Decode | None = None,
        retry: Retry = Retry(),  # noqa: B008 - frozen
        poison: Poison[None] | DeadLetter | None = None,
        max_handler_seconds: float | None = None,
        prefetch: int = 100,
        prefetch_bytes: int = 16 << 20,
        shutdown_seconds: float = 30.0,
        on_assigned: Callable[[Shards], None] | None = None,
        on_revoked: Callable[[Shards], None] | None = None,
        on_lost: Callable[[Shards], None] | None = None,
    ) -> None:
        check_number("handler_threads", handler_threads, 1, 10_000)
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
        self._config = options.engine_config(
            self._callback, self._handle_in_thread, self._offer, handlers=handler_threads
        )
        self._pauses = Pauses()
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

    def _callback(self, function: Callable[[Shards], Any]) -> Callable[[Shards], Awaitable[None]]:
        def run(shards: Shards) -> None:
            check_done(function(shards), "callback")

        async def call(shards: Shards) -> None:
            await self._callback_threads.call(run, shards)

        return call

    def _handle_in_thread(self, function: Callable[[Any], Any]) -> Handle:
        def run(turn: Turn) -> None:
            assert self._loop is not None
            turn.begin_in_thread(self._loop)
            check_done(function(turn.argument()), "handler")

        async def handle(turn: Turn) -> None:
            future = self._threads.start(run, turn)
            turn.wait_in(future)
            await future

        return handle

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
            raise misuse(self._config, "run() needs a handler", "Pass handler=, or iterate over the consumer.")
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
        """Begin to consume in the background, in threads that do not keep the process alive.

        Call `stop` before the process ends, or use ``with``: otherwise handlers are cut off, and the group waits for
        the lease of a member that is gone.

        Raises:
            LifecycleError: it was started before.
        """
        if self._started:
            raise misuse(self._config, "a consumer can be started only once", "Make a new one.")
        check_process(self._pid)
        self._started = True
        self._loop = self._machine.acquire()
        future = self._machine.submit(self._run(), self._loop)
        future.add_done_callback(self._ended)
        self._machine.block(self._ready.wait, self._ready.is_set)

    async def _run(self) -> None:
        self._engine = Engine(self._config, self._pauses)
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

    async def _offer(self, turn: Turn) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turn.wait_in(done)
        self._offers.put((turn, done))
        await done

    def stop(self, *, hold: bool = False) -> None:
        """Hand out nothing more, finish, acknowledge, leave.

        Parameters:
            hold: keep the shards for a restart under the same member id within the lease, so that nothing moves.

        Raises:
            what `run` raises.
        """
        self.request_stop(hold=hold)
        self.wait()

    def request_stop(self, *, hold: bool = False) -> None:
        """Begin to stop, and return at once. May be called from a handler or a signal handler. `hold`: see `stop`."""
        self._soon(lambda engine: engine.stop(hold=hold))

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until it has stopped.

        Parameters:
            timeout_seconds: no longer than that; ``None``: for ever.

        Returns:
            Whether it has stopped.

        Raises:
            LifecycleError: called from the consumer's own threads, where it would wait for itself.
            what `run` raises.
        """
        check_process(self._pid)
        if not self._started:
            return True
        own = (*self._threads.threads, *self._callback_threads.threads)
        if threading.current_thread() in own:
            raise misuse(self._config, "a handler cannot wait for its own consumer", "Call request_stop().")
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
        """Iterate over messages until stopped. With ``ack="auto"`` asking for the next one acknowledges the last.

        Without ``with`` leaving the loop also stops the consumer; the message in the loop's body goes back.
        """
        if self._handler is not None:
            raise misuse(self._config, "a consumer with a handler cannot be iterated over", "Leave the handler out.")
        began_here = not self._started
        if began_here:
            self.start()
            _iterated.add(self)
        assert self._loop is not None
        done: asyncio.Future[None] | None = None
        over = False
        try:
            while (offer := self._next_offer()) is not None:
                turn, done = offer
                try:
                    turn.begin_in_thread(self._loop)
                    message = turn.argument()
                except (Withdrawn, Exception) as error:  # noqa: BLE001 - what decode raised counts as a failure
                    self._finish(done, error)
                    continue
                yield message
                self._finish(done, None)
            over = True
        finally:
            if done is not None:
                self._finish(done, Withdrawn())
            if began_here:
                _iterated.discard(self)
                if not over:
                    self._leave()
        self.wait()

    def _next_offer(self) -> Offer | None:
        return self._machine.block(lambda seconds: self._offers.get(timeout=seconds), lambda: not self._offers.empty())

    def _leave(self) -> None:
        """Stop, so that no ghost of a member stays in the group, and wait for the end, which is bounded."""
        self.request_stop()
        # A loop that ended with an exception is left when its frame goes, in whatever thread that is; and at the very
        # end of the interpreter no other thread runs any more.
        own = (*self._threads.threads, *self._callback_threads.threads)
        in_loop = asyncio._get_running_loop() is self._loop
        if threading.current_thread() not in own and not in_loop and not sys.is_finalizing():
            seconds = self._config.shutdown_seconds + _LEAVE_SECONDS
            self._machine.block(self._over.wait, self._over.is_set, seconds)
        if self._failure is not None:
            logger.warning("the loop over %s was left: %s", self._config.keys.stream, self._failure)

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
        """Hand out nothing more of these shards, and keep them. May be called before the start, too.

        Parameters:
            shards: which, by their indexes; ``None``: all, also those assigned later.
        """
        self._pauses.pause(shards)
        self._soon(lambda engine: engine.pauses_changed())

    def resume(self, shards: Iterable[int] | None = None) -> None:
        """Undo `pause` for these shards; ``None``: for all."""
        self._pauses.resume(shards)
        self._soon(lambda engine: engine.pauses_changed())

    def flush(self, *, timeout_seconds: float = 5.0) -> None:
        """Send all acknowledgements that are queued.

        Raises:
            RedisUnavailableError: they could not be sent within `timeout_seconds`.
        """
        self._in_loop(lambda engine: within(timeout_seconds, engine.flush()))

    def lag(self) -> Lag:
        """Return for each owned shard how many entries have not been received; ``None``: Redis cannot tell.

        Raises:
            RedisUnavailableError: no answer in time.
        """
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
