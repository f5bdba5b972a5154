"""Everything that this library raises, and the one table from a script's error word to its exception.

::

    CoordError                     stream, group, member, shard, hint, retriable
    ├── ConfigError                (also ValueError) an argument or a setting is wrong
    ├── LifecycleError             a call that does not fit the object's state: closed, forked, not started
    │   └── DrainTimeoutError      handlers did not finish within the shutdown time
    ├── NotFoundError              no such stream, group or shard
    ├── AlreadyExistsError
    ├── ConflictError              the request contradicts what is stored
    ├── MembershipError
    │   ├── FencedError            the shard or the session belongs to somebody else by now
    │   └── DuplicateMemberError   two live processes use one member id
    ├── RoutingError
    │   ├── RoutingUnavailableError
    │   ├── RoutingRegressionError
    │   └── NoShardError
    ├── PublishError               outcome unknown or refused
    │   └── PartialPublishError
    ├── AdminError
    │   ├── RateLimitedError       retry_after_seconds
    │   ├── FrozenError
    │   ├── PermissionDeniedError
    │   └── WaitTimeoutError       what was waited for is not over yet, and goes on
    ├── MetadataError
    │   ├── CorruptMetadataError
    │   ├── MetadataRegressionError
    │   ├── UnsupportedSchemaError
    │   └── UnsupportedProtocolError
    └── RedisUnavailableError      no answer from Redis within the time allowed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from .models import Receipt

__all__ = [
    "AdminError",
    "AlreadyExistsError",
    "ConfigError",
    "ConflictError",
    "CoordError",
    "CorruptMetadataError",
    "DrainTimeoutError",
    "DuplicateMemberError",
    "FencedError",
    "FrozenError",
    "LifecycleError",
    "MembershipError",
    "MetadataError",
    "MetadataRegressionError",
    "NoShardError",
    "NotFoundError",
    "PartialPublishError",
    "PermissionDeniedError",
    "PublishError",
    "RateLimitedError",
    "RedisUnavailableError",
    "Refusal",
    "REFUSALS",
    "RoutingError",
    "RoutingRegressionError",
    "RoutingUnavailableError",
    "UnsupportedProtocolError",
    "UnsupportedSchemaError",
    "WaitTimeoutError",
    "refused",
]


class CoordError(Exception):
    """Base of all errors of this library.

    Attributes:
        stream, group, member: whom it concerns; ``None`` where that does not apply.
        shard: index of the shard, or ``None``.
        hint: what to do next, in a sentence.
        retriable: whether the same call may succeed later without anybody changing anything.
        word, detail: the error word of the script that refused and what came with it; empty if no script did.
    """

    retriable: bool = False
    hint: str = ""
    word: str = ""
    detail: str = ""

    def __init__(
        self,
        message: str,
        *,
        stream: str | None = None,
        group: str | None = None,
        member: str | None = None,
        shard: int | None = None,
        hint: str | None = None,
        retriable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.stream = stream
        self.group = group
        self.member = member
        self.shard = shard
        if hint is not None:
            self.hint = hint
        if retriable is not None:
            self.retriable = retriable

    def __str__(self) -> str:
        where = ", ".join(
            f"{name} {value!r}"
            for name, value in (
                ("stream", self.stream),
                ("group", self.group),
                ("member", self.member),
                ("shard", self.shard),
            )
            if value is not None
        )
        text = f"{self.message} ({where})" if where else self.message
        if not self.hint:
            return text
        return f"{text} {self.hint}" if text.endswith((".", "!", "?")) else f"{text}. {self.hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only arguments do not survive the default pickling, and process pools pickle exceptions.
        return (_rebuild, (type(self), self.message, self.__dict__))


def _rebuild(kind: type[CoordError], message: str, state: dict[str, Any]) -> CoordError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class ConfigError(CoordError, ValueError):
    """An argument or a setting is wrong."""


class LifecycleError(CoordError):
    """The call does not fit the state of the object."""


class DrainTimeoutError(LifecycleError):
    """Handlers did not finish within the shutdown time; their entries stay pending and are delivered again.

    Of a producer: calls had not returned when `quiesce` stopped waiting.
    """


class NotFoundError(CoordError):
    """There is no such stream, group or shard."""


class AlreadyExistsError(CoordError):
    """It exists already."""


class ConflictError(CoordError):
    """The request contradicts what is stored."""


class MembershipError(CoordError):
    """Something is wrong with the membership of a consumer in its group."""


class FencedError(MembershipError):
    """The shard, or the whole session, belongs to somebody else by now."""


class DuplicateMemberError(MembershipError):
    """Two live processes use one member id and replace each other again and again."""


class RoutingError(CoordError):
    """A producer cannot tell where to write."""


class RoutingUnavailableError(RoutingError):
    """The cached layout has expired and could not be refreshed; the producer does not guess."""

    retriable = True


class RoutingRegressionError(RoutingError):
    """The stored routing epoch is lower than one this producer has seen: the stream record went backwards."""


class NoShardError(RoutingError):
    """The stream has no shards at present."""

    retriable = True


class PublishError(CoordError):
    """An entry was not published, or it is unknown whether it was."""


class PartialPublishError(PublishError):
    """Some entries of a ``publish_many`` were not published, or it is unknown whether they were.

    Attributes:
        receipts: one per entry in the order given; ``None`` where it failed.
        failed: index of each failed entry -> why.
    """

    def __init__(
        self,
        message: str,
        *,
        receipts: Sequence[Receipt | None],
        failed: Mapping[int, CoordError],
        stream: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, stream=stream, hint=hint)
        self.receipts = receipts
        self.failed = failed


class AdminError(CoordError):
    """An administrative request was refused."""


class RateLimitedError(AdminError):
    """Too many mutations by this principal on this group.

    Attributes:
        retry_after_seconds: when the next one will be accepted.
    """

    retriable = True

    def __init__(self, message: str, *, retry_after_seconds: float, **where: Any) -> None:
        super().__init__(message, **where)
        self.retry_after_seconds = retry_after_seconds


class FrozenError(AdminError):
    """The group is frozen by an operator."""


class PermissionDeniedError(AdminError):
    """The Redis user lacks a right; the message names it."""


class WaitTimeoutError(AdminError):
    """What was waited for is not over within the time allowed. It goes on."""

    retriable = True


class MetadataError(CoordError):
    """The stored metadata cannot be used; nothing was written and nothing is read until it is repaired."""


class CorruptMetadataError(MetadataError):
    """A field of the metadata is missing or unreadable."""


class MetadataRegressionError(MetadataError):
    """The metadata went backwards: Redis lost writes, or an old backup was restored."""


class UnsupportedSchemaError(MetadataError):
    """The metadata was written by a version of the library that stores it differently."""


class UnsupportedProtocolError(MetadataError):
    """This version of the library speaks no protocol version that the group accepts."""


class RedisUnavailableError(CoordError):
    """Redis gave no usable answer within the time allowed."""

    retriable = True
    hint = "Check that Redis runs there and can be reached; then the same call may succeed."


@attrs.frozen
class Refusal:
    """What one error word of the scripts means: the exception, its text and the next step."""

    error: type[CoordError]
    message: str
    hint: str = ""
    retriable: bool = False


# Texts may use {detail} (the rest of the script's answer), {stream} and {group}. A test holds the keys
# against the `@error` lines of the Lua files, in both directions.
REFUSALS: Mapping[str, Refusal] = MappingProxyType(
    {
        "AHEAD": Refusal(
            MetadataRegressionError,
            "a key on the shard's slot is ahead of the stored record: {detail}",
            "The record was lost or restored from an old backup. Do not force it: see 'The record is older than what "
            "was seen' in docs/guide/backup-and-repair.md.",
        ),
        "BACKUP_BEHIND": Refusal(
            MetadataRegressionError,
            "the backup is older than what has been seen since: {detail}",
            "Restoring it would take back what somebody has built on. Recreate the group as a new lifecycle: "
            "Admin.recreate.",
        ),
        "BUSY": Refusal(
            ConflictError,
            "not at this moment: {detail}",
            "Try again in some milliseconds; if it stays so, Monitor.resharding({stream!r}) says what it waits for.",
            retriable=True,
        ),
        "CLOSED": Refusal(
            RoutingUnavailableError,
            "the shard is closed, epoch and layout of its route: {detail}",
            "Nothing was published. A resharding is at its cut-over: one that quiesces stays there until all is "
            "consumed; else its driver is slow or gone, and another one takes over within a heartbeat. Publish again.",
            retriable=True,
        ),
        "CORRUPT_METADATA": Refusal(
            CorruptMetadataError,
            "the metadata is damaged: {detail}",
            "Nothing was written. Restore the record from a backup, or recreate the group: see 'The record is damaged' "
            "in docs/guide/backup-and-repair.md.",
        ),
        "DELETED_MEANWHILE": Refusal(
            ConflictError,
            "a deletion of the group is not finished, or was decided meanwhile: {detail}",
            "Call delete again to finish it, then create again.",
            retriable=True,
        ),
        "EXISTS": Refusal(
            AlreadyExistsError,
            "the group exists already",
            "Pass exist_ok=True to accept it as it is.",
        ),
        "FAILED_BEFORE": Refusal(
            AdminError,
            "this request failed before: {detail}",
            "The same request id gives the recorded outcome. Mend the cause, then ask under a new one.",
        ),
        "FENCED": Refusal(
            FencedError,
            "the shard is fenced for another session: {detail}",
            "Another member owns it by now; stop working on it. Its entries are delivered there.",
        ),
        "FENCED_MEMBER_EPOCH": Refusal(
            FencedError,
            "the session was fenced: {detail}",
            "The member gives up its shards and joins again with epoch 0.",
        ),
        "FROZEN": Refusal(
            FrozenError,
            "the group is frozen since {detail} (Redis server ms)",
            "An operator is at work; the audit log says who and why. Admin.unfreeze ends it.",
        ),
        "GROUP_NOT_FOUND": Refusal(
            NotFoundError,
            "there is no such group",
            "Check both names and key_prefix; Monitor.groups lists what there is. To create it: "
            "Admin(redis, requested_by=...).create({stream!r}, group={group!r}, shards=..., reason=...).",
        ),
        "LATE": Refusal(
            ConflictError,
            "the shard is past the resharding that this was meant for: {detail}",
            "Another driver carried it on. The stream's record says how far it is.",
            retriable=True,
        ),
        "METADATA_REGRESSION": Refusal(
            MetadataRegressionError,
            "the metadata is older than what this member has seen: {detail}",
            "Redis lost writes or an old backup was restored. This member reads nothing until an operator restores or "
            "recreates the group: see 'The record is older than what was seen' in docs/guide/backup-and-repair.md.",
        ),
        "MOVED_ON": Refusal(
            ConflictError,
            "the resharding has moved on: {detail}",
            "Another driver carried it on. The stream's record says how far it is.",
            retriable=True,
        ),
        "NOT_CLOSED": Refusal(
            ConflictError,
            "the shard has not been closed for the layout that it should be opened for: {detail}",
            "Its route lost writes. The driver closes it first, and notes the larger cut.",
            retriable=True,
        ),
        "NOT_EMPTY": Refusal(
            ConflictError,
            "the group has live members: {detail}",
            "Stop its consumers first, or pass force=True.",
        ),
        "NOT_READY": Refusal(
            ConflictError,
            "the resharding cannot move on yet: {detail}",
            "Its driver goes on with what is missing.",
            retriable=True,
        ),
        "NOT_RESHARDING": Refusal(
            ConflictError,
            "that resharding is not under way: {detail}",
            "To go back after its end, scale to the earlier number of shards.",
        ),
        "ORDER_UNSUPPORTED": Refusal(
            ConflictError,
            "the order of keys cannot be kept across a resharding of a stream that routes by {detail}",
            "It moves keys between any two shards, so every shard would have to wait for every other. Pass "
            "ordered=False, or stop the producers and let the groups drain first.",
        ),
        "RESHARDING": Refusal(
            ConflictError,
            "the stream is being resharded already: {detail}",
            "Wait for its end, or take it back: Admin.rollback.",
        ),
        "RATE_LIMITED": Refusal(
            RateLimitedError,
            "too many mutations by this Redis user; the next one is accepted in {detail} ms",
            "Wait, or let an operator raise the limit with Admin.limit.",
            retriable=True,
        ),
        "REQUEST_ID_REUSED": Refusal(
            ConflictError,
            "this request id was used for another request: {detail}",
            "Draw a new one for each request; only the very same request may be sent again under its id.",
        ),
        "REVISION_CONFLICT": Refusal(
            ConflictError,
            "the stream's record was changed since the plan was made: revision {detail}",
            "Somebody else applied first. Make the plan anew and look at it.",
        ),
        "ROUTE_MISSING": Refusal(
            RoutingUnavailableError,
            "the shard's route key is missing",
            "It was deleted or lost. Admin.create(..., exist_ok=True) makes it anew, and so does a resharding.",
        ),
        "SAME_SHARD_COUNT": Refusal(
            ConflictError,
            "the stream has that number of shards already: {detail}",
            "There is nothing to do.",
        ),
        "SESSION_EXISTS": Refusal(
            FencedError,
            "a session of this member id is alive: {detail}",
            "The joiner joins again naming that session.",
            retriable=True,
        ),
        "SHARD_COUNT_MISMATCH": Refusal(
            ConflictError,
            "the stream has another number of shards: {detail}",
            "All groups of a stream share its shards: leave `shards` out, or reshard the stream.",
        ),
        "SHARDS_REQUIRED": Refusal(
            ConfigError,
            "the stream is not known yet, so its number of shards must be given",
            "Pass shards=N to create.",
        ),
        "STALE_RECORD": Refusal(
            ConflictError,
            "a route is not made from a record that was read too long ago: {detail}",
            "The driver reads it again. If it stays so, the clocks of the Redis nodes differ by half a minute.",
            retriable=True,
        ),
        "STALE_ROUTE": Refusal(
            RoutingUnavailableError,
            "the producer routed by another layout than the shard's, epoch and layout of its route: {detail}",
            "Nothing was published. The producer reads the layout again and routes anew; if that does not help, the "
            "stream's record and its shards do not fit each other.",
            retriable=True,
        ),
        "STREAM_MISSING": Refusal(
            NotFoundError,
            "the shard's stream key does not exist",
            "Its data is gone: it was deleted, evicted or flushed. Admin.create(..., exist_ok=True) makes it anew.",
        ),
        "STREAM_NOT_FOUND": Refusal(
            NotFoundError,
            "there is no such stream",
            "Check its name and key_prefix; Monitor.groups lists what there is. To create its first group: "
            "Admin(redis, requested_by=...).create({stream!r}, group=..., shards=..., reason=...).",
        ),
        "UNKNOWN_MEMBER_ID": Refusal(
            FencedError,
            "the group does not know this member: it left, expired or was fenced",
            "The member gives up its shards and joins again with epoch 0.",
        ),
        "UNSUPPORTED_PROTOCOL": Refusal(
            UnsupportedProtocolError,
            "this library speaks no protocol version that is stored: {detail}",
            "Upgrade the older side; see the compatibility table in the docs.",
        ),
        "UNSUPPORTED_SCHEMA": Refusal(
            UnsupportedSchemaError,
            "the metadata has an unknown schema: {detail}",
            "A newer release wrote it. Upgrade this process; nothing was written. See docs/guide/upgrading.md.",
        ),
    }
)

_UNKNOWN_REFUSAL = Refusal(
    CoordError,
    "unexpected answer {word} {detail}",
    "It comes from another release of the library; see the compatibility table in the docs.",
)


def refused(
    word: str,
    detail: str = "",
    *,
    stream: str | None = None,
    group: str | None = None,
    member: str | None = None,
    shard: int | None = None,
) -> CoordError:
    """Make the exception for an error word of the scripts.

    Parameters:
        word: the first element of a script's answer.
        detail: the rest of the answer, for people.
        stream, group, member, shard: whom the call concerned.

    Returns:
        An instance of the class that `REFUSALS` gives for the word; a plain `CoordError` for a word that this
        version does not know (a newer script).
    """
    refusal = REFUSALS.get(word, _UNKNOWN_REFUSAL)
    names = {"word": word, "detail": detail or "no detail", "stream": stream, "group": group}
    more: dict[str, Any] = {}
    if refusal.error is RateLimitedError:
        more["retry_after_seconds"] = int(detail) / 1000 if detail.isdecimal() else 1.0
    error = refusal.error(
        refusal.message.format(**names),
        stream=stream,
        group=group,
        member=member,
        shard=shard,
        hint=refusal.hint.format(**names),
        retriable=refusal.retriable,
        **more,
    )
    error.word, error.detail = word, detail
    return error
