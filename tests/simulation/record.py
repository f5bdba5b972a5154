"""Judges the record of one group: what it holds, seen from outside, before and after each command that touches it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from redis_stream_coord.commands import HeartbeatReply, HeartbeatRequest
from redis_stream_coord.errors import CoordError

_MEMBER = re.compile(
    rb"nonce=(\w+) epoch=(\d+) changed=[01] weight=(\d+) joined_ms=\d+ state=(\w+) "
    rb"assigned=(\S+) revoking=(\S+) pending=(\S+)"
)
_SHARD = re.compile(
    rb"target=(\S+) holder=(\S+) token=(\d+) state=(\w+) deadline_ms=(\d+) hold_until_ms=(\d+) readable=([01])"
)
_GROWING = (b"version", b"group_epoch", b"assignment_epoch", b"grant_counter", b"incarnation")


def _held(text: bytes) -> dict[int, int]:
    return {} if text == b"-" else {int(i): int(t) for i, t in (pair.split(b":") for pair in text.split(b","))}


class MemberRecord:
    """One member as stored."""

    __slots__ = ("assigned", "epoch", "nonce", "revoking", "state", "text", "weight")

    def __init__(self, text: bytes) -> None:
        found = _MEMBER.fullmatch(text)
        assert found, f"unreadable member: {text!r}"
        self.text = text
        self.nonce = found[1].decode()
        self.epoch, self.weight, self.state = int(found[2]), int(found[3]), found[4]
        self.assigned, self.revoking = _held(found[5]), _held(found[6])


class ShardRecord:
    """One shard as stored."""

    __slots__ = ("deadline_ms", "hold_until_ms", "holder", "readable", "state", "target", "text", "token")

    def __init__(self, text: bytes) -> None:
        found = _SHARD.fullmatch(text)
        assert found, f"unreadable shard: {text!r}"
        self.text = text
        self.target = None if found[1] == b"-" else found[1].decode()
        self.holder = None if found[2] == b"-" else found[2].decode()
        self.token, self.state = int(found[3]), found[4]
        self.deadline_ms, self.hold_until_ms = int(found[5]), int(found[6])
        self.readable = found[7] == b"1"


class GroupRecord:
    """What is stored of one group, kept up to date with every write, and with what stood there before it.

    Attributes:
        header: numbers of the header.
        members, shards: by id and by index.
        leases: deadline in Redis server ms, by member id.
        gone: nonces of sessions that ended, each with how, and with the latest token at that time: what such a session
            still does under tokens up to that may be excused. (A late copy of its join may begin it anew.)
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.header: dict[bytes, int] = {}
        self.members: dict[str, MemberRecord] = {}
        self.shards: dict[int, ShardRecord] = {}
        self.leases: dict[str, int] = {}
        self.gone: dict[str, tuple[str, int]] = {}
        self.epochs: dict[str, int] = {}
        self.old_header: dict[bytes, int] = {}
        self.old_members: dict[str, MemberRecord | None] = {}
        self.old_shards: dict[int, ShardRecord | None] = {}
        self.old_leases: dict[str, int | None] = {}
        # nonce -> epoch, assigned and revoking of the latest full answer
        self.in_round = self.was_in_round = False  # whether a correction round is open, and was before the command
        self.told: dict[str, tuple[int, dict[int, int], dict[int, int]]] = {}
        self.exchanged = -1  # assignment epoch in which a shard was exchanged for one with a stuck handler
        self.restored = (
            False  # the record went back: sessions come into step by rounds, which are judged by what comes of it
        )
        self.touched = False

    # --- following ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """What is there now is what was there before the next command."""
        self.was_in_round = self.in_round
        if self.touched:
            self.old_header.clear()
            self.old_members.clear()
            self.old_shards.clear()
            self.touched = False
        self.old_leases.clear()

    def write(self, field: bytes, value: bytes | None) -> None:
        """A field of the metadata was written, or removed."""
        self.touched = True
        if field.startswith(b"member:"):
            member = field[7:].decode()
            self.old_members.setdefault(member, self.members.get(member))
            if value:
                self.members[member] = MemberRecord(value)
            else:
                self.members.pop(member, None)
        elif field.startswith(b"shard:"):
            shard = int(field[6:])
            self.old_shards.setdefault(shard, self.shards.get(shard))
            if value:
                self.shards[shard] = ShardRecord(value)
            else:
                self.shards.pop(shard, None)
        elif field == b"round":
            self.was_in_round = self.was_in_round or self.in_round
            self.in_round = bool(value and value.startswith(b"open "))
        elif value and value.isdigit():
            self.old_header.setdefault(field, self.header.get(field, 0))
            self.header[field] = int(value)

    def clear(self) -> None:
        """The metadata came or went as a whole."""
        for member in list(self.members):
            self.write(b"member:" + member.encode(), None)
        for shard in list(self.shards):
            self.write(b"shard:%d" % shard, None)
        for field, value in self.header.items():
            self.old_header.setdefault(field, value)
        self.header.clear()
        self.touched = True

    def write_lease(self, field: bytes, value: float | None) -> None:
        member = field.decode()
        self.old_leases.setdefault(member, self.leases.get(member))
        if value:
            self.leases[member] = int(value)
        else:
            self.leases.pop(member, None)

    def clear_leases(self) -> None:
        for member in list(self.leases):
            self.write_lease(member.encode(), None)

    # --- what was there before the command ----------------------------------------------------------------------------

    def was(self, name: bytes) -> int:
        return self.old_header.get(name, self.header.get(name, 0))

    def was_member(self, member: str) -> MemberRecord | None:
        return self.old_members[member] if member in self.old_members else self.members.get(member)

    def was_shard(self, shard: int) -> ShardRecord | None:
        return self.old_shards[shard] if shard in self.old_shards else self.shards.get(shard)

    def lease_was(self, member: str) -> int | None:
        return self.old_leases[member] if member in self.old_leases else self.leases.get(member)

    # --- what others ask ----------------------------------------------------------------------------------------------

    def holds(self, member: str, nonce: str, shard: int, token: int) -> bool:
        """Whether this very session holds a shard, under this token."""
        mine, found = self.members.get(member), self.shards.get(shard)
        return (
            mine is not None
            and mine.nonce == nonce
            and found is not None
            and (found.holder, found.token) == (member, token)
        )

    def end(self, nonce: str, how: str) -> None:
        """A session is over."""
        _, before = self.gone.get(nonce, ("", 0))
        # The counter may have gone back since.
        self.gone[nonce] = (how, max(self.header.get(b"grant_counter", 0), self.was(b"grant_counter"), before))

    def reads(self, shard: int) -> bool:
        """Whether members may be given a shard."""
        found = self.shards.get(shard)
        return found is not None and found.readable

    def how_ended(self, nonce: str, token: int) -> str:
        """Return how a session ended, as far as it concerns this token; empty if it did not."""
        how, counter = self.gone.get(nonce, ("", 0))
        return how if token <= counter else ""

    # --- judging ------------------------------------------------------------------------------------------------------

    def check_whole(self) -> None:
        """What one look at the record shows: one owner, both sides agree, the target is valid."""
        members, shards, header = self.members, self.shards, self.header
        held = {}
        for name, member in members.items():
            for state, some in ((b"assigned", member.assigned), (b"revoking", member.revoking)):
                for index, token in some.items():
                    assert index not in held, f"shard {index} is held by {held[index]} and {name}"
                    shard = shards.get(index)
                    stored = None if shard is None else (shard.holder, shard.token, shard.state)
                    assert stored == (name, token, state), f"shard {index} and member {name} disagree"
                    held[index] = name
        live = {name: member.weight for name, member in members.items() if member.state == b"active"}
        settled = header[b"group_epoch"] == header[b"assignment_epoch"]
        counts = dict.fromkeys(live, 0)
        for index, shard in shards.items():
            assert shard.holder is None or index in held, f"the holder of shard {index} does not list it"
            assert shard.token <= header[b"grant_counter"], f"token of shard {index} above the counter"
            if settled and shard.readable:
                assert shard.target is not None or not live, f"shard {index} has no target"
                assert shard.target is None or shard.target in live or not live, (
                    f"target of shard {index}: {shard.target}"
                )
                if shard.target in counts:
                    counts[shard.target] += 1
        if live and settled and self.exchanged != header[b"assignment_epoch"]:
            total = sum(live.values())
            readable = sum(shard.readable for shard in shards.values())
            for name, weight in live.items():
                fair = readable * weight / total
                assert fair - 1 < counts[name] < fair + 1, f"{name} is meant to get {counts[name]}, its part is {fair}"

    def check_growth(self) -> None:
        """Nothing that has to grow went back, and nothing changed under the same version."""
        if not self.touched:
            return
        for name in _GROWING:
            assert self.header[name] >= self.was(name), f"{name.decode()} went backwards"
        if self.old_members or self.old_shards:
            assert self.header[b"version"] > self.was(b"version"), "changed under the same version"
        for index, old in self.old_shards.items():
            shard = self.shards.get(index)
            assert old is None or shard is None or shard.token >= old.token, f"token of shard {index} went backwards"
        for name, before in self.old_members.items():
            member = self.members.get(name)
            if member is None:
                continue
            if before is not None and before.nonce == member.nonce:
                assert member.epoch - before.epoch in (0, 1), f"epoch of {name} from {before.epoch} to {member.epoch}"
            else:
                floor = max(self.was(b"version"), self.epochs.get(name, 0))
                assert member.epoch > floor, f"an epoch of {name} was used again"
            self.epochs[name] = member.epoch

    def after_heartbeat(
        self, request: HeartbeatRequest, outcome: HeartbeatReply | CoordError, now_ms: int, *, fresh: bool
    ) -> None:
        """Judge a heartbeat by what it brought, what was there, and what is there now.

        Parameters:
            request, outcome: what was said, and answered.
            now_ms: Redis server time.
            fresh: it is the latest of a session that waits for the answer.
        """
        if self.restored:
            self._after_restored(request, outcome)
            return
        if self.touched:
            assert self.header, "the record went away"
            if any(fence_token == 0 for _, _, fence_token in request.refused):
                self.exchanged = self.header[b"assignment_epoch"]
            self.check_growth()
            self.check_whole()
            self._check_inputs(request)
            self._check_ends(request, now_ms)
            for index, old in self.old_shards.items():
                if old is not None:
                    self._check_shard(index, old, self.shards.get(index), request, now_ms)
            self._check_grants(request)
        if isinstance(outcome, CoordError):
            self._check_refusal(request, outcome, now_ms, fresh=fresh)
            return
        self._check_waiting(now_ms)
        if outcome.status != "LEFT":
            self._check_answer(request, outcome)
        before = self.was_member(request.member)
        if request.epoch > 0:
            nonce = None if before is None else before.nonce
            assert nonce == request.nonce, "a session that is over was accepted"
            assert request.version <= self.was(b"version"), "a witness of a later record was accepted"
        elif before is not None and before.nonce != request.nonce:
            assert request.replaces == before.nonce, "a session was replaced that was not named"

    def after_readable(self) -> None:
        """Judge a word about which shards may be read: nothing changes hands by it."""
        if not self.touched:
            return
        if not self.restored:
            self.check_growth()
        self.check_whole()
        changed = False
        for index, old in self.old_shards.items():
            new = self.shards.get(index)
            changed = changed or (old is not None and old.readable) != (new is not None and new.readable)
            before = None if old is None else (old.holder, old.token)
            if new is None:
                assert before is None or before[0] is None, f"shard {index} was taken from {before}"
            elif before is not None:
                assert before == (new.holder, new.token), f"shard {index} went from {before} by a word about shards"
        grown = self.header[b"group_epoch"] > self.was(b"group_epoch")
        assert changed == grown, "shards came or went without a new group epoch" if changed else "nothing changed"

    def _after_restored(self, request: HeartbeatRequest, outcome: HeartbeatReply | CoordError) -> None:
        """After the record went back: what one look shows, that it grows and gives no token twice, and that nobody
        who has seen more than it knows goes on as if nothing had happened.
        """
        ahead = request.epoch > 0 and request.version > self.was(b"version")
        if isinstance(outcome, HeartbeatReply) and outcome.status != "LEFT" and ahead:
            # If it closes a round that it was not in step with, the member does not take the answer, and comes again.
            heard = outcome.round is not None or self.was_in_round
            assert heard, f"a witness of version {request.version} was answered {outcome}"
        if not self.touched:
            return
        assert self.header, "the record went away"
        for name in _GROWING:
            assert self.header[name] >= self.was(name), f"{name.decode()} went backwards"
        self.check_whole()
        for name, old in self.old_members.items():
            new = self.members.get(name)
            if old is not None and (new is None or new.nonce != old.nonce):
                self.end(old.nonce, "rolled back")
        for index, was in self.old_shards.items():
            now = self.shards.get(index)
            holder = None if was is None else self.was_member(was.holder or "")
            if was is None or now is None or now.token == was.token or now.holder is None:
                continue
            assert now.token > self.was(b"grant_counter"), f"the token {now.token} of shard {index} is not new"
            if holder is not None:
                self.end(holder.nonce, "rolled back")

    def _check_answer(self, request: HeartbeatRequest, outcome: HeartbeatReply) -> None:
        """A full answer is what is stored; a short one says that this has not changed since the last answer."""
        mine = self.members[request.member]
        if outcome.holdings is None and request.nonce in self.told:
            epoch, assigned, revoking = self.told[request.nonce]
            # What it has just reported as drained needs no word.
            left = revoking.items() - {(held.shard, held.token) for held in request.revoked}
            same = (epoch, assigned) == (mine.epoch, mine.assigned) and not mine.revoking and not left
            assert same, f"{mine.text!r} is called unchanged; told were {epoch}, {assigned}, {revoking}"
        elif outcome.holdings is not None:
            said = (outcome.holdings.assigned, outcome.holdings.revoking)
            assert said == (mine.assigned, mine.revoking), "the answer is not what is stored"
        assert (outcome.status == "REVOKE_PENDING") == bool(mine.revoking), f"{outcome.status}, {mine.text!r}"
        self.told[request.nonce] = (mine.epoch, mine.assigned, mine.revoking)

    def _inputs_changed(self) -> bool:
        def said(member: MemberRecord | None) -> int | None:
            return member.weight if member is not None and member.state == b"active" else None

        return any(said(old) != said(self.members.get(name)) for name, old in self.old_members.items())

    def _check_inputs(self, request: HeartbeatRequest) -> None:
        """Every input of the assignment bumps the group epoch; without one nothing is bumped and no target moves."""
        in_and_out = request.epoch == 0 and request.leaving  # joined and gone in one step
        surrendered = any(fence_token == 0 for _, _, fence_token in request.refused)
        grown = self.header[b"group_epoch"] > self.was(b"group_epoch")
        changed = self._inputs_changed()
        assert not changed or grown, "an input changed without a new group epoch"
        assert changed or not grown or in_and_out or surrendered, "the group epoch grew without an input"
        assert self.header[b"assignment_epoch"] == self.header[b"group_epoch"], "the target was not computed"
        if self.header[b"assignment_epoch"] == self.was(b"assignment_epoch"):
            for index, old in self.old_shards.items():
                same = old is None or index not in self.shards or old.target == self.shards[index].target
                assert same, f"the target of shard {index} changed within an assignment epoch"

    def _away(self, now_ms: int) -> bool:
        """Whether nobody had renewed for half a lease before this command: Redis was not there, nobody is to blame."""
        leases = {**self.leases, **{name: at for name, at in self.old_leases.items() if at is not None}}
        for name, at in self.old_leases.items():
            if at is None:
                leases.pop(name, None)
        return bool(leases) and max(leases.values()) < now_ms + self.header[b"lease_ms"] / 2

    def _check_ends(self, request: HeartbeatRequest, now_ms: int) -> None:
        """Sessions end for a reason. Remembers which."""
        for name, old in self.old_members.items():
            new = self.members.get(name)
            if old is None or (new is not None and new.nonce == old.nonce):
                continue
            lease = self.lease_was(name)
            speaks = request.member == name and request.nonce == old.nonce
            overdue = any(0 < self._deadline(index) <= now_ms for index in old.revoking)
            if request.member == name and request.epoch == 0 and request.replaces == old.nonce:
                self.end(old.nonce, "replaced")
            elif speaks and new is None and self._says_good_bye(request, old):
                self.end(old.nonce, "left")
            elif lease is not None and lease <= now_ms and not speaks:
                assert not self._away(now_ms), f"{name} expired, though nobody could renew for half a lease"
                self.end(old.nonce, "expired")
            elif overdue:
                assert not self._away(now_ms), f"{name} was fenced, though nobody could report for half a lease"
                self.end(old.nonce, "fenced")
            else:
                raise AssertionError(f"the session {old.nonce} of {name} ended without a reason")

    @staticmethod
    def _says_good_bye(request: HeartbeatRequest, old: MemberRecord) -> bool:
        reported = {held.shard: held.token for held in request.revoked}
        refused = {shard: token for shard, token, _ in request.refused}
        held = {**old.assigned, **old.revoking}
        leaving = request.leaving or old.state == b"leaving"
        return leaving and all(token in (reported.get(shard), refused.get(shard)) for shard, token in held.items())

    def _deadline(self, index: int) -> int:
        shard = self.was_shard(index)
        return 0 if shard is None else shard.deadline_ms

    def _check_shard(
        self, index: int, old: ShardRecord, new: ShardRecord | None, request: HeartbeatRequest, now_ms: int
    ) -> None:
        """A shard changes hands only after its holder gave it up, or is gone; and never under the same token."""
        if new is None:
            assert not old.readable, f"shard {index} went away, and is to be read"
        elif new.token == old.token and new.holder is not None:
            assert new.holder == old.holder, f"shard {index} changed hands under one token"
        if old.holder is None:
            return
        holder = self.was_member(old.holder)
        assert holder is not None
        now = self.members.get(old.holder)
        same_session = now is not None and now.nonce == holder.nonce
        if new is not None and (new.holder, new.token) == (old.holder, old.token):
            assert same_session, f"shard {index} went to another session of {old.holder} under the same token"
            return
        if not same_session:
            return  # judged by `_check_ends`
        spoke = request.nonce == holder.nonce and request.member == old.holder
        reported = spoke and any((held.shard, held.token) == (index, old.token) for held in request.revoked)
        reported = reported and (old.state == b"revoking" or request.leaving)
        refused = spoke and any((shard, token) == (index, old.token) for shard, token, _ in request.refused)
        assert reported or refused, f"shard {index} was taken from {old.holder} (token {old.token}, {old.state!r})"

    def _check_grants(self, request: HeartbeatRequest) -> None:
        """Whoever drains gets nothing new; and each grant has a token of its own."""
        for index, old in self.old_shards.items():
            new = self.shards.get(index)
            if new is None or new.holder is None or old is None or (old.holder, old.token) == (new.holder, new.token):
                continue
            assert new.token > self.was(b"grant_counter"), f"the token {new.token} of shard {index} is not new"
            mine, before = self.members[new.holder], self.was_member(new.holder)
            # What it has to drain since this very heartbeat may have been asked for after the grant.
            drains = (
                before is not None and before.nonce == mine.nonce and before.revoking.items() & mine.revoking.items()
            )
            assert not drains, f"{new.holder} got shard {index} while it drains {drains}"

    def _check_waiting(self, now_ms: int) -> None:
        """Nobody waits for a shard that is free: housekeeping may not come by for a long time."""
        for index, shard in self.shards.items():
            if shard.state != b"free" or shard.hold_until_ms > now_ms or shard.target is None:
                continue
            target = self.members.get(shard.target)
            ready = target is not None and target.state == b"active" and not target.revoking
            assert not ready, f"shard {index} is free, and its target {shard.target} does not get it"

    def _check_refusal(self, request: HeartbeatRequest, error: CoordError, now_ms: int, *, fresh: bool) -> None:
        mine = self.was_member(request.member)
        overdue = mine is not None and any(0 < self._deadline(index) <= now_ms for index in mine.revoking)
        if error.word == "UNKNOWN_MEMBER_ID" and overdue:
            return  # fenced in this very heartbeat
        changed = self.touched or bool(self.old_leases)
        assert not changed, f"a refusal changed the record: {error}"
        if not fresh:
            return
        if error.word == "GROUP_NOT_FOUND":
            assert not self.header, "the group is there"
        elif request.incarnation not in (0, self.header[b"incarnation"]):
            assert error.word in ("FENCED_MEMBER_EPOCH", "METADATA_REGRESSION"), error.word
        elif request.epoch == 0:
            assert error.word == "SESSION_EXISTS", f"a join was refused with {error.word}"
            assert mine is not None
            assert mine.nonce == error.detail != request.nonce
        elif error.word == "UNKNOWN_MEMBER_ID":
            assert mine is None, "a member was called unknown"
        elif error.word == "METADATA_REGRESSION":
            assert mine is not None
            regression = (
                request.version > self.header[b"version"]
                or request.assignment_epoch > self.header[b"assignment_epoch"]
                or request.epoch > mine.epoch
            )
            assert regression, "nothing went backwards"
        else:
            assert error.word == "FENCED_MEMBER_EPOCH", f"a heartbeat was refused with {error.word}"
            alive = mine is not None and mine.nonce == request.nonce and request.nonce not in self.gone
            assert not alive, f"a healthy member was fenced: {error}"

    # --- Redis lost something -----------------------------------------------------------------------------------------

    def went_back(self) -> None:
        """Redis lost its last writes here. Sessions whose record or lease is not what it was may go on believing."""
        for name, old in self.old_members.items():
            new = self.members.get(name)
            if old is not None and (new is None or new.text != old.text):
                self.end(old.nonce, "rolled back")
        for name, lease in self.old_leases.items():
            member = self.members.get(name)
            if member is not None and lease is not None and self.leases.get(name, 0) < lease:
                self.end(member.nonce, "rolled back")
        for index, was in self.old_shards.items():
            holder = self.was_member(was.holder) if was is not None and was.holder is not None else None
            if holder is not None and (index not in self.shards or self.shards[index].text != was.text):  # type: ignore[union-attr]
                self.end(holder.nonce, "rolled back")
        self.epochs = {name: member.epoch for name, member in self.members.items()}
        self.told.clear()
        self.restored = self.restored or self.touched

    def summary(self) -> Mapping[str, object]:
        """Return what does not change while nothing happens."""
        # The version is not among them: a deadline that has become void passes all the same.
        names = (b"group_epoch", b"assignment_epoch", b"grant_counter")
        return {
            **{name.decode(): self.header.get(name) for name in names},
            "shards": {index: shard.text for index, shard in self.shards.items()},
            "members": {name: member.text for name, member in self.members.items()},
        }
