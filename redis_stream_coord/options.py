"""What a user may choose for a consumer, checked once for both faces, and made into the engine's configuration."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import attrs

from .engine import EngineConfig, ShardsCallback
from .errors import ConfigError
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
    """The parameters that both faces share; see `AsyncConsumer`."""

    stream: str
    group: str
    redis: str | RedisSettings
    handler: Callable[[Message], Any] | Batch | None
    member: str | None
    weight: float
    concurrency: int
    ack: Ack
    decode: Decode | None
    retry: Retry
    poison: Poison | DeadLetter | None
    max_handler_seconds: float | None
    prefetch: int
    prefetch_bytes: int
    shutdown_seconds: float
    callbacks: Mapping[str, Callable[..., Any] | None]

    def check(self, *, want_async: bool) -> None:
        """Check everything. Raises: `ConfigError`."""
        _check_range("weight", self.weight, 0.001, 1000)
        _check_range("concurrency", self.concurrency, 1, 1000)
        _check_range("prefetch", self.prefetch, 1, 1000)
        _check_range("prefetch_bytes", self.prefetch_bytes, 1, 1 << 31)
        _check_range("shutdown_seconds", self.shutdown_seconds, 0, float("inf"))
        if self.max_handler_seconds is not None:
            _check_range("max_handler_seconds", self.max_handler_seconds, 0.001, float("inf"))
        if self.ack not in ("auto", "manual"):
            raise ConfigError(f"ack={self.ack!r} must be 'auto' or 'manual'")
        if isinstance(self.handler, Batch) and self.concurrency > 1:
            raise ConfigError("a Batch takes all keys of a shard together, so concurrency must be 1")
        functions: dict[str, Callable[..., Any] | None] = {"handler": _function(self.handler), **self.callbacks}
        if isinstance(self.poison, Poison):
            functions["poison"] = self.poison.handler
        for name, function in functions.items():
            _check_kind(name, function, want_async=want_async)

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


def _function(handler: Callable[[Message], Any] | Batch | None) -> Callable[..., Any] | None:
    return handler.handler if isinstance(handler, Batch) else handler


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}={value} must be between {low} and {high}")


def _check_kind(name: str, function: Any, *, want_async: bool) -> None:
    if function is None:
        return
    if not callable(function):
        raise ConfigError(f"{name}={function!r} cannot be called")
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if is_async is not want_async:
        kind, other = ("coroutine", "Consumer") if want_async else ("plain", "AsyncConsumer")
        raise ConfigError(f"{name} must be a {kind} function here", hint=f"Use {other} for the other kind.")
