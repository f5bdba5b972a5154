"""Commands for GitOps and Terraform: what there shall be, as a file says it, and the way there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import RenderableType
from rich.text import Text

from ..desired import Desired, Plan, dump, load
from ..errors import ConfigError
from .exits import Exit
from .output import View
from .session import CoordCommand, DestructiveCommand, Request, Session, confirm

_FILE = click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
_PRUNE = click.option("--prune", is_flag=True, help="Delete groups of declared streams that are not declared.")


@click.command("plan", cls=CoordCommand)
@_FILE
@_PRUNE
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan down, for apply --plan.")
@click.option("--detailed-exitcode", is_flag=True, help="Exit code 11 if something has drifted.")
def plan(session: Session, *, file: Path, prune: bool, out: Path | None, detailed_exitcode: bool) -> View:
    """Compare FILE with what there is, and change nothing."""
    made = session.admin("a plan").plan(_read(file), prune=prune)
    if out is not None:
        out.write_text(dump(made), "utf-8")
    return View(_data(made), _shown(made), Exit.DRIFT if detailed_exitcode and made.changes else Exit.OK)


def _read(file: Path) -> Desired:
    with click.open_file(str(file), encoding="utf-8") as opened:
        return Desired.parse(opened.read())


def _data(made: Plan) -> dict[str, Any]:
    return {
        "changes": [{**attrs.asdict(change), "text": str(change)} for change in made.changes],
        "undeclared": [{"stream": stream, "group": group} for stream, group in made.undeclared],
        "busy": made.busy,
        "revisions": made.revisions,
    }


def _shown(made: Plan) -> list[RenderableType]:
    signs = {"create": ("+", "green"), "scale": ("~", "yellow"), "delete": ("-", "red")}
    shown: list[RenderableType] = [Text.assemble(signs[change.action], f" {change}") for change in made.changes] or [
        "nothing has drifted"
    ]
    deleted = {(change.stream, change.group) for change in made.changes if change.action == "delete"}
    shown += [
        f"  not declared, and left alone: group {group} of {stream}"
        for stream, group in made.undeclared
        if (stream, group) not in deleted
    ]
    shown += [f"  {stream} is being resharded at present: its number of shards is left alone" for stream in made.busy]
    return shown


@click.command("apply", cls=DestructiveCommand)
@_FILE
@_PRUNE
@click.option(
    "--plan", "planned", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="As plan --out made it."
)
@click.option("--no-wait", is_flag=True, help="Only begin reshardings; consumers carry them on.")
def apply(
    session: Session, request: Request, *, file: Path, prune: bool, planned: Path | None, no_wait: bool, yes: bool
) -> View:
    """Make what there is what FILE says: existence of groups, numbers of shards. Nothing that runs is touched.

    Exit code 4 if somebody has changed a stream since the plan was made: of two who apply at once, one does.
    """
    wanted, admin = _read(file), session.admin(request.requested_by or "a dry run")
    made = admin.plan(wanted, prune=prune) if planned is None else _reviewed(planned, wanted)
    if request.dry_run:
        data = {"request_id": request.request_id, "dry_run": True, **_data(made)}
        return View(data, _shown(made))
    if any(change.action == "delete" for change in made.changes):
        for one in _shown(made):
            session.err.print(one)
        confirm(session, "Delete these groups and what is pending in them?", yes=yes)
    done = admin.apply(made, wait=not no_wait, **request.words)
    data = {"request_id": request.request_id, "dry_run": False, **_data(made)}
    return View(data, [f"done: {change}" for change in done] or ["nothing has drifted"])


def _reviewed(planned: Path, wanted: Desired) -> Plan:
    made = load(planned.read_text("utf-8"))
    if set(made.revisions) != set(wanted.streams):
        raise ConfigError("the plan was made of another file", hint="Plan again.")
    return made


COMMANDS = (plan, apply)
