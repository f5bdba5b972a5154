"""Whatever an administrator changes leaves an entry in an audit log: what, why and who."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import attrs
import pytest

from redis_stream_coord import (
    Admin,
    AsyncAdmin,
    ConflictError,
    Desired,
    DesiredStream,
    NotFoundError,
    PermissionDeniedError,
    RedisSettings,
    commands,
)
from redis_stream_coord.keys import StreamKeys
from redis_stream_coord.repairs import Part, Repairs
from tests.integration.kit import FAST, GROUP, Bench

one_server = pytest.mark.parametrize("server", ["redis7"], indirect=True)

WHY = {"reason": "OPS-7", "request_id": "r7"}
INDEX = "redis-stream:coord:groups"


def _scaled(bench: Bench, admin: Admin) -> None:
    """Take back a resharding that another operator has begun."""
    begun = bench.admin.scale(bench.stream, shards=3, wait=False, reason="begun")
    admin.rollback(begun, wait=False, **WHY)


def _restored(bench: Bench, admin: Admin, group: str | None) -> None:
    saved = bench.admin.backup()
    bench.redis.delete(bench.record if group is None else bench.keys.metadata)
    admin.restore(saved, bench.stream, group=group, **WHY)


def _applied(bench: Bench, admin: Admin) -> None:
    wanted = Desired({bench.stream: DesiredStream(stream=bench.stream, shards=2, groups=(GROUP, "second"))})
    admin.apply(admin.plan(wanted), **WHY)


def _routed(bench: Bench, admin: Admin) -> None:
    bench.redis.delete(StreamKeys(bench.stream).shard(1).route)
    admin.repair("routes", stream=bench.stream, **WHY)


def _listed(bench: Bench, admin: Admin) -> None:
    bench.redis.srem(INDEX, f"{bench.stream}:{GROUP}")
    bench.redis.sadd(INDEX, f"{bench.stream}:ghost")
    admin.repair("index", **WHY)
    assert bench.monitor.groups() == [(bench.stream, GROUP)]


def _of_group(call: Callable[[Admin, str], Any]) -> Callable[[Bench, Admin], Any]:
    return lambda bench, admin: call(admin, bench.stream)


@attrs.frozen
class Mutation:
    """One method, or one thing that it can do.

    Attributes:
        run: calls it.
        action: how the entry names it.
        detail: what the entry says of it.
        group: whose log has the entry; ``None``: the stream's.
    """

    run: Callable[[Bench, Admin], Any]
    action: str
    detail: str = ""
    group: str | None = GROUP


MUTATIONS: dict[str, list[Mutation]] = {
    "create": [Mutation(_of_group(lambda a, s: a.create(s, group="new", **WHY)), "create", group="new")],
    "delete": [Mutation(_of_group(lambda a, s: a.delete(s, group=GROUP, **WHY)), "delete")],
    "retain": [
        Mutation(_of_group(lambda a, s: a.retain(s, retention="consumed", **WHY)), "retain", "consumed", group=None)
    ],
    "trim": [Mutation(_of_group(lambda a, s: a.trim(s, **WHY)), "trim", "0 entries on 0 shards", group=None)],
    "seek": [Mutation(_of_group(lambda a, s: a.seek(s, group=GROUP, to="oldest", **WHY)), "seek", "0-0 on 0,1")],
    "freeze": [Mutation(_of_group(lambda a, s: a.freeze(s, group=GROUP, **WHY)), "freeze")],
    "unfreeze": [Mutation(_of_group(lambda a, s: a.unfreeze(s, group=GROUP, **WHY)), "unfreeze")],
    "reconcile": [Mutation(_of_group(lambda a, s: a.reconcile(s, group=GROUP, **WHY)), "reconcile")],
    "limit": [
        Mutation(_of_group(lambda a, s: a.limit(s, group=GROUP, mutations=9, **WHY)), "limit", "* 9/60"),
        Mutation(_of_group(lambda a, s: a.limit(s, mutations=None, **WHY)), "limit", "* -", group=None),
    ],
    "scale": [
        Mutation(_of_group(lambda a, s: a.scale(s, shards=3, wait=False, **WHY)), "scale", group=None),
    ],
    "rollback": [Mutation(_scaled, "rollback", group=None)],
    "apply": [Mutation(_applied, "apply", group=None), Mutation(_applied, "create", group="second")],
    "restore": [
        Mutation(lambda bench, admin: _restored(bench, admin, GROUP), "restore"),
        Mutation(lambda bench, admin: _restored(bench, admin, None), "restore", group=None),
    ],
    "recreate": [Mutation(_of_group(lambda a, s: a.recreate(s, group=GROUP, **WHY)), "recreate")],
    "repair": [
        Mutation(_listed, "repair", "index: added"),
        Mutation(_listed, "repair", "index: removed", group="ghost"),
        Mutation(_routed, "repair", "routes: shard 1", group=None),
        Mutation(_of_group(lambda a, s: a.repair("leases", stream=s, group=GROUP, **WHY)), "repair", "leases"),
    ],
}
# What changes nothing by itself: `wait` only does the next steps of what `scale` or `rollback` has decided.
LOOKS = {"backup", "close", "plan", "plan_scale", "verify", "wait"}
CASES = [
    pytest.param(one, id=f"{method} {one.detail or one.group}") for method, some in MUTATIONS.items() for one in some
]


@pytest.mark.parametrize("face", [Admin, AsyncAdmin])
def test_every_method_is_known_to_look_or_to_be_audited(face: type) -> None:
    """A new one belongs to either, and one that says why it is asked for is a mutation."""
    methods = {name: method for name, method in inspect.getmembers(face, callable) if not name.startswith("_")}
    assert set(methods) == set(MUTATIONS) | LOOKS
    assert {name for name in methods if "reason" in inspect.signature(methods[name]).parameters} == set(MUTATIONS)
    parts = {one.detail.split(":")[0] for one in MUTATIONS["repair"]}
    assert parts == set(get_args(Part))


@one_server
@pytest.mark.parametrize("mutation", CASES)
def test_every_mutation_leaves_an_entry_that_says_what_why_and_who(bench: Bench, mutation: Mutation) -> None:
    bench.create(shards=2)
    with Admin(bench.url, requested_by="ann") as admin:
        mutation.run(bench, admin)
    entries = bench.monitor.audit(bench.stream, group=mutation.group)
    (entry,) = [one for one in entries if (one.action, one.requested_by) == (mutation.action, "ann")]
    assert (entry.outcome, entry.reason, entry.principal) == ("accepted", "OPS-7", "default")
    assert (entry.fields["stream"], entry.fields["group"]) == (bench.stream, mutation.group or "")
    assert entry.request_id.startswith("r7")
    assert mutation.detail in entry.detail
    assert entry.at_ms > 0
    assert len(entry.fingerprint) == 64


@one_server
def test_what_looks_changes_nothing(bench: Bench) -> None:
    bench.create(shards=2)

    def everything() -> dict[str, bytes]:
        return {key: bench.redis.execute_command("DUMP", key, NEVER_DECODE=True) for key in bench.redis.keys("*")}

    before = everything()
    bench.admin.backup()
    bench.admin.verify()
    bench.admin.plan_scale(bench.stream, shards=5)
    bench.admin.plan(Desired({bench.stream: DesiredStream(stream=bench.stream, shards=5, groups=())}), prune=True)
    assert everything() == before


# --- what lies on other slots than the audit log, and so cannot be changed by the script that writes it ---------------


@one_server
def test_the_index_is_not_changed_before_that_is_on_record(bench: Bench) -> None:
    """A driver that dies, or may not write the log, in between has changed nothing that nobody knows of."""
    bench.create(shards=1)
    bench.redis.srem(INDEX, f"{bench.stream}:{GROUP}")
    rules = ["+@all", "-sadd", "-srem"]
    bench.redis.execute_command("ACL", "SETUSER", "half", "reset", "on", ">change-me", "~*", *rules)
    settings = RedisSettings(bench.url, username="half", password="change-me")
    with Admin(settings, requested_by="half") as half, pytest.raises(PermissionDeniedError):
        half.repair("index", **WHY)
    assert bench.monitor.groups() == []
    assert [one.outcome for one in bench.monitor.audit(bench.stream, group=GROUP)] == [
        "unfinished",
        "accepted",
        "accepted",
    ]
    # The same request again does what it has said.
    assert bench.admin.repair("index", **WHY) == [f"{bench.stream}:{GROUP} added"]
    assert bench.monitor.groups() == [(bench.stream, GROUP)]


@one_server
def test_one_request_does_not_change_the_index_both_ways(bench: Bench) -> None:
    bench.create(shards=1)
    bench.redis.srem(INDEX, f"{bench.stream}:{GROUP}")
    bench.admin.repair("index", **WHY)
    bench.redis.delete(bench.keys.metadata)
    with pytest.raises(ConflictError, match="another request"):
        bench.admin.repair("index", **WHY)
    assert bench.admin.repair("index", reason="OPS-8") == [f"{bench.stream}:{GROUP} removed"]


@one_server
def test_a_route_is_not_made_anew_before_that_is_on_record(bench: Bench) -> None:
    bench.create(shards=3)
    routes = [StreamKeys(bench.stream).shard(shard).route for shard in range(3)]
    bench.redis.delete(routes[0])
    bench.redis.hset(routes[2], "epoch", "9")
    with pytest.raises(Exception, match="route of shard 2"):
        bench.admin.repair("routes", stream=bench.stream, **WHY)
    assert not bench.redis.exists(routes[0])
    (entry,) = bench.monitor.audit(bench.stream)
    assert (entry.outcome, entry.word) == ("failed", "AHEAD")


@one_server
@pytest.mark.parametrize("asleep", ["SADD", "SREM"])
def test_the_index_follows_the_record_whoever_slept(bench: Bench, asleep: str) -> None:
    """A driver of a creation that sleeps past a deletion, and the other way round."""
    sagas = Repairs(bench.url, requested_by="slow")
    if asleep == "SREM":
        bench.create(shards=1)
        late: Any = bench.asleep_before(asleep, sagas.delete(bench.stream, GROUP, True, "a test", None))
        bench.admin.delete(bench.stream, group=GROUP, force=True, reason="in its place")
        bench.create(shards=1)
    else:
        begun = sagas.create(bench.stream, GROUP, 1, "oldest", FAST, "jump-v1", "all", False, "a test", None)
        late = bench.asleep_before(asleep, begun)
        bench.delete()
    with suppress(NotFoundError):
        bench.runner.drive(late)
    assert bench.admin.verify() == []


@one_server
def test_a_new_lifecycle_is_finished_by_the_same_request(bench: Bench) -> None:
    bench.create(shards=1)
    recreate = Repairs(bench.url, requested_by="tests").recreate(bench.stream, GROUP, None, "a test", "r1")
    bench.asleep_before("activate", recreate)
    bench.redis.srem(INDEX, f"{bench.stream}:{GROUP}")
    view = bench.admin.recreate(bench.stream, group=GROUP, reason="a test", request_id="r1")
    registered = bench.runner.run(commands.resharding(StreamKeys(bench.stream))).groups[GROUP]
    assert registered.incarnation == view.incarnation
    assert bench.admin.verify() == []
