"""Commands for when something is wrong with what is stored: verify, backup, restore, recreate, repair."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click
from rich.console import RenderableType
from rich.text import Text

from ..backups import Backup
from ..errors import ConfigError
from ..models import Timings
from ..repairs import Part
from .changing import done, would
from .exits import Exit
from .looking import GROUP, STREAM
from .output import View, moment
from .session import CoordCommand, DestructiveCommand, MutationCommand, ReadCommand, Request, Session, confirm

_FILE = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
_ANY_STREAM = click.argument("stream", required=False)
_ANY_GROUP = click.argument("group", required=False)


@click.command("verify", cls=ReadCommand)
@_ANY_STREAM
@_ANY_GROUP
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A backup: records that are older than it are found too.",
)
def verify(session: Session, *, stream: str | None, group: str | None, against: Path | None) -> View:
    """Hold records, fences, routes, leases and the index against each other. Exit code 10 if something does not fit."""
    backup = None if against is None else Backup.load(against)
    found = session.admin("verify").verify(stream, group=group, against=backup)
    shown: list[RenderableType] = []
    for one in found:
        shown.append(Text.assemble(("! ", "bold red"), str(one)))
        if one.section:
            shown.append(f"  -> docs/guide/backup-and-repair.md#{one.section}")
    return View(found, shown or ["everything fits together"], Exit.PROBLEMS if found else Exit.OK)


@click.command("backup", cls=CoordCommand)
@_ANY_STREAM
@_ANY_GROUP
@click.option("--to", "file", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The file to write.")
def backup(session: Session, *, stream: str | None, group: str | None, file: Path) -> View:
    """Write the records of streams and groups to a file, with a checksum. Not the entries."""
    made = session.admin("backup").backup(stream, group=group)
    made.save(file)
    groups = sum(len(one.groups) for one in made.streams.values())
    data = {"file": str(file), "made_ms": made.made_ms, "streams": len(made.streams), "groups": groups}
    return View(data, [f"{file}: {len(made.streams)} streams and {groups} groups, as of {moment(made.made_ms)} UTC"])


@click.command("restore", cls=DestructiveCommand)
@_FILE
@STREAM
@_ANY_GROUP
def restore(session: Session, request: Request, *, file: Path, stream: str, group: str | None, yes: bool) -> View:
    """Put the record of a group, or without GROUP that of a stream, back as a backup has it.

    Exit code 8 if a fence, a route, a member or the stored record has seen more than the backup knows.
    """
    saved = Backup.load(file)
    what = f"the record of {stream}" if group is None else f"the record of {stream}/{group}"
    text = f"restore {what} as of {moment(saved.made_ms)} UTC"
    if request.dry_run:
        return would(request, text)
    confirm(session, f"{text[0].upper()}{text[1:]}?", yes=yes)
    session.admin(request.requested_by).restore(saved, stream, group=group, **request.words)
    return done(request, f"{what} is restored as of {moment(saved.made_ms)} UTC")


@click.command("recreate", cls=DestructiveCommand)
@STREAM
@GROUP
@click.option("--heartbeat", type=float, metavar="SECONDS", help="Default: as it was, if that can still be read.")
@click.option("--lease", type=float, metavar="SECONDS", help="Default: as it was, if that can still be read.")
@click.option("--rebalance", type=float, metavar="SECONDS", help="Default: as it was, if that can still be read.")
def recreate(
    session: Session,
    request: Request,
    *,
    stream: str,
    group: str,
    heartbeat: float | None,
    lease: float | None,
    rebalance: float | None,
    yes: bool,
) -> View:
    """Begin a new lifecycle of a group whose record is lost, damaged or too old; it keeps its places on the shards."""
    text = f"begin a new lifecycle of {stream}/{group}"
    if request.dry_run:
        return would(request, text)
    confirm(session, f"{text[0].upper()}{text[1:]}? Members of the old one are fenced.", yes=yes)
    view = session.admin(request.requested_by).recreate(
        stream, group=group, timings=_timings(heartbeat, lease, rebalance), **request.words
    )
    return done(request, f"{stream}/{group}: incarnation {view.incarnation}, {len(view.shards)} shards", group=view)


def _timings(heartbeat: float | None, lease: float | None, rebalance: float | None) -> Timings | None:
    given = {"heartbeat_seconds": heartbeat, "lease_seconds": lease, "rebalance_seconds": rebalance}
    chosen = {name: value for name, value in given.items() if value is not None}
    return Timings(**chosen) if chosen else None


@click.command("repair", cls=MutationCommand)
@click.argument("what", type=click.Choice(["index", "routes", "leases"]))
@_ANY_STREAM
@_ANY_GROUP
def repair(session: Session, request: Request, *, what: str, stream: str | None, group: str | None) -> View:
    """Make anew what follows from the records: the index, missing routes of a STREAM, leases of a STREAM's GROUP."""
    if (what != "index" and stream is None) or (what == "leases" and group is None):
        raise ConfigError(f"repair {what} needs {'STREAM' if what == 'routes' else 'STREAM and GROUP'}")
    if request.dry_run:
        found = session.admin("a dry run").verify(stream, group=group)
        return would(request, f"repair {what}; verify says: {'; '.join(map(str, found)) or 'everything fits together'}")
    lines = session.admin(request.requested_by).repair(cast(Part, what), stream=stream, group=group, **request.words)
    return View(
        {"request_id": request.request_id, "dry_run": False, "done": lines}, list(lines) or ["nothing to repair"]
    )


COMMANDS = (verify, backup, restore, recreate, repair)
