"""Faults planted into reshardings; see `faults`."""

from __future__ import annotations

# ruff: noqa: E501 - what stands in a script is quoted as it stands there
from collections.abc import Callable
from typing import Any
from unittest import mock

import attrs

from redis_stream_coord import reshard
from redis_stream_coord.attempts import Course
from redis_stream_coord.commands import SagaRecord

from .planting import Fault, instead


def _said(**changes: Any) -> Callable[[Any], Any]:
    """What `standing` finds is not what is there."""
    return lambda real: lambda *args, **options: attrs.evolve(real(*args, **options), **changes)


def _all_consumed(real: Any) -> Any:
    def patched(view: Any, name: str, evidence: Any) -> Any:
        return attrs.evolve(real(view, name, evidence), consumed=view.barriers, passed=True)

    return patched


def _blind(real: Any) -> Any:
    """A shard that gave no answer counts as closed."""

    def patched(*args: Any) -> Any:
        yield from real(*args)
        return {}

    return patched


_DECIDE = "if not route.cut_of({ cuts = cuts }, s.epoch) then refuse('NOT_READY', 'no cut of shard ' .. int(shard)) end"

RESHARDING = (
    Fault(
        "no barrier in the read",
        "11",
        (("read", "local limit = route.barrier(route.read(key.route), stored.passed)", "local limit = nil"),),
    ),
    Fault(
        "a driver that slept opens a route",
        "11",
        (("open", "if order > 0 then", "if false then"), ("open", "if now.epoch ~= arg.epoch then", "if false then")),
    ),
    Fault("a driver that slept closes a route again", "11", (("close", "if order > 0 then", "if false then"),)),
    Fault(
        "the close notes no cut of what is there",
        "11",
        (("close", "local id, kept = position.last_id(key.stream), {}", "local id, kept = '0-0', {}"),),
    ),
    Fault(
        "a second close notes a smaller cut",
        "11",
        (
            (
                "close",
                "if order == 0 then return { 'OK', route.cut_of(now, arg.epoch) or '0-0' } end",
                "if order == 0 then return { 'OK', '0-0' } end",
            ),
            ("note_cuts", "elseif position.less(own.id, arg.cuts[i + 1]) then", "else"),
        ),
    ),
    Fault(
        "decided without all cuts",
        "11",
        (("decide", _DECIDE, ""),),
        (instead(reshard, "_close", _blind),),
        place="`reshard.py`",
    ),
    Fault(
        "the event id is looked up after the route",
        "10",
        (("publish", "  if known then", "  if known and not word then"),),
    ),
    Fault(
        "the layout is not compared in the publish",
        "11",
        (("publish", "route[1] ~= arg.layout and 'STALE_ROUTE' or nil", "nil"),),
    ),
    Fault(
        "layouts before are not asked for event ids",
        "10",
        python=(instead(Course, "before", lambda real: lambda self, key, remembered=(): []),),
        place="`publishing.py`",
    ),
    Fault(
        "the record forgets the layouts before",
        "10",
        (
            (
                "layout",
                "answer[#answer + 1] = layout.ended_since(record, clock.now_ms() - arg.window_ms)",
                "answer[#answer + 1] = {}",
            ),
        ),
    ),
    Fault(
        "evidence ignores what is pending",
        "10",
        (
            (
                "evidence",
                "first = pending > 0 and summary[2] or (after and after[1] or '')",
                "pending, first = 0, after and after[1] or ''",
            ),
        ),
    ),
    Fault(
        "evidence ignores what was not delivered",
        "10",
        (
            (
                "evidence",
                "first = pending > 0 and summary[2] or (after and after[1] or '')",
                "first = pending > 0 and summary[2] or ''",
            ),
        ),
    ),
    Fault(
        "a removed shard is taken before it is drained",
        "10",
        python=(instead(reshard, "standing", _said(drained=True)),),
        place="`reshard.py`",
    ),
    Fault(
        "a group passes before it has consumed",
        "11",
        python=(instead(reshard, "standing", _all_consumed),),
        place="`reshard.py`",
    ),
    Fault(
        "remaining shards hold nothing on the way in",
        "11",
        (("lib/saga", "  return shard < s.to\nend", "  return false\nend"),),
        (
            lambda: mock.patch.object(
                SagaRecord, "holds", lambda self, shard: self.target > self.source and shard in self.added
            ),
        ),
        place="`reshard.py`",
    ),
    Fault(
        "older words about readable shards count",
        "7",
        (
            (
                "readable",
                "local newer = arg.epoch > g.layout_epoch or (arg.epoch == g.layout_epoch and arg.step > g.layout_step)",
                "local newer = true",
            ),
        ),
    ),
    Fault("the passed epoch goes back", "11", (("pass", "if stored.passed >= arg.epoch then", "if false then"),)),
    Fault(
        "the epoch is not compared in the record",
        "6",
        (
            (
                "lib/saga",
                "if s and s.id == arg.saga and s.epoch == arg.epoch and s.state == state then return s end",
                "if s and s.state == state then return s end",
            ),
        ),
    ),
    Fault(
        "a takeover forgets what was passed",
        "11",
        (("claim", "  'nonce', arg.nonce)\nreturn", "  'nonce', arg.nonce, 'passed', '0')\nreturn"),),
    ),
    Fault(
        "an abandoned cut-over draws no fresh epoch",
        "6",
        (
            (
                "lib/saga",
                "local epoch, fields = draw(record), {}",
                "local epoch, fields = s.epoch, {}",
            ),
        ),
    ),
    Fault(
        "a shard that went is trimmed as if nobody needed it",
        "10",
        (
            (
                "trim_removed",
                "(position.needed_from(key.stream) or position.last_id(key.stream))",
                "position.last_id(key.stream)",
            ),
        ),
    ),
)
