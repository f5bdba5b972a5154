"""Commands that change something: each calls the method of `Admin` of its name, with who asks and why."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from ..errors import CoordError, NotFoundError
from ..models import Timings
from ..routing import DEFAULT_PROTOCOL, PROTOCOLS
from .exits import Exit
from .looking import GROUP, STREAM, in_all, problems, removed_table
from .output import View, shards
from .session import DestructiveCommand, MutationCommand, Request, Session, confirm


def done(request: Request, text: str, **data: Any) -> View:
    """Return what was done."""
    return View({"request_id": request.request_id, "dry_run": False, **data}, [text])


def would(request: Request, text: str, **data: Any) -> View:
    """Return what would be done."""
    return View({"request_id": request.request_id, "dry_run": True, "would": text, **data}, [f"would {text}"])


def _retention(value: str) -> Any:
    """Make what `Admin` takes of ``all``, ``consumed`` or a number."""
    return int(value) if value.isdigit() else value


def place(value: str) -> str | datetime:
    """Make what `Admin.seek` takes of a word, an entry id, or a time. Raises: `ValueError`: not a time."""
    is_time = "T" in value or ":" in value
    return datetime.fromisoformat(value.replace("Z", "+00:00")) if is_time else value


@click.command("create", cls=MutationCommand)
@STREAM
@GROUP
@click.option("--shards", type=click.IntRange(min=1), help="How many; needed for a new stream only.")
@click.option("--start", type=click.Choice(["oldest", "new"]), default="oldest", show_default=True)
@click.option("--heartbeat", type=float, default=Timings().heartbeat_seconds, show_default=True, metavar="SECONDS")
@click.option("--lease", type=float, default=Timings().lease_seconds, show_default=True, metavar="SECONDS")
@click.option("--rebalance", type=float, default=Timings().rebalance_seconds, show_default=True, metavar="SECONDS")
@click.option("--routing", type=click.Choice(sorted(PROTOCOLS)), default=DEFAULT_PROTOCOL, show_default=True)
@click.option("--retention", default="all", show_default=True, help="all, consumed, or a number of entries.")
@click.option("--exist-ok", is_flag=True, help="Accept a group that exists, and mend what it lacks on its shards.")
def create(session: Session, request: Request, *, stream: str, group: str, **given: Any) -> View:
    """Create a group, and its stream if this is the first one."""
    timings = Timings(
        heartbeat_seconds=given.pop("heartbeat"),
        lease_seconds=given.pop("lease"),
        rebalance_seconds=given.pop("rebalance"),
    )
    given["retention"] = _retention(given["retention"])
    if request.dry_run:
        return _would_create(session, request, stream, group, given)
    admin = session.admin(request.requested_by)
    view = admin.create(stream, group=group, timings=timings, **given, **request.words)
    text = f"{stream}/{group}: {len(view.shards)} shards, version {view.version}, incarnation {view.incarnation}"
    return done(request, text, group=view)


def _would_create(session: Session, request: Request, stream: str, group: str, given: dict[str, Any]) -> View:
    try:
        session.monitor.describe(stream, group=group)
    except NotFoundError:
        pass
    else:
        known = "accept the group that exists" if given["exist_ok"] else "be refused: the group exists"
        return would(request, known, exists=True)
    try:
        count: int | None = session.monitor.routing(stream).layout.shards
    except NotFoundError:
        count = None
    if count is None and given["shards"] is None:
        return would(request, "be refused: the stream is new and needs --shards", exists=False)
    if count is not None and given["shards"] not in (None, count):
        return would(request, f"be refused: the stream has {count} shards", exists=False)
    where = f"on the {count} shards of stream {stream}" if count else f"and stream {stream} of {given['shards']} shards"
    return would(request, f"create group {group} {where}", exists=False)


@click.command("delete", cls=DestructiveCommand)
@STREAM
@GROUP
@click.option("--force", is_flag=True, help="Even with live members or damaged metadata.")
def delete(session: Session, request: Request, *, stream: str, group: str, force: bool, yes: bool) -> View:
    """Delete a group and so what is pending in it. The streams stay."""
    text = f"delete group {group} of stream {stream}{_content(session, stream, group)}"
    if request.dry_run:
        return would(request, text)
    confirm(session, f"{text[0].upper()}{text[1:]}?", yes=yes)
    session.admin(request.requested_by).delete(stream, group=group, force=force, **request.words)
    return done(request, f"{stream}/{group} is deleted")


def _content(session: Session, stream: str, group: str) -> str:
    """Say what a group has, as far as it can be read."""
    try:
        view = session.monitor.describe(stream, group=group)
        statuses = session.monitor.shards(stream, group=group)
    except CoordError as error:
        return f" ({error.message})"
    pending = sum(status.reading.pending or 0 for status in statuses)
    return f" with {len(view.members)} members, {len(view.shards)} shards and {pending} pending entries"


@click.command("retain", cls=MutationCommand)
@STREAM
@click.option("--retention", required=True, help="all, consumed, or a number of entries.")
def retain(session: Session, request: Request, *, stream: str, retention: str) -> View:
    """Change how long the entries of a stream are kept."""
    now = session.monitor.routing(stream).layout.retention
    if request.dry_run:
        return would(request, f"change the retention of {stream} from {now} to {retention}")
    session.admin(request.requested_by).retain(stream, retention=_retention(retention), **request.words)
    return done(request, f"{stream}: retention {retention}, before {now}", before=now, retention=retention)


@click.command("seek", cls=DestructiveCommand)
@STREAM
@GROUP
@click.option("--to", type=place, required=True, help="oldest, newest, an entry id, or 2026-01-31T12:00:00+00:00.")
@click.option("--shard", "chosen", type=click.IntRange(min=0), multiple=True, help="Only this one; may be repeated.")
def seek(
    session: Session, request: Request, *, stream: str, group: str, to: Any, chosen: tuple[int, ...], yes: bool
) -> View:
    """Move a group to another place, to read again or to skip. What is pending is forgotten."""
    where = f"shards {shards(chosen)}" if chosen else "all shards"
    text = f"move {stream}/{group} on {where} to {to}"
    if request.dry_run:
        return would(request, text)
    confirm(session, f"{text[0].upper()}{text[1:]}? What is pending there is forgotten.", yes=yes)
    session.admin(request.requested_by).seek(stream, group=group, to=to, shards=chosen or None, **request.words)
    return done(request, f"{stream}/{group} goes on at {to} on {where}")


@click.command("trim", cls=DestructiveCommand)
@STREAM
def trim(session: Session, request: Request, *, stream: str, yes: bool) -> View:
    """Trim now what lies on shards that the layout has no more; what a group still needs stays.

    Exit code 10 if something kept a shard from being trimmed.
    """
    found = session.monitor.removed(stream)
    what = f"trim {in_all(found)} as far as no group needs them"
    if request.dry_run:
        view = would(request, what, removed=found)
        return View(view.data, [*view.shown, *removed_table(found)])
    confirm(session, f"{what[0].upper()}{what[1:]}? They cannot be read again.", yes=yes)
    trimmed = session.admin(request.requested_by).trim(stream, **request.words)
    text = f"{trimmed.entries} entries and {trimmed.event_ids} event ids are gone from removed shards of {stream}"
    view = done(request, text, trimmed=trimmed)
    shown = [*view.shown, *problems(list(map(str, trimmed.waits)))]
    return View(view.data, shown, Exit.PROBLEMS if trimmed.waits else Exit.OK)


COMMANDS = (create, delete, retain, seek, trim)
