"""Handlers that note what they are given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..models import Message


class _Recorder:
    """What both share.

    Attributes:
        messages: every message that was handed over, in order; also those whose handling then failed.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []

    @property
    def ids(self) -> list[str]:
        """Their ids."""
        return [message.id for message in self.messages]

    def texts(self, field: str) -> list[str]:
        """Return one field of each, as text."""
        return [message.text(field) for message in self.messages]

    def of_key(self, key: str | bytes) -> list[Message]:
        """Return those of one partition key."""
        wanted = key.encode() if isinstance(key, str) else key
        return [message for message in self.messages if message.key == wanted]


class Recorder(_Recorder):
    """A handler for `Consumer`. Parameters: then: called with each message after it was noted, for example to fail."""

    def __init__(self, then: Callable[[Message], object] | None = None) -> None:
        super().__init__()
        self._then = then

    def __call__(self, message: Message) -> None:
        self.messages.append(message)
        if self._then is not None:
            self._then(message)


class AsyncRecorder(_Recorder):
    """A handler for `AsyncConsumer`. Parameters: then: awaited with each message after it was noted."""

    def __init__(self, then: Callable[[Message], Awaitable[object]] | None = None) -> None:
        super().__init__()
        self._then = then

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)
        if self._then is not None:
            await self._then(message)
