"""The rights in docs/redis-users.md are enough, and no more than it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis

from redis_stream_coord import (
    Admin,
    ConflictError,
    Consumer,
    DeadLetter,
    Message,
    Monitor,
    Outgoing,
    PermissionDeniedError,
    Producer,
    RedisSettings,
    Retry,
)
from redis_stream_coord.keys import GroupKeys
from tests.servers import Server
from tests.waiting import eventually

PAGE = Path(__file__).parents[2] / "docs" / "redis-users.md"
STREAM, GROUP = "orders", "billing"
ROLES = ("consumer", "producer", "admin", "monitor")


def _rules() -> dict[str, list[str]]:
    rules = {}
    for block in re.findall(r"^```text\n(ACL SETUSER .*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        words = block.replace("\\\n", " ").split()[2:]
        rules[words[0]] = words[1:]
    assert set(rules) == set(ROLES)
    return rules


def _settings(server: Server, role: str) -> RedisSettings:
    return RedisSettings(server.url, username=role, password="change-me")


@pytest.fixture
def users(server: Server) -> Server:
    with server.client(protocol=2) as client:
        for role, rules in _rules().items():
            client.execute_command("ACL", "SETUSER", role, *rules)
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


def test_each_role_can_do_its_work(users: Server) -> None:
    server = users
    with Admin(_settings(server, "admin"), requested_by="tests") as admin:
        admin.create(STREAM, group=GROUP, shards=4, retention="consumed", reason="a test")
        admin.create(STREAM, group=GROUP, exist_ok=True, reason="a test")
        handled: list[Message] = []

        def handle(message: Message) -> None:
            if message.text("n") == "3" and not message.deliveries > 1:
                raise ValueError("the first time")
            handled.append(message)
            if message.text("n") != "0":
                message.ack_delete()

        with Consumer(
            STREAM,
            group=GROUP,
            redis=_settings(server, "consumer"),
            handler=handle,
            retry=Retry(backoff_seconds=0.01),
            poison=DeadLetter("orders:dead", after_deliveries=5),
        ) as consumer:
            with Producer(STREAM, redis=_settings(server, "producer")) as producer:
                producer.publish_many([Outgoing(fields={"n": str(n)}, key=str(n)) for n in range(20)])
                producer.publish({"n": "20"}, key="20", event_id="twenty")
                assert producer.publish({"n": "20"}, key="20", event_id="twenty").duplicate
            with Producer(STREAM, redis=_settings(server, "producer"), fenced=False) as plain:
                plain.publish({"n": "21"}, key="21")
            eventually(lambda: len(handled) == 22, what="all are handled")
            assert set(consumer.lag()) == {0, 1, 2, 3}
            with Monitor(_settings(server, "monitor")) as monitor:
                assert monitor.groups() == [(STREAM, GROUP)]
                assert monitor.describe(STREAM, group=GROUP).violations() == []
            admin.seek(STREAM, group=GROUP, to="oldest", reason="a test")
            eventually(lambda: len(handled) > 22, what="something is handled again")
            with pytest.raises(ConflictError):
                admin.delete(STREAM, group=GROUP, reason="a test")
        admin.retain(STREAM, retention="all", reason="a test")
        with server.client(protocol=2) as client:
            audited = client.xrange(GroupKeys(STREAM, GROUP).audit)
        assert {fields["principal"] for _, fields in audited} == {"admin"}
        admin.delete(STREAM, group=GROUP, reason="a test")
    assert _refused(server) == []


def test_a_consumer_cannot_do_what_is_the_administrators(users: Server) -> None:
    server = users
    keys = GroupKeys(STREAM, GROUP)
    with Admin(_settings(server, "admin"), requested_by="tests") as admin:
        admin.create(STREAM, group=GROUP, shards=1, reason="a test")
    with Admin(_settings(server, "consumer"), requested_by="tests") as not_admin:
        with pytest.raises(PermissionDeniedError):
            not_admin.delete(STREAM, group=GROUP, force=True, reason="a test")
        with pytest.raises(PermissionDeniedError):
            not_admin.create(STREAM, group="another", reason="a test")
    with server.client(protocol=2, username="consumer", password="change-me") as client:
        for command in (
            ("DEL", keys.metadata),
            ("UNLINK", keys.metadata),
            ("XADD", keys.audit, "*", "action", "none"),
            ("FLUSHALL",),
            ("EVAL", "return redis.call('DEL', KEYS[1])", 1, keys.metadata),
        ):
            with pytest.raises(redis.ResponseError, match=r"(?i)permission|can't run"):
                client.execute_command(*command)
    with Monitor(server.url) as monitor:
        assert monitor.describe(STREAM, group=GROUP).shards


def test_a_consumer_without_client_unblock_works(users: Server) -> None:
    server = users
    with server.client(protocol=2) as client:
        client.execute_command("ACL", "SETUSER", "consumer", "-client")
    with Admin(_settings(server, "admin"), requested_by="tests") as admin:
        admin.create(STREAM, group=GROUP, shards=4, reason="a test")
    handled: list[Message] = []
    with (
        Consumer(STREAM, group=GROUP, redis=_settings(server, "consumer"), handler=handled.append) as consumer,
        Producer(STREAM, redis=_settings(server, "producer")) as producer,
    ):
        eventually(lambda: len(consumer.assignment) == 4, what="it owns all shards")
        for n in range(8):
            producer.publish({"n": str(n)}, key=str(n))
        eventually(lambda: len(handled) == 8, what="all are handled")
