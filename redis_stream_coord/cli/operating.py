"""Commands for an operator at work: freeze, unfreeze, reconcile, limit."""

from __future__ import annotations

import click

from .changing import done, would
from .looking import GROUP, STREAM
from .output import View
from .session import MutationCommand, Request, Session


@click.command("freeze", cls=MutationCommand)
@STREAM
@GROUP
def freeze(session: Session, request: Request, *, stream: str, group: str) -> View:
    """Stop grants and changes of a group while somebody works on it. Members keep what they have."""
    if request.dry_run:
        return would(request, f"freeze {stream}/{group}")
    session.admin(request.requested_by).freeze(stream, group=group, **request.words)
    return done(request, f"{stream}/{group} is frozen; end it with `redis-stream-coord unfreeze {stream} {group}`")


@click.command("unfreeze", cls=MutationCommand)
@STREAM
@GROUP
def unfreeze(session: Session, request: Request, *, stream: str, group: str) -> View:
    """End a freeze; what was held back is granted with the next heartbeat."""
    if request.dry_run:
        return would(request, f"end the freeze of {stream}/{group}")
    session.admin(request.requested_by).unfreeze(stream, group=group, **request.words)
    return done(request, f"{stream}/{group} is not frozen any more")


@click.command("reconcile", cls=MutationCommand)
@STREAM
@GROUP
def reconcile(session: Session, request: Request, *, stream: str, group: str) -> View:
    """Do once what any heartbeat does: expire, fence, compute the target, grant. For where nobody sends one."""
    if request.dry_run:
        findings = [one for one in session.monitor.triage(stream, group=group) if one.level != "ok"]
        text = f"reconcile {stream}/{group}, of which triage says: " + (
            "; ".join(f.text for f in findings) or "all is well"
        )
        return would(request, text)
    events = session.admin(request.requested_by).reconcile(stream, group=group, **request.words)
    return done(request, f"{stream}/{group}: {', '.join(events) or 'nothing was due'}", events=events)


@click.command("limit", cls=MutationCommand)
@STREAM
@click.argument("group", required=False)
@click.option("--principal", default="*", show_default=True, help="A Redis user; *: all without a limit of their own.")
@click.option("--mutations", type=click.IntRange(min=0), help="So many in --per-seconds.")
@click.option("--per-seconds", type=click.IntRange(min=1), default=60, show_default=True, help="Of --mutations.")
@click.option("--none", is_flag=True, help="No limit of its own any more.")
def limit(
    session: Session,
    request: Request,
    *,
    stream: str,
    group: str | None,
    principal: str,
    mutations: int | None,
    per_seconds: int,
    none: bool,
) -> View:
    """Change how many changes a Redis user may ask for; without a limit set it is 60 in 60 seconds."""
    if none is (mutations is not None):
        raise click.UsageError("give either --mutations N or --none")
    where = stream if group is None else f"{stream}/{group}"
    said = "no limit of its own" if none else f"{mutations} changes in {per_seconds} s"
    if request.dry_run:
        return would(request, f"give {principal} on {where}: {said}")
    session.admin(request.requested_by).limit(
        stream, group=group, principal=principal, mutations=mutations, per_seconds=per_seconds, **request.words
    )
    return done(request, f"{principal} on {where}: {said}")


COMMANDS = (freeze, unfreeze, reconcile, limit)
