"""What a consumer does with an entry beyond handing it to its handler once: batches, retries, poison, dead letters."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Generic, TypeVar

import attrs

from .checks import check_number
from .errors import ConfigError
from .models import Message

# What the user's function returns: nothing for `Consumer`, something to await for `AsyncConsumer`.
R_co = TypeVar("R_co", covariant=True)

# Marks an entry of a dead-letter stream with where it came from and why.
DEAD_PREFIX = "rsc-dead-"
# An entry that nobody gives up comes from leaving `Poison` out, not from a large number.
_MOST_DELIVERIES = 1_000_000


@attrs.frozen(kw_only=True)
class Retry:
    """Hand a failed entry to its handler again, in place, so that order holds; other shards go on meanwhile.

    What the handler (or ``decode``) raised decides whether that makes sense. An error is *fatal* if it is of one of the
    `fatal` types, or if `retriable` is given and it is of none of those. After a fatal error the entry is not tried
    again: it goes to the `Poison` or `DeadLetter` of the consumer at once; without one the consumer stops, the entry
    stays unacknowledged, and ``run`` and ``wait`` raise the error. All other errors are tried again, until ``poison``
    says that it was often enough.

    Parameters:
        backoff_seconds: before the second try; doubled for each further one, with jitter.
        max_backoff_seconds: longest wait.
        retriable: types of exceptions that another try may mend, with their subclasses; ``None``: all.
        fatal: types of exceptions that no further try will mend, with their subclasses, `retriable` or not.

    Raises:
        ConfigError: negative, the wrong way round, or not types of exceptions.
    """

    backoff_seconds: float = 0.1
    max_backoff_seconds: float = 30.0
    retriable: tuple[type[Exception], ...] | None = None
    fatal: tuple[type[Exception], ...] = ()

    def __attrs_post_init__(self) -> None:
        for name, types in (("retriable", self.retriable or ()), ("fatal", self.fatal)):
            given: tuple[object, ...] = types if isinstance(types, tuple) else (None,)
            if not all(isinstance(one, type) and issubclass(one, Exception) for one in given):
                raise ConfigError(f"{name}={types!r} must be a tuple of types of exceptions")
        check_number("max_backoff_seconds", self.max_backoff_seconds, 0.0)
        check_number("backoff_seconds", self.backoff_seconds, 0.0, float(self.max_backoff_seconds))

    def is_fatal(self, error: BaseException) -> bool:
        """Return whether no further try will mend what ended with `error`."""
        if isinstance(error, self.fatal):
            return True
        # What is no Exception is a cancellation that got out of the handler: that says nothing about the entry.
        listed = self.retriable is None or isinstance(error, self.retriable)
        return isinstance(error, Exception) and not listed

    def delay(self, failures: int, chance: random.Random | None = None) -> float:
        """Return seconds to wait after so many failures in a row, with the jitter that `chance` decides."""
        ceiling = min(self.max_backoff_seconds, self.backoff_seconds * 2.0 ** min(failures - 1, 30))
        return (chance or random).uniform(ceiling / 2, ceiling)


@attrs.frozen
class Batch(Generic[R_co]):
    """A handler that takes a list of entries of one shard. It succeeds or fails as a whole.

    After a failure its entries come one by one, so that a bad one is found and the others get through.

    Parameters:
        handler: takes a list of `Message`, in order; a plain function for `Consumer`, a coroutine function for
            `AsyncConsumer`.
        max_size: at most so many entries.
        within_seconds: how long a batch that is not full waits for more.

    Raises:
        ConfigError: not positive.
    """

    handler: Callable[[list[Message]], R_co]
    max_size: int = attrs.field(default=100, kw_only=True)
    within_seconds: float = attrs.field(default=0.1, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_number("max_size", self.max_size, 1, 1000)
        check_number("within_seconds", self.within_seconds, 0.0)


@attrs.frozen
class Poison(Generic[R_co]):
    """What to do with an entry that cannot be handled. The application decides; without this it is tried for ever.

    Parameters:
        handler: takes the `Message`; ``message.error`` is why, ``None`` if every earlier owner died on it. When it
            returns, the entry is acknowledged; when it raises, the entry is tried again, or, after a fatal error, given
            to it again.
        after_deliveries: so many deliveries are enough; tries in place and takeovers both count. After an error that is
            fatal for `Retry` a single one is.

    Raises:
        ConfigError: `after_deliveries` is not positive.
    """

    handler: Callable[[Message], R_co]
    after_deliveries: int = attrs.field(kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_number("after_deliveries", self.after_deliveries, 1, _MOST_DELIVERIES)


@attrs.frozen
class DeadLetter:
    """A ready-made `Poison`: appends the entry to another stream, then acknowledges it.

    A crash between the two writes repeats the first: an entry may stand there twice, and is never lost. It keeps its
    fields, and gets ``rsc-dead-stream``, ``-shard``, ``-id``, ``-group``, ``-deliveries`` and ``-reason``.

    Parameters:
        stream: key of a plain Redis stream.
        after_deliveries: see `Poison`.
    """

    stream: str
    after_deliveries: int = attrs.field(kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.stream, str) or not self.stream:
            raise ConfigError(f"stream={self.stream!r} must be the key of a Redis stream")
        check_number("after_deliveries", self.after_deliveries, 1, _MOST_DELIVERIES)


def dead_fields(message: Message, group: str, raw: list[bytes]) -> list[str | bytes]:
    """Return the fields of a dead-letter entry: those of the original, then where it came from and why."""
    reason = "no handler survived it" if message.error is None else repr(message.error)
    origin = {
        "stream": message.stream,
        "shard": str(message.shard),
        "id": message.id,
        "group": group,
        "deliveries": str(message.deliveries),
        "reason": reason,
    }
    return [*raw, *(part for name, value in origin.items() for part in (DEAD_PREFIX + name, value))]
