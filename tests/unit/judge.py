"""Looks at a group from outside, before and after each script that runs, and says what the protocol does not allow."""

from __future__ import annotations

from collections.abc import Iterable

from redis_stream_coord import commands
from redis_stream_coord.commands import Fence, HeartbeatReply, HeartbeatRequest
from redis_stream_coord.errors import CoordError, FencedError
from redis_stream_coord.group_view import GroupView, MemberView, ShardView
from redis_stream_coord.models import Held
from redis_stream_coord.session import Session
from tests.unit.fake import FakeGroup

_GROWING = ("version", "group_epoch", "assignment_epoch", "grant_counter")


class Judge:
    """Sends every command of a simulation and checks what became of the record.

    Raises (from everything): AssertionError: an invariant of the protocol does not hold.
    """

    def __init__(self, group: FakeGroup) -> None:
        self.group = group
        self.view = group.view()
        # Sessions that may go on believing for a while: replaced by name, or fenced for not having drained in time.
        self.excused: set[str] = set()
        # Sessions that are over. A copy of its join that comes late may begin one anew, as a member without a process.
        self.ended: set[str] = set()
        # Sessions that have not heard of the record since it went backwards.
        self.stale: set[str] = set()
        self.restores = 0
        self._epochs: dict[str, int] = {}
        self._granted: dict[int, int] = {}
        self._claimed: dict[int, tuple[int, str]] = {}

    # --- commands -----------------------------------------------------------------------------------------------------

    def heartbeat(self, request: HeartbeatRequest, *, fresh: bool) -> HeartbeatReply | CoordError:
        """Run a heartbeat. `fresh`: it is the latest of a session that waits for the answer."""
        before = self.view
        now_ms = self.group.clock.ms
        try:
            outcome: HeartbeatReply | CoordError = self.group.run(commands.heartbeat(self.group.keys, request))
        except CoordError as error:
            outcome = error
        self.view = after = self.group.view()
        self.ended |= _nonces(before) - _nonces(after)
        assert after.violations() == [], after.violations()
        self._check_growth(before, after)
        self._check_inputs(before, after, request)
        if isinstance(outcome, CoordError):
            self._check_refusal(before, after, request, outcome, now_ms, fresh=fresh)
        else:
            self._check_grants(after, now_ms)
        if isinstance(outcome, HeartbeatReply) and outcome.holdings is not None and outcome.status != "LEFT":
            mine = after.members[request.member]
            assert (outcome.holdings.assigned, outcome.holdings.revoking) == (mine.assigned, mine.revoking)
        for index, old in before.shards.items():
            self._check_shard(before, after, old, after.shards[index], request, now_ms)
        return outcome

    def repeat(self, request: HeartbeatRequest, first: HeartbeatReply) -> None:
        """Run an accepted heartbeat once more, as if its reply had been lost: the decision stays the same."""
        again = self.heartbeat(request, fresh=False)
        if first.status == "LEFT":
            assert isinstance(again, CoordError) or again.status == "LEFT"
            return
        assert isinstance(again, HeartbeatReply), f"the same request was answered by {first} and refused with {again}"
        assert again.epoch == first.epoch
        if first.holdings is not None and again.holdings is not None:
            assert again.holdings == first.holdings
            assert again.status == first.status

    def claim(self, fence: Fence) -> None:
        """Run a claim. Raises also: `CoordError`."""
        before = self._claimed.get(fence.shard, (0, ""))
        self.group.run(commands.claim(self.group.keys, fence))
        now = (fence.token, fence.nonce)
        assert now == before or fence.token > before[0], f"fence of {fence.shard} went from {before} to {now}"
        self._claimed[fence.shard] = now

    def read(self, fence: Fence) -> None:
        """Run a read. Raises also: `CoordError`."""
        last = self._claimed.get(fence.shard)
        try:
            self.group.run(commands.read(self.group.keys, fence, after="0-0", count=10, max_bytes=1000))
        except FencedError:
            assert last != (fence.token, fence.nonce), f"the last session that claimed {fence.shard} cannot read it"
            raise
        assert last == (fence.token, fence.nonce), f"{fence} reads a shard that {last} claimed"

    def lose_fence(self, shard: int) -> None:
        """Delete a fence, as a failover may."""
        self.group.client.delete(self.group.keys.fence(shard))
        self._claimed.pop(shard, None)

    def lose_leases(self) -> None:
        """Delete the leases, as a failover may."""
        self.group.client.delete(self.group.keys.leases)
        self.view = self.group.view()

    def went_back(self, sessions: set[str], *, fences: bool) -> None:
        """The record was restored from a copy, and perhaps the fences were too. Tokens stay used for ever."""
        self.view = self.group.view()
        self.stale |= sessions
        self.ended -= _nonces(self.view)
        self.restores += 1
        self._epochs.clear()
        if fences:
            stored = {shard: self.group.client.hgetall(self.group.keys.fence(shard)) for shard in self.view.shards}
            self._claimed = {
                shard: (int(fence[b"token"]), fence[b"nonce"].decode())
                for shard, fence in stored.items()
                if b"token" in fence
            }

    # --- invariants ---------------------------------------------------------------------------------------------------

    def check_believers(self, sessions: Iterable[Session]) -> None:
        """At most one session believes to own a shard at this moment, whatever the record says."""
        now = self.group.clock.seconds
        believers: dict[int, str] = {}
        for session in sessions:
            if session.nonce in self.excused or session.nonce in self.stale:
                continue
            for shard, token in session.held().items():
                if session.owns(Held(shard, token), now):
                    other = believers.setdefault(shard, session.nonce)
                    assert other == session.nonce, f"{other} and {session.nonce} both believe to own shard {shard}"

    def _check_growth(self, before: GroupView, after: GroupView) -> None:
        assert after.incarnation == before.incarnation
        for name in _GROWING:
            assert getattr(after, name) >= getattr(before, name), f"{name} went backwards"
        if after.version == before.version:
            assert (after.shards, _stored(after)) == (before.shards, _stored(before)), "changed under the same version"
        for member in after.members.values():
            old = before.members.get(member.id)
            if old is not None and old.nonce == member.nonce:
                assert member.epoch - old.epoch in (0, 1)
            else:
                assert member.epoch > max(before.version, self._epochs.get(member.id, 0)), "an epoch was used again"
            self._epochs[member.id] = member.epoch

    def _check_inputs(self, before: GroupView, after: GroupView, request: HeartbeatRequest) -> None:
        """Every input of the assignment bumps the group epoch; without one nothing is bumped and no target moves."""
        if before.round is not None and after.round is None:
            assert after.group_epoch > before.group_epoch, "a round was closed without a new group epoch"
            assert after.assignment_epoch == after.group_epoch
            return
        in_and_out = request.epoch == 0 and request.leaving  # joined and gone in one step
        surrendered = any(fence_token == 0 for _, _, fence_token in request.refused)
        same = _inputs(before) == _inputs(after)
        if same and not in_and_out and not surrendered:
            assert after.group_epoch == before.group_epoch, "the group epoch grew without an input"
        if not same:
            assert after.group_epoch > before.group_epoch, "an input changed without a new group epoch"
        assert after.assignment_epoch == after.group_epoch or after.round is not None
        if after.assignment_epoch == before.assignment_epoch:
            assert _targets(after) == _targets(before), "the target changed within an assignment epoch"

    def _check_grants(self, after: GroupView, now_ms: int) -> None:
        """Nobody waits for a shard that is free: housekeeping may not come by for a long time."""
        if after.round is not None:
            return
        for shard in after.shards.values():
            target = after.members.get(shard.target or "")
            ready = target is not None and target.state == "active" and not target.revoking
            assert not (ready and shard.state == "free" and shard.hold_until_ms <= now_ms), (
                f"shard {shard.index} is free, and its target {shard.target} does not get it"
            )

    def _check_refusal(
        self,
        before: GroupView,
        after: GroupView,
        request: HeartbeatRequest,
        error: CoordError,
        now_ms: int,
        *,
        fresh: bool,
    ) -> None:
        mine = before.members.get(request.member)
        timed_out = mine is not None and _overdue(before, mine, now_ms)
        if mine is not None and before.round is not None and mine.id in before.round.waits_for:
            timed_out = timed_out or before.round.due_ms <= now_ms
        if error.word == "UNKNOWN_MEMBER_ID" and timed_out:
            return  # fenced in this very heartbeat
        heard_of_a_stranger = before.round is not None and before.round != after.round
        assert after.version == before.version or heard_of_a_stranger, f"a refusal changed the record: {error}"
        if request.nonce in self.stale:
            return
        if not fresh:
            return
        if request.epoch == 0:
            assert error.word == "SESSION_EXISTS"
            assert mine is not None
            assert mine.nonce == error.detail != request.nonce
        elif error.word == "UNKNOWN_MEMBER_ID":
            assert mine is None, "a member was called unknown"
        else:
            assert error.word == "FENCED_MEMBER_EPOCH"
            alive = mine is not None and mine.nonce == request.nonce and request.nonce not in self.ended
            assert not alive, f"a healthy member was fenced: {error}"

    def _check_shard(
        self,
        before: GroupView,
        after: GroupView,
        old: ShardView,
        new: ShardView,
        request: HeartbeatRequest,
        now_ms: int,
    ) -> None:
        assert new.token >= old.token, f"the token of shard {old.index} went backwards"
        if new.token != old.token:
            assert after.round is None, f"shard {old.index} was granted in a correction round"
            assert self._granted.setdefault(new.token, old.index) == old.index, f"token {new.token} was given twice"
        if new.token == old.token and new.holder is not None:
            assert new.holder == old.holder, f"shard {old.index} changed hands under one token"
        if old.holder is None or (new.holder, new.token) == (old.holder, old.token):
            return
        holder = before.members[old.holder]
        spoke = request.nonce == holder.nonce and request.member == holder.id
        this = Held(old.index, old.token)
        reported = spoke and this in request.revoked and (old.state == "revoking" or request.leaving)
        refused = spoke and (this.shard, this.token) in [(shard, token) for shard, token, _ in request.refused]
        gone = after.members.get(holder.id) is None or after.members[holder.id].nonce != holder.nonce
        # A lease that was lost is given anew in full, and then has not expired.
        expired = gone and holder.lease_remaining_ms is not None and _deadline(before, holder) <= now_ms
        fenced = gone and _overdue(before, holder, now_ms)
        replaced = request.member == holder.id and request.epoch == 0 and request.replaces == holder.nonce
        if before.round is not None and holder.id in before.round.waits_for:
            fenced = fenced or (gone and before.round.due_ms <= now_ms)
        # In the heartbeat of its report a round may have been opened, too.
        not_held = spoke and this in request.not_held
        if fenced or replaced:
            self.excused.add(holder.nonce)
        assert reported or refused or expired or fenced or replaced or not_held, (
            f"shard {old.index} was taken from {holder.id} (token {old.token}, {old.state}) by {request}"
        )


def _nonces(view: GroupView) -> set[str]:
    return {member.nonce for member in view.members.values()}


def _stored(view: GroupView) -> list[tuple[object, ...]]:
    return [(m.id, m.nonce, m.epoch, m.weight, m.state, m.assigned, m.revoking) for m in view.members.values()]


def _inputs(view: GroupView) -> dict[str, float]:
    return {m.id: m.weight for m in view.members.values() if m.state == "active"}


def _targets(view: GroupView) -> dict[int, str | None]:
    return {index: shard.target for index, shard in view.shards.items()}


def _deadline(view: GroupView, member: MemberView) -> int:
    assert member.lease_remaining_ms is not None
    return view.now_ms + member.lease_remaining_ms


def _overdue(view: GroupView, member: MemberView, now_ms: int) -> bool:
    return any(0 < view.shards[index].deadline_ms <= now_ms for index in member.revoking)
