"""Who may ask for what, how often, and what is written down of it; and what a frozen group does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from redis_stream_coord import (
    Admin,
    AdminError,
    AlreadyExistsError,
    ConfigError,
    ConflictError,
    CoordError,
    FrozenError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitedError,
    RedisSettings,
    WaitTimeoutError,
    commands,
)
from redis_stream_coord.commands import Saga
from redis_stream_coord.sagas import Sagas
from redis_stream_coord.scaling import Scaling
from tests.integration.kit import GROUP, STEADY, Bench, Crew, two_servers
from tests.servers import Server
from tests.waiting import eventually

FIELDS = {
    *("action", "outcome", "word", "detail", "principal", "roles", "request_id", "requested_by", "reason"),
    *("fingerprint", "client_address", "duration_ms", "stream", "group"),
}


def audit(bench: Bench, key: str | None = None) -> list[dict[str, str]]:
    return [dict(fields) for _, fields in bench.redis.xrange(key or bench.keys.audit)]


def test_each_mutation_leaves_one_entry_with_every_field(bench: Bench, server: Server) -> None:
    bench.create(shards=1)
    bench.admin.seek(bench.stream, group=GROUP, to="oldest", reason="look again")
    bench.admin.freeze(bench.stream, group=GROUP, reason="OPS-1")
    bench.admin.unfreeze(bench.stream, group=GROUP, reason="OPS-1 done")
    bench.admin.limit(bench.stream, group=GROUP, mutations=100, reason="a pipeline")
    bench.delete()
    entries = audit(bench)
    assert [entry["action"] for entry in entries] == ["create", "seek", "freeze", "unfreeze", "limit", "delete"]
    for entry in entries:
        assert set(entry) >= FIELDS
        assert (entry["outcome"], entry["word"], entry["principal"]) == ("accepted", "OK", "default")
        assert "WRITE" in entry["roles"]
        assert entry["client_address"].startswith("127.0.0.1:")
        assert float(entry["duration_ms"]) >= 0
        assert len(entry["fingerprint"]) == 64
    bench.create(shards=1)
    bench.admin.retain(bench.stream, retention="consumed", reason="less memory")
    assert [entry["action"] for entry in audit(bench, f"redis-stream:coord:{{{bench.stream}}}:audit")] == ["retain"]


@pytest.mark.parametrize("missing", ["reason", "requested_by", "request_id"])
def test_who_and_why_have_to_be_said(bench: Bench, missing: str) -> None:
    given = {"reason": "a test", "requested_by": "tests", "request_id": "1"} | {missing: ""}
    with pytest.raises(ConfigError), Admin(bench.url, requested_by=given["requested_by"]) as admin:
        admin.create(bench.stream, group=GROUP, shards=1, reason=given["reason"], request_id=given["request_id"])
    assert bench.redis.keys("*") == []


@two_servers
def test_the_same_request_gives_the_outcome_of_before(bench: Bench, crew: Crew) -> None:
    """Accepted, refused and failed ones; however the group is by now."""
    bench.create(shards=1, timings=STEADY, request_id="c1")
    view = bench.create(shards=1, timings=STEADY, request_id="c1")
    a = crew.start("a")
    a.owns(0)

    def delete(request_id: str, **options: Any) -> None:
        bench.admin.delete(bench.stream, group=GROUP, reason="a test", request_id=request_id, **options)

    with pytest.raises(ConflictError, match="live members"):
        delete("d1")
    crew.stop()
    with pytest.raises(ConflictError, match="live members"):
        delete("d1")
    delete("d2")
    delete("d2")
    with pytest.raises(NotFoundError):
        bench.create(shards=1, timings=STEADY, request_id="c1")
    again = bench.create(shards=1, timings=STEADY, request_id="c2")
    delete("d2")
    assert bench.view().incarnation == again.incarnation > view.incarnation
    accepted = [entry for entry in audit(bench) if entry["outcome"] == "accepted"]
    assert [entry["request_id"] for entry in accepted] == ["c1", "d2", "c2"]


def test_a_failed_request_is_recorded_and_stays_failed(bench: Bench) -> None:
    bench.redis.set(bench.stream_key(1), "not a stream")
    with pytest.raises(CoordError, match="wrong type"):
        bench.create(shards=2, request_id="c1")
    assert [(entry["outcome"], entry["word"]) for entry in audit(bench)] == [("failed", "-")]
    bench.redis.delete(bench.stream_key(1))
    with pytest.raises(AdminError, match="failed before"):
        bench.create(shards=2, request_id="c1")
    bench.create(shards=2, request_id="c2")


def test_a_refusal_before_the_deciding_script_is_recorded_too(bench: Bench) -> None:
    bench.create(shards=2)
    with pytest.raises(ConflictError, match="another number"):
        bench.admin.create(bench.stream, group="other", shards=3, reason="a test", request_id="c1")
    (entry,) = audit(bench, bench.keys.audit.replace(GROUP, "other"))
    assert (entry["outcome"], entry["word"]) == ("failed", "SHARD_COUNT_MISMATCH")
    with pytest.raises(ConflictError, match="another number"):
        bench.admin.create(bench.stream, group="other", shards=3, reason="a test", request_id="c1")


def test_one_request_id_for_two_requests_is_refused(bench: Bench) -> None:
    bench.create(shards=2)
    bench.admin.seek(bench.stream, group=GROUP, to="oldest", reason="a test", request_id="s1")
    with pytest.raises(ConflictError, match="another request"):
        bench.admin.seek(bench.stream, group=GROUP, to="newest", reason="a test", request_id="s1")


@two_servers
def test_too_many_mutations_are_refused_until_some_are_long_ago(bench: Bench) -> None:
    bench.create(shards=1)
    bench.admin.limit(bench.stream, group=GROUP, mutations=4, per_seconds=2, reason="a test")

    def seek() -> None:
        bench.admin.seek(bench.stream, group=GROUP, to="oldest", reason="a test")

    seek()
    seek()
    for _ in range(3):
        with pytest.raises(RateLimitedError) as caught:
            seek()
        assert 0 < caught.value.retry_after_seconds <= 2
        assert caught.value.retriable
    # Only the first of them is written down: else they would push everything else out.
    assert [entry["outcome"] for entry in audit(bench)].count("limited") == 1
    eventually(lambda: seek() is None, ignoring=(RateLimitedError,), what="the next one is accepted")
    # Another principal has a limit of its own, and this group's says nothing about others.
    bench.admin.create(bench.stream, group="other", reason="a test")


def test_a_limit_of_one_principal_is_its_own(bench: Bench, server: Server) -> None:
    bench.create(shards=1)
    bench.redis.execute_command("ACL", "SETUSER", "robot", "on", ">change-me", "~*", "&*", "+@all")
    bench.admin.limit(bench.stream, group=GROUP, principal="robot", mutations=0, reason="not today")
    settings = RedisSettings(bench.url, username="robot", password="change-me")
    with Admin(settings, requested_by="robot") as robot, pytest.raises(RateLimitedError):
        robot.freeze(bench.stream, group=GROUP, reason="a test")
    assert audit(bench)[-1]["principal"] == "robot"
    bench.admin.freeze(bench.stream, group=GROUP, reason="a test")
    bench.admin.unfreeze(bench.stream, group=GROUP, reason="a test")
    bench.admin.limit(bench.stream, group=GROUP, principal="robot", mutations=None, reason="today")
    with Admin(settings, requested_by="robot") as robot:
        robot.freeze(bench.stream, group=GROUP, reason="a test")


def test_a_principal_that_may_not_write_the_audit_changes_nothing(bench: Bench) -> None:
    bench.create(shards=1)
    if int(bench.redis.info()["redis_version"].split(".")[0]) < 7:
        pytest.skip("permissions by key are of Redis 7")
    rules = [
        f"%R~{bench.keys.audit}",
        f"~{bench.keys.metadata}",
        f"~{bench.keys.events}",
        f"~{bench.keys.limits}",
        "+@all",
    ]
    bench.redis.execute_command("ACL", "SETUSER", "reader", "reset", "on", ">change-me", *rules)
    settings = RedisSettings(bench.url, username="reader", password="change-me")
    before = bench.state()
    with Admin(settings, requested_by="reader") as admin, pytest.raises(PermissionDeniedError):
        admin.freeze(bench.stream, group=GROUP, reason="a test")
    assert bench.state() == before


# --- frozen ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mutation",
    [
        lambda bench: bench.delete(),
        lambda bench: bench.delete(force=True),
        lambda bench: bench.admin.seek(bench.stream, group=GROUP, to="oldest", reason="a test"),
    ],
)
def test_a_frozen_group_accepts_no_mutation(bench: Bench, mutation: Callable[[Bench], None]) -> None:
    bench.create(shards=1)
    bench.admin.freeze(bench.stream, group=GROUP, reason="OPS-1", request_id="f1")
    bench.admin.freeze(bench.stream, group=GROUP, reason="OPS-1", request_id="f1")
    since = bench.view().frozen_ms
    bench.admin.freeze(bench.stream, group=GROUP, reason="once more")
    assert bench.view().frozen_ms == since is not None
    with pytest.raises(FrozenError):
        mutation(bench)
    assert audit(bench)[-1]["word"] == "FROZEN"
    bench.admin.unfreeze(bench.stream, group=GROUP, reason="OPS-1 done")
    mutation(bench)


@two_servers
def test_a_frozen_group_grants_nothing_and_goes_on_where_it_was(bench: Bench, crew: Crew) -> None:
    bench.create(shards=2, timings=STEADY)
    a = crew.start("a")
    a.owns(0, 1)
    bench.admin.freeze(bench.stream, group=GROUP, reason="OPS-1")
    assert any("frozen" in reason for reason in bench.view().degraded())
    b = crew.start("b")
    eventually(lambda: len(a.consumer.assignment) == 1, what="a has given up what is meant for b")
    a.finishes(*bench.fill(next(iter(a.consumer.assignment))))
    bench.heartbeats_pass("b")
    assert b.consumer.assignment == frozenset()
    assert sum(shard.holder is None for shard in bench.view().shards.values()) == 1
    bench.admin.unfreeze(bench.stream, group=GROUP, reason="OPS-1 done")
    eventually(lambda: len(b.consumer.assignment) == 1, within_seconds=2, what="b gets what is meant for it")


@pytest.mark.parametrize("target", [1, 3])
def test_a_frozen_group_is_not_resharded(bench: Bench, target: int) -> None:
    bench.create(shards=2)
    bench.admin.freeze(bench.stream, group=GROUP, reason="OPS-1")
    with pytest.raises(FrozenError):
        bench.admin.scale(bench.stream, shards=target, reason="a test")
    assert audit(bench, f"redis-stream:coord:{{{bench.stream}}}:audit")[-1]["word"] == "FROZEN"
    assert bench.monitor.resharding(bench.stream) is None


@pytest.mark.parametrize(("target", "ends"), [(1, "COMPLETED"), (3, "COMPLETED"), (3, "ABANDONED")])
def test_a_resharding_that_misses_a_freeze_waits_for_its_end(bench: Bench, target: int, ends: str) -> None:
    """The freeze comes between the look at the group and the record of the stream, which are two slots."""
    bench.create(shards=2)
    sagas = Scaling(bench.url, requested_by="slow")
    late = bench.asleep_before("scale", sagas.scale(bench.stream, target, True, False, "a test", None))
    bench.admin.freeze(bench.stream, group=GROUP, reason="OPS-1")
    before = bench.record_of()
    begun = bench.runner.drive(late)
    with pytest.raises(WaitTimeoutError, match="frozen"):
        bench.admin.wait(begun, timeout_seconds=0.2)
    assert bench.monitor.resharding(bench.stream).state == "PREPARING"
    assert bench.record_of() == before
    if ends == "ABANDONED":
        assert bench.admin.rollback(begun, reason="OPS-1", timeout_seconds=10).state == ends
    bench.admin.unfreeze(bench.stream, group=GROUP, reason="OPS-1 done")
    assert bench.admin.wait(begun, timeout_seconds=10).state == ends


# --- deletions that meet creations ----------------------------------------------------------------------------------


def test_a_driver_of_a_deletion_that_slept_leaves_the_next_lifecycle_alone(bench: Bench, crew: Crew) -> None:
    first = bench.create(shards=2, timings=STEADY)
    bench.delete()
    bench.create(shards=2, timings=STEADY)
    a = crew.start("a")
    a.owns(0, 1)
    for shard in range(2):
        bench.runner.run(commands.retire(bench.keys, shard, incarnation=first.incarnation))
    for shard in range(2):
        a.finishes(*bench.fill(shard))


@pytest.mark.parametrize("asleep", ["resharding", "HGETALL", "retire", "unregister", "deleted"])
def test_a_driver_of_a_deletion_that_slept_does_not_unregister_the_next_lifecycle(bench: Bench, asleep: str) -> None:
    """Else no resharding waits for that group any more, and its members read shards that do not come or go."""
    bench.create(shards=2)
    late = deletion(bench, asleep)
    bench.delete()
    bench.create(shards=2)
    bench.runner.drive(late)
    assert bench.admin.verify() == []
    assert bench.monitor.routing(bench.stream).layout.groups == (GROUP,)


@pytest.mark.parametrize("asleep", ["resharding", "HGETALL", "unregister"])
def test_nor_one_that_is_being_created(bench: Bench, asleep: str) -> None:
    """It is registered, and has no record yet that says which lifecycle it is."""
    bench.create(shards=2)
    late = deletion(bench, asleep)
    bench.delete()
    sagas = Sagas(bench.url, requested_by="slow")
    begun = sagas.create(bench.stream, GROUP, 2, "oldest", STEADY, "jump-v1", "all", False, "a test", None)
    creation = bench.asleep_before("create", begun)
    bench.runner.drive(late)
    bench.runner.drive(creation)
    assert bench.admin.verify() == []
    assert bench.monitor.routing(bench.stream).layout.groups == (GROUP,)


def test_a_deletion_takes_the_registration_away_however_often_it_was_made(bench: Bench) -> None:
    """While the stream is resharded a creation registers the group once more, and is refused as it is being deleted."""
    bench.create(shards=2)
    sagas = Sagas(bench.url, requested_by="slow")
    begun = sagas.create(bench.stream, GROUP, 2, "oldest", STEADY, "jump-v1", "all", False, "a test", None)
    creation = bench.asleep_before("register", begun)
    late = deletion(bench, "unregister")
    bench.admin.scale(bench.stream, shards=3, wait=False, reason="a test")
    with pytest.raises(ConflictError, match="deletion"):
        bench.runner.drive(creation)
    bench.runner.drive(late)
    assert bench.monitor.routing(bench.stream).layout.groups == ()
    bench.admin.wait(bench.monitor.resharding(bench.stream), timeout_seconds=10)


@pytest.mark.parametrize("anew", [False, True])
def test_a_move_that_slept_past_a_deletion_moves_nothing(bench: Bench, anew: bool) -> None:
    bench.create(shards=2)
    ids = bench.fill(0, 3)
    sagas = Sagas(bench.url, requested_by="slow")
    late = bench.asleep_before("seek", sagas.seek(bench.stream, GROUP, ids[1], None, "a test", None))
    bench.delete()
    if anew:
        bench.create(shards=2)
    with pytest.raises(NotFoundError):
        bench.runner.drive(late)
    there = bench.redis.xinfo_groups(bench.stream_key(0))
    assert [group["last-delivered-id"] for group in there] == (["0-0"] if anew else [])


def deletion(bench: Bench, asleep: str) -> Saga[None]:
    """A deletion whose driver sleeps before a command of that name."""
    sagas = Sagas(bench.url, requested_by="slow")
    return bench.asleep_before(asleep, sagas.delete(bench.stream, GROUP, True, "a test", None))


def test_a_group_is_not_created_while_its_deletion_is_unfinished(bench: Bench) -> None:
    view = bench.create(shards=2)
    delete = commands.delete(bench.keys, force=False, request_id="d1", audit={"reason": "a test"})
    assert bench.runner.run(delete) == view.incarnation  # and then its driver died
    with pytest.raises(ConflictError, match="deletion"):
        bench.create(shards=2)
    bench.delete()
    assert bench.create(shards=2).incarnation > view.incarnation


def test_a_creation_that_was_overtaken_by_a_deletion_is_refused(bench: Bench) -> None:
    """What it had provisioned has been taken apart since."""
    bench.create(shards=2)
    bench.delete()
    late = commands.create(
        bench.keys,
        incarnation=1,
        shards=2,
        epoch=1,
        timings=STEADY,
        deleted=None,
        request_id="c1",
        audit={"reason": "a test"},
    )
    with pytest.raises(ConflictError, match="deletion"):
        bench.runner.run(late)
    bench.create(shards=2)
    with pytest.raises(AlreadyExistsError):
        bench.create(shards=2)
