"""Holding the records of a stream and its groups against each other, and against every witness of what was before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from . import commands, telemetry
from .backups import Backup
from .commands import Saga, StreamView
from .errors import (
    CoordError,
    CorruptMetadataError,
    MetadataRegressionError,
    NotFoundError,
    UnsupportedProtocolError,
    UnsupportedSchemaError,
)
from .group_view import GroupView
from .keys import GroupKeys, StreamKeys

# Where the page "Backup and repair" says what to do.
_SECTIONS: Mapping[type[CoordError], str] = {
    CorruptMetadataError: "the-record-is-damaged",
    MetadataRegressionError: "the-record-is-older-than-what-was-seen",
    NotFoundError: "the-record-is-missing",
    UnsupportedSchemaError: "the-record-is-of-a-newer-release",
    UnsupportedProtocolError: "the-record-is-of-a-newer-release",
}
_BEHIND = "the-record-is-older-than-what-was-seen"


@attrs.frozen
class Discrepancy:
    """One thing that is not as it should be.

    Attributes:
        kind: ``schema``, ``invariant``, ``witness``, ``route``, ``registration``, ``lease``, ``index`` or ``state``.
        message: what, in a sentence.
        stream, group, shard: where; ``None`` where that does not apply.
        error: name of the exception that a call would raise; empty if none would.
        section: of the page "Backup and repair" in the docs.
    """

    kind: str
    message: str
    stream: str | None = None
    group: str | None = None
    shard: int | None = None
    error: str = ""
    section: str = ""

    def __str__(self) -> str:
        where = [self.stream, self.group, None if self.shard is None else f"shard {self.shard}"]
        return f"{'/'.join(part for part in where if part)}: {self.message}"


def _of_error(error: CoordError, stream: str, group: str | None) -> Discrepancy:
    section = next((name for kind, name in _SECTIONS.items() if isinstance(error, kind)), "")
    return Discrepancy("schema", error.message, stream, group, error=type(error).__name__, section=section)


def stream(
    keys: StreamKeys,
    groups: Iterable[str],
    only: str | None,
    index: Sequence[tuple[str, str]],
    against: Backup | None,
) -> Saga[list[Discrepancy]]:
    """Look at one stream.

    Parameters:
        keys: of the stream.
        groups: names of groups that have a record.
        only: look at this group alone, if given.
        index: of all groups.
        against: a backup that the records must not be older than.
    """
    found: list[Discrepancy] = []
    names, registered = set(groups), None
    try:
        view: StreamView = yield commands.resharding(keys)
    except CoordError as error:
        found.append(_of_error(error, keys.stream, None))
    else:
        registered = set(view.groups)
        found += yield from _routes(keys, view)
        if only is None:
            names |= registered
        saved = against.streams.get(keys.stream) if against is not None else None
        if saved is not None and int(saved.record["version"]) > view.layout.version:
            found.append(_rolled_back(keys.stream, None, saved.record, view.layout.version))
    for name in sorted(names):
        group = GroupKeys(keys.stream, name, keys.prefix)
        found += yield from _group(group, against)
        if registered is not None and name not in registered:
            message = "the group is not registered with its stream"
            found.append(Discrepancy("registration", message, keys.stream, name, section="a-group-is-not-registered"))
        if (keys.stream, name) not in index:
            message = "the group is not in the index"
            found.append(Discrepancy("index", message, keys.stream, name, section="the-index-is-wrong"))
    return found


def _routes(keys: StreamKeys, view: StreamView) -> Saga[list[Discrepancy]]:
    found = []
    moving = view.saga is not None and view.saga.active
    for shard in range(view.layout.shards):
        route = yield commands.route(keys, shard)
        message, error, section = "", "", "a-route-is-missing"
        if route.state == "missing":
            message, error = "it has no route: nothing can be published to it or read", "RoutingUnavailableError"
        elif route.epoch is not None and route.epoch > view.layout.epoch and not moving:
            message = f"its route has epoch {route.epoch}, the record {view.layout.epoch}: the record went backwards"
            error, section = "MetadataRegressionError", _BEHIND
        elif not moving and (route.state != "open" or route.layout != view.layout.layout):
            message = f"its route is {route.state} for layout {route.layout}, the record has {view.layout.layout}"
            error = "RoutingUnavailableError"
        if message:
            kind = "witness" if section == _BEHIND else "route"
            found.append(Discrepancy(kind, message, keys.stream, None, shard, error, section))
    return found


def _group(keys: GroupKeys, against: Backup | None) -> Saga[list[Discrepancy]]:
    try:
        view: GroupView = yield commands.describe(keys)
    except CoordError as error:
        return [_of_error(error, keys.stream, keys.group)]
    found = [Discrepancy("invariant", text, keys.stream, keys.group) for text in view.violations()]
    if found:
        telemetry.invariant_violations.add(len(found), {telemetry.STREAM: keys.stream, telemetry.GROUP: keys.group})
    states = [text for text in view.degraded() if text not in view.violations()]
    found += [Discrepancy("state", text, keys.stream, keys.group, section=_BEHIND) for text in states]
    for member in view.members.values():
        if member.lease_remaining_ms is None:
            message = f"member {member.id} has no lease"
            found.append(Discrepancy("lease", message, keys.stream, keys.group, section="the-leases-are-wrong"))
    found += yield from _fences(keys, view)
    saved = against.streams.get(keys.stream) if against is not None else None
    group = saved.groups.get(keys.group) if saved is not None else None
    if group is not None:
        then = (int(group.record["incarnation"]), int(group.record["version"]))
        if then > (view.incarnation, view.version):
            found.append(_rolled_back(keys.stream, keys.group, group.record, view.version))
    return found


def _fences(keys: GroupKeys, view: GroupView) -> Saga[list[Discrepancy]]:
    found = []
    for shard in view.shards.values():
        fence = yield commands.fields_of(keys.fence(shard.index))
        try:
            incarnation, token = int(fence.get("incarnation", "0")), int(fence.get("token", "0"))
        except ValueError:
            message = "its fence is damaged"
            section = "the-record-is-damaged"
            one = Discrepancy("schema", message, keys.stream, keys.group, shard.index, "CorruptMetadataError", section)
            found.append(one)
            continue
        if (incarnation, token) > (view.incarnation, shard.token):
            message = (
                f"its fence has incarnation {incarnation} token {token}, the record {view.incarnation} {shard.token}: "
                "the record went backwards"
            )
            error = "MetadataRegressionError"
            found.append(Discrepancy("witness", message, keys.stream, keys.group, shard.index, error, _BEHIND))
    return found


def _rolled_back(stream: str, group: str | None, record: Mapping[str, str], version: int) -> Discrepancy:
    message = f"the record has version {version}, the backup {record['version']}: the record went backwards"
    return Discrepancy("witness", message, stream, group, error="MetadataRegressionError", section=_BEHIND)
