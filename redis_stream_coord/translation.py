"""What redis-py raises, and what this library makes of it: the one place where the two meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis.exceptions

from . import acl
from .commands import Command
from .errors import ConfigError, CoordError, CorruptMetadataError, PermissionDeniedError, RedisUnavailableError
from .settings import RedisSettings

# The command was not carried out, or it is unknown whether it was; in both cases a later try may succeed.
_TRANSIENT = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.TryAgainError,
    redis.exceptions.AskError,
    redis.exceptions.RedisClusterException,
    OSError,
    EOFError,
)
_TRANSIENT_WORDS = ("OOM", "MISCONF", "NOREPLICAS", "MASTERDOWN", "LOADING", "BUSY", "UNBLOCKED", "READONLY")

# What tells that the URL names another kind of server than there is: words of the error, and what to do.
_OTHER_SERVER: Sequence[tuple[str, str]] = (
    ("Cluster mode is not enabled", "The server is not a node of a Cluster: take redis:// or rediss://."),
    ("unknown command 'SENTINEL'", "The server is no Sentinel: name one, by default at port 26379, or take redis://."),
    ("DB index is out of range", "The server has no such database: take a smaller number, or `databases` in its file."),
)


def translate(
    error: Exception, name: str, command: Command[Any] | None = None, settings: RedisSettings | None = None
) -> CoordError:
    """Make an exception of this library of one of redis-py.

    Parameters:
        error: what redis-py raised.
        name: of the command, for the message.
        command: itself; the message says whom it concerns, and names the missing ACL rule if Redis refused it.
        settings: of the connection; the message says where Redis should be.
    """
    text = str(error)
    whom = {} if command is None else command.whom
    place = "" if settings is None else f" at {settings.address}"
    if isinstance(error, redis.exceptions.AuthenticationError) or text.startswith(("WRONGPASS", "NOAUTH")):
        return PermissionDeniedError(
            f"Redis{place} refused the credentials: {text}", hint="Check user name and password of RedisSettings."
        )
    # In a script a missing right is a plain error; before 7.2 it does not even name the right.
    in_script = "The user executing the script can't" in text or text.startswith("ACL failure in script")
    if isinstance(error, redis.exceptions.NoPermissionError) or "NOPERM" in text[:60] or in_script:
        return PermissionDeniedError(f"Redis refused {name}: {text}", hint=_missing_right(text, name, command), **whom)
    for words, remedy in _OTHER_SERVER:
        if words in text:
            return ConfigError(f"the URL does not fit Redis{place}: {text}", hint=remedy)
    alone = settings is not None and settings.address.topology != "cluster"
    if alone and isinstance(error, redis.exceptions.MovedError):
        remedy = "Take redis+cluster:// or rediss+cluster://, with one of its nodes or several."
        return ConfigError(f"the URL does not fit Redis{place}, which is a node of a Cluster", hint=remedy)
    if isinstance(error, _TRANSIENT) or text.startswith(_TRANSIENT_WORDS):
        remedy = RedisUnavailableError.hint
        if settings is not None and settings.address.tls:
            remedy += " A URL with rediss needs a port that speaks TLS."
        message = f"{name} got no answer from Redis{place}: {type(error).__name__}: {text}"
        return RedisUnavailableError(message, hint=remedy, **whom)
    if "WRONGTYPE" in text:
        keys = "" if command is None or not command.keys else f" {', '.join(command.keys)}"
        return CorruptMetadataError(
            f"a key used by {name} is of the wrong type: {text}",
            hint=f"Something else wrote to the library's keys. Look at{keys or ' them'} with TYPE.",
            **whom,
        )
    return CoordError(f"{name} failed: {type(error).__name__}: {text}", **whom)


def _missing_right(text: str, name: str, command: Command[Any] | None) -> str:
    script = None if command is None or command.script is None else command.script.name
    rule = acl.missing(
        text,
        command=name if script is None else "EVALSHA",
        keys=() if command is None else command.keys,
        script=script,
    )
    return f"The Redis user lacks the rule {rule}; `redis-stream-coord acl ROLE` prints all rules of a role."
