"""Looking at groups without changing anything."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from . import commands, reshard
from .group_view import GroupView, MemberView
from .models import Resharding
from .reads import Reads
from .runner import AsyncRunner, SyncRunner
from .settings import RedisSettings
from .triage import Finding
from .views import (
    AssignmentView,
    AuditEntry,
    Compatibility,
    EventEntry,
    RemovedShard,
    RoutingView,
    ShardStatus,
    StoredEntry,
    SystemHealth,
)


class Monitor:
    """Reads what is stored of groups, from plain code. Nothing here changes or delivers anything.

    Parameters:
        redis: URL or settings.

    Raises:
        ConfigError: the URL cannot be understood.
    """

    def __init__(self, redis: str | RedisSettings) -> None:
        self._reads = Reads(redis)
        self._runner = SyncRunner(self._reads.settings)

    def health(self) -> SystemHealth:
        """Look at Redis and at every group of the index.

        Returns:
            A report, also when Redis does not answer; then its status is ``UNAVAILABLE``.
        """
        return self._runner.drive(self._reads.health())

    def groups(self) -> list[tuple[str, str]]:
        """Return (stream, group) of every group in the index, sorted."""
        return self._runner.run(commands.groups(self._reads.settings.key_prefix))

    def describe(self, stream: str, *, group: str) -> GroupView:
        """Return the whole record of a group of a stream. Raises: `NotFoundError`, `MetadataError`."""
        return self._runner.run(commands.describe(self._reads.group_keys(stream, group)))

    def members(self, stream: str, *, group: str) -> Sequence[MemberView]:
        """Return the members of a group of a stream, by id. Raises: `NotFoundError`, `MetadataError`."""
        return list(self.describe(stream, group=group).members.values())

    def assignments(self, stream: str, *, group: str) -> AssignmentView:
        """Return target, current owners, drains under way and violated invariants of a group of a stream.

        Raises: `NotFoundError`, `MetadataError`.
        """
        return AssignmentView.of(self.describe(stream, group=group))

    def routing(self, stream: str) -> RoutingView:
        """Return where producers of a stream publish to, and whether its shards agree.

        Raises: `NotFoundError`, `MetadataError`.
        """
        return self._runner.drive(self._reads.routing(stream))

    def resharding(self, stream: str) -> Resharding | None:
        """Return how far the resharding of a stream is, and what it waits for by group and shard.

        The last one if none is under way; ``None`` if there never was one.

        Raises: `NotFoundError`, `MetadataError`.
        """
        return self._runner.drive(reshard.look(self._reads.stream_keys(stream)))

    def shards(self, stream: str, *, group: str) -> Sequence[ShardStatus]:
        """Return each shard of a group of a stream: owner, length, pending, lag, memory, slot, fence, route.

        Each shard is read at one moment, but not all of them at the same one.

        Raises: `NotFoundError`, `MetadataError`.
        """
        return self._runner.drive(self._reads.shards(stream, group))

    def removed(self, stream: str) -> Sequence[RemovedShard]:
        """Return what lies on shards that the layout of a stream has no more: entries, bytes, what keeps them there.

        Raises: `NotFoundError`, `MetadataError`.
        """
        return self._runner.drive(self._reads.removed(stream))

    def messages(
        self,
        stream: str,
        *,
        group: str | None = None,
        shard: int | None = None,
        entry_id: str | None = None,
        event_id: str | None = None,
        after: str | None = None,
        count: int = 10,
        newest: bool = False,
    ) -> Sequence[StoredEntry]:
        """Look at entries as they lie in their shards. Looking delivers nothing.

        Parameters:
            stream: name of the logical stream.
            group: also say to which member of this group an entry is delivered.
            shard: look into this shard only.
            entry_id: search for this entry, in each shard: ids are unique within a shard only.
            event_id: search for the entry with this event id, as far as its shard remembers.
            after: begin beyond this id.
            count: so many entries of each shard at most.
            newest: begin with the newest one, and go back.

        Returns:
            Entries by shard, then in the order asked for; empty if there are none.

        Raises:
            NotFoundError: there is no such stream, group or shard.
            MetadataError: its record cannot be used.
        """
        return self._runner.drive(self._reads.messages(stream, group, shard, entry_id, event_id, after, count, newest))

    def audit(self, stream: str, *, group: str | None = None, count: int = 100) -> Sequence[AuditEntry]:
        """Return the newest administrative mutations, newest first.

        Parameters:
            stream: name of the logical stream.
            group: those of this group; ``None``: those of the stream itself.
            count: at most so many.
        """
        return self._runner.drive(self._reads.audit(stream, group, count))

    def events(self, stream: str, *, group: str, count: int = 100) -> Sequence[EventEntry]:
        """Return the newest transitions of a group, newest first.

        Parameters:
            stream, group: its names.
            count: at most so many.
        """
        return self._runner.drive(self._reads.events(stream, group, count))

    def triage(
        self, stream: str, *, group: str, expected_shards: int | None = None, drain_seconds: float = 300.0
    ) -> Sequence[Finding]:
        """Walk the checklists of the runbook on a group: who is stuck where, and what to do next.

        Parameters:
            stream, group: its names.
            expected_shards: how many shards producers should see; ``None``: as many as they do.
            drain_seconds: a resharding that takes longer than that is a problem.

        Raises:
            NotFoundError: there is no such stream or group.
            MetadataError: its record cannot be used.
        """
        return self._runner.drive(self._reads.triage(stream, group, expected_shards, drain_seconds))

    def compatibility(self) -> Compatibility:
        """Return whether this release can work with every record there is."""
        return self._runner.drive(self._reads.compatibility())

    def close(self) -> None:
        """Close the connections."""
        self._runner.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncMonitor:
    """Reads what is stored of groups, from coroutines. Parameters: redis: URL or settings."""

    def __init__(self, redis: str | RedisSettings) -> None:
        self._reads = Reads(redis)
        self._runner = AsyncRunner(self._reads.settings)

    async def health(self) -> SystemHealth:
        """Look at Redis and at every group of the index; see `Monitor.health`."""
        return await self._runner.drive(self._reads.health())

    async def groups(self) -> list[tuple[str, str]]:
        """Return (stream, group) of every group in the index, sorted."""
        return await self._runner.run(commands.groups(self._reads.settings.key_prefix))

    async def describe(self, stream: str, *, group: str) -> GroupView:
        """Return the whole record of a group of a stream. Raises: `NotFoundError`, `MetadataError`."""
        return await self._runner.run(commands.describe(self._reads.group_keys(stream, group)))

    async def members(self, stream: str, *, group: str) -> Sequence[MemberView]:
        """Return the members of a group of a stream, by id. Raises: `NotFoundError`, `MetadataError`."""
        return list((await self.describe(stream, group=group)).members.values())

    async def assignments(self, stream: str, *, group: str) -> AssignmentView:
        """Return who should have what, and who has it; see `Monitor.assignments`."""
        return AssignmentView.of(await self.describe(stream, group=group))

    async def routing(self, stream: str) -> RoutingView:
        """Return where producers of a stream publish to, and whether its shards agree; see `Monitor.routing`."""
        return await self._runner.drive(self._reads.routing(stream))

    async def resharding(self, stream: str) -> Resharding | None:
        """Return how far the resharding of a stream is; see `Monitor.resharding`."""
        return await self._runner.drive(reshard.look(self._reads.stream_keys(stream)))

    async def shards(self, stream: str, *, group: str) -> Sequence[ShardStatus]:
        """Return each shard of a group of a stream; see `Monitor.shards`."""
        return await self._runner.drive(self._reads.shards(stream, group))

    async def removed(self, stream: str) -> Sequence[RemovedShard]:
        """Return what lies on shards that the layout of a stream has no more; see `Monitor.removed`."""
        return await self._runner.drive(self._reads.removed(stream))

    async def messages(
        self,
        stream: str,
        *,
        group: str | None = None,
        shard: int | None = None,
        entry_id: str | None = None,
        event_id: str | None = None,
        after: str | None = None,
        count: int = 10,
        newest: bool = False,
    ) -> Sequence[StoredEntry]:
        """Look at entries as they lie in their shards. Looking delivers nothing; see `Monitor.messages`."""
        return await self._runner.drive(
            self._reads.messages(stream, group, shard, entry_id, event_id, after, count, newest)
        )

    async def audit(self, stream: str, *, group: str | None = None, count: int = 100) -> Sequence[AuditEntry]:
        """Return the newest administrative mutations, newest first; see `Monitor.audit`."""
        return await self._runner.drive(self._reads.audit(stream, group, count))

    async def events(self, stream: str, *, group: str, count: int = 100) -> Sequence[EventEntry]:
        """Return the newest transitions of a group, newest first; see `Monitor.events`."""
        return await self._runner.drive(self._reads.events(stream, group, count))

    async def triage(
        self, stream: str, *, group: str, expected_shards: int | None = None, drain_seconds: float = 300.0
    ) -> Sequence[Finding]:
        """Walk the checklists of the runbook; see `Monitor.triage`."""
        return await self._runner.drive(self._reads.triage(stream, group, expected_shards, drain_seconds))

    async def compatibility(self) -> Compatibility:
        """Return whether this release can work with every record there is."""
        return await self._runner.drive(self._reads.compatibility())

    async def close(self) -> None:
        """Close the connections."""
        await self._runner.close()

    async def __aenter__(self) -> AsyncMonitor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
