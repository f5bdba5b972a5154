"""The rules of each role fit the scripts, and none has more than its work needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

import pytest

from redis_stream_coord import ConfigError, acl, keys
from redis_stream_coord.keys import GroupKeys, StreamKeys
from redis_stream_coord.scripts import catalogue
from tests.unit.test_lua_files import LIBRARIES, OPERATIONS, calls_of, included

# Commands of scripts that change nothing. A new one belongs here or to those that `acl` knows to write.
LOOKS = {
    "EXISTS",
    "HGET",
    "HGETALL",
    "HKEYS",
    "HLEN",
    "HMGET",
    "MEMORY|USAGE",
    "SCAN",
    "SMEMBERS",
    "TIME",
    "XINFO|CONSUMERS",
    "XINFO|GROUPS",
    "XINFO|STREAM",
    "XLEN",
    "XPENDING",
    "XRANGE",
    "XREVRANGE",
    "ZCARD",
    "ZRANGE",
    "ZRANGEBYSCORE",
    "ZREVRANGE",
    "ZSCORE",
}
OF_THE_CONNECTION = {"CLIENT|ID", "CLIENT|INFO", "CLIENT|UNBLOCK", "XREAD"}


def _commands(rules: Iterable[str]) -> set[str]:
    return {word[1:].upper() for rule in rules for word in rule.strip("()").split() if word.startswith("+")}


def _keys(rules: Iterable[str]) -> list[str]:
    return [rule[1:] for rule in rules if rule.startswith("~")]


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_call_of_a_script_is_found(name: str) -> None:
    for text in [OPERATIONS[name], *(LIBRARIES[library] for library in included(OPERATIONS[name]))]:
        for first, *rest in calls_of(text):
            if first.startswith("unpack("):
                table = re.escape(first[7:].split(",")[0].rstrip(")"))
                made = re.search(rf"\b{table} = \{{ '([A-Z]+)'", text)
                assert made is not None, f"{name}: what does {first} call?"
                assert made[1] in acl.calls(name)
                continue
            assert re.fullmatch(r"'[A-Z]+'", first), f"{name}: {first}"
            command = first.strip("'")
            sub = rest[0].strip("'") if rest else ""
            assert command in acl.calls(name) or f"{command}|{sub}" in acl.calls(name)


def test_every_command_is_known_to_look_or_to_write() -> None:
    called = set().union(*(acl.calls(name) for name in catalogue()))
    assert called - LOOKS - acl._WRITES == set()
    assert LOOKS.isdisjoint(acl._WRITES)


def test_a_reader_writes_nothing() -> None:
    for selectors in (True, False):
        commands = _commands(acl.rules("READ", selectors=selectors))
        assert commands - LOOKS == {"EVAL", "EVALSHA", "PING", "SELECT"}


@pytest.mark.parametrize("role", ["MEMBER", "PRODUCER"])
def test_neither_members_nor_producers_delete_keys_or_write_the_audit_log(role: acl.Role) -> None:
    for selectors in (True, False):
        rules = acl.rules(role, stream="orders", group="billing", selectors=selectors)
        assert _commands(rules).isdisjoint(acl._DESTROY)
        assert not any("audit" in rule for rule in rules)
        assert not any(rule.endswith(":groups") for rule in rules)


@pytest.mark.parametrize("role", ["MEMBER", "PRODUCER"])
def test_selectors_give_every_command_that_the_role_writes_with(role: acl.Role) -> None:
    needed = set(acl.commands_of(role, duties=role == "MEMBER"))
    with_selectors, without = (_commands(acl.rules(role, selectors=selectors)) for selectors in (True, False))
    assert with_selectors == without
    assert needed <= with_selectors
    root = _commands(rule for rule in acl.rules(role) if not rule.startswith("("))
    assert root.isdisjoint(acl._WRITES)


@pytest.mark.parametrize("role", ["MEMBER", "PRODUCER"])
def test_every_key_of_the_role_is_covered_and_no_other_group_is(role: acl.Role) -> None:
    patterns = _keys(acl.rules(role, stream="orders", group="billing", duties=False))

    def covered(key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in patterns)

    mine, other, stream = GroupKeys("orders", "billing"), GroupKeys("orders", "audit"), StreamKeys("orders")
    assert covered(stream.record)
    assert covered(stream.shard(17).stream)
    assert covered(mine.metadata) is (role == "MEMBER")
    assert covered(mine.fence(3)) is (role == "MEMBER")
    assert covered(stream.shard(3).route)  # publishing asks it, and reading, for barriers
    for key in (other.metadata, other.leases, mine.audit, stream.audit, keys.index(), StreamKeys("payments").record):
        assert not covered(key), key
    assert not covered("orders:dead")
    assert not covered("payments:0")


def test_a_member_with_duties_reaches_the_other_groups_of_its_stream_and_no_others() -> None:
    patterns = _keys(acl.rules("MEMBER", stream="orders", group="billing"))

    def covered(key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in patterns)

    other = GroupKeys("orders", "shipping")
    assert covered(other.metadata)
    assert covered(other.fence(3))
    assert not covered(other.audit)
    assert not covered(other.leases)
    assert not covered(GroupKeys("payments", "billing").metadata)


def test_every_script_is_somebodys() -> None:
    members = acl.scripts_of("MEMBER", duties=True)
    rest = set(catalogue()) - members - acl.scripts_of("PRODUCER") - acl.scripts_of("READ")
    # What is left only an administrator runs, and no such script may be one that consumers or producers need.
    assert rest <= acl.scripts_of("WRITE")
    for name in members | acl.scripts_of("PRODUCER"):
        assert "audit" not in catalogue()[name].keys


def test_a_member_asks_for_what_its_scripts_of_several_writes_need_and_its_role_gives_all_of_it() -> None:
    asked = acl.at_once("MEMBER")
    own = [name for name in acl.scripts_of("MEMBER") if len(acl.calls(name) & acl._WRITES) > 1]
    assert {"heartbeat", "read", "ack"} <= set(own)
    assert {command for command, _ in asked} == set().union(*(acl.calls(name) for name in own))
    given = acl.rules("MEMBER", duties=False)
    names = {key for _, key in asked if key}
    assert names == {"metadata", "leases", "events", "stream", "fence", "route"}
    root = _commands(rule for rule in given if not rule.startswith("("))
    for command, key in asked:
        assert command in root or command in acl._WRITABLE["MEMBER"][key], (command, key)
    assert ("HSET", "route") not in asked  # of the duties, which not every member has


def test_rules_without_names_are_for_all() -> None:
    patterns = _keys(acl.rules("READ"))
    for key in (GroupKeys("a:b", "c").metadata, StreamKeys("a:b").record, StreamKeys("a:b").shard(5).route, "a:b:7"):
        assert any(fnmatchcase(key, pattern) for pattern in patterns), key


def test_a_prefix_is_taken_literally() -> None:
    patterns = _keys(acl.rules("READ", stream="orders", group="billing", prefix="what*?"))
    assert r"what\*\?:{orders:billing}:metadata" in patterns


def test_dead_letters_are_appended_to_and_nothing_else() -> None:
    rules = acl.rules("MEMBER", stream="orders", group="billing", dead_letters=["orders:dead"])
    assert "(~orders:dead +xadd)" in rules
    assert "~orders:dead" in acl.rules("MEMBER", selectors=False, dead_letters=["orders:dead"])
    assert not any("dead" in rule for rule in acl.rules("PRODUCER", dead_letters=["orders:dead"]))


@pytest.mark.parametrize("given", [{"role": "member"}, {"role": "MEMBER", "stream": "a*"}])
def test_wrong_names_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        acl.rules(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("this user has no permissions to run the 'xread' command", "+xread"),
        ("this user has no permissions to run the 'evalsha' command or its subcommand", "+evalsha"),
        ("User a has no permissions to run the 'xgroup|create' command", "+xgroup|create"),
        ("ACL failure in script: User a has no permissions to run the 'hset' command", "+hset"),
        ("this user has no permissions to access one of the keys used as arguments", "one of ~a ~b"),
        ("No permissions to access a key", "one of ~a ~b"),
        ("User a has no permissions to access the 'b' key", "~b"),
        (
            "The user executing the script can't access at least one of the keys mentioned in the command arguments",
            "one of ~a ~b",
        ),
        ("The user executing the script can't run this command or subcommand", "one of +hmget +hset"),
    ],
)
def test_the_missing_rule_is_named(text: str, expected: str) -> None:
    assert acl.missing(text, command="EVALSHA", keys=["a", "b"], script="claim") == expected
