"""Administration: the two faces. What they do stands in `redis_stream_coord.sagas`."""

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
from .runner import SyncRunner
from .sagas import Retention, Start
from .settings import RedisSettings
from .verification import Discrepancy
from .views import Trimmed


class Admin:
    """Creates and deletes groups, and changes numbers of shards.

    Parameters:
        redis: URL or settings.
        requested_by: who asks; recorded with every mutation.

    Raises:
        ConfigError: an argument is wrong.
    """

    def __init__(self, redis: str | RedisSettings, *, requested_by: str) -> None:
        self._sagas = Repairs(redis, requested_by=requested_by)
        self._runner = SyncRunner(self._sagas.settings)

    def create(
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
        """Create a group, and its stream if this is the first one.

        Parameters:
            stream: name of the logical stream; its shards are the Redis streams ``<stream>:<index>``.
            group: name of the consumer group.
            reason: why; recorded.
            shards: number of shards; needed for a new stream only.
            start: where the group begins on shards that it has not read yet: ``oldest`` entry, or only ``new`` ones.
            timings: see `Timings`.
            routing: for a new stream: how keys are routed, ``jump-v1`` or ``murmur3-mod-v1``.
            retention: for a new stream: ``all`` entries stay; only those not ``consumed`` by all groups; or a number:
                so many stay, roughly, though all groups have finished them. What a group still needs always stays.
            exist_ok: accept a group that exists; missing streams and consumer groups of its shards are made anew.
            request_id: the same id again returns the recorded outcome.

        Returns:
            The group as it is now.

        Raises:
            AlreadyExistsError: it exists and `exist_ok` is false.
            ConflictError: the stream has another number of shards.
            ConfigError: an argument is wrong, or `shards` is missing for a new stream.
        """
        return self._runner.drive(
            self._sagas.create(stream, group, shards, start, timings, routing, retention, exist_ok, reason, request_id)
        )

    def delete(
        self, stream: str, *, group: str, reason: str, force: bool = False, request_id: str | None = None
    ) -> None:
        """Delete a group: its record, its consumer groups on the shards and so its pending entries. Streams stay.

        Parameters:
            stream, group: its names.
            reason: why; recorded.
            force: even though it has live members, or its metadata is damaged.
            request_id: the same id again returns the recorded outcome.

        Raises:
            ConflictError: it has live members.
            NotFoundError: there is no such group.
        """
        self._runner.drive(self._sagas.delete(stream, group, force, reason, request_id))

    def retain(self, stream: str, *, retention: Retention, reason: str, request_id: str | None = None) -> None:
        """Change how long the entries of a stream are kept.

        Parameters:
            stream: name of the logical stream.
            retention: see `create`.
            reason: why; recorded.
            request_id: the same id again changes nothing.

        Raises:
            NotFoundError: there is no such stream.
        """
        self._runner.drive(self._sagas.retain(stream, retention, reason, request_id))

    def trim(self, stream: str, *, reason: str, request_id: str | None = None) -> Trimmed:
        """Trim now what lies on shards that the layout of a stream has no more, whatever its retention is.

        Entries that a group still needs stay, and so do the streams.

        Parameters:
            stream: name of the logical stream.
            reason: why; recorded.
            request_id: for the audit log; trimming twice does no harm.

        Returns:
            What went, and what kept a shard from being trimmed.

        Raises:
            ConflictError: a resharding is under way, which may bring shards back.
            NotFoundError: there is no such stream.
        """
        return self._runner.drive(self._sagas.trim(stream, reason, request_id))

    def seek(
        self,
        stream: str,
        *,
        group: str,
        to: str | datetime,
        reason: str,
        shards: Iterable[int] | None = None,
        request_id: str | None = None,
    ) -> None:
        """Move a group to another place, to read again or to skip; also while its consumers run.

        What is pending is forgotten, and what consumers have read ahead is not handed out any more. An entry that is in
        a handler at this moment may be handed out again before it is finished, by another member.

        Parameters:
            stream, group: its names.
            to: ``oldest``, ``newest``, an entry id (the next one is the first beyond it) or a time with a time
                zone (the next one is the first published at it or later).
            reason: why; recorded.
            shards: which; ``None``: all.
            request_id: for the audit log; seeking twice to one place does no harm.

        Raises:
            NotFoundError: there is no such group, shard, or stream of a shard.
        """
        self._runner.drive(self._sagas.seek(stream, group, to, shards, reason, request_id))

    def freeze(self, stream: str, *, group: str, reason: str, request_id: str | None = None) -> None:
        """Freeze a group while an operator works on it: nobody is granted a shard, and no mutation but restore, repair
        and `unfreeze` is accepted. A resharding that is not decided waits, and may be taken back. Members keep what
        they have.

        Parameters:
            stream, group: its names.
            reason: why; recorded.
            request_id: the same id again returns the recorded outcome.

        Raises:
            NotFoundError: there is no such group.
            MetadataError: its metadata cannot be used.
        """
        self._runner.drive(self._sagas.freeze(stream, group, True, reason, request_id))

    def unfreeze(self, stream: str, *, group: str, reason: str, request_id: str | None = None) -> None:
        """End what `freeze` began; what was held back is granted with the next heartbeat. Parameters as there."""
        self._runner.drive(self._sagas.freeze(stream, group, False, reason, request_id))

    def reconcile(self, stream: str, *, group: str, reason: str, request_id: str | None = None) -> tuple[str, ...]:
        """Do once what any heartbeat does, where no member sends one: expire members whose lease has passed, fence
        those that did not drain in time, compute the target, grant.

        Who is overdue is expired even if Redis was away just now; whoever is alive after all joins again.

        Parameters:
            stream, group: its names.
            reason: why; recorded.
            request_id: the same id again returns the recorded outcome.

        Returns:
            Types of the events that came of it, such as ``member_expired``; empty: nothing was due.

        Raises:
            FrozenError: the group is frozen.
            NotFoundError: there is no such group.
            MetadataError: its metadata cannot be used.
        """
        return self._runner.drive(self._sagas.reconcile(stream, group, reason, request_id))

    def limit(
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
        """Change how many mutations a Redis user may ask for. Without a limit set it is 60 in 60 seconds.

        Parameters:
            stream: name of the logical stream.
            mutations: how many; ``None``: no limit of its own any more.
            reason: why; recorded.
            group: on this group; ``None``: on the stream's record, for what concerns all of its groups.
            principal: the Redis user; ``*``: everybody who has no limit of its own.
            per_seconds: in which time.
            request_id: the same id again returns the recorded outcome.
        """
        self._runner.drive(self._sagas.limit(stream, group, principal, mutations, per_seconds, reason, request_id))

    def plan_scale(self, stream: str, *, shards: int, ordered: bool = True, quiesce: bool = False) -> ScalePlan:
        """Say what another number of shards would bring, and change nothing: which come and go, what share of the keys
        moves, what each group has to consume before it is over, and whether it would be refused.

        Parameters: as `scale`.

        Raises:
            NotFoundError: there is no such stream.
        """
        return self._runner.drive(self._sagas.plan(stream, shards, ordered, quiesce))

    def scale(
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
        """Change the number of shards of a stream while producers and consumers run.

        Parameters:
            stream: name of the logical stream.
            shards: how many there shall be; 0: none, until it is scaled again.
            reason: why; recorded.
            ordered: keep the order of each key across it. Consumers hold back what went to a new place until they have
                consumed what came before in the old one.
            quiesce: let no entry in until every group has consumed all that is there, in place of `ordered`. Producers
                wait, and fail once their timeout has passed.
            wait: carry it on here until it ends. ``False``: only begin it; a consumer of any group carries it on.
            timeout_seconds: wait no longer than that; it goes on by itself then.
            progress: is told at each step how far it is, and what it waits for.
            request_id: the same id again finds what it began.

        Returns:
            How it ended; with ``wait=False`` how far it is.

        Raises:
            ConflictError: another one is under way, the stream has that many shards already, or its routing protocol
                cannot keep order.
            WaitTimeoutError: it is not over after `timeout_seconds`; it goes on.
            RedisUnavailableError: Redis stayed away.
            NotFoundError: there is no such stream.
        """
        found = self._runner.drive(self._sagas.scale(stream, shards, ordered, quiesce, reason, request_id))
        return self.wait(found, timeout_seconds=timeout_seconds, progress=progress) if wait else found

    def rollback(
        self,
        resharding: Resharding,
        *,
        reason: str,
        wait: bool = True,
        timeout_seconds: float | None = None,
        progress: Callable[[Resharding], None] | None = None,
        request_id: str | None = None,
    ) -> Resharding:
        """Take a resharding back, at any moment before its end. Loses nothing, and keeps order if it did.

        Parameters:
            resharding: as `scale` or `Monitor.resharding` returned it.
            reason: why; recorded.
            wait, timeout_seconds, progress, request_id: as in `scale`.

        Returns:
            How it ended: ``ABANDONED`` or ``ROLLED_BACK``.

        Raises:
            ConflictError: it is over.
        """
        check_kind("resharding", resharding, Resharding)
        found = self._runner.drive(self._sagas.rollback(resharding.stream, resharding.id, reason, request_id))
        return self.wait(found, timeout_seconds=timeout_seconds, progress=progress) if wait else found

    def wait(
        self,
        resharding: Resharding,
        *,
        timeout_seconds: float | None = None,
        progress: Callable[[Resharding], None] | None = None,
    ) -> Resharding:
        """Carry a resharding on until it ends. Several may do so at once.

        Parameters:
            resharding: as `scale` or `Monitor.resharding` returned it.
            timeout_seconds: no longer than that; ``None``: as long as it takes.
            progress: is told at each step how far it is, and what it waits for.

        Raises:
            WaitTimeoutError: it is not over after `timeout_seconds`; it goes on.
            RedisUnavailableError: Redis stayed away.
            NotFoundError: it is over, and a later one has begun.
        """
        check_kind("resharding", resharding, Resharding)
        return self._runner.drive(self._sagas.wait(resharding.stream, resharding.id, timeout_seconds, progress))

    def plan(self, desired: Desired, *, prune: bool = False) -> Plan:
        """Compare what shall be with what there is, and change nothing.

        Parameters:
            desired: groups and numbers of shards, as `Desired.parse` reads them of a file.
            prune: also delete groups of the declared streams that are not declared.

        Returns:
            The changes that are needed, and the versions of the records that they were made of.
        """
        return self._runner.drive(applying.plan(self._sagas, desired, prune=prune))

    def apply(
        self,
        plan: Plan,
        *,
        reason: str,
        wait: bool = True,
        progress: Callable[[Resharding], None] | None = None,
        request_id: str | None = None,
    ) -> tuple[Change, ...]:
        """Carry a plan out, if the records of its streams are still those that it was made of.

        Parameters:
            plan: as `plan` returned it.
            reason: why; recorded with each change.
            wait: until reshardings have ended. ``False``: consumers carry them on.
            progress: is told at each step how far a resharding is.
            request_id: the same id again, with the same plan, goes on where it stopped.

        Returns:
            The changes that were made.

        Raises:
            ConflictError: somebody has changed a stream since the plan was made, which names both versions; or a group
                that is to be deleted has live members.
            CoordError: what a change ended with; those before it were made.
        """
        return self._runner.drive(applying.apply(self._sagas, plan, reason, wait, progress, request_id))

    def verify(
        self, stream: str | None = None, *, group: str | None = None, against: Backup | None = None
    ) -> Sequence[Discrepancy]:
        """Hold records, invariants, fences, routes, leases, registrations and the index against each other.

        Parameters:
            stream: only this stream; ``None``: everything, also what the index does not name.
            group: only this group of it.
            against: a backup; records that are older than it are found too. It is the only witness of a Redis that went
                back as a whole while nobody was connected.

        Returns:
            What is not as it should be; empty when all is well. Changes nothing.
        """
        return self._runner.drive(self._sagas.verify(stream, group, against))

    def backup(self, stream: str | None = None, *, group: str | None = None) -> Backup:
        """Read the records of streams and groups.

        Parameters:
            stream: only this stream and its groups; ``None``: all.
            group: only this group of it.

        Raises:
            MetadataError: a record is damaged, and so no backup.
            NotFoundError: there is no such stream or group.
        """
        return self._runner.drive(self._sagas.backup(stream, group))

    def restore(
        self, backup: Backup, stream: str, *, reason: str, group: str | None = None, request_id: str | None = None
    ) -> None:
        """Put a record back as a backup has it, unless anybody has seen more than it knows.

        Parameters:
            backup: see `backup` and `Backup.load`.
            stream: whose record; its own if no group is given.
            reason: why; recorded.
            group: the group whose record is put back.
            request_id: the same id again returns the recorded outcome.

        Raises:
            MetadataRegressionError: a fence, a route, a member or the stored record is ahead; says which.
            NotFoundError: the backup has no such stream or group.
        """
        self._runner.drive(self._sagas.restore(backup, stream, group, reason, request_id))

    def recreate(
        self,
        stream: str,
        *,
        group: str,
        reason: str,
        timings: Timings | None = None,
        request_id: str | None = None,
    ) -> GroupView:
        """Begin a new lifecycle of a group whose record is lost, damaged or too old, also while it is frozen.

        Members of the old lifecycle are fenced and join the new one. Consumer groups on the shards keep their places.

        Parameters:
            stream, group: its names.
            reason: why; recorded.
            timings: see `Timings`; ``None``: those it had, if they can still be read.
            request_id: the same id again returns the recorded outcome.

        Raises:
            ConfigError: the stream has no record either; restore that first, or create it.
        """
        return self._runner.drive(self._sagas.recreate(stream, group, timings, reason, request_id))

    def repair(
        self,
        what: Part,
        *,
        reason: str,
        stream: str | None = None,
        group: str | None = None,
        request_id: str | None = None,
    ) -> Sequence[str]:
        """Rebuild what follows from the records.

        Parameters:
            what: ``index``: the list of all groups, by a scan; each group that is added or removed has an audit entry
                of its own; ``routes``: those that are missing, from the stream's record; ``leases``: forget all, so
                that each member gets a full one.
            reason: why; recorded.
            stream: needed for ``routes`` and ``leases``.
            group: needed for ``leases``.
            request_id: the same id again returns the recorded outcome.

        Returns:
            What was done, a line for each.

        Raises:
            MetadataRegressionError: a route is ahead of the record.
            ConflictError: the stream is being resharded, and whoever drives that makes missing routes.
        """
        return self._runner.drive(self._sagas.repair(what, stream, group, reason, request_id))

    def close(self) -> None:
        """Close the connections."""
        self._runner.close()

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
