"""What there shall be, as a file says it: groups, and numbers of shards. And the difference to what there is.

Values and decisions only. What runs (members, leases, assignments, positions, entries) is no part of it, on purpose: it
is never declared, and so never put "right".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from .errors import ConfigError
from .keys import check_group, check_stream
from .models import Layout
from .routing import MAX_SHARDS

FORMAT = 1

Action = Literal["create", "scale", "delete"]


@attrs.frozen(kw_only=True)
class DesiredStream:
    """One stream as it shall be.

    Attributes:
        stream: name of the logical stream.
        shards: how many.
        groups: names of its groups, sorted.
    """

    stream: str
    shards: int
    groups: tuple[str, ...]


@attrs.frozen
class Desired:
    """The desired state of any number of streams.

    Attributes:
        streams: by name.
    """

    streams: Mapping[str, DesiredStream]

    @classmethod
    def parse(cls, text: str) -> Desired:
        """Read a file.

        Parameters:
            text: JSON, ``{"version": 1, "streams": {"orders": {"shards": 8, "groups": ["billing"]}}}``.

        Raises:
            ConfigError: it says something else, or something that cannot be declared; says where.
        """
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the file of desired groups is not JSON: {error}") from error
        _only(found, {"version", "streams"}, "the file")
        if found.get("version") != FORMAT:
            raise ConfigError(f"version {found.get('version')!r} of the file is not {FORMAT}, which this release reads")
        streams = found.get("streams")
        if not isinstance(streams, dict):
            raise ConfigError("`streams` must be an object: name -> shards and groups")
        return cls({name: _stream(check_stream(name), value) for name, value in sorted(streams.items())})


def _stream(name: str, value: Any) -> DesiredStream:
    where = f"stream {name!r}"
    _only(value, {"shards", "groups"}, where)
    shards, groups = value.get("shards"), value.get("groups")
    if type(shards) is not int or not 1 <= shards <= MAX_SHARDS:
        raise ConfigError(f"{where}: `shards` must be a number from 1 to {MAX_SHARDS}, not {shards!r}")
    if not isinstance(groups, list) or not groups or not all(isinstance(group, str) for group in groups):
        raise ConfigError(f"{where}: `groups` must be a list of names, one at least")
    if len(set(groups)) != len(groups):
        raise ConfigError(f"{where}: a group stands twice in `groups`")
    return DesiredStream(stream=name, shards=shards, groups=tuple(sorted(map(check_group, groups))))


def _only(value: Any, names: set[str], where: str) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be an object")
    if unknown := sorted(set(value) - names):
        raise ConfigError(
            f"{where} has {', '.join(map(repr, unknown))}",
            hint=f"Only {', '.join(sorted(names))} can be declared: existence and number of shards, never what runs.",
        )


@attrs.frozen(kw_only=True)
class Change:
    """One step from what there is to what shall be.

    Attributes:
        action: ``create`` a group (and its stream), ``scale`` a stream, ``delete`` a group.
        stream: which.
        group: which; ``None`` for ``scale``.
        shards: number of shards afterwards; ``None`` for ``delete``.
        before: number of shards now; ``None`` where the stream is new, and for ``delete``.
    """

    action: Action
    stream: str
    group: str | None = None
    shards: int | None = None
    before: int | None = None

    def __str__(self) -> str:
        if self.action == "scale":
            return f"scale {self.stream}: {self.before} -> {self.shards} shards"
        if self.action == "delete":
            return f"delete group {self.group} of {self.stream}"
        new = f" and the stream, with {self.shards} shards" if self.before is None else ""
        return f"create group {self.group} of {self.stream}{new}"


@attrs.frozen(kw_only=True)
class Plan:
    """The difference between what shall be and what there was when it was made.

    Attributes:
        revisions: stream -> version of its record that the plan was made of; 0: there was none.
        changes: what `Admin.apply` would do, in order; empty: nothing has drifted.
        undeclared: (stream, group) that are there and in no file; they are only deleted if that is asked for.
        busy: streams that are being resharded at present; their number of shards is not judged.
    """

    revisions: Mapping[str, int]
    changes: tuple[Change, ...]
    undeclared: tuple[tuple[str, str], ...]
    busy: tuple[str, ...] = ()


def difference(desired: Desired, layouts: Mapping[str, Layout | None], *, prune: bool) -> Plan:
    """Compare what shall be with what there is.

    Parameters:
        desired: what shall be.
        layouts: stream -> its record now, or ``None``; of each stream that is declared.
        prune: delete groups of declared streams that are not declared.
    """
    changes: list[Change] = []
    undeclared: list[tuple[str, str]] = []
    busy: list[str] = []
    for name, wanted in desired.streams.items():
        layout = layouts[name]
        now = None if layout is None else layout.shards
        known = () if layout is None else layout.groups
        moving = layout is not None and layout.resharding in ("PREPARING", "CUTOVER", "DRAINING", "REOPENING")
        if moving:
            busy.append(name)
        # New groups first: so a group takes part in the resharding from its beginning.
        for group in wanted.groups:
            if group not in known:
                count = wanted.shards if now is None else now
                changes.append(Change(action="create", stream=name, group=group, shards=count, before=now))
                now = count
        if now != wanted.shards and not moving:
            changes.append(Change(action="scale", stream=name, shards=wanted.shards, before=now))
        extra = [group for group in known if group not in wanted.groups]
        undeclared += [(name, group) for group in extra]
        if prune:
            changes += [Change(action="delete", stream=name, group=group) for group in extra]
    return Plan(
        revisions={name: 0 if layout is None else layout.version for name, layout in layouts.items()},
        changes=tuple(changes),
        undeclared=tuple(undeclared),
        busy=tuple(busy),
    )


def dump(plan: Plan) -> str:
    """Write a plan down, to be applied later, after a review."""
    return json.dumps({"format": FORMAT, **attrs.asdict(plan)}, indent=1, sort_keys=True) + "\n"


def load(text: str) -> Plan:
    """Read what `dump` wrote. Raises: `ConfigError`."""
    try:
        found = json.loads(text)
        if found.pop("format") != FORMAT:
            raise ConfigError("the plan was made by another release: plan again")
        return Plan(
            revisions={str(name): int(version) for name, version in found["revisions"].items()},
            changes=tuple(Change(**change) for change in found["changes"]),
            undeclared=tuple((stream, group) for stream, group in found["undeclared"]),
            busy=tuple(found["busy"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"this is no plan: {error!r}") from error
