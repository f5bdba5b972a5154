"""Faults planted on purpose, each to be switched on alone: the judge has to find every one of them.

Most change the text of a real script; the others what a session or a worker does. A place that is to be changed and is
not there is an error, so that the catalogue follows the code.
"""

from __future__ import annotations

# ruff: noqa: E501, ISC004 - what stands in a script is quoted as it stands there
import contextlib
from types import MappingProxyType
from typing import Any
from unittest import mock

from redis_stream_coord import session
from redis_stream_coord.outstanding import Outstanding
from redis_stream_coord.session import Session, ShardInput, ShardState

from .member import Process
from .planting import Fault, instead
from .resharding_faults import RESHARDING
from .work import Work


def _claimed_again() -> contextlib.AbstractContextManager[Any]:
    changed = {**session.SHARD_TRANSITIONS, (ShardState.REVOKED, ShardInput.CANCEL): ShardState.CLAIMING}
    return mock.patch.object(session, "SHARD_TRANSITIONS", MappingProxyType(changed))


def _lease_from_reply(answered: Any) -> Any:
    return lambda self, request, outcome, sent_at: answered(self, request, outcome, self.now)


def _no_look_before_the_answer(answered: Any) -> Any:
    def patched(self: Process, request: Any, outcome: Any, sent_at: float) -> None:
        with mock.patch.object(Session, "tick", return_value=[]):
            answered(self, request, outcome, sent_at)

    return patched


def _forgets(lose: Any) -> Any:
    return lambda self, reason, ended=True: lose(self, reason)


def _drained_at_once(close: Any) -> Any:
    def patched(self: Work) -> None:
        if self.stopping and not self.ended and not self.calling and self.slots and not self.refused:
            self.ended = True
            self.owner.drained(self)
        else:
            close(self)

    return patched


def _acknowledged_first(start: Any) -> Any:
    def patched(self: Work) -> None:
        before = [slot for slot in self.slots if slot.running]
        start(self)
        for slot in self.slots:
            if slot.running and slot not in before:
                self._acknowledge(slot.entry.id)

    return patched


def _no_lease(reads: Any) -> Any:
    return lambda self, held, now: reads(self, held, self.lease_until - 1.0)


def _forgets_ledger(init: Any) -> Any:
    def patched(self: Work, owner: Any, keys: Any, fence: Any, ledger: Any, **options: Any) -> None:
        init(self, owner, keys, fence, type(ledger)(), **options)

    return patched


FAULTS = (
    # --- who owns what ----------------------------------------------------------------------------------------------
    Fault(
        "assign before revoke",
        "2",
        (
            (
                "lib/rebalance",
                "    if s.state == 'assigned' and s.holder ~= id then\n      revoke(g, log, s, now)\n    elseif s.state == 'revoking' and s.holder == id then\n      keep(log, s, g.members[id])",
                "    if s.state == 'assigned' and s.holder ~= id then\n      free(g, s)\n    elseif s.state == 'revoking' and s.holder == id then\n      keep(log, s, g.members[id])",
            ),
        ),
    ),
    Fault(
        "absence read as release",
        "5",
        (
            (
                "heartbeat",
                "leases.renew(live, g, me.id, now)\n",
                "leases.renew(live, g, me.id, now)\nfor index in pairs(arg.epoch > 0 and me.assigned or {}) do\n"
                "  if not owned[index] then rebalance.free(g, group.shard(g, index)) end\nend\n",
            ),
        ),
    ),
    Fault(
        "REVOKED not matched by its token",
        "2",
        (
            (
                "lib/rebalance",
                "if m.revoking[index] ~= token then return end",
                "if not m.revoking[index] then return end",
            ),
        ),
    ),
    Fault(
        "grants while revoking",
        "2",
        (
            (
                "lib/rebalance",
                "if not m or m.state ~= 'active' or next(m.revoking) then return end",
                "if not m or m.state ~= 'active' then return end",
            ),
        ),
    ),
    Fault(
        "token not raised on a static restart",
        "3",
        (
            (
                "lib/membership",
                "    s.token, s.dirty = rebalance.draw(g), true\n    m.assigned[index] = s.token\n",
                "    s.dirty = true\n",
            ),
        ),
    ),
    Fault(
        "token of a shard, not of the group",
        "3",
        (
            (
                "lib/rebalance",
                "s.holder, s.state, s.token, s.hold_until_ms, s.dirty = m.id, 'assigned', draw(g), 0, true",
                "s.holder, s.state, s.token, s.hold_until_ms, s.dirty = m.id, 'assigned', s.token + 1, 0, true",
            ),
        ),
    ),
    Fault(
        "a leaving member loses everything at once",
        "2",
        (
            (
                "lib/membership",
                "rebalance.revoke(g, log, group.shard(g, index), now)",
                "rebalance.free(g, group.shard(g, index))",
            ),
        ),
    ),
    Fault(
        "a refused claim frees whatever is held",
        "2",
        (
            (
                "lib/membership",
                "  if m.assigned[index] ~= token then return end\n  local s",
                "  if not m.assigned[index] then return end\n  local s",
            ),
        ),
    ),
    # --- sessions -----------------------------------------------------------------------------------------------------
    Fault(
        "a session replaced without naming it",
        "4",
        (("lib/membership", "if m and m.nonce ~= arg.replaces then refuse('SESSION_EXISTS', m.nonce) end", ""),),
    ),
    Fault(
        "group epoch not raised by a join",
        "6",
        (
            (
                "lib/membership",
                "m.id], g.member_count, g.group_epoch = m, g.member_count + 1, g.group_epoch + 1",
                "m.id], g.member_count = m, g.member_count + 1",
            ),
        ),
    ),
    Fault(
        "member epoch used again on a rejoin",
        "6",
        (
            (
                "lib/membership",
                "m.nonce, m.epoch, m.joined_ms, m.state, m.dirty = arg.nonce, g.version + 1, now, 'active', true",
                "m.nonce, m.epoch, m.joined_ms, m.state, m.dirty = arg.nonce, 1, now, 'active', true",
            ),
        ),
    ),
    Fault(
        "a lost reply fences",
        "8",
        (
            (
                "lib/membership",
                "if not g.round.open and arg.epoch < m.epoch - 1 then",
                "if not g.round.open and arg.epoch < m.epoch then",
            ),
        ),
    ),
    Fault(
        "short answer although something changed",
        "8",
        (
            (
                "heartbeat",
                "local unchanged = arg.epoch == me.epoch and not me.changed and",
                "local unchanged = arg.epoch == me.epoch and",
            ),
        ),
    ),
    Fault(
        "a late copy of a join swallows a change",
        "8",
        (
            ("heartbeat", "if me.changed and (arg.epoch == me.epoch or joined) and not", "if me.changed and not"),
            ("heartbeat", "if not joined then me.epoch", "if arg.epoch > 0 then me.epoch"),
        ),
    ),
    Fault(
        "expiry although Redis was away",
        "2",
        (
            (
                "lib/leases",
                "local away = newest[2] and tonumber(newest[2]) < now + g.lease_ms / 2",
                "local away = false",
            ),
        ),
    ),
    Fault(
        "nobody expires",
        "9",
        (("lib/rebalance", "for _, id in ipairs(held_leases.expired) do", "for _, id in ipairs({}) do"),),
    ),
    Fault(
        "lost leases expire their members",
        "2",
        (
            (
                "lib/leases",
                "if m and (leases.away or not redis.call('ZSCORE', leases.key, id)) then leases.set[id] = now + g.lease_ms end",
                "if m and not leases.set[id] and not redis.call('ZSCORE', leases.key, id) then leases.expired[#leases.expired + 1] = id end",
            ),
        ),
    ),
    Fault("lease measured from the reply", "1", python=(instead(Process, "_answered", _lease_from_reply),)),
    Fault(
        "a lapsed lease not noticed before the answer",
        "1",
        python=(instead(Process, "_answered", _no_look_before_the_answer),),
    ),
    Fault("entries handed out after the lease", "1", python=(instead(Session, "reads", _no_lease),)),
    Fault("a token read again after it was reported as drained", "2", python=(_claimed_again,)),
    Fault("a token read again after a lapsed lease", "2", python=(instead(Session, "_lose", _forgets),)),
    Fault("drained while a handler runs", "2", python=(instead(Work, "close", _drained_at_once),)),
    # --- fences and entries -------------------------------------------------------------------------------------------
    Fault(
        "no fence on read",
        "4",
        (("read", "local stored = fence.check(key.fence, arg)", "local stored = fence.read(key.fence)"),),
    ),
    Fault("no fence on ack", "4", (("ack", "fence.check(key.fence, arg)\n", ""),)),
    Fault("a claim is never refused", "3", (("claim", "then fence.refuse_for(stored) end", "then end"),)),
    Fault(
        "the fence does not compare sessions",
        "4",
        (
            (
                "lib/fence",
                "or fence.token ~= arg.token or fence.nonce ~= arg.nonce then",
                "or fence.token ~= arg.token then",
            ),
        ),
    ),
    Fault(
        "takeover reads only what is new",
        "10",
        (
            (
                "read",
                "local caught_up = #page <= arg.count",
                "if arg.after == '0-0' then page = {} end\nlocal caught_up = #page <= arg.count",
            ),
        ),
    ),
    Fault(
        "a lost reply loses what it brought",
        "10",
        (
            (
                "read",
                "local caught_up = #page <= arg.count",
                "if arg.after ~= '0-0' then page = {} end\nlocal caught_up = #page <= arg.count",
            ),
        ),
    ),
    Fault(
        "consumers deleted with what is pending",
        "10",
        (
            (
                "read",
                "local wait_after, held = '', 0\n",
                "for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', key.stream, arg.group)) do\n  if info[2] ~= arg.member then redis.call('XGROUP', 'DELCONSUMER', key.stream, arg.group, info[2]) end\nend\nlocal wait_after, held = '', 0\n",
            ),
        ),
    ),
    Fault(
        "position is the highest acknowledged id",
        "10",
        (
            (
                "ack",
                "local now = known and position.of(key.stream, arg.group) or ''",
                "local now = known and arg.ids[#arg.ids] or ''",
            ),
        ),
    ),
    Fault(
        "a vanished consumer group begins at the end",
        "10",
        (
            (
                "read",
                "redis.call('XGROUP', 'CREATE', key.stream, arg.group, stored.position)",
                "redis.call('XGROUP', 'CREATE', key.stream, arg.group, '$')",
            ),
        ),
    ),
    Fault("acknowledged before the handler is done", "10", python=(instead(Work, "start", _acknowledged_first),)),
    Fault("an entry in a handler is handed out again", "11", python=(instead(Work, "__init__", _forgets_ledger),)),
    Fault(
        "trimmed as soon as one group is done",
        "10",
        (
            (
                "trim",
                "local needed = position.needed_from(key.stream)",
                "local needed = position.of(key.stream, arg.groups[1])",
            ),
        ),
    ),
    Fault(
        "event ids are not remembered",
        "10",
        (("publish", "if id and event_id ~= '' then remember(event_id, id) end", ""),),
    ),
    # --- operators ----------------------------------------------------------------------------------------------------
    Fault(
        "no tombstone in the fence of a deleted group",
        "4",
        (
            (
                "retire",
                "redis.call('HSET', key.fence, 'incarnation', incarnation, 'token', '0', 'member', '-', 'nonce', '-')\n",
                "",
            ),
        ),
    ),
    Fault(
        "a late retirement hits the next lifecycle",
        "10",
        (
            (
                "retire",
                "if stored.incarnation > arg.incarnation then return { 'OK', int(stored.incarnation), 0 } end\n",
                "",
            ),
        ),
    ),
    Fault(
        "a group is moved under its owner",
        "11",
        (
            (
                "seek",
                "redis.call('HSET', key.fence, 'incarnation', int(stored.incarnation), 'token', int(stored.token), 'member', '-',\n  'nonce', 'sought', 'position', id)\n",
                "",
            ),
        ),
    ),
    # --- Redis that went back -----------------------------------------------------------------------------------------
    Fault(
        "witnesses of a later record are not heard",
        "6",
        (
            (
                "lib/membership",
                "if correction.witnessed(g, m, arg) then",
                "if false then",
            ),
        ),
    ),
    Fault(
        "nobody looks for lost acknowledgements",
        "9",
        python=(instead(Outstanding, "due", lambda due: lambda self: False),),
        place="`outstanding.py`",
    ),
    # --- resharding ---------------------------------------------------------------------------------------------------
    *RESHARDING,
)
