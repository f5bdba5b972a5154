"""Planning and applying a desired state, as sagas over those of `Admin`. The decisions are those of `desired`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import commands, desired, reshard
from .commands import Saga
from .desired import Change, Desired, Plan
from .errors import NotFoundError
from .models import Layout, Resharding, Timings
from .routing import DEFAULT_PROTOCOL
from .scaling import Scaling

Progress = Callable[[Resharding], None]


def plan(sagas: Scaling, wanted: Desired, *, prune: bool) -> Saga[Plan]:
    """Compare what shall be with what there is; see `Admin.plan`."""
    layouts: dict[str, Layout | None] = {}
    for name in wanted.streams:
        try:
            layouts[name] = yield commands.layout(sagas.stream_keys(name))
        except NotFoundError:
            layouts[name] = None
    return desired.difference(wanted, layouts, prune=prune)


def apply(
    sagas: Scaling, planned: Plan, reason: str, wait: bool, progress: Progress | None, request_id: str | None
) -> Saga[tuple[Change, ...]]:
    """Carry a plan out; see `Admin.apply`.

    Each stream's record is moved on from the version that the plan was made of, before anything else: of two operators
    who apply at once, one does, and the other is told both versions.
    """
    request_id = request_id or sagas.settings.machine.word()
    for stream in sorted({change.stream for change in planned.changes}):
        changes = [change for change in planned.changes if change.stream == stream]
        yield from _revise(sagas, stream, changes, planned.revisions[stream], reason, f"{request_id}/apply")
        for change in changes:
            yield from _change(sagas, change, reason, wait, progress, f"{request_id}/{change.action}")
    return planned.changes


def _revise(
    sagas: Scaling, stream: str, changes: Sequence[Change], expected: int, reason: str, request_id: str
) -> Saga[None]:
    keys = sagas.stream_keys(stream)
    # Without the version: the same request again finds what it did before, and goes on.
    request = sagas.request(keys, "apply", reason, request_id, changes=[str(change) for change in changes])

    def work(recorded: str | None) -> Saga[None]:
        if recorded is None:
            yield commands.revise(keys, expected=expected, **request.said())

    yield from sagas.carry_out(request, work)


def _change(
    sagas: Scaling, change: Change, reason: str, wait: bool, progress: Progress | None, request_id: str
) -> Saga[None]:
    if change.action == "scale":
        assert change.shards is not None
        found = yield from sagas.scale(change.stream, change.shards, True, False, reason, request_id)
        if wait:
            yield from reshard.drive(sagas.stream_keys(change.stream), saga_id=found.id, progress=progress)
        return
    assert change.group is not None
    if change.action == "delete":
        yield from sagas.delete(change.stream, change.group, False, reason, request_id)
        return
    yield from sagas.create(
        change.stream,
        change.group,
        change.shards,
        "oldest",
        Timings(),
        DEFAULT_PROTOCOL,
        "all",
        False,
        reason,
        request_id,
    )
