"""The entries of one shard that wait to be handed out: which may go next, and how much room is left."""

from __future__ import annotations

from collections import deque

import attrs

from .commands import Entry


@attrs.define
class Lane:
    """Entries that keep their order among each other: those of one partition key, or of the whole shard."""

    name: bytes | None
    entries: deque[Entry] = attrs.field(factory=deque)


class Lanes:
    """Divides entries into lanes. A lane that was taken is not given to anybody else until it is given back.

    Parameters:
        by_key: one lane for each partition key, entries without one together; otherwise one lane for all.
    """

    def __init__(self, *, by_key: bool) -> None:
        self._by_key = by_key
        self._lanes: dict[bytes | None, Lane] = {}
        self._ready: deque[Lane] = deque()
        self._taken: set[bytes | None] = set()
        self.count = 0
        self.bytes = 0

    def add(self, entry: Entry) -> None:
        """Put an entry behind the others of its lane."""
        name = entry.key if self._by_key else None
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name)
            self._ready.append(lane)
        elif not lane.entries and name not in self._taken:
            self._ready.append(lane)
        lane.entries.append(entry)
        self.count += 1
        self.bytes += entry.size

    @property
    def ready(self) -> int:
        """How many lanes could be taken now."""
        return len(self._ready)

    def take(self) -> Lane | None:
        """Take the lane that has waited longest, or ``None``."""
        if not self._ready:
            return None
        lane = self._ready.popleft()
        self._taken.add(lane.name)
        return lane

    def pop(self, lane: Lane, most: int) -> list[Entry]:
        """Take up to so many entries from the front of a lane that was taken."""
        entries = [lane.entries.popleft() for _ in range(min(most, len(lane.entries)))]
        self.count -= len(entries)
        self.bytes -= sum(entry.size for entry in entries)
        return entries

    def give_back(self, lane: Lane) -> None:
        """Let somebody else take the lane, behind those that have waited longer."""
        self._taken.discard(lane.name)
        if lane.entries:
            self._ready.append(lane)
        else:
            del self._lanes[lane.name]
