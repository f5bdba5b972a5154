"""What `Admin` does, as sagas: idempotent steps around one deciding write, so that a mutation which was interrupted is
finished by calling it again. No input or output here; a runner drives them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

from . import commands, routing
from .commands import Command, Pause, Saga
from .errors import AlreadyExistsError, ConfigError, CoordError, MetadataError, NotFoundError
from .keys import GroupKeys, StreamKeys
from .models import GroupView, Layout, Timings
from .settings import RedisSettings

Start = Literal["oldest", "new"]
Retention = Literal["all", "consumed"] | int

_BUSY_PAUSE_SECONDS = 0.02
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


class Sagas:
    """The mutations, for both faces of `redis_stream_coord.admin`."""

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
        return self._create(keys, register, start, timings, exist_ok, audit, request_id or self._request_id())

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
        began = self.settings.machine.clock()
        yield from self._identify(audit)
        layout = yield from self._when_not_busy(register)
        incarnation = yield from self._provision(keys, layout, start)
        audit["duration_ms"] = f"{(self.settings.machine.clock() - began) * 1000:.1f}"
        try:
            incarnation = yield commands.create(
                keys,
                incarnation=incarnation,
                shards=layout.shards,
                epoch=layout.epoch,
                timings=timings,
                request_id=request_id,
                audit=audit,
            )
        except AlreadyExistsError as error:
            if not exist_ok:
                raise
            incarnation = int(error.detail)
        # What follows repeats harmlessly, and finishes a creation that was interrupted.
        while True:
            command = commands.activate(keys, layout.layout, incarnation=incarnation)
            present = yield from self._when_not_busy(command)
            if present.epoch == layout.epoch:
                break
            # A resharding was decided meanwhile, without this group.
            layout = present
            yield from self._provision(keys, layout, start)
            yield commands.readable(keys, epoch=layout.epoch, step=2, shards=layout.shards)
        yield commands.enlist(keys, present=True)
        view: GroupView = yield commands.describe(keys)
        return view

    def _provision(self, keys: GroupKeys, layout: Layout, start: Start) -> Saga[int]:
        """Make all shards ready. Returns an incarnation above all that their fences have seen."""
        incarnation = 0
        for shard in range(layout.shards):
            found = yield commands.provision(keys, shard, start="0" if start == "oldest" else "$", layout=layout)
            incarnation = max(incarnation, found + 1)
        return incarnation

    def _when_not_busy(self, command: Command[Layout]) -> Saga[Layout]:
        """Send a command again while a resharding is at its cut-over, which takes milliseconds."""
        deadline = self.settings.machine.clock() + self.settings.timeout_seconds
        while True:
            try:
                layout: Layout = yield command
            except CoordError as error:
                if error.word != "BUSY" or self.settings.machine.clock() > deadline:
                    raise
                yield Pause(_BUSY_PAUSE_SECONDS)
            else:
                return layout

    def delete(self, stream: str, group: str, force: bool, reason: str, request_id: str | None) -> Saga[None]:
        keys = GroupKeys(stream, group, self.settings.key_prefix)
        audit = self._audit(stream, group, "delete", reason, {"force": force})
        return self._delete(keys, force, audit, request_id or self._request_id())

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
            stream = yield commands.resharding(StreamKeys(keys.stream, keys.prefix))
        except NotFoundError:
            stream = None
        if stream is not None:
            # Also where there were shards once: they may come back.
            for shard in range(stream.top if missing is None else 0):
                yield commands.retire(keys, shard)
            known = yield commands.unregister(keys)
            if missing is not None and known:
                for shard in range(stream.top):
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
        return self._retain(
            StreamKeys(stream, self.settings.key_prefix), kept, audit, request_id or self.settings.machine.word()
        )

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
        return self._seek(keys, place, chosen, audit, request_id or self._request_id())

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

    def _request_id(self) -> str:
        return self.settings.machine.word()

    def _identify(self, audit: dict[str, str]) -> Saga[None]:
        """Add who Redis says we are. A user who may not ask goes down as unknown, and is not stopped for it."""
        try:
            info = yield commands.client_info()
        except CoordError:
            info = {}
        audit["principal"] = info.get("user", "unknown")
        audit["client_address"] = info.get("addr", "unknown")
