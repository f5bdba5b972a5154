"""The worker of one shard as the simulation sees it: when it claims, reads, hands out, acknowledges and is drained.

It follows `redis_stream_coord.worker` and `acks` step by step, without tasks: every call to Redis and every start or
end of a handler is a step of its own, which others may come between. Lanes are the real ones, and so is the memory of
what is outstanding.
"""

from __future__ import annotations

from typing import Protocol

from redis_stream_coord import commands
from redis_stream_coord.commands import Command, Entry, Fence, Page
from redis_stream_coord.errors import CoordError, FencedError
from redis_stream_coord.keys import GroupKeys
from redis_stream_coord.lanes import Lane, Lanes
from redis_stream_coord.models import Held
from redis_stream_coord.outstanding import Outstanding


class Owner(Protocol):
    """What a worker needs of the process it runs in."""

    @property
    def now(self) -> float: ...
    def owns(self, held: Held) -> bool: ...
    def reads(self, held: Held) -> bool: ...
    def claimed(self, work: Work) -> None: ...
    def claim_refused(self, work: Work, error: CoordError) -> None: ...
    def unfenced(self, work: Work) -> None: ...
    def drained(self, work: Work) -> None: ...
    def say(self, work: Work, command: Command[None]) -> None: ...
    def started(self, work: Work, entry: Entry) -> None: ...
    def ended(self, work: Work, entry: Entry, *, finished: bool) -> None: ...


class Ledger:
    """What a process did with entries of one shard, kept across tokens; see `redis_stream_coord.handling.Ledger`."""

    def __init__(self) -> None:
        self.busy: set[str] = set()
        self.finished: set[str] = set()
        self.late: set[str] = set()
        self.incarnation = 0

    def enter(self, incarnation: int) -> None:
        """Begin a lifecycle of the group."""
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            self.forget()

    def forget(self) -> None:
        """Remember only what is in a handler."""
        self.finished.clear()
        self.late.clear()


class Slot:
    """A lane that was taken, and the entry at its front."""

    __slots__ = ("deliveries", "entry", "lane", "noting", "running")

    def __init__(self, lane: Lane, entry: Entry) -> None:
        self.lane = lane
        self.entry = entry
        self.deliveries = entry.deliveries
        self.running = False  # in a handler
        self.noting = False  # failed, and the count is being written down


class Work:
    """One shard under one token, from the claim to the last acknowledgement."""

    def __init__(
        self, owner: Owner, keys: GroupKeys, fence: Fence, ledger: Ledger, *, concurrency: int, prefetch: int
    ) -> None:
        self.owner = owner
        self.keys = keys
        self.fence = fence
        self.held = Held(fence.shard, fence.token)
        self.ledger = ledger
        self.concurrency = concurrency
        self.prefetch = prefetch
        self.lanes = Lanes(by_key=concurrency > 1)
        self.slots: list[Slot] = []
        self.acks: list[str] = []
        self.claimed = False
        self.stopping = False
        self.refused = False  # fenced: what follows is only to wait for the handlers
        self.ended = False
        self.before: Work | None = None  # an earlier one of the same token, whose handlers may still run
        self.after = "0-0"
        self.caught_up = False
        self.doubted = False
        self.outstanding = Outstanding(lambda: owner.now)
        self._known: frozenset[str] = frozenset()  # what was outstanding when the call under way was sent
        self._looking = False  # that call asks for what is pending
        self._sorting = False  # that call reads again what was lost
        self._just_read = False
        self.waits = False  # nothing more was there, or it could not be asked: again after a while
        self.untried: dict[str, int] = {}
        self.uncounted = False
        self.calling = False  # claim, read or last word under way
        self.sending = False  # acknowledgement under way

    def stop(self) -> None:
        self.stopping = True

    def notices(self) -> bool:
        """Whether it would stop by itself: the lease has passed, or the shard is asked back."""
        return self.claimed and not self.stopping and not self.owner.reads(self.held)

    def look(self) -> None:
        self.doubted, self.waits = True, False

    # --- what there is to do ------------------------------------------------------------------------------------------

    def reading(self) -> bool:
        return not self.stopping and self.owner.reads(self.held)

    def may_call(self) -> bool:
        """Whether a claim, a read or a look is next."""
        if self.calling or self.stopping or self.ended:
            return False
        if not self.claimed:
            return not self.waits
        return self.reading() and (self._may_read() or self._may_look())

    def _may_read(self) -> bool:
        return self.doubted or (not self.waits and self.room() > 0)

    def _may_look(self) -> bool:
        return self.caught_up and not self.doubted and self.outstanding.due()

    def room(self) -> int:
        return 0 if self.lanes.count > self.prefetch // 2 else self.prefetch - self.lanes.count

    def call(self) -> Command[object]:
        """Return the claim, read or look that is next; its outcome goes to `called`."""
        self.calling = True
        if not self.claimed:
            return commands.claim(self.keys, self.fence)
        self._looking = self._may_look() and (self._just_read or not self._may_read())
        self._just_read = not self._looking
        if self._looking:
            self._known = self.outstanding.ids
            after, count = self.outstanding.begin()
            return commands.outstanding(self.keys, self.fence, after=after, count=count)
        if self.caught_up and not self.lanes.count and not self.slots:
            self.ledger.late.clear()
        self._sorting = self.outstanding.reads_again
        self._known = self.outstanding.ids if self._sorting else frozenset()
        return commands.read(self.keys, self.fence, after=self.after, count=max(1, self.room()), max_bytes=1000)

    def called(self, outcome: object) -> None:
        """Take the outcome of a claim, read or look."""
        self.calling = False
        if self.ended:
            return
        looked, self._looking = self._looking, False
        if isinstance(outcome, CoordError):
            if not looked or isinstance(outcome, FencedError):
                self._call_failed(outcome)
        elif looked:
            assert isinstance(outcome, list)
            self.after = self.outstanding.look(outcome, self._known, self.after)
            self.waits = self.waits and not self.outstanding.reads_again
        elif not self.claimed:
            self.claimed = True
            self.owner.claimed(self)
        else:
            assert isinstance(outcome, Page)
            self._take(outcome)
        self.close()

    def _call_failed(self, error: CoordError) -> None:
        if not isinstance(error, FencedError):
            self.doubted, self.waits = False, True
        elif not self.claimed:
            self.stopping = True
            self.owner.claim_refused(self, error)
        else:
            # What was read ahead is somebody else's, or to be read again.
            self.stopping = self.refused = True

    def _take(self, page: Page) -> None:
        self.doubted = False
        if self._sorting:
            page, self.after = self.outstanding.sort(page, self._known)
        else:
            self.after = page.last or self.after
        self.outstanding.received(page.entries)
        for entry in page.entries:
            self.lanes.add(entry)
            self.untried[entry.id] = entry.deliveries
        if page.caught_up and not self.caught_up:
            self.caught_up = True
            self.ledger.finished.intersection_update([*self.acks, *(entry.id for entry in page.entries)])
        self.waits = page.wait_after is not None

    # --- handing out --------------------------------------------------------------------------------------------------

    def may_start(self) -> bool:
        """Whether something can be handed out, or a lane taken."""
        if self.ended or self.stopping or self.doubted or not self.claimed:
            return False
        if not (self.lanes.ready and len(self.slots) < self.concurrency) and not any(
            not slot.running and not slot.noting for slot in self.slots
        ):
            return False
        return self.reading()

    def start(self) -> None:
        """Take a lane, or go on with one that waits; then hand its entry out, unless it is done or in a handler."""
        slot = next((slot for slot in self.slots if not slot.running and not slot.noting), None)
        if slot is None or (self.lanes.ready and len(self.slots) < self.concurrency):
            lane = self.lanes.take()
            if lane is None:
                return
            slot = Slot(lane, self.lanes.pop(lane, 1)[0])
            self.slots.append(slot)
        entry_id = slot.entry.id
        if entry_id in self.ledger.busy:
            return  # the handler of an earlier worker still runs
        if slot.deliveries == slot.entry.deliveries and (
            entry_id in self.ledger.finished or entry_id in self.ledger.late
        ):
            self._acknowledge(entry_id)
            self._release(slot)
            return
        self.ledger.busy.add(entry_id)
        self.untried.pop(entry_id, None)
        slot.running = True
        self.owner.started(self, slot.entry)

    def finish(self, slot: Slot, *, ok: bool) -> Command[None] | None:
        """A handler returned, or raised. Returns: the count to write down before the next try, if there is one."""
        slot.running = False
        self.ledger.busy.discard(slot.entry.id)
        self.owner.ended(self, slot.entry, finished=ok)
        if ok:
            self._acknowledge(slot.entry.id)
            self._release(slot)
        elif not self.reading():
            self._release(slot)
        else:
            slot.deliveries += 1
            slot.noting = True
            return commands.note_deliveries(self.keys, self.fence, {slot.entry.id: slot.deliveries})
        self.close()
        return None

    def noted(self, slot: Slot, outcome: object) -> None:
        """The count was written down, or not: at worst one is lost."""
        slot.noting = False
        if not self.reading() and slot in self.slots:
            self.untried[slot.entry.id] = slot.deliveries
            self._release(slot)
        self.close()

    def _release(self, slot: Slot) -> None:
        self.slots.remove(slot)
        self.lanes.give_back(slot.lane)

    def _acknowledge(self, entry_id: str) -> None:
        self.ledger.finished.add(entry_id)
        self.untried.pop(entry_id, None)
        self.acks.append(entry_id)

    # --- acknowledging, and the end -----------------------------------------------------------------------------------

    def may_send(self) -> bool:
        return bool(self.acks) and not self.sending and self.owner.owns(self.held)

    def send(self) -> tuple[Command[int], list[str]]:
        """Return the acknowledgement of what is queued; its outcome goes to `sent`."""
        self.sending = True
        batch = list(self.acks)
        return commands.ack(self.keys, self.fence, batch), batch

    def sent(self, batch: list[str], outcome: object) -> None:
        self.sending = False
        if isinstance(outcome, FencedError):
            self.look()
            if self.stopping:
                self.acks.clear()  # none of them counted; the flush at the end gives up
        elif not isinstance(outcome, CoordError):
            del self.acks[: len(batch)]
            self.ledger.finished.difference_update(batch)
            self.outstanding.acknowledged(batch)
            if self.stopping:
                self.ledger.late.update(batch)
        self.close()

    def close(self) -> None:
        """Come to the end, once everything that it waits for is over."""
        if not self.stopping or self.ended or self.calling:
            return
        for slot in [slot for slot in self.slots if not slot.running and not slot.noting]:
            self._release(slot)
        if self.slots or (self.before is not None and not self.before.ended):
            return
        if self.refused:
            self.ended = True
            self.owner.unfenced(self)
        elif not self.sending and (not self.acks or not self.owner.owns(self.held)):
            last_word = None if self.uncounted else self._uncount()
            if last_word is not None:
                self.uncounted = self.calling = True
                self.owner.say(self, last_word)
                return
            self.ended = True
            self.owner.drained(self)

    def said(self) -> None:
        self.calling = False
        self.close()

    def _uncount(self) -> Command[None] | None:
        """If the first entry left was only read ahead, return how to say so: the next owner would count it."""
        if not self.untried or not self.owner.owns(self.held) or self.owner.reads(self.held):
            return None
        entry_id = min(self.untried, key=lambda one: tuple(map(int, one.split("-"))))
        return commands.note_deliveries(self.keys, self.fence, {entry_id: self.untried[entry_id] - 1})
