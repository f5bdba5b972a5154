"""What `Admin` does about records that are damaged, lost or too old, as sagas."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from . import commands, reshard, verification
from .backups import Backup, GroupBackup, StreamBackup
from .commands import Saga, Scan, StreamView
from .errors import ConfigError, CoordError, MetadataError, NotFoundError, refused
from .group_view import GroupView
from .keys import GroupKeys, StreamKeys
from .models import Timings
from .scaling import Scaling
from .verification import Discrepancy

Part = Literal["index", "routes", "leases"]


class Repairs(Scaling):
    """The mutations of `Scaling`, and those of repair; and what only looks for what has to be repaired."""

    # --- looking ------------------------------------------------------------------------------------------------------

    def known(self) -> Saga[dict[str, set[str]]]:
        """Return every stream that has a record, or a group with one, and those groups."""
        prefix = self.settings.key_prefix
        escaped = re.sub(r"([*?\[\]\\^])", r"\\\1", prefix)
        found: dict[str, set[str]] = {}
        for kind in ("stream", "metadata"):
            names = yield Scan(f"{escaped}:{{*}}:{kind}")
            for name in names:
                inner = name[len(prefix) + 2 : -len(kind) - 2]
                # The group is what stands after the last colon: it cannot contain one.
                stream, _, group = (inner, "", "") if kind == "stream" else inner.rpartition(":")
                found.setdefault(stream, set()).update({group} - {""})
        return found

    def verify(self, stream: str | None, group: str | None, against: Backup | None) -> Saga[Sequence[Discrepancy]]:
        """Hold everything against everything; see `Admin.verify`."""
        if stream is None:
            known: dict[str, set[str]] = yield from self.known()
        else:
            known = {stream: {group} if group is not None else set()}
        if against is not None and stream is None:
            for name, one in against.streams.items():
                known.setdefault(name, set()).update(one.groups)
        found: list[Discrepancy] = []
        index: list[tuple[str, str]] = yield commands.groups(self.settings.key_prefix)
        for name, groups in sorted(known.items()):
            found += yield from verification.stream(self.stream_keys(name), groups, group, index, against)
        if stream is None:
            everywhere = {(name, one) for name, groups in known.items() for one in groups}
            found += [
                Discrepancy(
                    "index", "the index names a group that has no record", name, one, section="the-index-is-wrong"
                )
                for name, one in index
                if (name, one) not in everywhere
            ]
        return found

    def backup(self, stream: str | None, group: str | None) -> Saga[Backup]:
        """Read the records; see `Admin.backup`."""
        if stream is None:
            known: dict[str, set[str]] = yield from self.known()
        else:
            known = {stream: set()}
        now_ms, streams = 0, {}
        for name in sorted(known):
            keys = self.stream_keys(name)
            view: StreamView = yield commands.resharding(keys)
            now_ms = view.now_ms
            record = yield commands.fields_of(keys.record)
            wanted = sorted(view.groups) if group is None else [group]
            groups = {}
            for one in wanted:
                of_group = self.group_keys(name, one)
                # The event first: what happens between the two is in the record and a witness against it, which only
                # refuses a restore. The other way round it could be in neither.
                event = yield commands.last_event(of_group)
                yield commands.describe(of_group)  # a damaged record is no backup
                fields = yield commands.fields_of(of_group.metadata)
                groups[one] = GroupBackup(fields, event)
            streams[name] = StreamBackup(record, groups)
        return Backup(now_ms, streams)

    # --- mending ------------------------------------------------------------------------------------------------------

    def restore(
        self, backup: Backup, stream: str, group: str | None, reason: str, request_id: str | None
    ) -> Saga[None]:
        """Put a record back; see `Admin.restore`."""
        if stream not in backup.streams:
            raise NotFoundError("the backup has no such stream", stream=stream)
        saved = backup.streams[stream]
        if group is None:
            return self._restore_stream(saved, stream, reason, request_id)
        if group not in saved.groups:
            raise NotFoundError("the backup has no such group", stream=stream, group=group)
        one = saved.groups[group]
        keys = self.group_keys(stream, group)
        content = {"made_ms": backup.made_ms, "record": dict(one.record)}
        request = self.request(keys, "restore", reason, request_id, **content)

        def work(recorded: str | None) -> Saga[None]:
            if recorded is None:
                yield from self._ask_fences(keys, one.record)
                yield commands.restore(keys, one.record, one.last_event, **request.said())
            yield commands.describe(keys)
            yield from self.listed(keys, present=True)

        return self.carry_out(request, work)

    def _ask_fences(self, keys: GroupKeys, record: Mapping[str, str]) -> Saga[None]:
        """Refuse a backup that the fence of any shard is ahead of."""
        incarnation = int(record["incarnation"])
        for name, value in record.items():
            if not name.startswith("shard:"):
                continue
            shard = int(name.removeprefix("shard:"))
            token = int(re.search(r"token=(\d+)", value)[1])  # type: ignore[index]
            fence = yield commands.fields_of(keys.fence(shard))
            seen = (int(fence.get("incarnation", "0")), int(fence.get("token", "0")))
            if seen > (incarnation, token):
                why = f"the fence of shard {shard} has incarnation {seen[0]} token {seen[1]}, the backup {token}"
                raise refused("BACKUP_BEHIND", why, stream=keys.stream, group=keys.group)

    def _restore_stream(self, saved: StreamBackup, stream: str, reason: str, request_id: str | None) -> Saga[None]:
        keys = self.stream_keys(stream)
        request = self.request(keys, "restore", reason, request_id, record=dict(saved.record))
        epoch = int(saved.record["epoch"])

        def work(recorded: str | None) -> Saga[None]:
            if recorded is None:
                for shard in range(int(saved.record["top"])):
                    route = yield commands.route(keys, shard)
                    if route.epoch is not None and route.epoch > epoch:
                        why = f"the route of shard {shard} has epoch {route.epoch}, the backup {epoch}"
                        raise refused("BACKUP_BEHIND", why, stream=stream)
                yield commands.restore_stream(keys, saved.record, **request.said())
            yield commands.resharding(keys)

        return self.carry_out(request, work)

    def recreate(
        self, stream: str, group: str, timings: Timings | None, reason: str, request_id: str | None
    ) -> Saga[GroupView]:
        """Begin a new lifecycle of a group in place of a lost or damaged record; see `Admin.recreate`."""
        keys = self.group_keys(stream, group)
        request = self.request(keys, "recreate", reason, request_id, timings=str(timings))

        def work(recorded: str | None) -> Saga[GroupView]:
            kept = timings
            if kept is None:
                try:
                    old: GroupView = yield commands.describe(keys)
                    kept = old.timings
                except (MetadataError, NotFoundError):
                    kept = Timings()
            if recorded is not None:
                # Perhaps deleted or recreated since; only what this very request made is finished.
                view: GroupView = yield commands.describe(keys)
                if view.incarnation != int(recorded):
                    return view
            deleted = yield commands.deletion(keys)
            layout = yield from self._when_not_busy(
                self.stream_keys(stream), commands.register(keys, shards=None, routing="jump-v1")
            )
            made = yield from self._provision(keys, layout, "oldest")
            if recorded is None:
                made = yield commands.create(
                    keys,
                    incarnation=made,
                    shards=layout.shards,
                    epoch=layout.epoch,
                    timings=kept,
                    deleted=deleted,
                    anew=True,
                    **request.said(),
                )
            else:
                made = int(recorded)
            yield from self._finish(keys, layout, made, "oldest")
            view = yield commands.describe(keys)
            return view

        return self.carry_out(request, work)

    def repair(
        self, what: Part, stream: str | None, group: str | None, reason: str, request_id: str | None
    ) -> Saga[Sequence[str]]:
        """Rebuild what can be rebuilt; see `Admin.repair`."""
        if what not in ("index", "routes", "leases"):
            raise ConfigError(f"what={what!r} must be 'index', 'routes' or 'leases'")
        if stream is None or (what == "leases" and group is None):
            if what != "index":
                raise ConfigError(f"what={what!r} needs the name of a {'group' if what == 'leases' else 'stream'}")
            if not reason.strip():
                raise ConfigError("reason must say why")
            return self._repair_index(reason, request_id or self.settings.machine.word())
        if what == "leases":
            return self._repair_leases(self.group_keys(stream, str(group)), reason, request_id)
        if what == "routes":
            return self._repair_routes(self.stream_keys(stream), reason, request_id)
        raise ConfigError("the index is that of all streams: leave `stream` out")

    def _repair_index(self, reason: str, request_id: str) -> Saga[Sequence[str]]:
        """Each group has a request of its own: the index belongs to none of them, and so has no audit log."""
        known: dict[str, set[str]] = yield from self.known()
        index: list[tuple[str, str]] = yield commands.groups(self.settings.key_prefix)
        there = {(stream, group) for stream, groups in known.items() for group in groups}
        done = []
        for stream, group in sorted(there ^ set(index)):
            present = yield from self._repair_entry(
                self.group_keys(stream, group), (stream, group) in there, reason, request_id
            )
            done.append(f"{stream}:{group} {'added' if present else 'removed'}")
        return done

    def _repair_entry(self, keys: GroupKeys, present: bool, reason: str, request_id: str) -> Saga[bool]:
        request = self.request(keys, "repair", reason, request_id, what="index", present=present)

        def work(recorded: str | None) -> Saga[bool]:
            if recorded is None:
                # Before the change: they are two slots, and whoever dies in between has to leave its name rather than
                # a change of nobody's.
                yield commands.note_repair(keys, f"index: {'added' if present else 'removed'}", **request.said())
            found: bool = yield from self.listed(keys, present=present)
            return found

        return self.carry_out(request, work)

    def _repair_leases(self, keys: GroupKeys, reason: str, request_id: str | None) -> Saga[Sequence[str]]:
        request = self.request(keys, "repair", reason, request_id, what="leases")

        def work(_recorded: str | None) -> Saga[Sequence[str]]:
            yield commands.forget_leases(keys, **request.said())
            return ["every member gets one full lease"]

        return self.carry_out(request, work)

    def _repair_routes(self, keys: StreamKeys, reason: str, request_id: str | None) -> Saga[Sequence[str]]:
        request = self.request(keys, "repair", reason, request_id, what="routes")

        def work(recorded: str | None) -> Saga[Sequence[str]]:
            view: StreamView = yield commands.resharding(keys)
            if view.saga is not None and view.saga.active:
                raise refused("RESHARDING", f"{view.saga.state}: its driver makes missing routes", stream=keys.stream)
            epoch, shut = view.layout.epoch, []
            for shard in range(view.layout.shards):
                route = yield commands.route(keys, shard)
                if route.epoch is not None and route.epoch > epoch:
                    why = f"the route of shard {shard} has epoch {route.epoch}, the record {epoch}"
                    raise refused("AHEAD", why, stream=keys.stream, shard=shard)
                if route.state != "open":
                    shut.append(shard)
            if recorded is None:
                # Before the change, as for the index.
                said = ", ".join(f"shard {shard}" for shard in shut) or "nothing to do"
                yield commands.note_repair(keys, f"routes: {said}", **request.said())
            mended: dict[int, CoordError | None] = yield from reshard.mend_routes(keys)
            for error in mended.values():
                if error is not None:
                    raise error
            return [f"shard {shard} made anew" for shard in mended]

        return self.carry_out(request, work)
