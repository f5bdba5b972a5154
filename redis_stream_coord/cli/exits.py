"""Exit codes: what a script can act on. They do not change their meaning between releases."""

from __future__ import annotations

from enum import IntEnum

from ..errors import (
    AlreadyExistsError,
    ConfigError,
    ConflictError,
    CoordError,
    FrozenError,
    MetadataError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitedError,
    RedisUnavailableError,
)


class Exit(IntEnum):
    """Exit code of the command line."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    DENIED = 5
    FROZEN = 6
    RATE_LIMITED = 7
    METADATA = 8
    UNAVAILABLE = 9
    PROBLEMS = 10
    DRIFT = 11
    ABORTED = 12
    UNFINISHED = 13


# The first that fits counts.
_OF_ERRORS: tuple[tuple[type[CoordError], Exit], ...] = (
    (ConfigError, Exit.USAGE),
    (NotFoundError, Exit.NOT_FOUND),
    (AlreadyExistsError, Exit.CONFLICT),
    (ConflictError, Exit.CONFLICT),
    (PermissionDeniedError, Exit.DENIED),
    (FrozenError, Exit.FROZEN),
    (RateLimitedError, Exit.RATE_LIMITED),
    (MetadataError, Exit.METADATA),
    (RedisUnavailableError, Exit.UNAVAILABLE),
)


def exit_of(error: CoordError) -> Exit:
    """Return the exit code that an error ends the program with."""
    return next((code for kind, code in _OF_ERRORS if isinstance(error, kind)), Exit.FAILED)
