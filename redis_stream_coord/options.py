"""What a user may choose for a consumer, checked once for both faces, and made into the engine's configuration."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import attrs

from .checks import check_function, check_kind, check_number
from .engine import EngineConfig, ShardsCallback
from .errors import ConfigError, LifecycleError
from .handling import WorkConfig
from .keys import GroupKeys, check_member
from .models import Message
from .policies import Batch, DeadLetter, Poison, Retry
from .settings import RedisSettings, default_member
from .turns import Handle

Ack = Literal["auto", "manual"]
Decode = Callable[[dict[str, bytes]], Any]
# Makes a coroutine function of the user's callback: itself, or a call in a thread.
Adapt = Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]]
# Makes of the user's handler what runs it for a turn.
AdaptHandler = Callable[[Callable[..., Any]], Handle]


@attrs.frozen(kw_only=True)
class Options:
    """The parameters that both faces share; see `Consumer`."""

    stream: str
    group: str
    redis: str | RedisSettings
    handler: Callable[[Message], Any] | Batch[Any] | None
    member: str | None
    weight: float
    concurrency: int
    ack: Ack
    decode: Decode | None
    retry: Retry
    poison: Poison[Any] | DeadLetter | None
    max_handler_seconds: float | None
    prefetch: int
    prefetch_bytes: int
    shutdown_seconds: float
    callbacks: Mapping[str, Callable[..., Any] | None]

    def check(self, *, want_async: bool) -> None:
        """Check everything. Raises: `ConfigError`."""
        check_number("weight", self.weight, 0.001, 1000)
        check_number("concurrency", self.concurrency, 1, 1000)
        check_number("prefetch", self.prefetch, 1, 1000)
        check_number("prefetch_bytes", self.prefetch_bytes, 1, 1 << 31)
        check_number("shutdown_seconds", self.shutdown_seconds, 0.0)
        if self.max_handler_seconds is not None:
            check_number("max_handler_seconds", self.max_handler_seconds, 0.001)
        if self.ack not in ("auto", "manual"):
            raise ConfigError(f"ack={self.ack!r} must be 'auto' or 'manual'")
        check_kind("retry", self.retry, Retry, hint="Retry(backoff_seconds=0) tries again at once.")
        if self.poison is not None:
            check_kind("poison", self.poison, Poison, DeadLetter, hint="Poison(function, after_deliveries=...).")
        self._check_dead_letter()
        self._check_functions(want_async)

    def _check_functions(self, want_async: bool) -> None:
        if isinstance(self.handler, Batch):
            if self.concurrency > 1:
                raise ConfigError("a Batch takes all keys of a shard together, so concurrency must be 1")
            if self.handler.max_size > self.prefetch:
                raise ConfigError(
                    f"a Batch of max_size={self.handler.max_size} never fills: prefetch={self.prefetch} entries are "
                    "read ahead",
                    hint=f"Pass prefetch={self.handler.max_size} too.",
                )
        takes = "a list of Message" if isinstance(self.handler, Batch) else "a Message"
        if self.handler is not None:
            check_function("handler", _function(self.handler), takes, want_async=want_async)
        if isinstance(self.poison, Poison):
            check_function("poison", self.poison.handler, "a Message", want_async=want_async)
        if self.decode is not None:
            check_function("decode", self.decode, "the fields", want_async=False)
        for name, callback in self.callbacks.items():
            if callback is not None:
                check_function(name, callback, "a frozenset of shards", want_async=want_async)

    def _check_dead_letter(self) -> None:
        poison = self.poison
        if isinstance(poison, DeadLetter) and re.fullmatch(re.escape(self.stream) + r":\d+", poison.stream):
            raise ConfigError(
                f"the dead letters of stream {self.stream!r} cannot go to its own shard {poison.stream!r}",
                hint="They would be handed out there, fail again, and so on for ever.",
            )

    def engine_config(
        self, adapt: Adapt, adapt_handler: AdaptHandler, offer: Handle, *, handlers: int | None
    ) -> EngineConfig:
        """Return the configuration of the engine.

        Parameters:
            adapt: makes coroutine functions of the user's callbacks.
            adapt_handler: makes of the user's handlers what runs them for a turn.
            offer: takes turns when there is no handler.
            handlers: how many handlers can run at once; ``None``: any number.

        Raises:
            ConfigError: a name or the address of Redis is wrong.
        """
        settings = RedisSettings.of(self.redis)
        keys = GroupKeys(self.stream, self.group, settings.key_prefix)
        if self.member is not None:
            member, place = check_member(self.member), None
        else:
            member, place = default_member(keys.metadata, settings.machine)
        batch = self.handler if isinstance(self.handler, Batch) else None
        function = _function(self.handler)
        callbacks: dict[str, ShardsCallback | None] = {
            name: None if callback is None else adapt(callback) for name, callback in self.callbacks.items()
        }
        return EngineConfig(
            keys=keys,
            settings=settings,
            member=member,
            place=place,
            weight=self.weight,
            work=WorkConfig(
                handle=offer if function is None else adapt_handler(function),
                batch=batch,
                decode=self.decode,
                concurrency=self.concurrency,
                auto_ack=self.ack == "auto",
                retry=self.retry,
                poison=self.poison,
                poisoned=adapt_handler(self.poison.handler) if isinstance(self.poison, Poison) else None,
                handlers=0 if function is None else handlers,
                max_handler_seconds=self.max_handler_seconds,
                prefetch=self.prefetch,
                prefetch_bytes=self.prefetch_bytes,
            ),
            shutdown_seconds=self.shutdown_seconds,
            **callbacks,
        )


def misuse(config: EngineConfig, message: str, hint: str) -> LifecycleError:
    """Make the error for a call of a consumer that does not fit its state."""
    keys = config.keys
    return LifecycleError(message, stream=keys.stream, group=keys.group, member=config.member, hint=hint)


def _function(handler: Callable[[Message], Any] | Batch[Any] | None) -> Callable[..., Any] | None:
    return handler.handler if isinstance(handler, Batch) else handler
