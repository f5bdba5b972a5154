"""Where entries were sent, and what is known of it: the memory that keeps an event id from being published twice.

A *place* is a shard under one layout. A shard's route has a phase, (epoch, closed or open), that only moves up, and
each layout id is opened at most once. So once a shard refuses a layout from a higher phase, nothing that was routed by
that layout can ever land there any more: neither an attempt whose answer was lost nor one that is still on the wire.
Until then it may, and the entry must not be sent anywhere else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import attrs

from .commands import Published
from .models import Layout
from .routing import PROTOCOLS


@attrs.frozen
class Place:
    """A shard under one layout.

    Attributes:
        incarnation: lifecycle of the stream's record.
        layout: id of the layout, ``<epoch>:<shards>:<nonce>``.
        shard: index of the shard.
    """

    incarnation: int
    layout: str
    shard: int

    @property
    def epoch(self) -> int:
        return int(self.layout.partition(":")[0])

    def is_over(self, outcome: Published) -> bool:
        """Whether the shard refused this layout for good, by what it answered."""
        if outcome.word not in ("CLOSED", "STALE_ROUTE"):
            return False
        phase = outcome.detail.partition(" ")[0]
        return phase.isdigit() and int(phase) > self.epoch


class Course:
    """Where keys go under one layout, and where they went under the layouts before it.

    Parameters:
        layout: with at least one shard, or none.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._shard_of = PROTOCOLS[layout.routing].shard
        self._places = [Place(layout.incarnation, layout.layout, shard) for shard in range(layout.shards)]
        self._before = [
            (shards, one) for one in layout.earlier if (shards := int(one.split(":")[1])) not in (0, layout.shards)
        ]

    @property
    def is_empty(self) -> bool:
        """Whether there are no shards."""
        return not self._places

    def place(self, key: bytes) -> Place:
        """Return where a key goes; there are shards."""
        return self._places[self._shard_of(key, len(self._places))]

    def before(self, key: bytes, remembered: Iterable[Place] = ()) -> list[Place]:
        """Return where else an entry of the key may be by now, oldest first.

        Not the shard where it goes now: that one looks for the event id itself. Of each other shard the latest layout:
        a shard that is beyond it is beyond those before.

        Parameters:
            key: partition key.
            remembered: where the entry was sent.
        """
        earlier = [Place(self.layout.incarnation, one, self._shard_of(key, shards)) for shards, one in self._before]
        earlier += (place for place in remembered if place.incarnation == self.layout.incarnation)
        if not earlier:
            return earlier
        now = None if self.is_empty else self.place(key).shard
        latest: dict[int, Place] = {}
        for place in sorted(earlier, key=lambda place: place.epoch):
            if place.shard != now:
                latest.pop(place.shard, None)
                latest[place.shard] = place
        return list(latest.values())


@attrs.define
class _Memory:
    at: float
    sends: dict[Place, int] = attrs.field(factory=dict)  # how many were not answered


class Attempts:
    """Sends of entries with event ids that have no answer yet, or lost it. Bounded by time and count.

    An event id belongs to its key: with another key it is another entry.

    Parameters:
        clock: seconds that never go back.
        lock: held while the memory is looked at or changed.
        window_seconds: after so long the shards do not remember the id either.
        window_count: of more, the oldest are forgotten.
    """

    def __init__(
        self, clock: Callable[[], float], lock: AbstractContextManager[object], window_seconds: float, window_count: int
    ) -> None:
        self._clock = clock
        self._lock = lock
        self._window_seconds = window_seconds
        self._window_count = window_count
        self._memories: OrderedDict[tuple[str, bytes], _Memory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._memories)

    def begin(self, event_id: str, key: bytes, place: Place) -> None:
        """Note that an entry is about to be sent. Before it is: another thread may publish the same one meanwhile."""
        name, now = (event_id, key), self._clock()
        with self._lock:
            memory = self._memories.get(name)
            if memory is None:
                memory = self._memories[name] = _Memory(now)
            else:
                memory.at = now
                self._memories.move_to_end(name)
            memory.sends[place] = memory.sends.get(place, 0) + 1
            self._forget_old(now)

    def answered(self, event_id: str, key: bytes, place: Place, outcome: Published) -> None:
        """Note what the shard answered."""
        name = (event_id, key)
        with self._lock:
            memory = self._memories.get(name)
            if memory is None:
                return
            if outcome.is_there:
                del self._memories[name]
                return
            left = 0 if place.is_over(outcome) else memory.sends.get(place, 1) - 1
            if left:
                memory.sends[place] = left
            else:
                memory.sends.pop(place, None)
                if not memory.sends:
                    del self._memories[name]

    def places(self, event_id: str, key: bytes) -> list[Place]:
        """Return where the entry may be, or may still arrive."""
        if not self._memories:
            return []
        with self._lock:
            memory = self._memories.get((event_id, key))
            return [] if memory is None else list(memory.sends)

    def event_ids(self) -> tuple[str, ...]:
        """Return the event ids that there is something to remember of, oldest first."""
        with self._lock:
            return tuple(event_id for event_id, _ in self._memories)

    def _forget_old(self, now: float) -> None:
        # Two at most for each that comes in: bounded work, and it still shrinks.
        for _ in range(2):
            name, memory = next(iter(self._memories.items()))
            if len(self._memories) <= self._window_count and now - memory.at <= self._window_seconds:
                return
            del self._memories[name]
