"""`AsyncAdmin`: the same as `Admin`, from coroutines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from types import TracebackType

from . import applying, routing
from .backups import Backup
from .checks import check_kind
from .desired import Change, Desired, Plan
from .group_view import GroupView
from .models import Resharding, ScalePlan, Timings
from .repairs import Part, Repairs
from .runner import AsyncRunner
from .sagas import Retention, Start
from .settings import RedisSettings
from .verification import Discrepancy
from .views import Trimmed


class AsyncAdmin:
    """Creates and deletes groups, and changes numbers of shards, from coroutines. Parameters as `Admin`."""

    def __init__(self, redis: str | RedisSettings, *, requested_by: str) -> None:
        self._sagas = Repairs(redis, requested_by=requested_by)
        self._runner = AsyncRunner(self._sagas.settings)

    async def create(
        self,
        stream: str,
        *,
        group: str,
        reason: str,
        shards: int | None = None,
        start: Start = "oldest",
        timings: Timings = Timings(),  # noqa: B008 - frozen
        routing: str = routing.DEFAULT_PROTOCOL,
        retention: Retention = "all",
        exist_ok: bool = False,
        request_id: str | None = None,
    ) -> GroupView:
        """Create a group; see `Admin.create`."""
        return await self._runner.drive(
            self._sagas.create(stream, group, shards, start, timings, routing, retention, exist_ok, reason, request_id)
        )

    async def delete(
        self, stream: str, *, group: str, reason: str, force: bool = False, request_id: str | None = None
    ) -> None:
        """Delete a group; see `Admin.delete`."""
        await self._runner.drive(self._sagas.delete(stream, group, force, reason, request_id))

    async def retain(self, stream: str, *, retention: Retention, reason: str, request_id: str | None = None) -> None:
        """Change how long the entries of a stream are kept; see `Admin.retain`."""
        await self._runner.drive(self._sagas.retain(stream, retention, reason, request_id))

    async def trim(self, stream: str, *, reason: str, request_id: str | None = None) -> Trimmed:
        """Trim now what lies on shards that the layout of a stream has no more; see `Admin.trim`."""
        return await self._runner.drive(self._sagas.trim(stream, reason, request_id))

    async def seek(
        self,
        stream: str,
        *,
        group: str,
        to: str | datetime,
        reason: str,
        shards: Iterable[int] | None = None,
        request_id: str | None = None,
    ) -> None:
        """Move a group to another place; see `Admin.seek`."""
        await self._runner.drive(self._sagas.seek(stream, group, to, shards, reason, request_id))

    async def freeze(self, stream: str, *, group: str, reason: str, request_id: str | None = None) -> None:
        """Freeze a group while an operator works on it; see `Admin.freeze`."""
        await self._runner.drive(self._sagas.freeze(stream, group, True, reason, request_id))

    async def unfreeze(self, stream: str, *, group: str, reason: str, request_id: str | None = None) -> None:
        """End what `freeze` began; see `Admin.unfreeze`."""
        await self._runner.drive(self._sagas.freeze(stream, group, False, reason, request_id))

    async def reconcile(
        self, stream: str, *, group: str, reason: str, request_id: str | None = None
    ) -> tuple[str, ...]:
        """Do once what any heartbeat does; see `Admin.reconcile`."""
        return await self._runner.drive(self._sagas.reconcile(stream, group, reason, request_id))

    async def limit(
        self,
        stream: str,
        *,
        mutations: int | None,
        reason: str,
        group: str | None = None,
        principal: str = "*",
        per_seconds: int = 60,
        request_id: str | None = None,
    ) -> None:
        """Change how many mutations a Redis user may ask for; see `Admin.limit`."""
        saga = self._sagas.limit(stream, group, principal, mutations, per_seconds, reason, request_id)
        await self._runner.drive(saga)

    async def plan_scale(self, stream: str, *, shards: int, ordered: bool = True, quiesce: bool = False) -> ScalePlan:
        """Say what another number of shards would bring; see `Admin.plan_scale`."""
        return await self._runner.drive(self._sagas.plan(stream, shards, ordered, quiesce))

    async def scale(
        self,
        stream: str,
        *,
        shards: int,
        reason: str,
        ordered: bool = True,
        quiesce: bool = False,
        wait: bool = True,
        timeout_seconds: float | None = None,
        progress: Callable[[Resharding], None] | None = None,
        request_id: str | None = None,
    ) -> Resharding:
        """Change the number of shards; see `Admin.scale`."""
        found = await self._runner.drive(self._sagas.scale(stream, shards, ordered, quiesce, reason, request_id))
        return await self.wait(found, timeout_seconds=timeout_seconds, progress=progress) if wait else found

    async def rollback(
        self,
        resharding: Resharding,
        *,
        reason: str,
        wait: bool = True,
        timeout_seconds: float | None = None,
        progress: Callable[[Resharding], None] | None = None,
        request_id: str | None = None,
    ) -> Resharding:
        """Take a resharding back; see `Admin.rollback`."""
        check_kind("resharding", resharding, Resharding)
        found = await self._runner.drive(self._sagas.rollback(resharding.stream, resharding.id, reason, request_id))
        return await self.wait(found, timeout_seconds=timeout_seconds, progress=progress) if wait else found

    async def wait(
        self,
        resharding: Resharding,
        *,
        timeout_seconds: float | None = None,
        progress: Callable[[Resharding], None] | None = None,
    ) -> Resharding:
        """Carry a resharding on until it ends; see `Admin.wait`."""
        check_kind("resharding", resharding, Resharding)
        return await self._runner.drive(self._sagas.wait(resharding.stream, resharding.id, timeout_seconds, progress))

    async def plan(self, desired: Desired, *, prune: bool = False) -> Plan:
        """Compare what shall be with what there is; see `Admin.plan`."""
        return await self._runner.drive(applying.plan(self._sagas, desired, prune=prune))

    async def apply(
        self,
        plan: Plan,
        *,
        reason: str,
        wait: bool = True,
        progress: Callable[[Resharding], None] | None = None,
        request_id: str | None = None,
    ) -> tuple[Change, ...]:
        """Carry a plan out; see `Admin.apply`."""
        return await self._runner.drive(applying.apply(self._sagas, plan, reason, wait, progress, request_id))

    async def verify(
        self, stream: str | None = None, *, group: str | None = None, against: Backup | None = None
    ) -> Sequence[Discrepancy]:
        """Hold everything against everything; see `Admin.verify`."""
        return await self._runner.drive(self._sagas.verify(stream, group, against))

    async def backup(self, stream: str | None = None, *, group: str | None = None) -> Backup:
        """Read the records; see `Admin.backup`."""
        return await self._runner.drive(self._sagas.backup(stream, group))

    async def restore(
        self, backup: Backup, stream: str, *, reason: str, group: str | None = None, request_id: str | None = None
    ) -> None:
        """Put a record back; see `Admin.restore`."""
        await self._runner.drive(self._sagas.restore(backup, stream, group, reason, request_id))

    async def recreate(
        self,
        stream: str,
        *,
        group: str,
        reason: str,
        timings: Timings | None = None,
        request_id: str | None = None,
    ) -> GroupView:
        """Begin a new lifecycle of a group; see `Admin.recreate`."""
        return await self._runner.drive(self._sagas.recreate(stream, group, timings, reason, request_id))

    async def repair(
        self,
        what: Part,
        *,
        reason: str,
        stream: str | None = None,
        group: str | None = None,
        request_id: str | None = None,
    ) -> Sequence[str]:
        """Rebuild what follows from the records; see `Admin.repair`."""
        return await self._runner.drive(self._sagas.repair(what, stream, group, reason, request_id))

    async def close(self) -> None:
        """Close the connections."""
        await self._runner.close()

    async def __aenter__(self) -> AsyncAdmin:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
