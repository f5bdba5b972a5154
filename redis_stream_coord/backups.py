"""Backups of records as a value and as a file: versioned, with a checksum, readable by people."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from .errors import CorruptMetadataError, UnsupportedSchemaError

FORMAT = "redis-stream-coord-backup"
VERSION = 1

_HINT = "See 'Backup and repair' in the docs. Nothing was changed."


@attrs.frozen
class GroupBackup:
    """The record of one group.

    Attributes:
        record: every field of its metadata, as stored.
        last_event: id of its newest event at that time; what came since is a witness against the backup.
    """

    record: Mapping[str, str]
    last_event: str


@attrs.frozen
class StreamBackup:
    """The record of one stream, and of those of its groups that were asked for.

    Attributes:
        record: every field, as stored.
        groups: by name.
    """

    record: Mapping[str, str]
    groups: Mapping[str, GroupBackup]


@attrs.frozen
class Backup:
    """Records of streams and groups at one time. Not the entries of the streams: those are Redis's to keep.

    Attributes:
        made_ms: Redis server time.
        streams: by name.
    """

    made_ms: int
    streams: Mapping[str, StreamBackup]

    def dumps(self) -> str:
        """Return it as text."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "made_ms": self.made_ms,
            "streams": attrs.asdict(self)["streams"],
        }
        return json.dumps({**body, "sha256": _sum(body)}, indent=1, sort_keys=True) + "\n"

    def save(self, path: str | Path) -> None:
        """Write it to a file, in one step: whoever reads the path finds the old file or the whole new one."""
        beside = Path(f"{path}.new")
        with beside.open("w", encoding="utf-8") as file:
            file.write(self.dumps())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

    @classmethod
    def loads(cls, text: str) -> Backup:
        """Read a text that `dumps` made.

        Raises:
            CorruptMetadataError: it is none, or was changed since.
            UnsupportedSchemaError: a newer release made it.
        """
        try:
            body = json.loads(text)
            found = body.pop("sha256") if body.get("format") == FORMAT else None
        except (ValueError, AttributeError, KeyError) as error:
            raise CorruptMetadataError(f"this is no backup: {error!r}", hint=_HINT) from error
        if found is None:
            raise CorruptMetadataError(f"this is no backup: its format is {body.get('format')!r}", hint=_HINT)
        if body.get("version") != VERSION:
            raise UnsupportedSchemaError(
                f"the backup has version {body.get('version')!r}, this release reads {VERSION}", hint=_HINT
            )
        if found != _sum(body):
            raise CorruptMetadataError("the backup was damaged or changed: its checksum does not fit", hint=_HINT)
        streams = {
            name: StreamBackup(
                record=stream["record"],
                groups={group: GroupBackup(**one) for group, one in stream["groups"].items()},
            )
            for name, stream in body["streams"].items()
        }
        return cls(body["made_ms"], streams)

    @classmethod
    def load(cls, path: str | Path) -> Backup:
        """Read a file that `save` wrote; raises as `loads`, and `OSError`."""
        return cls.loads(Path(path).read_text("utf-8"))


def _sum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
