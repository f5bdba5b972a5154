"""Commands about the number of shards: look, begin, wait, take back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import click
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..errors import NotFoundError, WaitTimeoutError
from ..models import Resharding, ScalePlan
from .changing import would
from .exits import Exit
from .looking import STREAM
from .output import View, row, shards, span, table
from .session import CoordCommand, DestructiveCommand, MutationCommand, ReadCommand, Request, Session, confirm

_NO_WAIT = click.option("--no-wait", is_flag=True, help="Only begin it; consumers carry it on.")
_WAIT_TIMEOUT = click.option(
    "--wait-timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Wait no longer; it goes on. Exit code 13 then.",
)
_OVER_WELL = ("COMPLETED", "ROLLED_BACK", "ABANDONED")


@click.command("migrations", cls=ReadCommand)
@STREAM
def migrations(session: Session, *, stream: str) -> View:
    """Show the resharding under way, or the last one: its state, its age, and what it waits for."""
    found = session.monitor.resharding(stream)
    if found is None:
        return View(None, [f"stream {stream} was never resharded"])
    return View(_data(found), _shown(found))


def _data(found: Resharding) -> dict[str, Any]:
    fields = {field.name: getattr(found, field.name) for field in attrs.fields(Resharding)}
    return {**fields, "active": found.active, "entries_left": found.entries_left}


def _shown(found: Resharding) -> list[RenderableType]:
    kept = "order kept" if found.ordered else "order not kept"
    head = (
        f"{found.stream}: {found.source} -> {found.target} shards, {found.state} (id {found.id}, epoch {found.epoch}, "
        f"{'producers wait' if found.quiesce else kept}), began {span(found.age_seconds * 1000)} ago, last step "
        f"{span(found.state_age_seconds * 1000)} ago{f', {found.reason}' if found.reason else ''}"
    )
    shown: list[RenderableType] = [head]
    if found.waits:
        made = table("waits for", "group", ">shard", ">entries", "what")
        for waiting in found.waits:
            row(made, waiting.group, waiting.shard, waiting.entries, waiting.what)
        shown.append(made)
    return shown


@click.command("scale", cls=MutationCommand)
@STREAM
@click.option("--shards", "count", type=click.IntRange(min=0), required=True, help="How many there shall be.")
@click.option("--unordered", is_flag=True, help="Do not hold entries back for the order of keys.")
@click.option("--quiesce", is_flag=True, help="Producers wait until every group has consumed all that is there.")
@_NO_WAIT
@_WAIT_TIMEOUT
def scale(session: Session, request: Request, *, stream: str, count: int, **given: Any) -> View:
    """Change the number of shards of a stream while producers and consumers run."""
    how = {"ordered": not given["unordered"] and not given["quiesce"], "quiesce": given["quiesce"]}
    if request.dry_run:
        plan = session.admin("a dry run").plan_scale(stream, shards=count, **how)
        view = would(request, _plan_text(plan), plan=plan)
        return View(view.data, [*view.shown, *_plan_shown(plan)], Exit.CONFLICT if plan.refused else Exit.OK)
    admin = session.admin(request.requested_by)
    begun = admin.scale(stream, shards=count, wait=False, **how, **request.words)
    return _carried_on(session, request, begun, given["no_wait"], given["wait_timeout"], admin.wait)


def _plan_text(plan: ScalePlan) -> str:
    if plan.refused:
        return f"be refused: {plan.refused}"
    return (
        f"change {plan.stream} from {plan.source} to {plan.target} shards: added {shards(plan.added)}, removed "
        f"{shards(plan.removed)}, {plan.moved_share:.0%} of the keys move"
    )


def _plan_shown(plan: ScalePlan) -> list[RenderableType]:
    made = table("before it ends", "group", ">entries to consume", ">members")
    for one in plan.groups:
        row(made, one.group, "?" if one.entries is None else one.entries, one.members)
    return [made, *plan.notes]


@click.command("rollback", cls=DestructiveCommand)
@STREAM
@click.option("--id", "resharding_id", help="Only if it is this one. Default: the one under way.")
@_NO_WAIT
@_WAIT_TIMEOUT
def rollback(session: Session, request: Request, *, stream: str, resharding_id: str | None, **given: Any) -> View:
    """Take the resharding under way back; nothing is lost by it."""
    found = _under_way(session, stream, resharding_id)
    text = f"take the resharding of {stream} from {found.source} to {found.target} shards back, which is {found.state}"
    if request.dry_run:
        return would(request, text, resharding=_data(found))
    confirm(session, f"{text[0].upper()}{text[1:]}?", yes=given["yes"])
    admin = session.admin(request.requested_by)
    begun = admin.rollback(found, wait=False, **request.words)
    return _carried_on(session, request, begun, given["no_wait"], given["wait_timeout"], admin.wait)


def _under_way(session: Session, stream: str, resharding_id: str | None) -> Resharding:
    found = session.monitor.resharding(stream)
    if found is None or (resharding_id is not None and found.id != resharding_id):
        raise NotFoundError("there is no such resharding", stream=stream, hint="See `redis-stream-coord migrations`.")
    return found


@click.command("wait", cls=CoordCommand)
@STREAM
@click.option("--id", "resharding_id", help="Only if it is this one. Default: the one under way, or the last one.")
@_WAIT_TIMEOUT
def wait(session: Session, *, stream: str, resharding_id: str | None, wait_timeout: float | None) -> View:
    """Carry the resharding under way on until it ends; also without any consumer. Needs the rights of WRITE."""
    found = _under_way(session, stream, resharding_id)
    admin = session.admin("redis-stream-coord wait")
    return _carried_on(session, None, found, False, wait_timeout, admin.wait)


def _carried_on(
    session: Session,
    request: Request | None,
    found: Resharding,
    no_wait: bool,
    timeout_seconds: float | None,
    carry_on: Callable[..., Resharding],
) -> View:
    """Wait for the end of a resharding, unless nobody wants to; show a person how far it is."""
    code = Exit.OK
    if not no_wait and found.active:
        try:
            with _progress(session, found) as told:
                found = carry_on(found, timeout_seconds=timeout_seconds, progress=told)
        except WaitTimeoutError as error:
            if not session.as_json:
                session.say(str(error))
            code = Exit.UNFINISHED
            found = session.monitor.resharding(found.stream) or found
    if not found.active and found.state not in _OVER_WELL:
        code = Exit.FAILED
    data = {
        **({} if request is None else {"request_id": request.request_id, "dry_run": False}),
        "resharding": _data(found),
    }
    return View(data, _shown(found), code)


@contextmanager
def _progress(session: Session, found: Resharding) -> Iterator[Callable[[Resharding], None] | None]:
    """Show a bar where a person waits: of the entries that are left to consume."""
    if session.as_json or not session.err.is_terminal:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, TimeElapsedColumn(), console=session.err, transient=True) as bar:
        task = bar.add_task(f"{found.source} -> {found.target} shards", total=None, left="")
        most = 0

        def told(now: Resharding) -> None:
            nonlocal most
            most = max(most, now.entries_left)
            first = f": {now.waits[0]}" if now.waits else ""
            left = f"{now.entries_left} entries left{first}" if now.entries_left or first else ""
            bar.update(task, description=now.state, total=most or None, completed=most - now.entries_left, left=left)

        yield told


COMMANDS = (migrations, scale, rollback, wait)
