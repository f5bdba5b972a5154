"""Creating and deleting groups. Each mutation is a saga of idempotent steps around one deciding write, so that one
that was interrupted is finished by calling it again.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from types import TracebackType
from typing import Any, Literal

from . import commands, routing
from .commands import Command, Saga
from .errors import AlreadyExistsError, ConfigError, CoordError, MetadataError, NotFoundError
from .keys import GroupKeys, StreamKeys
from .models import GroupView, Layout, Timings
from .runner import AsyncRunner, SyncRunner
from .settings import RedisSettings

Start = Literal["oldest", "new"]
Retention = Literal["all", "consumed"] | int

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_PLACES = {"oldest": "0-0", "newest": "$"}


def _retention(retention: Retention) -> str:
    if isinstance(retention, int) and not isinstance(retention, bool) and retention > 0:
        return f"keep:{retention}"
    if retention in ("all", "consumed"):
        return str(retention)
    raise ConfigError(f"retention={retention!r} must be 'all', 'consumed' or a number of entries")


def _place(to: str | datetime) -> str:
    """Return the id beyond which to go on."""
    if isinstance(to, datetime):
        if to.tzinfo is None:
            raise ConfigError(f"to={to!r} has no time zone")
        # Rounded down, and without floating point: what was published in the rest of that millisecond comes too.
        ms = (to - _EPOCH) // timedelta(milliseconds=1)
        return f"{ms - 1}-18446744073709551615" if ms > 0 else "0-0"
    if to in _PLACES:
        return _PLACES[to]
    if re.fullmatch(r"\d+(-\d+)?", to):
        return to if "-" in to else f"{to}-0"
    raise ConfigError(f"to={to!r} must be 'oldest', 'newest', an entry id or a datetime")


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
        retention: Retention,
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
        kept = _retention(retention)
        request = {"shards": shards, "start": start, "timings": str(timings), "routing": protocol, "retention": kept}
        audit = self._audit(stream, group, "create", reason, request)
        register = commands.register(keys, shards=shards, routing=protocol, retention=kept)
        return self._create(keys, register, start, timings, exist_ok, audit, request_id or str(uuid.uuid4()))

    def _create(
        self,
        keys: GroupKeys,
        register: Command[Layout],
        start: Start,
        timings: Timings,
        exist_ok: bool,
        audit: dict[str, str],
        request_id: str,
    ) -> Saga[GroupView]:
        began = time.monotonic()
        yield from self._identify(audit)
        layout = yield register
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
        audit = self._audit(stream, group, "delete", reason, {"force": force})
        return self._delete(keys, force, audit, request_id or str(uuid.uuid4()))

    def _delete(self, keys: GroupKeys, force: bool, audit: dict[str, str], request_id: str) -> Saga[None]:
        yield from self._identify(audit)
        missing: NotFoundError | None = None
        try:
            yield commands.delete(keys, force=force, request_id=request_id, audit=audit)
        except NotFoundError as error:
            # Perhaps an earlier call got only so far; the rest is done if the stream still knows the group.
            missing = error
        if missing is None and (yield from self._exists(keys)):
            # The same request again, and the group has been created anew since: that one is not to be taken apart.
            return
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

    def _exists(self, keys: GroupKeys) -> Saga[bool]:
        try:
            yield commands.describe(keys)
        except NotFoundError:
            return False
        except MetadataError:
            pass
        return True

    def retain(self, stream: str, retention: Retention, reason: str, request_id: str | None) -> Saga[None]:
        kept = _retention(retention)
        audit = self._audit(stream, "", "retain", reason, {"retention": kept})
        return self._retain(StreamKeys(stream, self.settings.key_prefix), kept, audit, request_id or str(uuid.uuid4()))

    def _retain(self, keys: StreamKeys, kept: str, audit: dict[str, str], request_id: str) -> Saga[None]:
        yield from self._identify(audit)
        yield commands.retain(keys, kept, request_id=request_id, audit=audit)

    def seek(
        self,
        stream: str,
        group: str,
        to: str | datetime,
        shards: Iterable[int] | None,
        reason: str,
        request_id: str | None,
    ) -> Saga[None]:
        keys = GroupKeys(stream, group, self.settings.key_prefix)
        place = _place(to)
        chosen = None if shards is None else sorted(set(shards))
        audit = self._audit(stream, group, "seek", reason, {"to": place, "shards": chosen})
        return self._seek(keys, place, chosen, audit, request_id or str(uuid.uuid4()))

    def _seek(
        self, keys: GroupKeys, place: str, chosen: list[int] | None, audit: dict[str, str], request_id: str
    ) -> Saga[None]:
        yield from self._identify(audit)
        view: GroupView = yield commands.describe(keys)
        shards = list(view.shards) if chosen is None else chosen
        if unknown := set(shards) - set(view.shards):
            raise NotFoundError(f"there are no shards {sorted(unknown)}", stream=keys.stream, group=keys.group)
        detail = f"{place} on {','.join(map(str, shards))}"
        yield commands.record(keys, "seek", detail, request_id=request_id, audit=audit)
        for shard in shards:
            yield commands.seek(keys, shard, place)
        yield commands.announce(keys, "sought")

    def _audit(self, stream: str, group: str, action: str, reason: str, request: Mapping[str, Any]) -> dict[str, str]:
        if not reason.strip():
            raise ConfigError("reason must say why: it goes into the audit log", stream=stream, group=group or None)
        whole = json.dumps({"action": action, "stream": stream, "group": group, **request}, sort_keys=True)
        return {
            "requested_by": self.requested_by,
            "reason": reason,
            "stream": stream,
            "group": group,
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
        retention: Retention = "all",
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
            retention: for a new stream: ``all`` entries stay; only those not ``consumed`` by all groups; or a number:
                so many stay, roughly, though all groups have finished them. What a group still needs always stays.
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
            self._sagas.create(stream, group, shards, start, timings, routing, retention, exist_ok, reason, request_id)
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

    def retain(self, stream: str, *, retention: Retention, reason: str, request_id: str | None = None) -> None:
        """Change how long the entries of a stream are kept.

        Parameters:
            stream: name of the logical stream.
            retention: see `create`.
            reason: why; recorded.
            request_id: the same id again changes nothing.

        Raises:
            NotFoundError: there is no such stream.
        """
        self._runner.drive(self._sagas.retain(stream, retention, reason, request_id))

    def seek(
        self,
        stream: str,
        *,
        group: str,
        to: str | datetime,
        reason: str,
        shards: Iterable[int] | None = None,
        request_id: str | None = None,
    ) -> None:
        """Move a group to another place, to read again or to skip; also while its consumers run.

        What is pending is forgotten, and what consumers have read ahead is not handed out any more. An entry that is in
        a handler at this moment may be handed out again before it is finished, by another member.

        Parameters:
            stream, group: its names.
            to: ``oldest``, ``newest``, an entry id (the next one is the first beyond it) or a time with a time
                zone (the next one is the first published at it or later).
            reason: why; recorded.
            shards: which; ``None``: all.
            request_id: for the audit log; seeking twice to one place does no harm.

        Raises:
            NotFoundError: there is no such group, shard, or stream of a shard.
        """
        self._runner.drive(self._sagas.seek(stream, group, to, shards, reason, request_id))

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
        retention: Retention = "all",
        exist_ok: bool = False,
        request_id: str | None = None,
    ) -> GroupView:
        """Create a group; see `Admin.create`."""
        return await self._runner.drive(
            self._sagas.create(stream, group, shards, start, timings, routing, retention, exist_ok, reason, request_id)
        )

    async def delete(
        self, stream: str, *, group: str, reason: str, force: bool = False, request_id: str | None = None
    ) -> None:
        """Delete a group; see `Admin.delete`."""
        await self._runner.drive(self._sagas.delete(stream, group, force, reason, request_id))

    async def retain(self, stream: str, *, retention: Retention, reason: str, request_id: str | None = None) -> None:
        """Change how long the entries of a stream are kept; see `Admin.retain`."""
        await self._runner.drive(self._sagas.retain(stream, retention, reason, request_id))

    async def seek(
        self,
        stream: str,
        *,
        group: str,
        to: str | datetime,
        reason: str,
        shards: Iterable[int] | None = None,
        request_id: str | None = None,
    ) -> None:
        """Move a group to another place; see `Admin.seek`."""
        await self._runner.drive(self._sagas.seek(stream, group, to, shards, reason, request_id))

    async def close(self) -> None:
        """Close the connections."""
        await self._runner.close()

    async def __aenter__(self) -> AsyncAdmin:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
