"""Roles that Redis itself enforces: what each can do and what it cannot, command by command, on every server."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import redis

from redis_stream_coord import (
    Admin,
    Backup,
    ConflictError,
    Consumer,
    CoordError,
    DeadLetter,
    Desired,
    DesiredStream,
    Message,
    Monitor,
    NotFoundError,
    Outgoing,
    PermissionDeniedError,
    Producer,
    RedisSettings,
    Retry,
    acl,
)
from redis_stream_coord.acl import Role
from redis_stream_coord.keys import GroupKeys, StreamKeys
from tests.servers import Server
from tests.waiting import eventually

STREAM, GROUP, DEAD = "orders", "billing", "orders:dead"
OTHER = "shipping"
KEYS, STREAM_KEYS = GroupKeys(STREAM, GROUP), StreamKeys(STREAM)
EVERYBODY: frozenset[Role] = frozenset(acl.ROLES)


def _has_selectors(server: Server) -> bool:
    """Redis 6.2 has none: there a role may use each of its commands on each of its keys."""
    return server.name != "redis62"


def _settings(server: Server, role: str) -> RedisSettings:
    return RedisSettings(server.url, username=role.lower(), password="change-me")


@pytest.fixture
def users(server: Server) -> Server:
    with Admin(server.url, requested_by="tests") as admin:
        admin.create(STREAM, group=GROUP, shards=4, retention="consumed", reason="a test")
        admin.create(STREAM, group=OTHER, reason="a test")
    with server.client(protocol=2) as client:
        for role in acl.ROLES:
            rules = acl.rules(
                role,
                stream=STREAM,
                # A resharding concerns every group.
                group=None if role == "WRITE" else GROUP,
                selectors=_has_selectors(server),
                dead_letters=[DEAD],
                duties=False,
            )
            client.execute_command("ACL", "SETUSER", role.lower(), "reset", "on", ">change-me", *rules)
        client.execute_command("ACL", "LOG", "RESET")
    return server


def _refused(server: Server) -> list[str]:
    """What the server refused to our users, as it says it itself."""
    with server.client(protocol=2) as client:
        entries = client.acl_log()
    return [
        f"{entry['username']}: {entry['reason']} {entry['object']}"
        for entry in entries
        # See CLIENT SETINFO on the page; on 6.2 the log names no subcommand.
        if entry["object"] not in ("client", "client|setinfo")
    ]


# --- each can do its work -------------------------------------------------------------------------------------------


def test_each_role_can_do_its_work(users: Server) -> None:
    server = users
    handled: list[Message] = []

    def handle(message: Message) -> None:
        if message.text("n") == "13":
            raise ValueError("poison")
        if message.text("n") == "3" and not message.deliveries > 1:
            raise ValueError("the first time")
        handled.append(message)
        if message.text("n") != "0":
            message.ack_delete()

    with (
        Admin(_settings(server, "WRITE"), requested_by="tests") as admin,
        Monitor(_settings(server, "READ")) as monitor,
    ):
        admin.create(STREAM, group=GROUP, exist_ok=True, reason="a test")
        with Consumer(
            STREAM,
            group=GROUP,
            redis=_settings(server, "MEMBER"),
            handler=handle,
            retry=Retry(backoff_seconds=0.01),
            poison=DeadLetter(DEAD, after_deliveries=3),
        ) as consumer:
            with Producer(STREAM, redis=_settings(server, "PRODUCER")) as producer:
                producer.publish_many([Outgoing(fields={"n": str(n)}, key=str(n)) for n in range(20)])
                producer.publish({"n": "20"}, key="20", event_id="twenty")
                assert producer.publish({"n": "20"}, key="20", event_id="twenty").duplicate
            with Producer(STREAM, redis=_settings(server, "PRODUCER"), fenced=False) as plain:
                plain.publish({"n": "21"}, key="21")
            eventually(lambda: len(handled) == 21, what="all are handled")
            assert set(consumer.lag()) == {0, 1, 2, 3}
            _look_at_everything(monitor)
            admin.seek(STREAM, group=GROUP, to="oldest", reason="a test")
            eventually(lambda: len(handled) > 21, what="something is handled again")
            with pytest.raises(ConflictError):
                admin.delete(STREAM, group=GROUP, reason="a test")
        admin.retain(STREAM, retention="all", reason="a test")
        assert {entry.principal for entry in monitor.audit(STREAM, group=GROUP)} == {"default", "write"}
        admin.delete(STREAM, group=GROUP, reason="a test")
    assert _refused(server) == []


def _look_at_everything(monitor: Monitor) -> None:
    # The index names all groups; of the other one this reader may not look at the record.
    assert monitor.groups() == [(STREAM, GROUP), (STREAM, OTHER)]
    assert monitor.describe(STREAM, group=GROUP).violations() == []
    assert monitor.routing(STREAM).problems == ()
    assert len(monitor.shards(STREAM, group=GROUP)) == 4
    assert monitor.triage(STREAM, group=GROUP)
    assert monitor.resharding(STREAM) is None
    monitor.messages(STREAM, group=GROUP)
    monitor.messages(STREAM, event_id="twenty")
    assert monitor.events(STREAM, group=GROUP)
    assert monitor.audit(STREAM, group=GROUP)
    monitor.audit(STREAM)


# --- through the library --------------------------------------------------------------------------------------------


def _produce(settings: RedisSettings) -> None:
    with Producer(STREAM, redis=settings) as producer:
        producer.publish({"n": "1"}, key="a")


def _consume(settings: RedisSettings) -> None:
    from redis_stream_coord.commands import HeartbeatRequest, heartbeat
    from redis_stream_coord.runner import SyncRunner

    runner = SyncRunner(settings)
    request = HeartbeatRequest(
        member="m",
        nonce="n",
        epoch=0,
        incarnation=0,
        version=0,
        assignment_epoch=0,
        weight=1.0,
        replaces=None,
        leaving=True,
        owned=[],
        revoked=[],
        refused=[],
    )
    try:
        runner.run(heartbeat(KEYS, request))
    finally:
        runner.close()


_WANTED = Desired({STREAM: DesiredStream(stream=STREAM, shards=5, groups=(GROUP, OTHER))})


def _saved(admin: Admin) -> Backup:
    """A backup that knows the group, made by somebody else."""
    with Admin(RedisSettings(admin._runner.settings.url), requested_by="tests") as other:
        return other.backup(STREAM, group=GROUP)


def _monitor(call: Callable[[Monitor], Any]) -> Callable[[RedisSettings], Any]:
    def run(settings: RedisSettings) -> None:
        with Monitor(settings) as monitor:
            call(monitor)

    return run


def _admin(call: Callable[[Admin], Any]) -> Callable[[RedisSettings], Any]:
    def run(settings: RedisSettings) -> None:
        with Admin(settings, requested_by="tests") as admin:
            call(admin)

    return run


# What is asked of the library, and who may: everybody else gets `PermissionDeniedError`, and nothing has changed.
ASKED: dict[str, tuple[Callable[[RedisSettings], Any], set[Role]]] = {
    "publish": (_produce, {"WRITE", "PRODUCER"}),
    # What an administrator does for a group without members is what a heartbeat does; but it cannot read a shard.
    "join and leave": (_consume, {"MEMBER", "WRITE"}),
    "read the routing": (_monitor(lambda monitor: monitor.routing(STREAM)), {"READ", "WRITE", "MEMBER", "PRODUCER"}),
    "read the record": (_monitor(lambda m: m.describe(STREAM, group=GROUP)), {"READ", "WRITE", "MEMBER"}),
    "read another group's record": (_monitor(lambda m: m.describe(STREAM, group=OTHER)), {"WRITE"}),
    "read the audit log": (_monitor(lambda m: m.audit(STREAM, group=GROUP)), {"READ", "WRITE"}),
    "read the index": (_monitor(lambda m: m.groups()), {"READ", "WRITE"}),
    "create a group": (
        _admin(lambda a: a.create(STREAM, group=GROUP, exist_ok=True, reason="a test")),
        {"WRITE"},
    ),
    "change the retention": (_admin(lambda a: a.retain(STREAM, retention="all", reason="a test")), {"WRITE"}),
    "trim removed shards": (_admin(lambda a: a.trim(STREAM, reason="a test")), {"WRITE"}),
    "move a group": (_admin(lambda a: a.seek(STREAM, group=GROUP, to="newest", reason="a test")), {"WRITE"}),
    "change the number of shards": (
        _admin(lambda a: a.scale(STREAM, shards=5, reason="a test", wait=False)),
        {"WRITE"},
    ),
    "freeze a group": (_admin(lambda a: a.freeze(STREAM, group=GROUP, reason="a test")), {"WRITE"}),
    "reconcile a group": (_admin(lambda a: a.reconcile(STREAM, group=GROUP, reason="a test")), {"WRITE"}),
    "change a limit": (_admin(lambda a: a.limit(STREAM, group=GROUP, mutations=9, reason="a test")), {"WRITE"}),
    "apply a file": (_admin(lambda a: a.apply(a.plan(_WANTED), reason="a test", wait=False)), {"WRITE"}),
    "verify": (_admin(lambda a: a.verify(STREAM, group=GROUP)), {"READ", "WRITE"}),
    # A member may read its own record, and so write it down.
    "back up": (_admin(lambda a: a.backup(STREAM, group=GROUP)), {"READ", "WRITE", "MEMBER"}),
    "restore": (_admin(lambda a: a.restore(_saved(a), STREAM, group=GROUP, reason="a test")), {"WRITE"}),
    "create a group anew": (_admin(lambda a: a.recreate(STREAM, group=GROUP, reason="a test")), {"WRITE"}),
    "repair leases": (_admin(lambda a: a.repair("leases", stream=STREAM, group=GROUP, reason="a test")), {"WRITE"}),
    "repair routes": (_admin(lambda a: a.repair("routes", stream=STREAM, reason="a test")), {"WRITE"}),
    "delete a group": (_admin(lambda a: a.delete(STREAM, group=GROUP, force=True, reason="a test")), {"WRITE"}),
}


def _everything(client: Any) -> dict[str, Any]:
    """What is stored, but for what any reader sees change: nothing."""
    found = {}
    for key in sorted(client.scan_iter()):
        kind = client.type(key)
        found[key] = {"hash": client.hgetall, "stream": client.xlen, "set": client.smembers}.get(
            kind, lambda key: client.zrange(key, 0, -1)
        )(key)
    return found


@pytest.mark.parametrize("role", acl.ROLES)
@pytest.mark.parametrize("asked", ASKED)
def test_what_a_role_may_ask_of_the_library(users: Server, role: Role, asked: str) -> None:
    call, allowed = ASKED[asked]
    with users.client(protocol=2) as client:
        before = _everything(client)
        if role in allowed:
            call(_settings(users, role))
            return
        with pytest.raises(PermissionDeniedError) as caught:
            call(_settings(users, role))
        assert _everything(client) == before
    # It names the rule, or all that it may be.
    assert "lacks the rule" in caught.value.hint
    assert "+" in caught.value.hint or "~" in caught.value.hint


# --- command by command ---------------------------------------------------------------------------------------------

_REFUSED = re.compile(r"(?i)no permissions|The user executing the script can't")
_SET, _DEL = "return redis.call('HSET', KEYS[1], 'x', '1')", "return redis.call('DEL', KEYS[1])"
_ROUTE, _SHARD, _FENCE = STREAM_KEYS.shard(0).route, STREAM_KEYS.shard(0).stream, KEYS.fence(0)

# A command by hand, and who may give it; and who else may on a server without selectors.
COMMANDS: dict[tuple[Any, ...], tuple[set[Role], set[Role]]] = {
    # Nobody but who administers deletes a key of the library, by itself or in a script.
    ("DEL", KEYS.metadata): ({"WRITE"}, set()),
    ("DEL", KEYS.leases): ({"WRITE"}, set()),
    ("DEL", STREAM_KEYS.record): ({"WRITE"}, set()),
    ("DEL", _FENCE): ({"WRITE"}, set()),
    ("DEL", _SHARD): ({"WRITE"}, set()),
    ("EVAL", _DEL, 1, KEYS.metadata): ({"WRITE"}, set()),
    ("EVAL", _DEL, 1, STREAM_KEYS.record): ({"WRITE"}, set()),
    ("UNLINK", KEYS.metadata): (set(), set()),
    ("RENAME", KEYS.metadata, KEYS.leases): (set(), set()),
    ("EXPIRE", KEYS.metadata, 1): (set(), set()),
    ("SET", KEYS.metadata, "x"): (set(), set()),
    # The index and the audit log are the administration's.
    ("SREM", "redis-stream:coord:groups", f"{STREAM}:{GROUP}"): ({"WRITE"}, set()),
    ("XADD", KEYS.audit, "*", "action", "none"): ({"WRITE"}, set()),
    ("XADD", STREAM_KEYS.audit, "*", "action", "none"): ({"WRITE"}, set()),
    # Who may delete a key may trim it too.
    ("XTRIM", KEYS.audit, "MAXLEN", 0): ({"WRITE"}, set()),
    # Records. A member's heartbeat has to write its group's, so it could by hand too.
    ("HSET", KEYS.metadata, "version", "9"): ({"WRITE", "MEMBER"}, set()),
    ("HSET", _FENCE, "token", "9"): ({"WRITE", "MEMBER"}, set()),
    ("EVAL", _SET, 1, _ROUTE): ({"WRITE"}, {"MEMBER", "PRODUCER"}),
    ("HSET", _ROUTE, "state", "closed"): ({"WRITE"}, {"MEMBER", "PRODUCER"}),
    ("HSET", STREAM_KEYS.record, "shards", "9"): ({"WRITE"}, {"MEMBER", "PRODUCER"}),
    ("HSET", GroupKeys(STREAM, OTHER).metadata, "version", "9"): ({"WRITE"}, set()),
    ("DEL", GroupKeys(STREAM, OTHER).metadata): ({"WRITE"}, set()),
    # Shards.
    ("XADD", _SHARD, "*", "n", "1"): ({"WRITE", "PRODUCER"}, {"MEMBER"}),
    ("XREADGROUP", "GROUP", GROUP, "x", "STREAMS", _SHARD, ">"): ({"MEMBER"}, set()),
    ("XACK", _SHARD, GROUP, "1-1"): ({"MEMBER"}, set()),
    ("XTRIM", _SHARD, "MAXLEN", 0): ({"WRITE", "MEMBER"}, set()),
    ("XDEL", _SHARD, "1-1"): ({"MEMBER"}, set()),
    ("XGROUP", "DESTROY", _SHARD, GROUP): ({"WRITE"}, set()),
    ("XADD", DEAD, "*", "n", "1"): ({"MEMBER"}, set()),
    # What is not the library's.
    ("GET", "session:1"): (set(), set()),
    ("XADD", "payments:0", "*", "n", "1"): (set(), set()),
    ("XRANGE", "payments:0", "-", "+"): (set(), set()),
    ("KEYS", "*"): (set(), set()),
    ("FLUSHALL",): (set(), set()),
    ("CONFIG", "GET", "*"): (set(), set()),
    ("ACL", "LIST"): (set(), set()),
    ("SCRIPT", "FLUSH"): (set(), set()),
    # Looking.
    ("HGETALL", KEYS.metadata): ({"READ", "WRITE", "MEMBER"}, set()),
    ("HGET", _ROUTE, "state"): ({"READ", "WRITE", "MEMBER", "PRODUCER"}, set()),
    ("XRANGE", _SHARD, "-", "+"): ({"READ", "WRITE", "MEMBER"}, set()),
    ("XRANGE", KEYS.audit, "-", "+"): ({"READ", "WRITE"}, set()),
    ("SMEMBERS", "redis-stream:coord:groups"): ({"READ", "WRITE"}, set()),
}


@pytest.mark.parametrize("role", acl.ROLES)
def test_what_a_role_may_do_by_hand(users: Server, role: Role) -> None:
    wrong = []
    for command, (allowed, also_without_selectors) in COMMANDS.items():
        expected = allowed if _has_selectors(users) else allowed | also_without_selectors
        with users.client(protocol=2, username=role.lower(), password="change-me") as client:
            try:
                client.execute_command(*command)
                refused = ""
            except redis.ResponseError as error:
                # Otherwise it fails because another command of this list has deleted the key: it was allowed.
                denied = isinstance(error, redis.exceptions.NoPermissionError)
                refused = str(error) if denied or _REFUSED.search(str(error)) else ""
        if bool(refused) is (role in expected):
            wrong.append((command, refused or "was allowed"))
    assert wrong == []


def test_a_member_that_was_refused_has_changed_nothing(users: Server) -> None:
    with Monitor(users.url) as monitor:
        before = monitor.describe(STREAM, group=GROUP)
        with Admin(_settings(users, "MEMBER"), requested_by="tests") as not_admin:
            for call in (
                lambda: not_admin.delete(STREAM, group=GROUP, force=True, reason="a test"),
                lambda: not_admin.create(STREAM, group="another", reason="a test"),
                lambda: not_admin.seek(STREAM, group=GROUP, to="oldest", reason="a test"),
            ):
                with pytest.raises(PermissionDeniedError):
                    call()
        after = monitor.describe(STREAM, group=GROUP)
        assert (after.version, after.incarnation) == (before.version, before.incarnation)
        with pytest.raises(NotFoundError):
            monitor.describe(STREAM, group="another")


def test_a_consumer_without_client_unblock_works(users: Server) -> None:
    server = users
    with server.client(protocol=2) as client:
        client.execute_command("ACL", "SETUSER", "member", "-client")
    handled: list[Message] = []
    with (
        Consumer(STREAM, group=GROUP, redis=_settings(server, "MEMBER"), handler=handled.append) as consumer,
        Producer(STREAM, redis=_settings(server, "PRODUCER")) as producer,
    ):
        eventually(lambda: len(consumer.assignment) == 4, what="it owns all shards")
        for n in range(8):
            producer.publish({"n": str(n)}, key=str(n))
        eventually(lambda: len(handled) == 8, what="all are handled")


with_selectors = pytest.mark.parametrize("server", ["redis7", "redis8", "valkey9"], indirect=True)


@with_selectors
@pytest.mark.parametrize(
    ("right", "key"),
    [("xadd", KEYS.events), ("zrem", KEYS.leases), ("hdel", KEYS.metadata), ("xdel", STREAM_KEYS.shard(0).stream)],
    ids=["xadd", "zrem", "hdel", "xdel"],
)
def test_a_member_that_lacks_what_its_scripts_need_only_now_and_then_begins_nothing(
    users: Server, right: str, key: str
) -> None:
    """Redis takes nothing back: a heartbeat that is refused in its midst has changed the group, and told nobody."""
    server = users
    rules = acl.rules("MEMBER", stream=STREAM, group=GROUP, duties=False)
    short = [rule.replace(f" +{right}", "") for rule in rules]
    with (
        server.client(protocol=2) as client,
        Consumer(STREAM, group=GROUP, redis=_settings(server, "MEMBER"), handler=print) as consumer,
    ):
        eventually(lambda: len(consumer.assignment) == 4, what="it owns all shards")
        consumer.stop()
        client.execute_command("ACL", "SETUSER", "member", "reset", "on", ">change-me", *short)
        before = _everything(client)
        with Consumer(STREAM, group=GROUP, redis=_settings(server, "MEMBER"), handler=print) as other:
            eventually(lambda: f"+{right} ~{key}" in str(other.health.waits_for), what="it says what is missing")
            assert "redis-stream-coord acl MEMBER" in str(other.health.waits_for)
            assert _everything(client) == before
            client.execute_command("ACL", "SETUSER", "member", "reset", "on", ">change-me", *rules)
            eventually(lambda: len(other.assignment) == 4, what="it goes on as soon as it may")


@with_selectors
@pytest.mark.parametrize("right", ["hset", "hdel"])
def test_an_entry_whose_event_id_cannot_be_remembered_is_not_appended(users: Server, right: str) -> None:
    """Its producer would be told that it failed, and publish it again."""
    server, shard = users, STREAM_KEYS.shard(0).stream
    rules = acl.rules("PRODUCER", stream=STREAM)
    with server.client(protocol=2) as client:
        short = [rule.replace(f" +{right}", "") for rule in rules]
        client.execute_command("ACL", "SETUSER", "producer", "reset", "on", ">change-me", *short)
        with Producer(STREAM, redis=_settings(server, "PRODUCER")) as producer:
            key = next(str(n) for n in range(100) if producer.route(str(n)).shard == 0)
            many = [Outgoing(fields={}, key=key), Outgoing(fields={}, key=key, event_id="e1")]
            for publish in (lambda: producer.publish({}, key=key, event_id="e1"), lambda: producer.publish_many(many)):
                with pytest.raises(CoordError, match=f"'{right}' command"):
                    publish()
                assert client.xlen(shard) == 0
            # Without an event id it is one command.
            producer.publish({}, key=key)
            assert client.xlen(shard) == 1


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_a_right_that_is_taken_away_later_stops_a_member_once(users: Server) -> None:
    server = users
    rules = acl.rules("MEMBER", stream=STREAM, group=GROUP, duties=False)
    short = [rule.replace(" +xadd", "") for rule in rules]
    with (
        server.client(protocol=2) as client,
        Consumer(STREAM, group=GROUP, redis=_settings(server, "MEMBER"), member="a", handler=print) as consumer,
    ):
        eventually(lambda: len(consumer.assignment) == 4, what="it owns all shards")
        client.execute_command("ACL", "SETUSER", "member", "reset", "on", ">change-me", *short)
        with Consumer(STREAM, group=GROUP, redis=server.url, member="b", handler=print):
            # It is refused once in its midst; from then on nothing is begun.
            eventually(
                lambda: f"a member needs: +xadd ~{KEYS.events}" in consumer.health.waits_for,
                what="it says what is missing",
            )
            client.execute_command("ACL", "SETUSER", "member", "reset", "on", ">change-me", *rules)
            eventually(lambda: len(consumer.assignment) == 2, what="it goes on as soon as it may")


def test_members_carry_a_resharding_on_and_those_without_the_duty_leave_it_to_an_administrator(users: Server) -> None:
    server = users
    selectors = _has_selectors(server)
    with server.client(protocol=2) as client:
        rules = acl.rules("MEMBER", stream=STREAM, group=GROUP, selectors=selectors)
        client.execute_command("ACL", "SETUSER", "driver", "reset", "on", ">change-me", *rules)
    with (
        Admin(_settings(server, "WRITE"), requested_by="tests") as admin,
        Monitor(_settings(server, "READ")) as monitor,
    ):
        admin.delete(STREAM, group=OTHER, reason="a test")
        with Consumer(STREAM, group=GROUP, redis=_settings(server, "driver"), handler=print) as consumer:
            eventually(lambda: len(consumer.assignment) == 4, what="it owns all shards")
            admin.scale(STREAM, shards=5, reason="a test", wait=False)
            eventually(lambda: len(consumer.assignment) == 5, within_seconds=30, what="it carried the resharding on")
            eventually(
                lambda: (found := monitor.resharding(STREAM)) is not None and found.state == "COMPLETED",
                within_seconds=30,
                what="it is over",
            )
        with Consumer(STREAM, group=GROUP, redis=_settings(server, "MEMBER"), handler=print) as consumer:
            eventually(lambda: len(consumer.assignment) == 5, what="it owns all shards")
            begun = admin.scale(STREAM, shards=6, reason="a test", wait=False)
            assert admin.wait(begun, timeout_seconds=30).state == "COMPLETED"
            eventually(lambda: len(consumer.assignment) == 6, within_seconds=30, what="it reads the added shard too")
