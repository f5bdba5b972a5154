"""Judges the record of the stream and the routes of its shards: one layout after the other, nothing lost in between."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import attrs

from .deliveries import Deliveries, Item
from .watched import Watched

_SAGA = re.compile(
    rb"id=(\w+) state=(\w+) epoch=(\d+) from=(\d+) to=(\d+) ordered=([01]) quiesce=([01]) back=([01]) opened=[01] .*"
)
_GROUP = re.compile(rb"registered=(\d+) incarnation=(\d+) since=(\d+) prepared=(\d+) passed=(\d+) drained=(\d+)")
_ACTIVE = frozenset({"PREPARING", "CUTOVER", "DRAINING", "REOPENING"})
# What may follow; from DRAINING it may also be taken back, which begins anew.
_NEXT: Mapping[str, frozenset[str]] = {
    "PREPARING": frozenset({"CUTOVER", "REOPENING"}),
    "CUTOVER": frozenset({"DRAINING", "REOPENING"}),
    "DRAINING": frozenset({"COMPLETED", "PREPARING"}),
    "REOPENING": frozenset({"ABANDONED", "FAILED"}),
}
# The step before: its epoch goes on.
_SAME_EPOCH = frozenset({"CUTOVER", "DRAINING", "COMPLETED", "ABANDONED", "FAILED"})


def _id(text: bytes) -> tuple[int, int]:
    ms, _, seq = text.partition(b"-")
    return int(ms), int(seq)


@attrs.frozen
class SagaSeen:
    """A resharding as stored."""

    id: str
    state: str
    epoch: int
    source: int
    target: int
    ordered: bool
    quiesce: bool

    @property
    def active(self) -> bool:
        return self.state in _ACTIVE

    @property
    def union(self) -> range:
        return range(max(self.source, self.target))


@attrs.frozen
class GroupSeen:
    """What a group has done for reshardings, as stored."""

    registered: int
    incarnation: int
    since: int
    prepared: int
    passed: int
    drained: int


class Route(Watched):
    """The route of one shard, kept up to date with every write."""

    __slots__ = ()

    @staticmethod
    def phase(fields: Mapping[bytes, bytes]) -> tuple[int, bool] | None:
        """Return epoch and whether it is open; ``None`` if there is no route."""
        return (int(fields[b"epoch"]), fields[b"state"] == b"open") if fields else None


class LayoutRecord(Watched):
    """The record of the stream, with what stood there before the latest command.

    Parameters:
        shards: how many there may ever be.

    Attributes:
        decided: how many layouts there were before this one.
        era: how many of them did not keep the order of keys.
        routes: by shard.
    """

    def __init__(self, shards: int) -> None:
        super().__init__()
        self.decided = self.era = 0
        self.routes = [Route() for _ in range(shards)]
        self._drawn = 0
        self._disturbed: str | None = None  # a resharding whose drivers may believe in what Redis has lost since

    # --- following ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """What is there now is what was there before the next command."""
        self.touched = False
        for route in self.routes:
            route.touched = False

    def went_back(self) -> None:
        """Redis lost its last writes: what was drawn since then is drawn again."""
        self._drawn = self._number(b"drawn")
        self._disturbed = None if self.saga is None else self.saga.id

    # --- what others ask ----------------------------------------------------------------------------------------------

    @property
    def shards(self) -> int:
        return self._number(b"shards")

    @property
    def layout(self) -> bytes:
        return self.fields.get(b"layout", b"")

    @property
    def saga(self) -> SagaSeen | None:
        return self._saga(self.fields)

    def _number(self, name: bytes) -> int:
        return int(self.fields.get(name, 0))

    @staticmethod
    def _saga(fields: Mapping[bytes, bytes]) -> SagaSeen | None:
        text = fields.get(b"saga", b"-")
        if text == b"-":
            return None
        found = _SAGA.fullmatch(text)
        assert found, f"unreadable resharding: {text!r}"
        return SagaSeen(
            found[1].decode(),
            found[2].decode(),
            int(found[3]),
            int(found[4]),
            int(found[5]),
            found[6] == b"1",
            found[7] == b"1",
        )

    def _cut(self, shard: int, epoch: int) -> tuple[int, int] | None:
        for cut in self.fields.get(b"cuts:%d" % shard, b"-").split(b","):
            parts = cut.split(b":")
            if parts[0] == b"%d" % epoch:
                return _id(parts[1])
        return None

    def _barriers(self) -> list[tuple[int, int, int]]:
        found = []
        for barrier in self.fields.get(b"barriers", b"-").split(b","):
            if barrier != b"-":
                epoch, source, target = map(int, barrier.split(b":"))
                found.append((epoch, source, target))
        return found

    # --- judging ------------------------------------------------------------------------------------------------------

    def check(self, deliveries: Mapping[str, Deliveries], items: Mapping[tuple[int, str], Item]) -> None:
        """Judge what the latest command has done to the record and the routes."""
        for shard, route in enumerate(self.routes):
            if route.touched:
                old, new = route.phase(route.old), route.phase(route.fields)
                if old is not None and new is not None:
                    assert new >= old, f"the route of shard {shard} went from {old} back to {new}"
        if not self.touched or not self.old:
            self._drawn = max(self._drawn, self._number(b"drawn"))
            return
        assert self.fields, "the record of the stream went away"
        for name in (b"version", b"epoch", b"drawn"):
            assert self._number(name) >= int(self.old[name]), f"{name.decode()} of the stream went backwards"
        if self.fields[b"layout"] != self.old[b"layout"]:
            assert self._number(b"epoch") > int(self.old[b"epoch"]), f"another layout under epoch {self.layout!r}"
        self._check_saga(items)
        self._check_marks(deliveries)
        self._drawn = max(self._drawn, self._number(b"drawn"))

    def _check_saga(self, items: Mapping[tuple[int, str], Item]) -> None:
        old, new = self._saga(self.old), self.saga
        if new is None or (old is not None and (old.id, old.state, old.epoch) == (new.id, new.state, new.epoch)):
            return
        if old is None or old.id != new.id:
            assert old is None or not old.active, f"{new} began while there was {old}"
            assert new.state == "PREPARING", f"{new} begins so"
        else:
            assert new.state in _NEXT.get(old.state, ()), f"{old} became {new}"
        if old is not None and old.id == new.id and new.state in _SAME_EPOCH:
            assert new.epoch == old.epoch, f"{old} became {new}"
        else:
            assert new.epoch > self._drawn, f"epoch {new.epoch} was drawn twice: {new}"
        if new.state == "DRAINING":
            self._check_decision(new, items)
        if new.state == "COMPLETED":
            assert not self._barriers(), f"{new} has barriers left"

    def _check_decision(self, saga: SagaSeen, items: Mapping[tuple[int, str], Item]) -> None:
        """No shard of either layout takes an entry of an earlier one any more, and all that are there are cut off."""
        self.decided += 1
        if not saga.ordered and not saga.quiesce:
            self.era += 1
        if saga.id == self._disturbed:
            return
        cuts = {}
        for shard in saga.union:
            cut = cuts[shard] = self._cut(shard, saga.epoch)
            assert cut is not None, f"{saga} was decided without a cut of shard {shard}"
            phase = Route.phase(self.routes[shard].fields)
            # One that was lost and made anew, from a record of before, takes nothing either.
            shut = phase is None or phase[0] >= saga.epoch or not phase[1]
            assert shut, f"{saga} was decided, and the route of {shard} is {phase}"
        for item in items.values():
            cut = cuts.get(item.shard)
            assert cut is None or item.excused or item.parts <= cut, f"{item} is beyond the cut {cut} of {saga}"

    def _check_marks(self, deliveries: Mapping[str, Deliveries]) -> None:
        saga = self.saga
        for field, text in self.fields.items():
            if not field.startswith(b"group:") or self.old.get(field) == text or saga is None or not saga.active:
                continue
            if saga.id == self._disturbed:
                continue
            before, now = self._group(self.old.get(field)), self._group(text)
            of = deliveries[field[6:].decode()]
            if now is None or of.life is None or of.life.incarnation != now.incarnation:
                continue  # the mark counts for nothing, or for a lifecycle that begins
            if now.prepared == saga.epoch and (before is None or before.prepared < saga.epoch):
                lacking = [shard for shard in saga.union if not of.record.reads(shard)]
                assert not lacking, f"{of.group} is called prepared, and may not read {lacking}"
            if now.passed == saga.epoch and (before is None or before.passed < saga.epoch):
                self._check_passed(saga, now, of)
            if now.drained == saga.epoch and (before is None or before.drained < saga.epoch):
                gone = range(saga.target, saga.source) if saga.state == "DRAINING" else range(saga.source, saga.target)
                self._nothing_left(of, gone, None, saga, "drained")

    def _check_passed(self, saga: SagaSeen, group: GroupSeen, of: Deliveries) -> None:
        if saga.state == "CUTOVER":
            self._nothing_left(of, range(saga.source), None, saga, "done")
        for epoch, source, target in self._barriers():
            sources = range(source) if target > source else range(target, source)
            for shard in sources:
                if shard < self.shards or group.since < epoch:
                    self._nothing_left(of, [shard], self._cut(shard, epoch), saga, f"past epoch {epoch}")

    def _nothing_left(
        self, of: Deliveries, shards: Sequence[int], until: tuple[int, int] | None, saga: SagaSeen, what: str
    ) -> None:
        life = of.life
        assert life is not None
        for shard in shards:
            first = life.first_of_shard(shard)
            if first is not None and (until is None or first.parts <= until):
                raise AssertionError(f"{of.group} is called {what}, and has not finished {first}: {saga}")

    @staticmethod
    def _group(text: bytes | None) -> GroupSeen | None:
        if text is None:
            return None
        found = _GROUP.fullmatch(text)
        assert found, f"unreadable group: {text!r}"
        return GroupSeen(*map(int, found.groups()))

    def check_rest(self, groups: Mapping[str, Deliveries]) -> None:
        """When nothing is under way any more, record, routes and groups agree on one layout."""
        assert not self._barriers(), "barriers are left"
        cuts = [name for name in self.fields if name.startswith(b"cuts:")]
        assert not cuts, f"cuts are left: {cuts}"
        for shard, route in enumerate(self.routes):
            if not route.fields:
                assert shard >= self.shards, f"shard {shard} has no route"
            elif shard < self.shards:
                found = (route.fields[b"state"], route.fields[b"layout"])
                assert found == (b"open", self.layout), f"the route of shard {shard} is {found}, not {self.layout!r}"
            else:
                assert route.fields[b"state"] == b"closed", f"shard {shard} is open, and there are {self.shards}"
        for name, of in groups.items():
            if of.record.header:
                shards = sorted(of.record.shards)
                assert shards == list(range(self.shards)), f"{name} has the shards {shards}, there are {self.shards}"
