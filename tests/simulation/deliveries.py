"""Judges what became of entries: published once, fenced, handled in order, acknowledged after that, never lost.

It reads Redis and the record of the handlers. What Redis itself lost, what an operator skipped, and what was deleted is
excused by name: entry for entry, session for session.
"""

from __future__ import annotations

from typing import Any

from redis_stream_coord.commands import Entry, Fence

from .record import GroupRecord
from .store import FINISHED, GONE, NO_GROUP, PENDING, Store
from .watched import Watched

# Ends of a session after which its handlers may run on beside those of the next owner.
_OVERLAP = frozenset({"expired", "fenced", "replaced", "abandoned", "deleted", "rolled back"})
# Ends that a session may not have heard of while it goes on handing out.
_UNAWARE = frozenset({"fenced", "replaced", "abandoned", "deleted", "rolled back"})


class Item:
    """One entry that was accepted.

    Attributes:
        layout: how many layouts were decided before it was accepted.
        era: how many of them did not keep the order of keys.
        order: place in the order of acceptance, over all shards.
        excused: why nobody has to handle it any more; empty if somebody has.
    """

    __slots__ = ("era", "event", "excused", "id", "key", "layout", "order", "parts", "shard")

    def __init__(
        self, shard: int, entry_id: str, key: bytes | None, event: str | None, order: int, *, layout: int, era: int
    ) -> None:
        self.shard = shard
        self.id = entry_id
        self.key = key
        self.event = event
        self.order = order
        self.layout = layout
        self.era = era
        self.excused = ""
        ms, _, seq = entry_id.partition("-")
        self.parts = (int(ms), int(seq))

    def __repr__(self) -> str:
        return f"{self.shard}/{self.id} (number {self.order}, key {self.key!r})"


class Handling:
    """A handler that runs."""

    __slots__ = ("item", "nonce", "process", "shard", "token")

    def __init__(self, process: object, fence: Fence, item: Item) -> None:
        self.process = process
        self.nonce = fence.nonce
        self.shard = fence.shard
        self.token = fence.token
        self.item = item


class Fencing(Watched):
    """The fence of one shard for one group, kept up to date with every write."""

    __slots__ = ()

    @staticmethod
    def rank(fields: dict[bytes, bytes]) -> tuple[int, int]:
        return int(fields.get(b"incarnation", 0)), int(fields.get(b"token", 0))

    @staticmethod
    def passed(fields: dict[bytes, bytes]) -> int:
        return int(fields.get(b"passed", 0))

    def admits(self, fence: Fence) -> bool:
        nonce = self.fields.get(b"nonce", b"").decode()
        return self.rank(self.fields) == (fence.incarnation, fence.token) and nonce == fence.nonce


class Life:
    """One lifecycle of a group: what it has to handle, and has handled.

    Parameters:
        incarnation: which one.
        since: how many layouts had been decided when it began. What was accepted under those before comes in the order
            of each shard, and no more.
    """

    def __init__(self, incarnation: int, since: int) -> None:
        self.incarnation = incarnation
        self.since = since
        self.done: set[Item] = set()
        self.skipped: set[Item] = set()
        self._by_shard: dict[int, list[Item]] = {}
        self._by_key: dict[tuple[Any, ...], list[Item]] = {}
        self._first_of_shard: dict[int, int] = {}
        self._first_of_key: dict[tuple[Any, ...], int] = {}

    def expect(self, item: Item) -> None:
        self._by_shard.setdefault(item.shard, []).append(item)
        for name in self._orders(item):
            self._by_key.setdefault(name, []).append(item)

    def _orders(self, item: Item) -> list[tuple[Any, ...]]:
        """Return names of the orders that an entry has its place in."""
        orders: list[tuple[Any, ...]] = [(item.key, item.era)] if item.layout >= self.since else []
        if self.since or item.era:
            orders.append((item.key, item.shard, ""))
        return orders

    def is_ordered(self, one: Item, other: Item) -> bool:
        """Whether one of the two has to be handled before the other."""
        return bool(set(self._orders(one)) & set(self._orders(other)))

    def over(self, item: Item) -> bool:
        return item in self.done or item in self.skipped or bool(item.excused)

    def forget_pointers(self) -> None:
        """Something is expected again that was not."""
        self._first_of_shard.clear()
        self._first_of_key.clear()

    def _first(self, items: list[Item], pointers: dict[Any, int], name: Any) -> Item | None:
        at = pointers.get(name, 0)
        while at < len(items) and self.over(items[at]):
            at += 1
        pointers[name] = at
        return items[at] if at < len(items) else None

    def first_of_shard(self, shard: int) -> Item | None:
        """Return the first entry of a shard that nobody has finished."""
        items = self._by_shard.get(shard)
        return self._first(items, self._first_of_shard, shard) if items else None

    def before(self, item: Item) -> Item | None:
        """Return the first entry of a key that nobody has finished, and that has to be before this one."""
        for name in self._orders(item):
            items = self._by_key.get(name)
            first = self._first(items, self._first_of_key, name) if items else None
            if first is not None and first.order < item.order:
                return first
        return None

    def unfinished(self) -> list[Item]:
        return [item for items in self._by_shard.values() for item in items if not self.over(item)]

    def of_shard(self, shard: int) -> list[Item]:
        return self._by_shard.get(shard, [])


class Deliveries:
    """Everything about entries for one group.

    Parameters:
        store: to look into.
        stream, group: names.
        record: the group's record, for who holds what.
        items: (shard, id) -> entry, shared by all groups of the stream.
    """

    def __init__(
        self, store: Store, stream: str, group: str, record: GroupRecord, items: dict[tuple[int, str], Item]
    ) -> None:
        self.store = store
        self.stream = stream
        self.group = group
        self.record = record
        self.items = items
        self.fences: dict[int, Fencing] = {}
        self.lives: dict[int, Life] = {}
        self.running: list[Handling] = []
        self.surrendered: set[tuple[str, int, int]] = set()  # nonce, shard, token
        self._moves: dict[int, int] = {}  # shard -> how often the group was moved there
        self._begun: dict[int, int] = {}  # shard -> how often it had been moved when the latest entry was read
        self._read: dict[tuple[int, int, str], int] = {}  # shard, token, id -> how often it had been moved then

    @property
    def life(self) -> Life | None:
        """The lifecycle that there is now."""
        return self.lives.get(self.record.header.get(b"incarnation", 0))

    def shard_key(self, shard: int) -> bytes:
        return f"{self.stream}:{shard}".encode()

    # --- commands -----------------------------------------------------------------------------------------------------

    def claimed(self, fence: Fence, *, accepted: bool, word: str) -> None:
        fencing = self.fences[fence.shard]
        old = fencing.old if fencing.touched else fencing.fields
        before = fencing.rank(old)
        claim = (fence.incarnation, fence.token)
        same = claim == before and old.get(b"nonce", b"").decode() == fence.nonce
        if accepted:
            assert claim > before or same, f"fence of shard {fence.shard} went from {before} to {claim}"
            assert fencing.admits(fence), f"a claim of {claim} left the fence at {fencing.fields}"
        else:
            assert not fencing.touched, "a refused claim moved the fence"
            assert word != "FENCED" or not (claim > before or same), f"a claim of {claim} above {before} was refused"

    def fenced_call(self, fence: Fence, *, accepted: bool, word: str, what: str) -> None:
        """A read, acknowledgement or note was carried out or refused."""
        fencing = self.fences[fence.shard]
        if accepted:
            assert fencing.admits(fence), f"{what} of {fence} under the fence {fencing.fields}"
        elif word == "FENCED":
            assert not fencing.admits(fence), f"the last session that claimed shard {fence.shard} may not {what}"
        self.check_shard(fence.shard)

    def read(self, fence: Fence, ids: list[str]) -> None:
        moves, life = self._moves.get(fence.shard, 0), self.life
        for entry_id in ids:
            self._read[fence.shard, fence.token, entry_id] = moves
            item = self.items.get((fence.shard, entry_id))
            if item is not None and life is not None and life.incarnation == fence.incarnation:
                first = life.before(item)
                held = first is not None and first.shard != item.shard
                assert not held, f"{item} was read before {first} was finished"

    def acked(self, fence: Fence, ids: list[str]) -> None:
        life = self.lives.get(fence.incarnation)
        if life is None:
            return
        for entry_id in ids:
            item = self.items.get((fence.shard, entry_id))
            assert item is None or life.over(item), f"{item} was acknowledged, and nobody has finished it"
        position = self._position(fence.shard)
        first = life.first_of_shard(fence.shard)
        assert first is None or position < first.parts, f"position {position} is beyond {first}, which is not finished"

    def _position(self, shard: int) -> tuple[int, int]:
        ms, _, seq = self.fences[shard].fields.get(b"position", b"0-0").partition(b"-")
        return int(ms), int(seq)

    def check_shard(self, shard: int) -> None:
        """The first entry that nobody has finished is still to come."""
        life = self.life
        item = life.first_of_shard(shard) if life is not None else None
        if item is None:
            return
        standing = self._standing(item)
        if standing == NO_GROUP:
            position = self._position(shard)
            assert position < item.parts, f"{item} is lost: its group will begin anew at {position}"
            return
        assert standing not in (GONE, FINISHED), f"{item} is lost: {'gone' if standing == GONE else 'acknowledged'}"

    # --- operators ----------------------------------------------------------------------------------------------------

    def begin(self, incarnation: int, shards: int, layout: int) -> None:
        """A lifecycle of the group begins: what its consumer groups are beyond, it does not have to handle."""
        before = self.lives.get(max(self.lives, default=0))
        life = self.lives[incarnation] = Life(incarnation, layout)
        for item in self.items.values():
            life.expect(item)
            # Finished before, and perhaps acknowledged only from here on.
            if before is not None and item in before.done and self._standing(item) == PENDING:
                life.done.add(item)
        for shard in range(shards):
            self.skip(life, shard)
        # It never reads the shards that are about to go: who was there before may still drain them.
        life.skipped.update(item for item in life.unfinished() if item.shard >= shards)

    def _standing(self, item: Item) -> int:
        return self.store.standing(self.shard_key(item.shard), self.group.encode(), item.id.encode())

    def skip(self, life: Life, shard: int) -> None:
        """What is neither to be delivered nor pending does not come any more."""
        for item in life.of_shard(shard):
            if not life.over(item):
                standing = self._standing(item)
                # A consumer group that is not there will begin anew at the recorded position.
                passed = standing == NO_GROUP and item.parts <= self._position(shard)
                if passed or standing in (GONE, FINISHED):
                    life.skipped.add(item)

    def sought(self, shard: int) -> None:
        self._moves[shard] = self._moves.get(shard, 0) + 1
        if self.life is not None:
            self.skip(self.life, shard)

    def is_behind(self) -> bool:
        """Whether there was a later lifecycle than that of the record."""
        incarnation = self.record.header.get(b"incarnation", 0)
        return max(self.lives, default=0) > incarnation or any(
            fencing.rank(fencing.fields)[0] > incarnation for fencing in self.fences.values()
        )

    # --- handlers -----------------------------------------------------------------------------------------------------

    def started(self, process: object, fence: Fence, entry: Entry) -> None:
        """A handler was called."""
        item = self.items.get((fence.shard, entry.id))
        assert item is not None, f"{fence.shard}/{entry.id} was handed out, and never published"
        gone = self.record.how_ended(fence.nonce, fence.token)
        current = fence.incarnation == self.record.header.get(b"incarnation")
        if current and gone not in _UNAWARE:
            holds = self.record.holds(fence.member, fence.nonce, fence.shard, fence.token)
            assert holds, f"{fence} handed out {item}, and does not hold the shard ({gone or 'alive'})"
        for other in self.running:
            self._check_overlap(other, process, fence, item)
        life = self.lives.get(fence.incarnation)
        if life is not None and current:
            first = life.before(item)
            assert first is None, f"{item} was handed out before {first} was finished"
            if not gone:
                moves = self._read.get((fence.shard, fence.token, entry.id), 0)
                assert moves >= self._begun.get(fence.shard, 0), f"{item} was read before the group was moved"
                self._begun[fence.shard] = moves
        self.running.append(Handling(process, fence, item))

    def _check_overlap(self, other: Handling, process: object, fence: Fence, item: Item) -> None:
        mine = other.process is process
        assert not mine or other.item is not item, f"{item} is in two handlers of one process"
        life = self.lives.get(fence.incarnation)
        if life is not None and (
            (mine and item in life.done)
            or (other.shard != fence.shard and (item in life.done or life.over(other.item)))
        ):
            # One of them comes again, because its consumer group vanished or was moved, and in the order of its shard
            # only: what follows it may still be in a handler. Or an operator moved the group beyond it.
            return
        ordered = other.item.key == item.key if life is None else life.is_ordered(item, other.item)
        if (mine or other.shard != fence.shard) and not ordered:
            return
        if (other.nonce, other.shard, other.token) in self.surrendered:
            return
        theirs = self.record.how_ended(other.nonce, other.token)
        ours = self.record.how_ended(fence.nonce, fence.token)
        assert theirs in _OVERLAP or ours in _UNAWARE, (
            f"{item} is handed out to {fence.nonce} while {other.item} is with {other.nonce}"
        )

    def ended(self, process: object, fence: Fence, entry: Entry, *, finished: bool) -> None:
        """A handler returned, or raised."""
        item = self.items[fence.shard, entry.id]
        for at, handling in enumerate(self.running):
            if handling.process is process and handling.item is item:
                del self.running[at]
                break
        if finished:
            # In later lifecycles too: until it is fenced, a member of the one before may still acknowledge.
            for incarnation, life in self.lives.items():
                if incarnation >= fence.incarnation:
                    life.done.add(item)

    def died(self, process: object) -> None:
        """A process is gone, with its handlers."""
        self.running = [handling for handling in self.running if handling.process is not process]
