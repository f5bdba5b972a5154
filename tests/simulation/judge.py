"""Sends every command of a simulation, and says after each what the protocol does not allow.

It looks from outside: it reads Redis and the record of the handlers, and never the state of a member.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from redis_stream_coord.commands import Command, Fence, HeartbeatReply, HeartbeatRequest, Published
from redis_stream_coord.errors import CoordError
from redis_stream_coord.keys import GroupKeys, StreamKeys
from redis_stream_coord.models import EVENT_ID_FIELD, KEY_FIELD

from .deliveries import Deliveries, Fencing, Item
from .layout import LayoutRecord
from .record import GroupRecord
from .store import Store


class Judge:
    """Sends commands and judges them.

    Parameters:
        store: where they go.
        groups: keys of the groups; all of one stream.
        shards: how many shards there may ever be.

    Raises (from everything): AssertionError: an invariant of the protocol does not hold.
    """

    def __init__(self, store: Store, groups: list[GroupKeys], shards: int) -> None:
        self.store = store
        self.keys = groups
        self.stream = groups[0].stream
        self.items: dict[tuple[int, str], Item] = {}
        self.events: dict[str, Item] = {}
        self.events_lost = False  # remembered event ids were lost: a second entry is possible
        self.records: dict[str, GroupRecord] = {}
        self.deliveries: dict[str, Deliveries] = {}
        self.layout = LayoutRecord(shards)
        self.performed = 0
        self._followers: dict[bytes, tuple[Callable[[bytes, Any], None], Callable[[], None]]] = {}
        self._fences: list[Fencing] = []
        self._shards: dict[bytes, int] = {}
        self._groups: dict[str, GroupKeys] = {}
        for keys in groups:
            record = self.records[keys.group] = GroupRecord(keys.group)
            deliveries = self.deliveries[keys.group] = Deliveries(store, keys.stream, keys.group, record, self.items)
            self._followers[keys.metadata.encode()] = (record.write, record.clear)
            self._followers[keys.leases.encode()] = (record.write_lease, record.clear_leases)
            self._groups[keys.metadata] = keys
            for shard in range(shards):
                fencing = deliveries.fences[shard] = Fencing()
                self._fences.append(fencing)
                self._followers[keys.fence(shard).encode()] = (fencing.write, fencing.clear)
        names = StreamKeys(self.stream)
        self._followers[names.record.encode()] = (self.layout.write, self.layout.clear)
        for shard, route in enumerate(self.layout.routes):
            self._shards[names.shard(shard).stream.encode()] = shard
            self._followers[names.shard(shard).route.encode()] = (route.write, route.clear)
        self._checks: dict[str, Callable[[Command[Any], Any, Any, bool], None]] = {
            "heartbeat": self._heartbeat,
            "claim": self._claim,
            "read": self._read,
            "ack": self._ack,
            "note_deliveries": self._fenced,
            "outstanding": self._fenced,
            "trim": self._trim,
            "trim_removed": self._trim_removed,
            "publish": self._publish,
            "create": self._create,
            "delete": self._delete,
            "seek": self._seek,
            "readable": self._readable,
        }

    # --- carrying out -------------------------------------------------------------------------------------------------

    def perform(self, command: Command[Any], about: Any = None, *, fresh: bool = True) -> Any:
        """Carry out a command and judge it.

        Parameters:
            command: what to do.
            about: the request of a heartbeat, or the fence of what is done under one.
            fresh: whoever sent it waits for the answer, and has not sent anything later.

        Returns:
            What its parser made of the answer, or the `CoordError`.
        """
        self.performed += 1
        try:
            outcome = self.store.run(command)
        except CoordError as error:
            outcome = error
        self._follow()
        check = self._checks.get(command.name)
        if check is not None:
            check(command, about, outcome, fresh)
        for fencing in self._fences:
            if fencing.touched:
                old, new = fencing.rank(fencing.old), fencing.rank(fencing.fields)
                assert new >= old, f"{command.name} took a fence from {old} back to {new}"
                passed, before = fencing.passed(fencing.fields), fencing.passed(fencing.old)
                assert passed >= before or new[0] > old[0], f"{command.name} took a group from {before} to {passed}"
        self.layout.check(self.deliveries, self.items)
        self._settle()
        return outcome

    def twice(self, command: Command[Any], about: Any, first: Any) -> None:
        """Would the same command, sent again because its reply was lost, give the same decision? Changes nothing."""
        before = self.store.calls
        try:
            again = self.store.run(command)
        except CoordError as error:
            again = error
        self.store.take_back(before)
        if isinstance(first, HeartbeatReply):
            if first.status == "LEFT":
                assert isinstance(again, CoordError) or again.status == "LEFT", f"{first}, and again {again}"
                return
            assert isinstance(again, HeartbeatReply), f"the same request was answered by {first}, then by {again!r}"
            assert again.epoch == first.epoch, f"{first}, and again {again}"
            if again.round != first.round:
                return  # the first time has closed a round, and what the request has seen opens another one
            if first.holdings is not None and again.holdings is not None:
                # What it gave up, and was asked for or given only at the end of the first time, is free the next time.
                given_up = {(held.shard, held.token) for held in about.revoked}
                given_up |= {(shard, token) for shard, token, _ in about.refused}
                before = first.holdings.assigned.items() | first.holdings.revoking.items()
                freed = before - (again.holdings.assigned.items() | again.holdings.revoking.items())
                same = again.holdings == first.holdings and again.status == first.status
                assert same or (freed and freed <= given_up), f"{first}, and again {again}"
        elif command.name == "claim":
            assert isinstance(again, CoordError) == isinstance(first, CoordError), f"{first!r}, and again {again!r}"

    def _follow(self) -> None:
        for key, field, value in self.store.changes():
            if key == b"":
                follower = self._followers.get(field)
                if follower is not None:
                    follower[1]()
            else:
                follower = self._followers.get(key)
                if follower is not None:
                    follower[0](field, value)

    def _settle(self) -> None:
        for record in self.records.values():
            record.settle()
        for fencing in self._fences:
            fencing.touched = False
        self.layout.settle()

    # --- one check for each command -----------------------------------------------------------------------------------

    def _heartbeat(self, command: Command[Any], about: HeartbeatRequest, outcome: Any, fresh: bool) -> None:
        group = self._groups[command.keys[0]].group
        self.records[group].after_heartbeat(about, outcome, self.store.ms, fresh=fresh)

    def _of(self, command: Command[Any]) -> Deliveries:
        group = command.keys[1].rpartition(":")[2]  # the fence key ends in the group's name
        return self.deliveries[group]

    def _claim(self, command: Command[Any], about: Fence, outcome: Any, fresh: bool) -> None:
        refused = isinstance(outcome, CoordError)
        self._of(command).claimed(about, accepted=not refused, word=outcome.word if refused else "")

    def _read(self, command: Command[Any], about: Fence, outcome: Any, fresh: bool) -> None:
        self._fenced(command, about, outcome, fresh)
        if not isinstance(outcome, CoordError):
            self._of(command).read(about, [entry.id for entry in outcome.entries])

    def _fenced(self, command: Command[Any], about: Fence, outcome: Any, fresh: bool) -> None:
        refused = isinstance(outcome, CoordError)
        word = outcome.word if refused else ""
        self._of(command).fenced_call(about, accepted=not refused, word=word, what=command.name)

    def _ack(self, command: Command[Any], about: Fence, outcome: Any, fresh: bool) -> None:
        if not isinstance(outcome, CoordError):
            assert command.script is not None
            ids = [str(one) for one in command.arguments[len(command.script.arguments) - 1 :]]
            self._of(command).acked(about, ids)
        self._fenced(command, about, outcome, fresh)

    def _trim(self, command: Command[Any], about: Fence, outcome: Any, fresh: bool) -> None:
        self._fenced(command, about, outcome, fresh)
        if not isinstance(outcome, CoordError):
            self._gone(command.keys[0].encode())

    def _trim_removed(self, command: Command[Any], about: Any, outcome: Any, fresh: bool) -> None:
        if not isinstance(outcome, CoordError):
            self._gone(command.keys[0].encode())

    def _gone(self, key: bytes) -> None:
        """Entries were removed from a shard: nobody needs them."""
        there, shard = set(self.store.ids(key)), self._shards[key]
        for item in self.items.values():
            if item.shard == shard and not item.excused and item.id.encode() not in there:
                for deliveries in self.deliveries.values():
                    life = deliveries.life
                    assert life is None or life.over(item), f"{item} was trimmed, and {deliveries.group} needs it"
                item.excused = "trimmed"

    def _publish(self, command: Command[Any], about: Any, outcome: Any, fresh: bool) -> None:
        if isinstance(outcome, CoordError):
            return
        shard = self._shards[command.keys[0].encode()]
        for (key, event), one in zip(_entries(command), outcome, strict=True):
            assert isinstance(one, Published)
            known = self.events.get(event) if event is not None else None
            if one.word == "DUPLICATE":
                place = None if known is None else (known.shard, known.id)
                assert place == (shard, one.detail), f"{event} is no duplicate"
            elif one.word == "OK":
                assert known is None or known.excused or self.events_lost, f"{event} was published twice: {known}"
                item = Item(
                    shard, one.detail, key, event, self.performed, layout=self.layout.decided, era=self.layout.era
                )
                self.items[shard, one.detail] = item
                if event is not None:
                    self.events[event] = item
                for deliveries in self.deliveries.values():
                    for life in deliveries.lives.values():
                        life.expect(item)

    def _create(self, command: Command[Any], about: Any, outcome: Any, fresh: bool) -> None:
        record = self.records[self._groups[command.keys[0]].group]
        if record.touched:
            deliveries = self.deliveries[record.name]
            record.epochs.clear()
            record.restored = False
            incarnation = record.header[b"incarnation"]
            # Above everything that was ever claimed: whoever sleeps since an earlier lifecycle stays out.
            for shard, fencing in deliveries.fences.items():
                rank = fencing.rank(fencing.fields)
                assert rank[0] < incarnation or shard not in record.shards, f"incarnation {incarnation}, fence {rank}"
            deliveries.begin(incarnation, len(record.shards), self.layout.decided)

    def _delete(self, command: Command[Any], about: Any, outcome: Any, fresh: bool) -> None:
        record = self.records[self._groups[command.keys[0]].group]
        for member in record.old_members.values():
            if member is not None:
                record.end(member.nonce, "deleted")

    def _seek(self, command: Command[Any], about: Any, outcome: Any, fresh: bool) -> None:
        if not isinstance(outcome, CoordError):
            self._of(command).sought(self._shards[command.keys[0].encode()])

    def _readable(self, command: Command[Any], about: Any, outcome: Any, fresh: bool) -> None:
        self.records[self._groups[command.keys[0]].group].after_readable()

    # --- what happens to Redis ----------------------------------------------------------------------------------------

    def lose(self, key: str, *words: str) -> None:
        """Carry out a plain command that takes something away, as damage does."""
        self.store.plain(key, *words)
        self._follow()
        self._settle()

    def roll_back(self, calls: int, slots: list[str] | None) -> None:
        """Redis loses its latest writes, everywhere or on some slots. What is lost thereby is excused by name."""
        lives = {group: deliveries.life for group, deliveries in self.deliveries.items()}
        self.store.take_back(calls, slots)
        for keys in self.keys:
            record = self.records[keys.group]
            record.clear()
            record.clear_leases()
            for field, value in self.store.hash(keys.metadata.encode()).items():
                record.write(field, value)
            for field, value in self.store.hash(keys.leases.encode()).items():
                record.write_lease(field, value)
            record.went_back()
            for shard, fencing in self.deliveries[keys.group].fences.items():
                fencing.clear()
                for field, value in self.store.hash(keys.fence(shard).encode()).items():
                    fencing.write(field, value)
        names = StreamKeys(self.stream)
        for key_of, follower in [(names.record, self.layout)] + [
            (names.shard(shard).route, route) for shard, route in enumerate(self.layout.routes)
        ]:
            follower.clear()
            for field, value in self.store.hash(key_of.encode()).items():
                follower.write(field, value)
        self.layout.went_back()
        self._settle()
        for key, shard in self._shards.items():
            there = set(self.store.ids(key))
            for item in self.items.values():
                if item.shard == shard and (item.id.encode() in there) == bool(item.excused):
                    item.excused = "" if item.excused else "lost by Redis"
        for group, deliveries in self.deliveries.items():
            for life in deliveries.lives.values():
                life.forget_pointers()
            if deliveries.life is not None and deliveries.life is not lives[group]:
                # An earlier lifecycle came back; its shards may have gone on without it.
                for shard in deliveries.record.shards:
                    deliveries.skip(deliveries.life, shard)
        self.events_lost = True

    # --- handlers' record ---------------------------------------------------------------------------------------------

    def nobody_lost_anything(self) -> None:
        """Everything accepted was handled by every group that is there."""
        for deliveries in self.deliveries.values():
            life = deliveries.life
            if life is not None:
                left = life.unfinished()
                assert not left, f"{deliveries.group} has not handled {left[:5]}, {len(left)} in all"

    def nothing_is_pending(self) -> None:
        """What was handled is acknowledged: a position that stands still keeps entries, and whatever waits for it."""
        for name, deliveries in self.deliveries.items():
            for shard in deliveries.record.shards:
                key = deliveries.shard_key(shard).decode()
                with contextlib.suppress(CoordError):  # nobody has read there, and its consumer group was lost
                    count, first, *_ = self.store.plain(key, "XPENDING", key, name)
                    assert not count, f"{name} has {count} entries pending on shard {shard}, from {first}"


def _entries(command: Command[Any]) -> list[tuple[bytes | None, str | None]]:
    """Return key and event id of each entry of a publish."""
    words = [word if type(word) is bytes else str(word).encode() for word in command.arguments]
    at, found = len(command.script.arguments) - 1, []  # type: ignore[union-attr]
    while at < len(words):
        count = int(words[at + 1])
        fields = dict(zip(words[at + 2 : at + 2 + count : 2], words[at + 3 : at + 2 + count : 2], strict=True))
        event = fields.get(EVENT_ID_FIELD)
        found.append((fields.get(KEY_FIELD), event.decode() if event is not None else None))
        at += 2 + count
    return found
