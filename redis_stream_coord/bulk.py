"""Publishing many entries at once, as a saga: several go in one call, and several calls in one round trip.

Nothing of one key overtakes. A shard gets one batch in a round trip, and the next only after that one went well; where
an entry failed for good, nothing behind it with the same key is sent. When a shard refuses the layout, all that is left
is divided anew, in the order given.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import islice

from .attempts import Course, Place
from .commands import Pause, Published, Saga, Together
from .errors import CoordError, PartialPublishError, RedisUnavailableError
from .models import Receipt
from .publishing import Entry, NotSentError, Publishing, away_pauses, closed_pauses, outcome_word

_BATCH = 200  # entries per script call: Redis does nothing else meanwhile
_BATCH_BYTES = 1024 * 1024  # of one script call, unless a single entry is larger
_CALLS = 64  # script calls per round trip
_PLAIN = 1000  # plain commands per round trip

_Batch = tuple[Place, list[int]]


class Bulk:
    """One call of ``publish_many``.

    Parameters:
        publishing: of the producer.
        entries: what to publish.
    """

    def __init__(self, publishing: Publishing, entries: Sequence[Entry]) -> None:
        self._publishing = publishing
        self._entries = entries
        self._receipts: list[Receipt | None] = [None] * len(entries)
        self._failed: dict[int, CoordError] = {}
        self._reasons: dict[int, CoordError] = {}  # why something that is left is not through yet
        self._left: list[int] = list(range(len(entries)))
        self._stuck: set[bytes] = set()  # keys of which something failed
        self._searched: set[int] = set()  # entries that are nowhere but, perhaps, where they go now
        self._receipt_count = 0
        self._trouble: CoordError | None = None  # what stands in the way of the rest
        self._is_over = False  # and whether only another layout helps

    def run(self) -> Saga[list[Receipt]]:
        """Publish them.

        Returns:
            A receipt for each.

        Raises:
            PartialPublishError: some were not, or perhaps not, published.
            RoutingError: nobody knows where to; nothing was sent.
        """
        try:
            yield from self._run()
        except CoordError as error:
            # It concerns the layout, and so everything that is left.
            if len(self._left) == len(self._entries) and not self._reasons:
                self._publishing.count(error, len(self._entries))
                raise
            self._settle()
            self._give_up(error)
        return self._finish()

    def _run(self) -> Saga[None]:
        publishing, began = self._publishing, self._publishing.clock()
        layout_id, receipt_count = "", -1
        deadline, closed, away, was_lost = began, closed_pauses(), away_pauses(), False
        while self._left:
            if receipt_count != self._receipt_count:  # whatever went well gives the rest its full time
                receipt_count, deadline = self._receipt_count, publishing.clock() + publishing.timeout_seconds
                closed, away, was_lost = closed_pauses(), away_pauses(), False
            course = yield from publishing.course(deadline)
            if course.layout.layout != layout_id:
                self._searched.clear()
                layout_id = course.layout.layout
            trouble = yield from self._step(course, began)
            if trouble is None or not self._left:
                continue
            if isinstance(trouble, RedisUnavailableError) and not was_lost:
                was_lost, deadline = True, publishing.clock() + publishing.timeout_seconds
            if publishing.clock() >= deadline and receipt_count == self._receipt_count:
                self._give_up(None)
            elif isinstance(trouble, RedisUnavailableError):
                yield Pause(next(away))
            else:
                yield from publishing.another(course, self._is_over, closed, deadline)

    def _step(self, course: Course, began: float) -> Saga[CoordError | None]:
        """Send what is left under one layout. Returns: what stood in the way."""
        self._trouble = None
        if self._publishing.fenced:
            yield from self._search(course)
        if not self._trouble and self._left:
            if course.is_empty:
                yield from self._publishing.no_shards(course, began)
            else:
                yield from self._send(course)
        self._settle()
        return self._trouble

    # --- where entries may be by now ----------------------------------------------------------------------------------

    def _search(self, course: Course) -> Saga[None]:
        """Ask every other shard where entries with event ids may be, of each entry oldest first."""
        turns: dict[int, deque[Place]] = {}
        for position in self._left:
            if position not in self._searched and (places := self._publishing.before(course, self._entries[position])):
                turns[position] = deque(places)
        while turns and self._trouble is None:
            lanes: dict[Place, deque[int]] = {}
            for position, turn in turns.items():
                lanes.setdefault(turn[0], deque()).append(position)
            batches = [(place, batch) for place, lane in lanes.items() for batch in self._cut(lane) if batch][:_CALLS]
            for position in (yield from self._round(batches, search=True)):
                turns[position].popleft()
            turns = {
                position: turn
                for position, turn in turns.items()
                if turn and not self._is_done(position) and self._entries[position].key not in self._stuck
            }
        if self._trouble is None:
            self._settle()
            self._searched.update(self._left)

    # --- where they go now --------------------------------------------------------------------------------------------

    def _send(self, course: Course) -> Saga[None]:
        """Send what is left, until all of it is sent or something stands in the way."""
        entries = self._entries
        if not self._publishing.fenced:
            for first in range(0, len(self._left), _PLAIN):
                window = [p for p in self._left[first : first + _PLAIN] if entries[p].key not in self._stuck]
                yield from self._round([(course.place(entries[p].key), [p]) for p in window])
                if self._trouble is not None:
                    return
            return
        lanes: dict[Place, deque[int]] = {}
        for position in self._left:
            key = entries[position].key
            if key not in self._stuck:
                lanes.setdefault(course.place(key), deque()).append(position)
        while lanes and self._trouble is None:
            batches = [(place, next(self._cut(lane))) for place, lane in islice(lanes.items(), _CALLS)]
            yield from self._round([batch for batch in batches if batch[1]])
            lanes = {place: lane for place, lane in lanes.items() if lane}

    def _cut(self, lane: deque[int]) -> Iterator[list[int]]:
        """Take batches from a lane, in order; of keys that are stuck nothing."""
        while lane:
            batch: list[int] = []
            size = 0
            while lane and len(batch) < _BATCH:
                entry = self._entries[lane[0]]
                size += sum(map(len, entry.flat))
                if batch and size > _BATCH_BYTES:
                    break
                position = lane.popleft()
                if entry.key not in self._stuck:
                    batch.append(position)
            yield batch

    def _round(self, batches: Sequence[_Batch], *, search: bool = False) -> Saga[list[int]]:
        """Send batches in one round trip and note what became of them.

        Returns:
            When searching: the entries that are not there, and never will be.
        """
        publishing, sends = self._publishing, []
        for place, positions in batches:
            entries = [self._entries[position] for position in positions]
            if publishing.fenced:
                for entry in entries:
                    publishing.begin(place, entry)
            sends.append(publishing.command(place, entries))
        over: list[int] = []
        results = (yield Together(sends)) if sends else []
        for (place, positions), result in zip(batches, results, strict=True):
            if isinstance(result, CoordError):
                self._note_error(positions, result)
                continue
            for position, outcome in zip(positions, result, strict=True):
                if self._note(place, position, outcome, search):
                    over.append(position)
        return over

    def _note(self, place: Place, position: int, outcome: Published, search: bool) -> bool:
        publishing, entry = self._publishing, self._entries[position]
        if entry.event_id is not None:
            publishing.answered(place, entry, outcome)
        if outcome.is_there:
            self._receipts[position] = publishing.receipt(place, outcome)
            self._receipt_count += 1
            return False
        is_over = place.is_over(outcome)
        if is_over and search:
            return True
        error = publishing.refused(place, outcome)
        if error.retriable:
            self._reasons[position] = self._trouble = error
            self._is_over = is_over
        else:
            self._fail(position, error)
        return False

    def _note_error(self, positions: Sequence[int], error: CoordError) -> None:
        if not isinstance(error, RedisUnavailableError):
            for position in positions:
                self._fail(position, error)
            return
        self._trouble = error
        for position in positions:
            entry = self._entries[position]
            unknown = self._publishing.unknown(error, entry)
            if self._publishing.is_repeatable(entry):
                self._reasons[position] = unknown
            else:
                self._fail(position, unknown)

    # --- what became of them ------------------------------------------------------------------------------------------

    def _is_done(self, position: int) -> bool:
        return self._receipts[position] is not None or position in self._failed

    def _fail(self, position: int, error: CoordError) -> None:
        self._failed[position] = error
        self._stuck.add(self._entries[position].key)

    def _settle(self) -> None:
        """Find what is left. What stands behind a failure of its key fails too: it would overtake it."""
        left = []
        for position in self._left:
            if self._is_done(position):
                continue
            if self._entries[position].key in self._stuck:
                self._failed[position] = self._reasons.get(position) or self._not_sent()
            else:
                left.append(position)
        self._left = left

    def _give_up(self, error: CoordError | None) -> None:
        for position in self._left:
            self._failed[position] = self._reasons.get(position) or error or self._not_sent()
        self._left = []

    def _not_sent(self) -> NotSentError:
        return NotSentError(
            "not sent: something before it was not published",
            stream=self._publishing.keys.stream,
            hint="It certainly is not in the stream. Publish it again after what failed before it.",
            retriable=True,
        )

    def _finish(self) -> list[Receipt]:
        outcomes = [receipt or self._failed[position] for position, receipt in enumerate(self._receipts)]
        counts = Counter(map(outcome_word, outcomes))
        for outcome in {outcome_word(outcome): outcome for outcome in outcomes}.values():
            self._publishing.count(outcome, counts[outcome_word(outcome)])
        if self._failed:
            first = min(self._failed)
            raise PartialPublishError(
                f"{len(self._failed)} of {len(outcomes)} entries were not published; number {first}: "
                f"{self._failed[first]}",
                receipts=self._receipts,
                failed=dict(sorted(self._failed.items())),
                stream=self._publishing.keys.stream,
                hint="See .failed for each entry's reason and .receipts for those that were published.",
            )
        return [receipt for receipt in self._receipts if receipt is not None]
