"""Creating and deleting groups. Each mutation is a saga of idempotent steps around one deciding write, so that one
that was interrupted is finished by calling it again.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

from . import commands, routing
from .commands import Saga
from .errors import AlreadyExistsError, ConfigError, CoordError, NotFoundError
from .keys import GroupKeys, StreamKeys
from .models import GroupView, Timings
from .runner import AsyncRunner, SyncRunner
from .settings import RedisSettings

Start = Literal["oldest", "new"]


class _Sagas:
    """The mutations, for both faces."""

    def __init__(self, redis: str | RedisSettings, *, requested_by: str) -> None:
        if not requested_by.strip():
            raise ConfigError("requested_by must say who asks: it goes into the audit log")
        self.settings = RedisSettings.of(redis)
        self.requested_by = requested_by

    def create(
        self,
        stream: str,
        group: str,
        shards: int | None,
        start: Start,
        timings: Timings,
        protocol: str,
        exist_ok: bool,
        reason: str,
        request_id: str | None,
    ) -> Saga[GroupView]:
        keys = GroupKeys(stream, group, self.settings.key_prefix)
        if shards is not None and not 1 <= shards <= routing.MAX_SHARDS:
            raise ConfigError(f"shards={shards} must be between 1 and {routing.MAX_SHARDS}")
        if start not in ("oldest", "new"):
            raise ConfigError(f"start={start!r} must be 'oldest' or 'new'")
        if protocol not in routing.PROTOCOLS:
            raise ConfigError(f"routing={protocol!r} must be one of {', '.join(routing.PROTOCOLS)}")
        request = {"shards": shards, "start": start, "timings": str(timings), "routing": protocol}
        audit = self._audit(keys, "create", reason, request)
        return self._create(keys, shards, start, timings, protocol, exist_ok, audit, request_id or str(uuid.uuid4()))

    def _create(
        self,
        keys: GroupKeys,
        shards: int | None,
        start: Start,
        timings: Timings,
        protocol: str,
        exist_ok: bool,
        audit: dict[str, str],
        request_id: str,
    ) -> Saga[GroupView]:
        began = time.monotonic()
        yield from self._identify(audit)
        layout = yield commands.register(keys, shards=shards, routing=protocol)
        incarnation = 0
        for shard in range(layout.shards):
            found = yield commands.provision(keys, shard, start="0" if start == "oldest" else "$", layout=layout)
            incarnation = max(incarnation, found + 1)
        audit["duration_ms"] = f"{(time.monotonic() - began) * 1000:.1f}"
        try:
            yield commands.create(
                keys,
                incarnation=incarnation,
                shards=layout.shards,
                timings=timings,
                request_id=request_id,
                audit=audit,
            )
        except AlreadyExistsError:
            if not exist_ok:
                raise
        # What follows repeats harmlessly, and finishes a creation that was interrupted.
        yield commands.activate(StreamKeys(keys.stream, keys.prefix), layout.layout)
        yield commands.enlist(keys, present=True)
        view: GroupView = yield commands.describe(keys)
        return view

    def delete(self, stream: str, group: str, force: bool, reason: str, request_id: str | None) -> Saga[None]:
        keys = GroupKeys(stream, group, self.settings.key_prefix)
        audit = self._audit(keys, "delete", reason, {"force": force})
        return self._delete(keys, force, audit, request_id or str(uuid.uuid4()))

    def _delete(self, keys: GroupKeys, force: bool, audit: dict[str, str], request_id: str) -> Saga[None]:
        yield from self._identify(audit)
        missing: NotFoundError | None = None
        try:
            yield commands.delete(keys, force=force, request_id=request_id, audit=audit)
        except NotFoundError as error:
            # Perhaps an earlier call got only so far; the rest is done if the stream still knows the group.
            missing = error
        try:
            layout = yield commands.layout(StreamKeys(keys.stream, keys.prefix))
        except NotFoundError:
            layout = None
        if layout is not None:
            for shard in range(layout.shards if missing is None else 0):
                yield commands.retire(keys, shard)
            known = yield commands.unregister(keys)
            if missing is not None and known:
                for shard in range(layout.shards):
                    yield commands.retire(keys, shard)
                missing = None
        yield commands.enlist(keys, present=False)
        if missing is not None:
            raise missing

    def _audit(self, keys: GroupKeys, action: str, reason: str, request: Mapping[str, Any]) -> dict[str, str]:
        if not reason.strip():
            raise ConfigError("reason must say why: it goes into the audit log", stream=keys.stream, group=keys.group)
        whole = json.dumps({"action": action, "stream": keys.stream, "group": keys.group, **request}, sort_keys=True)
        return {
            "requested_by": self.requested_by,
            "reason": reason,
            "stream": keys.stream,
            "group": keys.group,
            "fingerprint": hashlib.sha256(whole.encode()).hexdigest(),
        }

    def _identify(self, audit: dict[str, str]) -> Saga[None]:
        """Add who Redis says we are. A user who may not ask goes down as unknown, and is not stopped for it."""
        try:
            info = yield commands.client_info()
        except CoordError:
            info = {}
        audit["principal"] = info.get("user", "unknown")
        audit["client_address"] = info.get("addr", "unknown")


class Admin:
    """Creates and deletes groups.

    Parameters:
        redis: URL or settings.
        requested_by: who asks; recorded with every mutation.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(self, redis: str | RedisSettings, *, requested_by: str) -> None:
        self._sagas = _Sagas(redis, requested_by=requested_by)
        self._runner = SyncRunner(self._sagas.settings)

    def create(
        self,
        stream: str,
        *,
        group: str,
        reason: str,
        shards: int | None = None,
        start: Start = "oldest",
        timings: Timings = Timings(),  # noqa: B008 - frozen
        routing: str = routing.DEFAULT_PROTOCOL,
        exist_ok: bool = False,
        request_id: str | None = None,
    ) -> GroupView:
        """Create a group, and its stream if this is the first one.

        Parameters:
            stream: name of the logical stream; its shards are the Redis streams ``<stream>:<index>``.
            group: name of the consumer group.
            reason: why; recorded.
            shards: number of shards; needed for a new stream only.
            start: where the group begins on shards that it has not read yet: ``oldest`` entry, or only ``new`` ones.
            timings: see `Timings`.
            routing: for a new stream: how keys are routed, ``jump-v1`` or ``murmur3-mod-v1``.
            exist_ok: accept a group that exists; missing streams and consumer groups of its shards are made anew.
            request_id: the same id again returns the recorded outcome.

        Returns:
            The group as it is now.

        Raises:
            AlreadyExistsError: it exists and `exist_ok` is false.
            ConflictError: the stream has another number of shards.
            ConfigError: an argument is wrong, or `shards` is missing for a new stream.
        """
        return self._runner.drive(
            self._sagas.create(stream, group, shards, start, timings, routing, exist_ok, reason, request_id)
        )

    def delete(
        self, stream: str, *, group: str, reason: str, force: bool = False, request_id: str | None = None
    ) -> None:
        """Delete a group: its record, its consumer groups on the shards and so its pending entries. Streams stay.

        Parameters:
            stream, group: its names.
            reason: why; recorded.
            force: even though it has live members, or its metadata is damaged.
            request_id: the same id again returns the recorded outcome.

        Raises:
            ConflictError: it has live members.
            NotFoundError: there is no such group.
        """
        self._runner.drive(self._sagas.delete(stream, group, force, reason, request_id))

    def close(self) -> None:
        """Close the connections."""
        self._runner.close()

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncAdmin:
    """Creates and deletes groups, from coroutines. Parameters as `Admin`."""

    def __init__(self, redis: str | RedisSettings, *, requested_by: str) -> None:
        self._sagas = _Sagas(redis, requested_by=requested_by)
        self._runner = AsyncRunner(self._sagas.settings)

    async def create(
        self,
        stream: str,
        *,
        group: str,
        reason: str,
        shards: int | None = None,
        start: Start = "oldest",
        timings: Timings = Timings(),  # noqa: B008 - frozen
        routing: str = routing.DEFAULT_PROTOCOL,
        exist_ok: bool = False,
        request_id: str | None = None,
    ) -> GroupView:
        """Create a group; see `Admin.create`."""
        return await self._runner.drive(
            self._sagas.create(stream, group, shards, start, timings, routing, exist_ok, reason, request_id)
        )

    async def delete(
        self, stream: str, *, group: str, reason: str, force: bool = False, request_id: str | None = None
    ) -> None:
        """Delete a group; see `Admin.delete`."""
        await self._runner.drive(self._sagas.delete(stream, group, force, reason, request_id))

    async def close(self) -> None:
        """Close the connections."""
        await self._runner.close()

    async def __aenter__(self) -> AsyncAdmin:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
