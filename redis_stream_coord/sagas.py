"""What `Admin` does, as sagas: idempotent steps around one deciding write, so that a mutation which was interrupted is
finished by calling it again. No input or output here; a runner drives them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import Literal

from . import commands, reshard, routing
from .commands import Command, Pause, Saga, StreamView
from .errors import AlreadyExistsError, ConfigError, CoordError, NotFoundError, refused
from .governance import Governance, Request
from .group_view import GroupView
from .keys import GroupKeys, StreamKeys
from .models import Layout, Timings

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


class Sagas(Governance):
    """The mutations, for both faces of `redis_stream_coord.admin`."""

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
        keys = self.group_keys(stream, group)
        if shards is not None and not 1 <= shards <= routing.MAX_SHARDS:
            raise ConfigError(f"shards={shards} must be between 1 and {routing.MAX_SHARDS}")
        if start not in ("oldest", "new"):
            raise ConfigError(f"start={start!r} must be 'oldest' or 'new'")
        if protocol not in routing.PROTOCOLS:
            raise ConfigError(f"routing={protocol!r} must be one of {', '.join(routing.PROTOCOLS)}")
        kept = _retention(retention)
        request = self.request(
            keys,
            "create",
            reason,
            request_id,
            shards=shards,
            start=start,
            timings=str(timings),
            routing=protocol,
            retention=kept,
        )

        def work(recorded: str | None) -> Saga[GroupView]:
            if recorded is not None:
                # Perhaps deleted since, and even created anew; only what this very request made is finished.
                view: GroupView = yield commands.describe(keys)
                if view.incarnation != int(recorded):
                    return view
            deleted: str | None = yield commands.deletion(keys)
            if deleted is not None and deleted.endswith("unfinished"):
                raise refused("DELETED_MEANWHILE", deleted, stream=stream, group=group)
            register = commands.register(keys, shards=shards, routing=protocol, retention=kept)
            layout = yield from self._when_not_busy(self.stream_keys(stream), register)
            incarnation = yield from self._provision(keys, layout, start)
            if recorded is None:
                incarnation = yield from self._decide(keys, incarnation, layout, timings, deleted, exist_ok, request)
            else:
                incarnation = int(recorded)
            yield from self._finish(keys, layout, incarnation, start)
            view = yield commands.describe(keys)
            return view

        return self.carry_out(request, work)

    def _decide(
        self,
        keys: GroupKeys,
        incarnation: int,
        layout: Layout,
        timings: Timings,
        deleted: str | None,
        exist_ok: bool,
        request: Request,
    ) -> Saga[int]:
        """Write the record. Returns the incarnation of the group, which may have been there already."""
        try:
            made: int = yield commands.create(
                keys,
                incarnation=incarnation,
                shards=layout.shards,
                epoch=layout.epoch,
                timings=timings,
                deleted=deleted,
                **request.said(),
            )
        except AlreadyExistsError as error:
            if not exist_ok:
                raise
            return int(error.detail)
        return made

    def _finish(self, keys: GroupKeys, layout: Layout, incarnation: int, start: Start) -> Saga[None]:
        """Do what follows the deciding write. It repeats harmlessly, and finishes a creation that was interrupted."""
        while True:
            command = commands.activate(keys, layout.layout, incarnation=incarnation)
            present = yield from self._when_not_busy(self.stream_keys(keys.stream), command)
            if present.epoch == layout.epoch:
                break
            # A resharding was decided meanwhile. If this group was part of it, it has yet to drain what goes, and a
            # driver says when; else nobody has told it of the new layout.
            layout = present
            yield from self._provision(keys, layout, start)
            view: StreamView = yield commands.resharding(self.stream_keys(keys.stream))
            group = view.groups.get(keys.group)
            if group is None or group.since >= layout.epoch:
                yield commands.readable(keys, epoch=layout.epoch, step=2, shards=layout.shards)
        yield from reshard.mend_routes(StreamKeys(keys.stream, keys.prefix))
        yield from self.listed(keys, present=True)

    def listed(self, keys: GroupKeys, *, present: bool) -> Saga[bool]:
        """Make the index name a group, or forget it.

        It lies on another slot than the record. Whoever changes it may have slept since the record was written: past a
        deletion, or past the creation that followed. So it looks afterwards, and the record's word counts.

        Returns:
            Whether the index names the group now.
        """
        while True:
            yield commands.enlist(keys, present=present)
            found: bool = yield commands.exists(keys)
            if found is present:
                return found
            present = found

    def _provision(self, keys: GroupKeys, layout: Layout, start: Start) -> Saga[int]:
        """Make all shards ready. Returns an incarnation above all that their fences have seen."""
        incarnation = 0
        for shard in range(layout.shards):
            found = yield commands.provision(keys, shard, start="0" if start == "oldest" else "$", layout=layout)
            incarnation = max(incarnation, found + 1)
        return incarnation

    def _when_not_busy(self, keys: StreamKeys, command: Command[Layout]) -> Saga[Layout]:
        """Send a command again while a resharding is at its cut-over, which takes milliseconds. Perhaps nobody else is
        there to carry it on: there may be no group whose members could.
        """
        clock = self.settings.machine.clock
        deadline = clock() + self.settings.timeout_seconds
        while True:
            try:
                layout: Layout = yield command
            except CoordError as error:
                if error.word != "BUSY" or clock() > deadline:
                    raise
                yield Pause(_BUSY_PAUSE_SECONDS)
                yield from reshard.leave_cut_over(keys, goes_on=lambda: clock() <= deadline)
            else:
                return layout

    def delete(self, stream: str, group: str, force: bool, reason: str, request_id: str | None) -> Saga[None]:
        keys = self.group_keys(stream, group)
        request = self.request(keys, "delete", reason, request_id, force=force)

        def work(recorded: str | None) -> Saga[None]:
            if recorded is None:
                incarnation = yield commands.delete(keys, force=force, **request.said())
            else:
                incarnation = int(recorded)
            yield from self.take_apart(keys, incarnation)

        return self.carry_out(request, work)

    def take_apart(self, keys: GroupKeys, incarnation: int) -> Saga[None]:
        """Finish the deletion of a lifecycle, if that is the last one and it is not finished yet."""
        while True:
            # The stream before the deletion: as long as that is unfinished nobody creates the group anew, so what is
            # registered here is none of a later lifecycle. The other way round a driver could sleep in between.
            try:
                stream: StreamView | None = yield commands.resharding(self.stream_keys(keys.stream))
            except NotFoundError:
                stream = None
            state = yield commands.deletion(keys)
            if state != f"{incarnation} unfinished":
                return
            known = None if stream is None else stream.groups.get(keys.group)
            if stream is not None:
                # Also where there were shards once: they may come back.
                for shard in range(stream.top):
                    yield commands.retire(keys, shard, incarnation=incarnation)
            # Not gone: a creation that is about to be refused has registered it once more.
            if known is None or (yield commands.unregister(keys, registered=known.registered)):
                break
        yield from self.listed(keys, present=False)
        yield commands.deleted(keys, incarnation)

    def retain(self, stream: str, retention: Retention, reason: str, request_id: str | None) -> Saga[None]:
        kept = _retention(retention)
        keys = self.stream_keys(stream)
        request = self.request(keys, "retain", reason, request_id, retention=kept)

        def work(_recorded: str | None) -> Saga[None]:
            yield commands.retain(keys, kept, **request.said())

        return self.carry_out(request, work)

    def seek(
        self,
        stream: str,
        group: str,
        to: str | datetime,
        shards: Iterable[int] | None,
        reason: str,
        request_id: str | None,
    ) -> Saga[None]:
        keys = self.group_keys(stream, group)
        place = _place(to)
        chosen = None if shards is None else sorted(set(shards))
        request = self.request(keys, "seek", reason, request_id, to=place, shards=chosen)

        def work(_recorded: str | None) -> Saga[None]:
            view: GroupView = yield commands.describe(keys)
            wanted = list(view.shards) if chosen is None else chosen
            if unknown := set(wanted) - set(view.shards):
                raise NotFoundError(f"there are no shards {sorted(unknown)}", stream=stream, group=group)
            detail = f"{place} on {','.join(map(str, wanted))}"
            yield commands.record(keys, "seek", detail, **request.said())
            for shard in wanted:
                yield commands.seek(keys, shard, place, incarnation=view.incarnation)
            yield commands.announce(keys, "sought")

        return self.carry_out(request, work)

    def freeze(self, stream: str, group: str, on: bool, reason: str, request_id: str | None) -> Saga[None]:
        keys = self.group_keys(stream, group)
        request = self.request(keys, "freeze" if on else "unfreeze", reason, request_id)

        def work(_recorded: str | None) -> Saga[None]:
            yield commands.freeze(keys, on=on, **request.said())

        return self.carry_out(request, work)

    def reconcile(self, stream: str, group: str, reason: str, request_id: str | None) -> Saga[tuple[str, ...]]:
        keys = self.group_keys(stream, group)
        request = self.request(keys, "reconcile", reason, request_id)

        def work(_recorded: str | None) -> Saga[tuple[str, ...]]:
            found: tuple[str, ...] = yield commands.reconcile(keys, **request.said())
            return found

        return self.carry_out(request, work)

    def limit(
        self,
        stream: str,
        group: str | None,
        principal: str,
        mutations: int | None,
        per_seconds: int,
        reason: str,
        request_id: str | None,
    ) -> Saga[None]:
        keys: GroupKeys | StreamKeys = self.stream_keys(stream) if group is None else self.group_keys(stream, group)
        if mutations is not None and (mutations < 0 or per_seconds < 1):
            raise ConfigError(f"mutations={mutations} per_seconds={per_seconds} must not be negative, or less than 1")
        if not re.fullmatch(r"\S+", principal):
            raise ConfigError(f"principal={principal!r} must name a Redis user, or be '*'")
        value = "-" if mutations is None else f"{mutations}/{per_seconds}"
        request = self.request(keys, "limit", reason, request_id, principal=principal, limit=value)

        def work(_recorded: str | None) -> Saga[None]:
            yield commands.limit(keys, principal, value, **request.said())

        return self.carry_out(request, work)
