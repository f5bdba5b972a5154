"""What one owner of a shard has received and not acknowledged; by that it knows what is pending and should not be.

A failover may lose the last writes of Redis, acknowledgements among them that it had accepted. Their entries are
pending again, below the id beyond which the owner reads, so nobody would hand them out before the shard changes hands:
the position stands still, nothing is trimmed, a resharding waits. So an owner that has caught up asks now and then for
the ids of what is pending. Those that it does not know to be outstanding are read again, and handed out again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import attrs

from .commands import Entry, Page

# At most so often. An idle owner has something to do each `waiting.LOOK_AGAIN_SECONDS`, and looks then.
_LOOK_SECONDS = 5.0
# So many ids at most are looked at, and then those behind them: an application may hold any number of messages.
_PAGE = 1000
_START = "0-0"


class Outstanding:
    """The entries that one owner has received and not acknowledged, and its looks for what is pending beside them.

    Parameters:
        clock: of the machine.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ids: set[str] = set()
        self._next_look = clock() + _LOOK_SECONDS
        self._cursor = _START  # what has been looked at already
        self._stood: str | None = None  # while it reads again: the last id that it had received before
        self._until = _START  # reads again up to this id
        self.lost: set[str] = set()  # acknowledged once, handed out again, and not acknowledged since

    def received(self, entries: Iterable[Entry]) -> None:
        """Take note of entries that were read."""
        self._ids.update(entry.id for entry in entries)

    def acknowledged(self, ids: Iterable[str]) -> None:
        """Take note of what Redis has acknowledged."""
        self._ids.difference_update(ids)
        self.lost.difference_update(ids)

    @property
    def reads_again(self) -> bool:
        """Whether what was lost is being read."""
        return self._stood is not None

    @property
    def ids(self) -> frozenset[str]:
        """What is outstanding at this moment.

        Take it before Redis is asked for what is pending: what is acknowledged before its answer is here stands in the
        answer, and was not lost.
        """
        return frozenset(self._ids)

    def due(self) -> bool:
        """Whether it is time to look."""
        return not self.reads_again and self._clock() >= self._next_look

    def begin(self) -> tuple[str, int]:
        """Begin a look. Returns: beyond which id, and for how many ids, Redis is to be asked."""
        self._next_look = self._clock() + _LOOK_SECONDS
        return self._cursor, _PAGE

    def look(self, pending: Sequence[str], known: Collection[str], after: str) -> str:
        """End a look.

        Parameters:
            pending: ids, as Redis has answered.
            known: what was outstanding before it was asked.
            after: the last id that was received. What is pending beyond it comes with the next read in any case.

        Returns:
            From which id to read on: `after`, unless something was lost.
        """
        self._cursor = pending[-1] if len(pending) == _PAGE else _START
        stood = _order(after)
        lost = [entry_id for entry_id in pending if entry_id not in known and _order(entry_id) <= stood]
        if not lost:
            return after
        self._stood, self._until = after, lost[-1]
        return _before(lost[0])

    def sort(self, page: Page, known: Collection[str]) -> tuple[Page, str]:
        """Take from a page that was read again what is handed out.

        Parameters:
            page: as it was read.
            known: what was outstanding before it was asked for.

        Returns:
            The page without what is outstanding, and from which id to read on. The count of a lost entry says that it
            was delivered before: Redis may not have been told, because nobody expected it to come again.
        """
        assert self._stood is not None
        stood = _order(self._stood)
        entries = []
        for number, entry in enumerate(page.entries):
            if number < page.again and entry.id in known:
                continue
            if number < page.again and _order(entry.id) <= stood:
                self.lost.add(entry.id)
                entry = attrs.evolve(entry, deliveries=max(entry.deliveries, 2))
            entries.append(entry)
        again = page.again - (len(page.entries) - len(entries))
        # What was received is in hand, or was handled, before it was deleted.
        gone = [entry_id for entry_id in page.gone if _order(entry_id) > stood]
        after = page.last or self._stood
        if page.caught_up or _order(after) >= _order(self._until):
            if page.recreated_at is None:
                after = max(after, self._stood, key=_order)
            self._stood = None
            self._next_look = self._clock()  # where something was lost there may be more
        return attrs.evolve(page, entries=entries, again=again, gone=gone), after


def _order(entry_id: str) -> tuple[int, int]:
    ms, _, sequence = entry_id.partition("-")
    return int(ms), int(sequence)


def _before(entry_id: str) -> str:
    """Return the id just before one that is not 0-0."""
    ms, sequence = _order(entry_id)
    return f"{ms}-{sequence - 1}" if sequence else f"{ms - 1}-{(1 << 64) - 1}"
