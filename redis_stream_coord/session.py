"""The life of one member, without any input or output: answers in, actions out, the time handed in.

`Session` never sleeps, reads a clock or touches a socket. The engine sends what `request` returns, hands the answer
to `accepted` or `refused`, and carries out the actions. A simulation can drive thousands of sessions the same way.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs

from .commands import HeartbeatReply, HeartbeatRequest
from .errors import CoordError, DuplicateMemberError, MetadataRegressionError, RedisUnavailableError, refused
from .models import Held, Timings

# A member displaced so often by another session of its own id, within so many leases, has a living twin.
_DISPLACED_LIMIT = 3
_DISPLACED_LEASES = 10
# Reported in place of the token of the fence that refused a claim: nobody has the shard, it only needs another token.
ANOTHER_TOKEN = -1
# Part of the lease by which a member stops before Redis would expire it.
_SAFETY_MARGIN = 0.1


class State(enum.Enum):
    """States of a member."""

    JOINING = "joining"  # has no session, or does not know yet whether its join was accepted
    MEMBER = "member"  # has a session
    LEAVING = "leaving"  # drains everything, then goes
    GONE = "gone"  # left; the end
    FAILED = "failed"  # cannot go on; the end


class Input(enum.Enum):
    """What can happen to a member."""

    ACCEPTED = "accepted"  # a heartbeat was accepted
    EXISTS = "exists"  # another session of this id is alive; the next join names it
    FENCED = "fenced"  # the session is no more
    UNUSABLE = "unusable"  # the metadata cannot be used
    DISPLACED = "displaced"  # replaced by another session of the same id too often
    STOP = "stop"  # the user wants to stop, and nobody in the group knows this session
    LEAVE = "leave"  # the user wants to stop
    LEFT = "left"  # the group has let it go, or it may go without asking


# A missing entry is an illegal move.
TRANSITIONS: Mapping[tuple[State, Input], State] = MappingProxyType(
    {
        (State.JOINING, Input.ACCEPTED): State.MEMBER,
        (State.JOINING, Input.EXISTS): State.JOINING,
        (State.JOINING, Input.FENCED): State.JOINING,
        (State.JOINING, Input.UNUSABLE): State.JOINING,
        (State.JOINING, Input.STOP): State.GONE,
        (State.JOINING, Input.LEAVE): State.LEAVING,
        (State.MEMBER, Input.ACCEPTED): State.MEMBER,
        (State.MEMBER, Input.FENCED): State.JOINING,
        (State.MEMBER, Input.UNUSABLE): State.MEMBER,
        (State.MEMBER, Input.DISPLACED): State.FAILED,
        (State.MEMBER, Input.LEAVE): State.LEAVING,
        (State.LEAVING, Input.ACCEPTED): State.LEAVING,
        (State.LEAVING, Input.EXISTS): State.GONE,
        (State.LEAVING, Input.FENCED): State.GONE,
        (State.LEAVING, Input.UNUSABLE): State.LEAVING,
        (State.LEAVING, Input.LEAVE): State.LEAVING,
        (State.LEAVING, Input.LEFT): State.GONE,
    }
)


class ShardState(enum.Enum):
    """What a member thinks of a shard that it has been given."""

    CLAIMING = "claiming"  # granted; the fence is not raised yet
    OWNED = "owned"  # claimed: read it
    DRAINING = "draining"  # asked for back: finish what is in a handler, acknowledge, hand out nothing
    REVOKED = "revoked"  # drained; reported until the group takes it back
    UNCLAIMABLE = "unclaimable"  # the token can never be used; reported until the group takes it back


class ShardInput(enum.Enum):
    """What can happen to a shard of a member."""

    CLAIMED = "claimed"  # the fence is raised
    REFUSED = "refused"  # the fence is ahead of the token
    UNFENCED = "unfenced"  # the fence has been lost: claim again
    REVOKE = "revoke"  # the group wants it back
    CANCEL = "cancel"  # the group wants it no longer back
    SURRENDER = "surrender"  # a handler is stuck: somebody else shall have it
    DRAINED = "drained"  # nothing of it is in a handler, and everything finished is acknowledged


SHARD_TRANSITIONS: Mapping[tuple[ShardState, ShardInput], ShardState] = MappingProxyType(
    {
        (ShardState.CLAIMING, ShardInput.CLAIMED): ShardState.OWNED,
        (ShardState.CLAIMING, ShardInput.REFUSED): ShardState.UNCLAIMABLE,
        (ShardState.CLAIMING, ShardInput.REVOKE): ShardState.DRAINING,
        (ShardState.OWNED, ShardInput.CLAIMED): ShardState.OWNED,
        (ShardState.OWNED, ShardInput.UNFENCED): ShardState.CLAIMING,
        (ShardState.OWNED, ShardInput.REVOKE): ShardState.DRAINING,
        (ShardState.OWNED, ShardInput.SURRENDER): ShardState.UNCLAIMABLE,
        (ShardState.DRAINING, ShardInput.CLAIMED): ShardState.DRAINING,
        (ShardState.DRAINING, ShardInput.REFUSED): ShardState.REVOKED,
        (ShardState.DRAINING, ShardInput.UNFENCED): ShardState.DRAINING,
        (ShardState.DRAINING, ShardInput.REVOKE): ShardState.DRAINING,
        (ShardState.DRAINING, ShardInput.CANCEL): ShardState.CLAIMING,
        (ShardState.DRAINING, ShardInput.DRAINED): ShardState.REVOKED,
        (ShardState.DRAINING, ShardInput.SURRENDER): ShardState.REVOKED,
        (ShardState.REVOKED, ShardInput.REVOKE): ShardState.REVOKED,
        # Reported under this token, so never read under it again: a copy of the report may still be on the wire, and
        # would free the shard behind our back. The group has to draw a new token.
        (ShardState.REVOKED, ShardInput.CANCEL): ShardState.UNCLAIMABLE,
        (ShardState.UNCLAIMABLE, ShardInput.CANCEL): ShardState.UNCLAIMABLE,
        (ShardState.UNCLAIMABLE, ShardInput.REVOKE): ShardState.REVOKED,
    }
)

_HOLDING = frozenset({ShardState.CLAIMING, ShardState.OWNED, ShardState.DRAINING})


@attrs.frozen
class Claim:
    """Raise the fence of this shard, then read it from the first pending entry."""

    held: Held


@attrs.frozen
class Drain:
    """Hand out nothing more of these shards; call `Session.drained` for each when it is done."""

    held: tuple[Held, ...]


@attrs.frozen
class Lost:
    """These shards are gone already: hand out nothing, acknowledge nothing."""

    held: tuple[Held, ...]
    reason: str


Action = Claim | Drain | Lost


@attrs.define
class _Shard:
    held: Held
    state: ShardState = ShardState.CLAIMING
    fence_token: int = 0  # of the fence that refused the claim; or `ANOTHER_TOKEN`; 0: not for me


class Session:
    """The membership of one consumer in its group.

    Parameters:
        member: member id.
        weight: share of the shards it asks for.
        draw_nonce: returns a new random word for each join.
    """

    def __init__(self, member: str, *, weight: float, draw_nonce: Callable[[], str]) -> None:
        self.member = member
        self.weight = weight
        self.state = State.JOINING
        self.nonce = draw_nonce()
        self.incarnation = 0
        self.epoch = 0
        self.version = 0
        self.group_epoch = 0
        self.assignment_epoch = 0
        self.timings = Timings()
        self.lease_until = 0.0
        self.last_accepted = 0.0
        self.failure: CoordError | None = None
        self.trouble: CoordError | None = None  # why the last heartbeat brought nothing, if it did not
        self.urgent = True  # something has to be said, or heard, now and not at the next interval
        self.round: str | None = None  # the correction round that this member takes part in
        self._given: dict[int, int] = {}  # what the record gives it in that round: shard -> token
        self._draw_nonce = draw_nonce
        self._replaces: str | None = None
        self._asked = False  # a join with this nonce has been sent
        self._hold = False
        self._displaced: list[float] = []
        self._failures = 0
        self._shards: dict[int, _Shard] = {}

    # --- what others may know -----------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether this member has come to its end."""
        return self.state in (State.GONE, State.FAILED)

    def held(self, *states: ShardState) -> dict[int, int]:
        """Return shard -> token of the shards in one of `states` (all if none is given)."""
        return {i: s.held.token for i, s in self._shards.items() if not states or s.state in states}

    @property
    def count(self) -> int:
        """How many shards it has been given."""
        return len(self._shards)

    def owns(self, held: Held, now: float) -> bool:
        """Whether entries of a shard may be handed out or acknowledged at this moment, as far as one can know here."""
        shard = self._shards.get(held.shard)
        return shard is not None and shard.held == held and shard.state in _HOLDING and now < self.lease_until

    def reads(self, held: Held, now: float) -> bool:
        """Whether new entries of a shard may be handed out."""
        shard = self._shards.get(held.shard)
        return shard is not None and shard.state is ShardState.OWNED and self.owns(held, now)

    def delay(self, now: float) -> float:
        """Seconds until the next heartbeat is due."""
        if self.urgent and not self._failures:
            return 0.0
        beat = self.timings.heartbeat_seconds
        if self._failures:
            # Soon at first, so that a short outage costs little; never slower than the interval.
            return float(min(beat, 0.05 * 2 ** min(self._failures, 10)))
        return max(0.0, self.last_accepted + beat - now)

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    def request(self) -> HeartbeatRequest:
        """Return what to say now. One heartbeat at a time: its answer comes before the next request."""
        self.urgent = False
        self._asked = True
        shards = list(self._shards.values())
        return HeartbeatRequest(
            member=self.member,
            nonce=self.nonce,
            epoch=self.epoch,
            incarnation=self.incarnation,
            version=self.version,
            assignment_epoch=self.assignment_epoch,
            weight=self.weight,
            replaces=self._replaces,
            leaving=self.state is State.LEAVING and not self._hold,
            owned=[s.held for s in shards if s.state in _HOLDING],
            revoked=[s.held for s in shards if s.state is ShardState.REVOKED],
            round=self.round,
            not_held=[Held(*pair) for pair in sorted(self._given.items()) if not self._has(*pair)],
            refused=[(s.held.shard, s.held.token, s.fence_token) for s in shards if s.state is ShardState.UNCLAIMABLE],
        )

    def accepted(self, request: HeartbeatRequest, reply: HeartbeatReply, *, sent_at: float) -> list[Action]:
        """Take an accepted heartbeat.

        Parameters:
            request: the one that it answers.
            reply: the answer.
            sent_at: when the request was sent, on the clock that all times here are of. The lease counts from there:
                counted from the answer, it would outlast the one in Redis.

        Returns:
            What to do now, in this order.
        """
        older = reply.version < request.version or reply.assignment_epoch < request.assignment_epoch
        if older and reply.status in ("OK", "REVOKE_PENDING"):
            # A lower version is taken over by SYNC_METADATA only. This is no answer of the group's present record.
            detail = f"answered with version {reply.version}, seen {request.version}"
            return self.refused(refused("METADATA_REGRESSION", detail, member=self.member), now=sent_at)
        self.trouble, self._failures, self._replaces = None, 0, None
        self.incarnation, self.epoch = reply.incarnation, reply.epoch
        self.version, self.group_epoch = reply.version, reply.group_epoch
        self.assignment_epoch, self.timings = reply.assignment_epoch, reply.timings
        self.last_accepted = sent_at
        if reply.status == "LEFT":
            return self._end(Input.LEFT, "left the group")
        self.lease_until = sent_at + reply.timings.lease_seconds * (1 - _SAFETY_MARGIN)
        self._move(Input.ACCEPTED)
        self.round, self._given = reply.round, {}
        actions = self._reconcile(request, reply) if reply.round is None else self._correct(reply)
        if self.state is State.LEAVING and self._hold and not self._shards_to_drain():
            return [*actions, *self._end(Input.LEFT, "stopped; shards are held for a restart")]
        return actions

    def refused(self, error: CoordError, *, now: float) -> list[Action]:
        """Take a refused or unanswered heartbeat.

        Parameters:
            error: what came instead of an answer.
            now: the time.

        Returns:
            What to do now. Nothing while Redis is merely away: the lease decides.
        """
        self.trouble = error
        word = error.word
        if isinstance(error, RedisUnavailableError):
            self._failures += 1
            return []
        if word == "SESSION_EXISTS":
            self._replaces, self.urgent = error.detail, True
            if self.state is State.LEAVING:
                return self._end(Input.EXISTS, "another session took over")
            self._move(Input.EXISTS)
            return []
        if word in ("FENCED_MEMBER_EPOCH", "UNKNOWN_MEMBER_ID"):
            return self._fenced(error, now)
        self._failures += 1
        if word == "GROUP_NOT_FOUND":
            if self.state is State.LEAVING:
                return self._end(Input.FENCED, "the group is gone")
            lost = self._lose("the group does not exist any more")
            if self.state is State.MEMBER:
                self._restart(incarnation=0)
                self._move(Input.FENCED)
            return lost
        # Damaged, newer or older metadata: the session stays, to go on or to bear witness, but nothing is read.
        self._move(Input.UNUSABLE)
        return self._lose(f"the metadata cannot be used: {error}", ended=False)

    def tick(self, now: float) -> list[Action]:
        """Give everything up when the lease has passed on the local clock. Call it at `lease_until`."""
        if now < self.lease_until:
            return []
        return self._lose("the lease ran out without an answer from Redis", ended=False)

    # --- what the engine reports --------------------------------------------------------------------------------------

    def claimed(self, held: Held) -> None:
        """The fence of a shard is raised."""
        self._move_shard(held, ShardInput.CLAIMED)

    def claim_refused(self, held: Held, *, fence_token: int) -> list[Action]:
        """The fence of a shard is ahead of the token that was granted."""
        shard = self._move_shard(held, ShardInput.REFUSED)
        if shard is None:
            return []
        shard.fence_token, self.urgent = fence_token, True
        return [Lost((held,), "its fence is ahead of the token that was granted")]

    def unfenced(self, held: Held) -> list[Action]:
        """A read or an acknowledgement was refused for a shard that this member believes to own.

        Returns:
            The claim to try again: the fence may only have been lost. If it was raised, the claim will be refused.
        """
        shard = self._move_shard(held, ShardInput.UNFENCED)
        return [Claim(held)] if shard is not None and shard.state is ShardState.CLAIMING else []

    def surrender(self, held: Held) -> list[Action]:
        """A handler is stuck: give the shard up without waiting for it, and to another member if there is one."""
        shard = self._move_shard(held, ShardInput.SURRENDER)
        if shard is None:
            return []
        shard.fence_token, self.urgent = 0, True
        return [Lost((held,), "its handler is stuck")]

    def drained(self, held: Held) -> None:
        """Nothing of a shard is in a handler any more, and everything finished is acknowledged."""
        if self._move_shard(held, ShardInput.DRAINED) is not None:
            self.urgent = True

    def leave(self, *, hold: bool) -> list[Action]:
        """Begin to leave: everything is drained first.

        Parameters:
            hold: do not tell the group, so that a restart under the same member id within the lease gets the same
                shards back and nothing moves meanwhile.
        """
        if self.finished:
            return []
        if self.state is State.JOINING and not self._asked:
            return self._end(Input.STOP, "stopped before it joined")
        if self.state is not State.LEAVING:
            # The first word counts: a stop that only follows, at the end of a ``with``, does not undo a hold.
            self._hold = hold
        self._move(Input.LEAVE)
        self.urgent, self._failures = True, 0
        return self._drain([s.held for s in self._shards.values() if s.state in _HOLDING])

    def abandon(self) -> list[Held]:
        """Give up waiting for handlers: report everything as drained. Returns: what was not."""
        stuck = [s.held for s in self._shards.values() if s.state in _HOLDING]
        self._drain(stuck)
        for held in stuck:
            self.drained(held)
        return stuck

    # --- decisions ----------------------------------------------------------------------------------------------------

    def _move(self, given: Input) -> None:
        self.state = TRANSITIONS[self.state, given]

    def _move_shard(self, held: Held, given: ShardInput) -> _Shard | None:
        """Move a shard; what comes too late, for another token, moves nothing."""
        shard = self._shards.get(held.shard)
        if shard is None or shard.held != held or (shard.state, given) not in SHARD_TRANSITIONS:
            return None
        shard.state = SHARD_TRANSITIONS[shard.state, given]
        return shard

    def _reconcile(self, request: HeartbeatRequest, reply: HeartbeatReply) -> list[Action]:
        if reply.holdings is None:
            # Nothing is revoking any more: what was reported has been taken back.
            for held in request.revoked:
                if held in [s.held for s in self._shards.values()]:
                    del self._shards[held.shard]
            # What was given up since the request has to be asked for again: this answer does not name it.
            self.urgent = self.urgent or set(request.owned) != {s.held for s in self._shards.values()}
            return []
        assigned, revoking = reply.holdings.assigned, reply.holdings.revoking
        claims: list[Action] = []
        drains: list[Held] = []
        lost: list[Held] = []
        for index, shard in list(self._shards.items()):
            held = shard.held
            if assigned.get(index) == held.token:
                claims += self._keep(shard)
            elif revoking.get(index) == held.token:
                drains.append(held)
            else:
                if shard.state in _HOLDING:
                    lost.append(held)
                del self._shards[index]
        for index, token in revoking.items():
            if index not in self._shards:
                # Never received, or lost since: there is nothing to drain.
                self._shards[index] = _Shard(Held(index, token), ShardState.REVOKED)
                self.urgent = True
        if reply.status == "OK" and self.state is State.MEMBER:
            for index, token in assigned.items():
                if index not in self._shards:
                    self._shards[index] = _Shard(Held(index, token))
                    claims.append(Claim(Held(index, token)))
        actions: list[Action] = [Lost(tuple(lost), "the group gave it to another member")] if lost else []
        return [*actions, *self._drain(drains), *claims]

    def _correct(self, reply: HeartbeatReply) -> list[Action]:
        """Come into step with a record that went backwards: what matches is kept, the rest drained; nothing is claimed.

        Every shard that the record gives this member is answered for by name: owned, drained, or not held.
        """
        assert reply.holdings is not None
        assert reply.round is not None
        assigned, revoking = reply.holdings.assigned, reply.holdings.revoking
        drains: list[Held] = []
        for index, shard in list(self._shards.items()):
            token = shard.held.token
            kept = assigned.get(index) == token and shard.state is not ShardState.REVOKED
            reported = revoking.get(index) == token and shard.state is ShardState.REVOKED
            # One that is being drained goes on being drained: only OK lets it be read again.
            if shard.state in _HOLDING and not kept:
                drains.append(shard.held)
            elif not kept and not reported:
                # Reported under this token, and never read under it again.
                del self._shards[index]
        self._given = {**assigned, **revoking}
        missing = any(not self._has(index, token) for index, token in self._given.items())
        self.urgent = self.urgent or reply.status == "SYNC_METADATA" or missing
        self.trouble = MetadataRegressionError(
            f"the metadata went backwards, and correction round {reply.round} is open: stored version {reply.version}",
            member=self.member,
            hint="Nothing is granted until all members are in step; then it goes on by itself. Find out why.",
        )
        return self._drain(drains)

    def _has(self, index: int, token: int) -> bool:
        """Whether a shard is in hand under this token."""
        shard = self._shards.get(index)
        return shard is not None and shard.held.token == token and shard.state in _HOLDING

    def _keep(self, shard: _Shard) -> list[Action]:
        """Take the answer that a shard is assigned under the token it is known by."""
        before = shard.state
        if self.state is State.LEAVING or self._move_shard(shard.held, ShardInput.CANCEL) is None:
            return []
        if before is ShardState.REVOKED:
            shard.fence_token, self.urgent = ANOTHER_TOKEN, True
        return [Claim(shard.held)] if shard.state is ShardState.CLAIMING else []

    def _drain(self, held: list[Held]) -> list[Action]:
        begun = []
        for one in held:
            before = self._shards[one.shard].state
            shard = self._move_shard(one, ShardInput.REVOKE)
            if shard is not None and shard.state is ShardState.DRAINING and before is not ShardState.DRAINING:
                begun.append(one)
            elif before is ShardState.UNCLAIMABLE:
                self.urgent = True  # nothing to drain: the group waits only for the word
        return [Drain(tuple(begun))] if begun else []

    def _shards_to_drain(self) -> bool:
        return any(s.state in _HOLDING for s in self._shards.values())

    def _lose(self, reason: str, *, ended: bool = True) -> list[Action]:
        """Give up what is held.

        Unless the session has `ended`, tokens reported as drained or unusable stay known: a copy of the report may be
        on the wire, and would free the shard while it is read under them again.
        """
        lost = tuple(s.held for s in self._shards.values() if s.state in _HOLDING)
        kept = {} if ended else {i: s for i, s in self._shards.items() if s.state not in _HOLDING}
        self._shards = kept
        return [Lost(lost, reason)] if lost else []

    def _restart(self, *, incarnation: int) -> None:
        self.nonce, self.epoch, self._asked = self._draw_nonce(), 0, False
        self.version = self.assignment_epoch = 0
        self.incarnation, self._replaces, self.urgent = incarnation, None, True
        self.round, self._given = None, {}

    def _fenced(self, error: CoordError, now: float) -> list[Action]:
        if self.state is State.LEAVING:
            return self._end(Input.FENCED, str(error))
        lost = self._lose(str(error))
        if error.detail.startswith("replaced"):
            window = _DISPLACED_LEASES * self.timings.lease_seconds
            self._displaced = [at for at in self._displaced if now - at < window] + [now]
            if len(self._displaced) >= _DISPLACED_LIMIT:
                self.failure = DuplicateMemberError(
                    f"another live process uses this member id: replaced {len(self._displaced)} times",
                    member=self.member,
                    hint="Give every process a member id of its own.",
                )
                self._move(Input.DISPLACED)
                return lost
        # An older incarnation was refused: the group was created anew, and this is a first join.
        recreated = "created anew" in error.detail
        self._restart(incarnation=0 if recreated else self.incarnation)
        self._move(Input.FENCED)
        return lost

    def _end(self, given: Input, reason: str) -> list[Action]:
        lost = self._lose(reason)
        self._move(given)
        return lost
