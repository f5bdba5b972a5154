"""One call of a handler, and the moment in which it begins.

A call may have to wait for a free thread, or for a loop to ask for its next message. Whether it still may begin is
decided after that, in the thread that runs it, right before the handler's first line.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from .errors import ConfigError
from .machine import Machine
from .models import Message


class Withdrawn(Exception):  # noqa: N818 - never raised to a user
    """A message went back before anybody had finished it; that is no failure."""


class NotAwaitedError(ConfigError):
    """A function that was taken for a plain one has returned something to await: none of its work is done."""


def check_done(result: Any, what: str) -> None:
    """Check that a plain function has done its work. A lambda or decorator may hide that it only begins a coroutine.

    Parameters:
        result: what the function returned.
        what: it is, for the message.

    Raises:
        NotAwaitedError: it returned something to await.
    """
    if not inspect.isawaitable(result):
        return
    if inspect.iscoroutine(result):
        result.close()  # it will never run, and Python need not warn of that too
    raise NotAwaitedError(
        f"a {what} of a Consumer returned a {type(result).__name__}, and nobody awaits that",
        hint="Give AsyncConsumer a coroutine function, or Consumer a plain one that does its work before it returns.",
    )


class Turn:
    """One call of a handler.

    Parameters:
        messages: what it is given.
        as_list: whether the handler takes them as a list; otherwise there is one.
        decode: makes `Message.value` of the fields, or ``None``. Runs where the handler runs.
        allowed: whether it may begin, as far as one can know at this moment; called from any thread.
        machine: what the consumer runs on.
        note: writes down in Redis that the messages are handed out; ``None`` where that is not needed before.
    """

    __slots__ = (
        *("messages", "ids", "began", "ended", "acknowledged", "watchdog", "surrendered"),
        *("_as_list", "_decode", "_allowed", "_machine", "_note", "_lock", "_claimed", "_withdrawn", "_waiting"),
    )

    def __init__(
        self,
        messages: Sequence[Message],
        *,
        as_list: bool = False,
        decode: Callable[[dict[str, bytes]], Any] | None = None,
        allowed: Callable[[], bool],
        machine: Machine,
        note: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.messages = messages
        self.ids = [message.id for message in messages]
        self.began: float | None = None  # on the clock of the machine
        self.ended = False
        self.acknowledged: set[str] = set()  # by the handler itself
        self.watchdog: asyncio.TimerHandle | None = None
        self.surrendered = False  # whether the shard was given up for it once
        self._as_list = as_list
        self._decode = decode
        self._allowed = allowed
        self._machine = machine
        self._note = note
        self._lock = threading.Lock()
        self._claimed = self._withdrawn = False
        self._waiting: asyncio.Future[Any] | None = None

    # --- for whoever hands out; on the event loop ---------------------------------------------------------------------

    def wait_in(self, future: asyncio.Future[Any]) -> None:
        """Tell the future in which the outcome is awaited: a withdrawal ends it."""
        self._waiting = future
        if self._withdrawn:
            self._end_waiting()

    def withdraw(self) -> None:
        """Take the messages back, unless somebody has them already."""
        with self._lock:
            if self._claimed or self._withdrawn:
                return
            self._withdrawn = True
        self._end_waiting()

    def _end_waiting(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Withdrawn())

    # --- for whoever runs the handler ---------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Begin, on the event loop. Raises: `Withdrawn`: the messages must not be handed out any more."""
        self._claim()
        if self._note is not None:
            await self._note()
            self._look_again()
        self.began = self._machine.clock()

    def begin_in_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin, in another thread than that of the event loop. Raises: `Withdrawn`, see `begin`."""
        self._claim()
        if self._note is not None:
            try:
                noted = self._machine.submit(self._note(), loop)
                self._machine.block(noted.result, noted.done)
            except (concurrent.futures.CancelledError, RuntimeError):  # the loop ends, and everything with it
                raise Withdrawn from None
            self._look_again()
        self.began = self._machine.clock()

    def _claim(self) -> None:
        with self._lock:
            if self._withdrawn or not self._allowed():
                self._withdrawn = True
                raise Withdrawn
            self._claimed = True

    def _look_again(self) -> None:
        # Redis may have taken its time.
        if not self._allowed():
            raise Withdrawn

    def argument(self) -> Any:
        """Decode, and return what the handler takes. Raises: what ``decode`` raises; the entry counts as failed."""
        if self._decode is not None:
            for message in self.messages:
                message.value = self._decode(dict(message.fields))
        return list(self.messages) if self._as_list else self.messages[0]


Handle = Callable[[Turn], Awaitable[None]]
