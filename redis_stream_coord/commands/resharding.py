"""Resharding: the record that its drivers decide from, and the steps on the record, on the shards and on the groups.

Every step may be repeated, and is refused by a key that has seen a later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ..errors import CorruptMetadataError
from ..keys import GroupKeys, StreamKeys
from ..models import Layout
from .base import PROTOCOL, Command, call, flat, text

# So many cuts go in one call: Lua hands at most 8,000 values to one call, and Redis does nothing else meanwhile.
CUTS_AT_ONCE = 500


@attrs.frozen(kw_only=True)
class SagaRecord:
    """A resharding as stored.

    Attributes:
        id: of the resharding.
        state: ``PREPARING``, ``CUTOVER``, ``DRAINING``, ``COMPLETED``, ``REOPENING``, ``ABANDONED`` or ``FAILED``.
        epoch: routing epoch that it works under; fresh for each resharding, rollback and abandonment.
        source, target: numbers of shards, of the layout that it leaves and the one that it goes to.
        ordered: the order of keys is kept across it.
        quiesce: no entry comes in from the cut-over until every group has consumed all that is there.
        back: it is being rolled back: `source` and `target` have changed places.
        opened: the routes of the present layout are known to be open.
        void: epoch whose cuts hold nobody, because it was abandoned; 0: none.
        began_ms, changed_ms: Redis server time.
        reason: why it failed or goes back; empty if it does neither.
    """

    id: str
    state: str
    epoch: int
    source: int
    target: int
    ordered: bool
    quiesce: bool
    back: bool
    opened: bool
    void: int
    began_ms: int
    changed_ms: int
    reason: str = ""

    @property
    def active(self) -> bool:
        """Whether it has not come to its end."""
        return self.state in ("PREPARING", "CUTOVER", "DRAINING", "REOPENING")

    @property
    def union(self) -> range:
        """Shards of either layout."""
        return range(max(self.source, self.target))

    @property
    def added(self) -> range:
        """Shards that only the layout it goes to has."""
        return range(self.source, self.target)

    @property
    def removed(self) -> range:
        """Shards that only the layout it leaves has."""
        return range(self.target, self.source)

    def holds(self, shard: int) -> bool:
        """Whether entries beyond the cut of a shard wait for other shards."""
        return (
            self.ordered
            and not self.quiesce
            and shard in (self.added if self.target > self.source else range(self.target))
        )


@attrs.frozen
class Barrier:
    """What groups have to pass, in the order of keys, before they read on: that of one decided resharding.

    Attributes:
        epoch: of the resharding.
        source, target: numbers of shards.
    """

    epoch: int
    source: int
    target: int

    @property
    def sources(self) -> range:
        """Shards that keys moved away from: they have to be consumed up to their cuts."""
        return range(self.source) if self.target > self.source else range(self.target, self.source)

    @property
    def held(self) -> range:
        """Shards that keys moved to: beyond their cuts they wait."""
        return range(self.source, self.target) if self.target > self.source else range(self.target)


@attrs.frozen(kw_only=True)
class Registration:
    """A group as its stream knows it.

    Attributes:
        registered: number of its registration; grows when it registers again during a resharding.
        incarnation: lifecycle that the rest is true of.
        since: epoch of the layout that it was created for.
        prepared, passed, drained: highest epoch for which it has done so.
    """

    registered: int
    incarnation: int
    since: int
    prepared: int
    passed: int
    drained: int


@attrs.frozen(kw_only=True)
class StreamView:
    """The whole record of a stream at one moment.

    Attributes:
        now_ms: Redis server time.
        layout: the present one.
        saga: the resharding under way, or the last one, or ``None``.
        barriers: of decided reshardings that not every group is known to have passed, oldest first.
        cuts: shard -> its cuts as stored: ``epoch:id:held``, with commas.
        groups: by name.
        top: the largest number of shards that the stream ever had.
    """

    now_ms: int
    layout: Layout
    saga: SagaRecord | None
    barriers: Sequence[Barrier]
    cuts: Mapping[int, str]
    groups: Mapping[str, Registration]
    top: int

    def cut(self, shard: int, epoch: int) -> str | None:
        """Return the id of the cut of a shard at an epoch, or ``None``."""
        for cut in self.cuts.get(shard, "-").split(","):
            if cut.startswith(f"{epoch}:"):
                return cut.split(":")[1]
        return None


def resharding(keys: StreamKeys) -> Command[StreamView]:
    """Read the whole record of a stream. Raises (when run): `NotFoundError`, `MetadataError`."""
    return call("resharding", {"record": keys.record}, {"protocol": PROTOCOL}, _view, stream=keys.stream)


def _view(answer: list[Any]) -> StreamView:
    names = list(map(text, answer[2]))
    fields = dict(zip(names[::2], names[1::2], strict=True))
    try:
        groups = {name[6:]: Registration(**_numbers(value)) for name, value in fields.items() if name[:6] == "group:"}
        return StreamView(
            now_ms=int(answer[1]),
            layout=Layout(
                int(fields["version"]),
                int(fields["incarnation"]),
                int(fields["epoch"]),
                int(fields["shards"]),
                fields["routing"],
                fields["layout"],
                fields["state"],
                fields["retention"],
                tuple(sorted(groups)),
            ),
            saga=None if fields["saga"] == "-" else _saga(fields["saga"]),
            barriers=[Barrier(*map(int, b.split(":"))) for b in fields["barriers"].split(",") if b != "-"],
            cuts={int(name[5:]): value for name, value in fields.items() if name[:5] == "cuts:"},
            groups=dict(sorted(groups.items())),
            top=int(fields["top"]),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptMetadataError(f"the record of the stream cannot be read: {error!r}") from error


def _numbers(line: str) -> dict[str, int]:
    return {name: int(value) for name, value in (part.split("=") for part in line.split())}


def _saga(line: str) -> SagaRecord:
    line, _, reason = line.partition(" reason=")
    parts = dict(part.split("=") for part in line.split())
    return SagaRecord(
        id=parts["id"],
        state=parts["state"],
        epoch=int(parts["epoch"]),
        source=int(parts["from"]),
        target=int(parts["to"]),
        ordered=parts["ordered"] == "1",
        quiesce=parts["quiesce"] == "1",
        back=parts["back"] == "1",
        opened=parts["opened"] == "1",
        void=int(parts["void"]),
        began_ms=int(parts["began_ms"]),
        changed_ms=int(parts["changed_ms"]),
        reason="" if reason == "-" else reason,
    )


# --- on the record ----------------------------------------------------------------------------------------------------


def scale(
    keys: StreamKeys,
    saga_id: str,
    *,
    shards: int,
    ordered: bool,
    quiesce: bool,
    request_id: str,
    audit: Mapping[str, str],
) -> Command[str]:
    """Begin a resharding. Result: its id; that of an earlier one if this request was accepted before.

    Raises (when run): `ConflictError`: one is under way, there is nothing to do, or order cannot be kept.
    """
    return call(
        "scale",
        {"record": keys.record, "audit": keys.audit, "limits": keys.limits},
        {
            "protocol": PROTOCOL,
            "saga": saga_id,
            "shards": shards,
            "ordered": int(ordered),
            "quiesce": int(quiesce),
            "request_id": request_id,
            "audit": flat(audit),
        },
        lambda answer: text(answer[1]),
        stream=keys.stream,
    )


def rollback(keys: StreamKeys, saga_id: str, *, request_id: str, audit: Mapping[str, str]) -> Command[str]:
    """Take a resharding back. Raises (when run): `ConflictError`: it is not under way."""
    return call(
        "rollback",
        {"record": keys.record, "audit": keys.audit, "limits": keys.limits},
        {"protocol": PROTOCOL, "saga": saga_id, "request_id": request_id, "audit": flat(audit)},
        lambda answer: text(answer[1]),
        stream=keys.stream,
    )


def abandon(keys: StreamKeys, saga: SagaRecord, reason: str) -> Command[None]:
    """Give a resharding up while it is prepared, because it cannot be."""
    return call("abandon", {"record": keys.record}, {**_of(saga), "reason": reason}, lambda _: None, stream=keys.stream)


def mark(
    keys: StreamKeys, saga: SagaRecord, group: str, what: str, *, registered: int, incarnation: int
) -> Command[bool]:
    """Note that a group has ``prepared``, ``passed`` or ``drained``. Result: whether it counts."""
    return call(
        "mark",
        {"record": keys.record},
        {**_of(saga), "group": group, "registered": registered, "incarnation": incarnation, "what": what},
        lambda answer: bool(answer[1]),
        stream=keys.stream,
        group=group,
    )


def advance(keys: StreamKeys, saga: SagaRecord, state: str) -> Command[str]:
    """Move a resharding on to a state, or note that its routes are ``OPENED``. Result: the state."""
    return call(
        "advance", {"record": keys.record}, {**_of(saga), "state": state}, lambda a: text(a[1]), stream=keys.stream
    )


def note_cuts(keys: StreamKeys, saga: SagaRecord, cuts: Mapping[int, str]) -> Command[int]:
    """Note the cuts of at most `CUTS_AT_ONCE` shards. Result: how many."""
    return call(
        "note_cuts",
        {"record": keys.record},
        {**_of(saga), "cuts": [part for pair in sorted(cuts.items()) for part in pair]},
        lambda answer: int(answer[1]),
        stream=keys.stream,
    )


def decide(keys: StreamKeys, saga: SagaRecord) -> Command[str]:
    """Make the new layout the stream's. Result: its id."""
    return call("decide", {"record": keys.record}, _of(saga), lambda answer: text(answer[1]), stream=keys.stream)


def _of(saga: SagaRecord) -> dict[str, Any]:
    return {"protocol": PROTOCOL, "saga": saga.id, "epoch": saga.epoch}


# --- on a shard -------------------------------------------------------------------------------------------------------


def close(keys: StreamKeys, shard: int, saga: SagaRecord) -> Command[str]:
    """Close a shard for the epoch of a resharding. Result: id of its cut.

    Raises (when run): `MetadataRegressionError`: the shard is ahead; `RoutingUnavailableError`: it has no route.
    """
    decided = saga.state != "REOPENING"
    return _on_shard(
        "close",
        keys,
        shard,
        {"epoch": saga.epoch, "held": int(decided and saga.holds(shard)), "void": saga.void},
        lambda answer: text(answer[1]),
    )


def open_route(keys: StreamKeys, shard: int, *, epoch: int, layout: str) -> Command[None]:
    """Open a shard that is closed for an epoch.

    Raises (when run): `MetadataRegressionError`: the shard is ahead; `ConflictError`: it has to be closed first;
    `RoutingUnavailableError`: it has no route.
    """
    return _on_shard("open", keys, shard, {"epoch": epoch, "layout": layout}, lambda answer: None)


def rebuild(keys: StreamKeys, shard: int, view: StreamView) -> Command[bool]:
    """Make the route of a shard, closed, if it has none. Result: whether it was made."""
    arguments = {"epoch": view.layout.epoch, "cuts": view.cuts.get(shard, "-"), "read_ms": view.now_ms}
    return _on_shard("rebuild", keys, shard, arguments, lambda answer: bool(answer[1]))


def settle(keys: StreamKeys, shard: int, epoch: int) -> Command[int]:
    """Forget the cuts of a shard up to an epoch that every group has passed. Result: how many are left."""
    return _on_shard("settle", keys, shard, {"epoch": epoch}, lambda answer: int(answer[1]))


def _on_shard(name: str, keys: StreamKeys, shard: int, arguments: Mapping[str, Any], parse: Any) -> Command[Any]:
    names = keys.shard(shard)
    where = {"stream": names.stream, "route": names.route}
    return call(name, where, arguments, parse, stream=keys.stream, shard=shard)


def pass_barrier(keys: GroupKeys, shard: int, *, epoch: int, incarnation: int) -> Command[bool]:
    """Let a group read a shard beyond the barrier of an epoch. Result: whether it could not before."""
    return call(
        "pass",
        {"stream": StreamKeys(keys.stream).shard(shard).stream, "fence": keys.fence(shard)},
        {"epoch": epoch, "incarnation": incarnation},
        lambda answer: bool(answer[1]),
        stream=keys.stream,
        group=keys.group,
        shard=shard,
    )


@attrs.frozen(kw_only=True)
class Progress:
    """How far a group got on a shard.

    Attributes:
        found: its consumer group is there, or nothing is, because the stream is gone.
        first: id of the first entry that is not finished; ``None``: all are.
        pending: entries that were delivered and are not acknowledged.
        lag: entries that were not delivered, as Redis counts them, which proves nothing; ``None``: it cannot tell.
    """

    found: bool
    first: str | None
    pending: int
    lag: int | None

    def consumed(self, cut: str) -> bool:
        """Whether nothing at or below an id is pending or undelivered."""
        return self.found and (self.first is None or _order(self.first) > _order(cut))


@attrs.frozen(kw_only=True)
class Evidence:
    """How far the groups got on a shard, read together with its route in one script.

    Attributes:
        epoch, state: of its route.
        last: highest id that the stream has ever given out.
        strangers: consumer groups that nobody registered.
        groups: by name.
    """

    epoch: int
    state: str
    last: str
    strangers: Sequence[str]
    groups: Mapping[str, Progress]

    def closed_for(self, epoch: int) -> bool:
        """Whether nothing that was routed by a layout before `epoch` can come any more."""
        return self.epoch >= epoch

    def drained(self, group: str, epoch: int) -> bool:
        """Whether a shard that the layout of `epoch` does not have has nothing left for a group."""
        progress = self.groups[group]
        return self.closed_for(epoch) and progress.found and progress.first is None


def evidence(keys: StreamKeys, shard: int, groups: Sequence[str]) -> Command[Evidence]:
    """Ask how far groups got on a shard."""

    def parse(answer: list[Any]) -> Evidence:
        rest = answer[5:]
        return Evidence(
            epoch=int(answer[1]),
            state=text(answer[2]),
            last=text(answer[3]),
            strangers=list(map(text, answer[4])),
            groups={
                group: Progress(
                    found=bool(rest[4 * i]),
                    first=text(rest[4 * i + 1]) or None,
                    pending=int(rest[4 * i + 2]),
                    lag=int(rest[4 * i + 3]) if text(rest[4 * i + 3]) else None,
                )
                for i, group in enumerate(groups)
            },
        )

    return _on_shard("evidence", keys, shard, {"groups": list(groups)}, parse)


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))


# --- on a group -------------------------------------------------------------------------------------------------------


def readable(keys: GroupKeys, *, epoch: int, step: int, shards: int) -> Command[int]:
    """Say which shards members may be given: `shards` of them, from 0. Older words than the last are ignored.

    Result: incarnation of the group. Raises (when run): `NotFoundError`, `MetadataError`; `FrozenError`, of step 1.
    """
    return call(
        "readable",
        {"metadata": keys.metadata, "events": keys.events},
        {"epoch": epoch, "step": step, "shards": shards, "protocol": PROTOCOL},
        lambda answer: int(answer[1]),
        stream=keys.stream,
        group=keys.group,
    )


def last_word(keys: GroupKeys) -> Command[tuple[int, int]]:
    """Ask for the last word about readable shards. Result: its epoch and step; zeros if there is no such group."""
    names = [keys.metadata, "layout_epoch", "layout_step"]
    return Command("HMGET", None, [keys.metadata], names, lambda answer: (int(answer[0] or 0), int(answer[1] or 0)))
