"""Commands that look: each prints what `Monitor` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import click
from rich.console import RenderableType
from rich.text import Text

from ..group_view import GroupView, MemberView
from ..views import (
    AssignmentView,
    AuditEntry,
    EventEntry,
    RemovedShard,
    RoutingView,
    ShardStatus,
    StoredEntry,
    SystemHealth,
    member_state,
)
from .exits import Exit
from .output import View, moment, plain, row, shards, span, table
from .session import ReadCommand, Session

STREAM = click.argument("stream")
GROUP = click.argument("group")
_COLOURS = {"OK": "green", "EMPTY": "yellow", "DEGRADED": "red", "UNAVAILABLE": "red", "overdue": "red"}


def coloured(word: str) -> Text:
    """Show a status word in its colour."""
    return Text(word, style=_COLOURS.get(word, ""))


def problems(found: Sequence[str]) -> list[RenderableType]:
    """Show a sentence for each thing that is not as it should be."""
    return [Text.assemble(("! ", "bold red"), problem) for problem in found]


@click.command("health", cls=ReadCommand)
@click.option("--members-required", is_flag=True, help="A group without members is a problem too.")
def health(session: Session, *, members_required: bool) -> View:
    """Say whether Redis answers and all groups are well. Exit code 10 if not, 9 without Redis."""
    report = session.monitor.health()
    made = table(None, "stream", "group", "status", ">members", ">shards", "without owner", ">version")
    empty = False
    for one in report.groups:
        empty = empty or one.status == "EMPTY"
        cells = (one.members, one.shards, shards(one.unowned), one.version)
        row(made, one.stream, one.group, coloured(one.status), *cells)
    wrong = [*report.problems, *(f"{g.stream}/{g.group}: {p}" for g in report.groups for p in g.problems)]
    head = Text.assemble("Redis ", coloured(report.status))
    if report.latency_ms is not None:
        head.append(f", answered in {report.latency_ms:.1f} ms")
    code = Exit.OK if report.ok and not (empty and members_required) else Exit.PROBLEMS
    shown = [head, *([made] if report.groups else []), *problems(wrong)]
    return View(_health_data(report), shown, Exit.UNAVAILABLE if report.status == "UNAVAILABLE" else code)


def _health_data(report: SystemHealth) -> dict[str, Any]:
    return {
        "status": report.status,
        "problems": report.problems,
        "latency_ms": report.latency_ms,
        "groups": report.groups,
    }


@click.command("groups", cls=ReadCommand)
def groups(session: Session) -> View:
    """List all groups."""
    found = session.monitor.groups()
    made = table(None, "stream", "group")
    for name in found:
        row(made, *name)
    return View([{"stream": stream, "group": group} for stream, group in found], [made] if found else ["no groups"])


@click.command("describe", cls=ReadCommand)
@STREAM
@GROUP
def describe(session: Session, *, stream: str, group: str) -> View:
    """Show the whole record of a group."""
    view = session.monitor.describe(stream, group=group)
    timings = view.timings
    head = (
        f"{stream}/{group}: incarnation {view.incarnation}, version {view.version}, group epoch {view.group_epoch}, "
        f"assignment epoch {view.assignment_epoch}, heartbeat {timings.heartbeat_seconds:g} s, "
        f"lease {timings.lease_seconds:g} s, rebalance timeout {timings.rebalance_seconds:g} s"
    )
    found = view.violations()
    shown = [head, members_table(list(view.members.values())), shards_of_record(view), *problems(found)]
    return View({"group": view, "violations": found}, shown, Exit.PROBLEMS if found else Exit.OK)


def members_table(members: Sequence[MemberView]) -> RenderableType:
    made = table("members", "member", "state", ">lease ends in", ">weight", "owns", "drains", "waits for")
    for member in members:
        lease = None if member.lease_remaining_ms is None else span(member.lease_remaining_ms)
        cells = (lease, f"{member.weight:g}", shards(member.assigned), shards(member.revoking), shards(member.pending))
        row(made, member.id, coloured(member_state(member)), *cells)
    return made if members else "no members"


def shards_of_record(view: GroupView) -> RenderableType:
    made = table("shards", ">shard", "state", "holder", "target", ">token")
    for shard in view.shards.values():
        row(made, shard.index, shard.state, shard.holder, shard.target, shard.token)
    return made


@click.command("members", cls=ReadCommand)
@STREAM
@GROUP
def members(session: Session, *, stream: str, group: str) -> View:
    """Show the members of a group: who is alive, and what each has."""
    found = session.monitor.members(stream, group=group)
    return View([{"status": member_state(one), **plain(one)} for one in found], [members_table(found)])


@click.command("assignments", cls=ReadCommand)
@STREAM
@GROUP
def assignments(session: Session, *, stream: str, group: str) -> View:
    """Show who should have what, who has it, what is being drained. Exit code 10 if an invariant is violated."""
    view = session.monitor.assignments(stream, group=group)
    head = (
        f"{stream}/{group}: group epoch {view.group_epoch}, assignment epoch {view.assignment_epoch}, "
        f"{'converged' if view.converged else 'not converged'}"
    )
    made = table(None, ">shard", "target", "current")
    for index, target in view.target.items():
        row(made, index, target, view.current[index])
    shown: list[RenderableType] = [head, made, *_revokes(view), *problems(view.violations)]
    data = {**plain(view), "converged": view.converged}
    return View(data, shown, Exit.PROBLEMS if view.violations else Exit.OK)


def _revokes(view: AssignmentView) -> list[RenderableType]:
    if not view.revokes:
        return []
    made = table("being drained", ">shard", "holder", "for", ">since", ">fenced in")
    for one in view.revokes:
        row(made, one.shard, one.holder, one.target, span(one.waited_ms), span(one.remaining_ms))
    return [made]


@click.command("routing", cls=ReadCommand)
@STREAM
@click.option("--expected-shards", type=click.IntRange(min=0), help="Another number is a problem.")
def routing(session: Session, *, stream: str, expected_shards: int | None) -> View:
    """Show where producers publish to. Exit code 10 if a shard does not agree with the record."""
    view = session.monitor.routing(stream)
    if expected_shards is not None and view.layout.shards != expected_shards:
        problem = f"producers see {view.layout.shards} shards, and {expected_shards} are expected"
        view = attrs.evolve(view, problems=(problem, *view.problems))
    return View(view, _routing(stream, view), Exit.PROBLEMS if view.problems else Exit.OK)


def _routing(stream: str, view: RoutingView) -> list[RenderableType]:
    layout = view.layout
    head = (
        f"{stream}: {layout.shards} shards by {layout.routing}, epoch {layout.epoch}, layout {layout.layout}, "
        f"{layout.state}, retention {layout.retention}, groups {' '.join(layout.groups) or '-'}"
    )
    made = table(None, ">shard", "route", ">epoch", "layout")
    for route in view.routes:
        row(made, route.shard, route.state, route.epoch, route.layout)
    return [head, made, *problems(view.problems)]


@click.command("shards", cls=ReadCommand)
@STREAM
@GROUP
def shards_command(session: Session, *, stream: str, group: str) -> View:
    """Show each shard: length, pending, lag (? is unknown), memory, owner, slot."""
    found = session.monitor.shards(stream, group=group)
    columns = (
        ">shard",
        "owner",
        "state",
        ">length",
        ">pending",
        ">lag",
        ">oldest pending",
        ">memory",
        ">slot",
        "route",
    )
    made = table(None, *columns)
    for one in found:
        _shard(made, one)
    return View([_shard_data(one) for one in found], [made])


def _shard(made: Any, status: ShardStatus) -> None:
    reading = status.reading
    state = "not read" if status.record is None else status.record.state
    row(
        made,
        status.shard,
        status.owner,
        state if reading.exists else Text("stream is gone", style="red"),
        reading.length if reading.exists else None,
        reading.pending if reading.has_group else Text("no group", style="red"),
        "?" if reading.lag is None else reading.lag,
        None if reading.oldest is None else span(reading.oldest.idle_ms),
        "?" if reading.memory_bytes is None else f"{reading.memory_bytes / 1024:.1f} KiB",
        reading.slot,
        reading.route.state,
    )


def _shard_data(status: ShardStatus) -> dict[str, Any]:
    return {"shard": status.shard, "owner": status.owner, "record": status.record, "reading": status.reading}


@click.command("removed", cls=ReadCommand)
@STREAM
def removed(session: Session, *, stream: str) -> View:
    """Show what lies on shards that the layout has no more: entries, memory, and what keeps them there."""
    found = session.monitor.removed(stream)
    return View(found, [f"{in_all(found)} of {stream}", *removed_table(found)])


def in_all(found: Sequence[RemovedShard]) -> str:
    """Say how much lies on removed shards together."""
    known = [one.memory_bytes for one in found]
    size = "?" if None in known else f"{sum(filter(None, known)) / 1024:.1f} KiB"
    return f"{sum(one.entries for one in found)} entries ({size}) on {len(found)} removed shards"


def removed_table(found: Sequence[RemovedShard]) -> list[RenderableType]:
    """Show removed shards, and below what keeps entries there."""
    made = table(None, ">shard", ">entries", ">memory", ">event ids", "route", ">since epoch")
    for one in found:
        memory = "?" if one.memory_bytes is None else f"{one.memory_bytes / 1024:.1f} KiB"
        row(made, one.shard, one.entries, memory, one.event_ids, one.route, one.epoch)
    return [*([made] if found else []), *(str(waiting) for one in found for waiting in one.waits)]


@click.command("messages", cls=ReadCommand)
@STREAM
@click.option("--group", help="Also say to which member of this group an entry is delivered.")
@click.option("--shard", type=click.IntRange(min=0), help="Look into this shard only.")
@click.option("--id", "entry_id", help="Search for the entry with this id.")
@click.option("--event-id", help="Search for the entry with this event id, as far as its shard remembers.")
@click.option("--after", help="Begin beyond this id.")
@click.option("--count", type=click.IntRange(min=1), default=10, show_default=True, help="At most so many of a shard.")
@click.option("--newest", is_flag=True, help="Begin with the newest.")
def messages(session: Session, *, stream: str, **asked: Any) -> View:
    """Look at entries as they lie in the shards; nothing is delivered. Exit code 3 if a search finds none."""
    found = session.monitor.messages(stream, **asked)
    made = table(None, ">shard", "id", "added (UTC)", "key", "delivered to", "fields")
    for one in found:
        row(made, *_entry(one))
    searched = asked["entry_id"] is not None or asked["event_id"] is not None
    code = Exit.NOT_FOUND if searched and not found else Exit.OK
    return View(found, [made] if found else ["no entries"], code)


def _entry(entry: StoredEntry) -> tuple[object, ...]:
    pending = entry.pending
    to = None if pending is None else f"{pending.consumer} ({pending.deliveries}x, {span(pending.idle_ms)} ago)"
    fields = " ".join(f"{name}={value.decode('utf-8', 'backslashreplace')}" for name, value in entry.fields.items())
    key = None if entry.key is None else entry.key.decode("utf-8", "backslashreplace")
    return entry.shard, entry.id, moment(entry.at_ms), key, to, fields


_COUNT = click.option("--count", type=click.IntRange(min=1), default=20, show_default=True, help="At most so many.")


@click.command("audit", cls=ReadCommand)
@STREAM
@click.argument("group", required=False)
@_COUNT
def audit(session: Session, *, stream: str, group: str | None, count: int) -> View:
    """Show who changed what and why, newest first. Without GROUP: changes of the stream itself."""
    found = session.monitor.audit(stream, group=group, count=count)
    made = table(None, "when (UTC)", "action", "outcome", "detail", "requested by", "user", "reason", "request id")
    for one in found:
        row(made, *_audited(one))
    return View(found, [made] if found else ["nothing was changed yet"])


def _audited(entry: AuditEntry) -> tuple[object, ...]:
    outcome = entry.outcome if entry.outcome == "accepted" else Text(f"{entry.outcome} {entry.word}", style="red")
    who = (entry.requested_by, entry.principal, entry.reason, entry.request_id)
    return moment(entry.at_ms), entry.action, outcome, entry.detail or None, *who


@click.command("events", cls=ReadCommand)
@STREAM
@GROUP
@_COUNT
def events(session: Session, *, stream: str, group: str, count: int) -> View:
    """Show what happened in a group lately, newest first."""
    found = session.monitor.events(stream, group=group, count=count)
    made = table(None, "when (UTC)", "event", "member", ">shard", "details")
    for one in found:
        row(made, *_happened(one))
    return View(found, [made] if found else ["nothing has happened yet"])


def _happened(event: EventEntry) -> tuple[object, ...]:
    details = " ".join(f"{name}={value}" for name, value in event.fields.items())
    return moment(event.at_ms), event.type, event.member, event.shard, details


@click.command("compatibility", cls=ReadCommand)
def compatibility(session: Session) -> View:
    """Say whether this release can work with every record there is. Exit code 10 if not."""
    report = session.monitor.compatibility()
    head = f"release {report.release} speaks protocol {report.protocol}, and reads and writes schema {report.schema}"
    made = table(None, "stream", "group", "accepts protocol", "")
    for record in report.records:
        accepts = None if record.protocol is None else "{} to {}".format(*record.protocol)
        verdict = Text("fits", style="green") if record.problem is None else Text(record.problem, style="red")
        row(made, record.stream, record.group, accepts, verdict)
    data = {**plain(report), "ok": report.ok}
    return View(data, [head, *([made] if report.records else [])], Exit.OK if report.ok else Exit.PROBLEMS)


_LEVELS = {"ok": ("ok  ", "green"), "wait": ("wait", "yellow"), "act": ("ACT ", "bold red")}


@click.command("triage", cls=ReadCommand)
@STREAM
@GROUP
@click.option("--expected-shards", type=click.IntRange(min=0), help="How many shards producers should see.")
@click.option(
    "--drain-window",
    "drain_seconds",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="A resharding that takes longer is a problem.",
)
def triage(session: Session, *, stream: str, group: str, **given: Any) -> View:
    """Walk the runbook's checklists: who is stuck where, and what to do. Exit code 10 if somebody has to act."""
    found = session.monitor.triage(stream, group=group, **given)
    shown: list[RenderableType] = []
    for checklist in dict.fromkeys(one.checklist for one in found):
        shown.append(Text(f"{checklist} of {stream}/{group}", style="bold"))
        for one in found:
            if one.checklist == checklist:
                word, style = _LEVELS[one.level]
                shown.append(Text.assemble(f"  {one.step}. ", (word, style), f" {one.text}."))
                if one.next:
                    shown.append(f"          -> {one.next}")
    return View(found, shown, Exit.PROBLEMS if any(one.level == "act" for one in found) else Exit.OK)


COMMANDS = (
    compatibility,
    triage,
    health,
    groups,
    describe,
    members,
    assignments,
    routing,
    shards_command,
    removed,
    messages,
    audit,
    events,
)
