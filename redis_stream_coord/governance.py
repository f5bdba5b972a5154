"""What every mutation goes through, whatever it does: who asks and why, once, not too often, and all on the record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import attrs

from . import commands, telemetry
from .commands import Saga
from .errors import ConfigError, CoordError, RateLimitedError
from .keys import GroupKeys, StreamKeys
from .settings import RedisSettings

T = TypeVar("T")

# Refusals that their script has not written down: nothing was decided.
_NOT_RECORDED = frozenset({"RATE_LIMITED", "REQUEST_ID_REUSED"})


@attrs.define
class Request:
    """One mutation that somebody asked for.

    Attributes:
        keys: of the group or stream that it concerns; its audit entry lies in their slot.
        action: such as ``create``.
        request_id: the same id again gives the recorded outcome.
        audit: fields of the audit entry, as far as the caller knows them.
        clock: seconds on a clock that never jumps.
    """

    keys: GroupKeys | StreamKeys
    action: str
    request_id: str
    audit: dict[str, str]
    clock: Callable[[], float]
    _began: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._began = self.clock()

    def said(self) -> dict[str, Any]:
        """Return what the builder of the deciding command takes of it; the duration counts up to now."""
        duration_ms = (self.clock() - self._began) * 1000
        return {"request_id": self.request_id, "audit": {**self.audit, "duration_ms": f"{duration_ms:.1f}"}}


class Governance:
    """Makes and runs requests.

    Parameters:
        redis: URL or settings.
        requested_by: who asks; goes into each audit entry.

    Raises:
        ConfigError: nobody is named.
    """

    def __init__(self, redis: str | RedisSettings, *, requested_by: str) -> None:
        if not requested_by.strip():
            raise ConfigError("requested_by must say who asks: it goes into the audit log")
        self.settings = RedisSettings.of(redis)
        self.requested_by = requested_by

    def group_keys(self, stream: str, group: str) -> GroupKeys:
        return GroupKeys(stream, group, self.settings.key_prefix)

    def stream_keys(self, stream: str) -> StreamKeys:
        return StreamKeys(stream, self.settings.key_prefix)

    def request(
        self, keys: GroupKeys | StreamKeys, action: str, reason: str, request_id: str | None, **content: Any
    ) -> Request:
        """Make a request.

        Parameters:
            keys: of the group or stream that it concerns.
            action: what is to be done.
            reason: why.
            request_id: ``None``: draw one.
            content: everything that makes it this request; its fingerprint goes into the audit entry.

        Raises:
            ConfigError: no reason is given, or the request id is empty.
        """
        group = keys.group if isinstance(keys, GroupKeys) else ""
        if not reason.strip():
            raise ConfigError(
                "reason must say why: it goes into the audit log", stream=keys.stream, group=group or None
            )
        if request_id is not None and not 1 <= len(request_id) <= 200:
            raise ConfigError(f"request_id={request_id!r} must have 1 to 200 characters", stream=keys.stream)
        whole = json.dumps({"action": action, "stream": keys.stream, "group": group, **content}, sort_keys=True)
        audit = {
            "requested_by": self.requested_by,
            "reason": reason,
            "stream": keys.stream,
            "group": group,
            "fingerprint": hashlib.sha256(whole.encode()).hexdigest(),
        }
        return Request(keys, action, request_id or self.settings.machine.word(), audit, self.settings.machine.clock)

    def carry_out(self, request: Request, work: Callable[[str | None], Saga[T]]) -> Saga[T]:
        """Carry out a request, unless it was decided before.

        Parameters:
            request: whose.
            work: the steps. Takes the recorded detail if the request was accepted before, so that they may only have to
                be finished; else ``None``.

        Raises:
            CoordError: what it ended with, now or when it was first sent.
        """
        yield from self._identify(request)
        try:
            recorded: str | None = yield commands.begin(request.keys, request.action, **request.said())
            result = yield from work(recorded)
        except CoordError as error:
            if isinstance(error, RateLimitedError):
                telemetry.rate_limited.add(1, {telemetry.STREAM: request.keys.stream})
            if error.word not in _NOT_RECORDED:
                # Whatever keeps this from being written down is worth less than the error itself.
                with suppress(CoordError):
                    final = not error.retriable
                    yield commands.failed(request.keys, request.action, error, final=final, **request.said())
            raise
        return result

    def _identify(self, request: Request) -> Saga[None]:
        """Add who Redis says we are. A user who may not ask goes down as unknown, and is not stopped for it."""
        try:
            info = yield commands.client_info()
        except CoordError:
            info = {}
        request.audit["principal"] = info.get("user", "unknown")
        request.audit["client_address"] = info.get("addr", "unknown")
