"""What `Admin` does about the number of shards, as sagas. The decisions are those of `redis_stream_coord.reshard`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import lcm

from . import commands, removed, reshard, routing, standing, telemetry
from .commands import Barrier, Evidence, Saga, StreamView
from .errors import ConfigError, CoordError, NotFoundError, WaitTimeoutError, refused
from .group_view import GroupView
from .keys import GroupKeys, StreamKeys
from .models import GroupDrain, Resharding, ScalePlan
from .sagas import Sagas
from .views import Trimmed

Progress = Callable[[Resharding], None]


def moved_share(protocol: str, source: int, target: int) -> float:
    """Return the share of all keys that another number of shards moves to another shard.

    Of ``jump-v1`` it is the least that an even distribution can do: what the added shards get, or the removed ones
    had. ``murmur3-mod-v1`` keeps a key only where the remainders of two moduli are equal.
    """
    if source == target:
        return 0.0
    if protocol == "murmur3-mod-v1" and min(source, target) > 0:
        return 1 - min(source, target) / lcm(source, target)
    return 1 - min(source, target) / max(source, target)


class Scaling(Sagas):
    """The mutations of `Sagas`, and those of the number of shards."""

    def scale(
        self,
        stream: str,
        shards: int,
        ordered: bool,
        quiesce: bool,
        reason: str,
        request_id: str | None,
    ) -> Saga[Resharding]:
        """Begin a resharding; see `Admin.scale`."""
        keys = self.stream_keys(stream)
        _check(stream, shards)
        request = self.request(keys, "scale", reason, request_id, shards=shards, ordered=ordered, quiesce=quiesce)

        def work(recorded: str | None) -> Saga[Resharding]:
            if recorded is None:
                yield from self._check_thawed(keys)
                recorded = yield commands.scale(
                    keys,
                    self.settings.machine.word(),
                    shards=shards,
                    ordered=ordered,
                    quiesce=quiesce,
                    **request.said(),
                )
            return (yield from self._announced(keys, recorded))

        return self._counted(keys, self.carry_out(request, work))

    def _check_thawed(self, keys: StreamKeys) -> Saga[None]:
        """Refuse what concerns all groups of a stream while one of them is frozen."""
        view: StreamView = yield commands.resharding(keys)
        for group in sorted(view.groups):
            try:
                record: GroupView = yield commands.describe(GroupKeys(keys.stream, group, keys.prefix))
            except NotFoundError:
                continue  # being created, or deleted
            if record.frozen_ms is not None:
                raise refused("FROZEN", str(record.frozen_ms), stream=keys.stream, group=group)

    def rollback(self, stream: str, saga_id: str, reason: str, request_id: str | None) -> Saga[Resharding]:
        """Take a resharding back; see `Admin.rollback`."""
        keys = self.stream_keys(stream)
        request = self.request(keys, "rollback", reason, request_id, resharding=saga_id)

        def work(recorded: str | None) -> Saga[Resharding]:
            if recorded is None:
                yield commands.rollback(keys, saga_id, **request.said())
            return (yield from self._announced(keys, saga_id))

        return self._counted(keys, self.carry_out(request, work))

    def _counted(self, keys: StreamKeys, saga: Saga[Resharding]) -> Saga[Resharding]:
        telemetry.scale_requests.add(1, {telemetry.STREAM: keys.stream})
        try:
            return (yield from saga)
        except CoordError:
            telemetry.scale_requests_failed.add(1, {telemetry.STREAM: keys.stream})
            raise

    def _announced(self, keys: StreamKeys, saga_id: str) -> Saga[Resharding]:
        """Tell the groups, so that the member which has the duty goes to work at once. Returns how far it is."""
        view: StreamView = yield commands.resharding(keys)
        if view.saga is None or view.saga.id != saga_id:
            raise NotFoundError(f"resharding {saga_id} is over, and a later one has begun", stream=keys.stream)
        if view.saga.active:
            for group in view.groups:
                yield commands.announce(GroupKeys(keys.stream, group, keys.prefix), "resharding")
        found = standing.describe(keys.stream, view)
        assert found is not None
        return found

    def wait(
        self, stream: str, saga_id: str, timeout_seconds: float | None, progress: Progress | None
    ) -> Saga[Resharding]:
        """Carry a resharding on until it ends; see `Admin.wait`."""
        clock = self.settings.machine.clock
        deadline = None if timeout_seconds is None else clock() + timeout_seconds
        return self._wait(
            StreamKeys(stream, self.settings.key_prefix),
            saga_id,
            lambda: deadline is None or clock() < deadline,
            timeout_seconds,
            progress,
        )

    def _wait(
        self,
        keys: StreamKeys,
        saga_id: str,
        goes_on: Callable[[], bool],
        timeout_seconds: float | None,
        progress: Progress | None,
    ) -> Saga[Resharding]:
        found = yield from reshard.drive(keys, saga_id=saga_id, goes_on=goes_on, progress=progress)
        if found is None:
            raise NotFoundError(
                f"the stream's record knows no resharding {saga_id}",
                stream=keys.stream,
                hint="It remembers the last one only. See Monitor.audit.",
            )
        if found.active and not goes_on():
            waits = "; ".join(str(waiting) for waiting in found.waits[:3]) or "its next step"
            raise WaitTimeoutError(
                f"the resharding is still {found.state} after {timeout_seconds} s; it waits for: {waits}",
                stream=keys.stream,
                hint="It goes on by itself while a consumer runs. Wait again, or take it back: Admin.rollback.",
            )
        return found

    def trim(self, stream: str, reason: str, request_id: str | None) -> Saga[Trimmed]:
        """Trim the shards that the layout has no more; see `Admin.trim`."""
        keys = self.stream_keys(stream)
        request = self.request(keys, "trim", reason, request_id)

        def work(recorded: str | None) -> Saga[Trimmed]:
            view: StreamView = yield commands.resharding(keys)
            if view.saga is not None and view.saga.active:
                raise refused("RESHARDING", f"{view.saga.state}: shards that it removes are needed", stream=stream)
            if recorded is None:
                found = yield from removed.look(keys, view)
                entries = sum(one.entries for one in found)
                # Before the first step: what nobody has written down must not be gone.
                yield commands.note_trim(keys, f"{entries} entries on {len(found)} shards", **request.said())
            return (yield from removed.trim(keys, view, keep=0))

        return self.carry_out(request, work)

    def plan(self, stream: str, shards: int, ordered: bool, quiesce: bool) -> Saga[ScalePlan]:
        """Say what another number of shards would bring; see `Admin.plan_scale`."""
        _check(stream, shards)
        return self._plan(StreamKeys(stream, self.settings.key_prefix), shards, ordered, quiesce)

    def _plan(self, keys: StreamKeys, shards: int, ordered: bool, quiesce: bool) -> Saga[ScalePlan]:
        view: StreamView = yield commands.resharding(keys)
        layout, groups = view.layout, sorted(view.groups)
        sources = range(layout.shards) if quiesce else Barrier(0, layout.shards, shards).sources
        evidence: dict[int, Evidence] = {}
        for shard in sources:
            evidence[shard] = yield commands.evidence(keys, shard, groups)
        drains = []
        for group in groups:
            record: GroupView = yield commands.describe(GroupKeys(keys.stream, group, keys.prefix))
            active = sum(member.state == "active" for member in record.members.values())
            drains.append(GroupDrain(group=group, entries=_entries(evidence, group), members=active))
        removed = range(shards, layout.shards)
        return ScalePlan(
            stream=keys.stream,
            source=layout.shards,
            target=shards,
            added=tuple(range(layout.shards, shards)),
            removed=tuple(removed),
            moved_share=moved_share(layout.routing, layout.shards, shards),
            groups=tuple(drains),
            refused=_refusal(view, shards, ordered and not quiesce),
            notes=tuple(_notes(drains, evidence, removed)),
        )


def _check(stream: str, shards: int) -> None:
    if not isinstance(shards, int) or isinstance(shards, bool) or not 0 <= shards <= routing.MAX_SHARDS:
        raise ConfigError(f"shards={shards!r} must be between 0 and {routing.MAX_SHARDS}", stream=stream)


def _entries(evidence: Mapping[int, Evidence], group: str) -> int | None:
    total = 0
    for found in evidence.values():
        progress = found.groups[group]
        if progress.lag is None:
            return None
        total += progress.lag + progress.pending
    return total


def _refusal(view: StreamView, shards: int, ordered: bool) -> str | None:
    if view.layout.state == "creating":
        return "the stream is still being created"
    if view.saga is not None and view.saga.active:
        return f"the stream is being resharded from {view.saga.source} to {view.saga.target}: {view.saga.state}"
    if view.layout.shards == shards:
        return f"the stream has {shards} shards already"
    if ordered and view.layout.routing != routing.DEFAULT_PROTOCOL:
        return f"order cannot be kept with {view.layout.routing}: pass ordered=False, or quiesce=True"
    return None


def _notes(drains: list[GroupDrain], evidence: Mapping[int, Evidence], removed: range) -> list[str]:
    notes = [
        f"group {drain.group} has no live member: it will not consume what it has to"
        for drain in drains
        if not drain.members and drain.entries != 0
    ]
    for shard in removed:
        notes += [
            f"consumer group {name} on shard {shard} is nobody's that the stream knows; the shard's stream has to stay "
            "as long as it needs it"
            for name in evidence[shard].strangers
        ]
    return notes
