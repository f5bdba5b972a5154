"""The loader of the Lua files, on small texts of its own."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from lupa import lua51

from redis_stream_coord.scripts import Script, catalogue, parse
from tests.unit.fake import fake_group


def script(text: str, **libraries: str) -> Script:
    return parse("test", text, libraries)


def run(loaded: Script, keys: list[str], argv: list[str], call: Any = None) -> Any:
    """Run a script in Lua 5.1, with `redis.call` and `redis.pcall` given, and `redis.error_reply` as Redis has it."""
    lua = lua51.LuaRuntime()
    table = lua.table_from
    lua.globals().KEYS, lua.globals().ARGV = table(keys), table(argv)
    lua.globals().redis = table({"call": call, "error_reply": lambda text: table({"err": text})})
    answer = lua.execute(loaded.source)
    return list(answer.values()) if lua51.lua_type(answer) == "table" and answer["err"] is None else answer


# --- the header -----------------------------------------------------------------------------------------------------


def test_the_header_gives_names_and_order() -> None:
    loaded = script(
        "-- What it does.\n"
        "-- @key first    the first key\n"
        "-- @key second\n"
        "-- @arg name string   with words behind\n"
        "-- @arg count integer\n"
        "-- @arg rest list\n"
        "-- @returns OK\n"
        "-- @error NOT_EMPTY\n"
        "return { 'OK' }\n"
    )
    assert loaded.name == "test"
    assert loaded.keys == ("first", "second")
    assert loaded.arguments == (("name", "string"), ("count", "integer"), ("rest", "list"))
    assert loaded.refusals == {"NOT_EMPTY"}
    assert loaded.includes == ()


def test_names_stand_for_keys_and_arguments() -> None:
    loaded = script(
        "-- @key first\n-- @key second\n-- @arg name string\n-- @arg count integer\n-- @arg rest list\n"
        "return { key.first, key.second, arg.name, arg.count + 1, #arg.rest, arg.rest[1], arg.rest[2] }"
    )
    assert run(loaded, ["k1", "k2"], ["n", "41", "x", "y"]) == ["k1", "k2", "n", 42, 2, "x", "y"]
    assert run(loaded, ["k1", "k2"], ["n", "41"]) == ["k1", "k2", "n", 42, 0]


def test_a_script_without_keys_and_arguments() -> None:
    assert run(script("-- Nothing.\nreturn { 'OK' }"), [], []) == ["OK"]


def test_sha_is_that_of_the_source() -> None:
    loaded = script("return { 'OK' }")
    assert loaded.sha == hashlib.sha1(loaded.source.encode()).hexdigest()


def test_only_the_beginning_of_a_line_is_a_tag() -> None:
    loaded = script("-- See -- @key other\nlocal text = '-- @arg no list'\n  -- @key indented\nreturn { text }")
    assert (loaded.keys, loaded.arguments) == ((), ())


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("-- @arg n number", "unknown kind 'number'"),
        ("-- @arg n", "unknown kind None"),
        ("-- @argument n string", "unknown tag @argument"),
        ("-- @arg rest list\n-- @arg n string", "n stands after a list"),
        ("-- @key a\n-- @key a", "a name stands twice"),
        ("-- @arg a string\n-- @arg a integer", "a name stands twice"),
    ],
)
def test_a_wrong_header_is_refused(header: str, message: str) -> None:
    with pytest.raises(ValueError, match="test: .*" + message):
        script(header)


def test_a_key_and_an_argument_may_have_one_name() -> None:
    assert run(script("-- @key a\n-- @arg a string\nreturn { key.a, arg.a }"), ["k"], ["v"]) == ["k", "v"]


# --- includes -------------------------------------------------------------------------------------------------------


def test_libraries_come_once_and_after_those_that_they_need() -> None:
    loaded = script(
        "-- @include top\n-- @include base\nreturn { top.of(1) }",
        base="return function(n) return n + 1 end",
        middle="-- @include base\nreturn { twice = function(n) return base(base(n)) end }",
        top="-- @include middle\n-- @include base\nreturn { of = function(n) return middle.twice(base(n)) end }",
        unused="error('never loaded')",
    )
    assert loaded.includes == ("base", "middle", "top")
    assert run(loaded, [], []) == [4]


def test_refusals_of_libraries_are_those_of_the_script() -> None:
    loaded = script(
        "-- @include a\n-- @error OWN", a="-- @include b\n-- @error FROM_A\nreturn 1", b="-- @error FROM_B\nreturn 1"
    )
    assert loaded.refusals == {"OWN", "FROM_A", "FROM_B"}


def test_a_library_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"test: there is no lib/nowhere\.lua"):
        script("-- @include nowhere")


def test_a_library_that_includes_itself() -> None:
    with pytest.raises(ValueError, match="test: a includes itself through a -> b"):
        script("-- @include a", a="-- @include b", b="-- @include a")


def test_the_locals_of_a_library_are_its_own() -> None:
    loaded = script(
        "-- @include a\nlocal hidden = hidden\nreturn { a, hidden or 'none' }", a="local hidden = 1\nreturn 2"
    )
    # Redis refuses the read of an unknown global; plain Lua gives nil.
    assert run(loaded, [], []) == [2, "none"]


# --- what is sent ---------------------------------------------------------------------------------------------------

BOUND = script("-- @key k\n-- @arg s string\n-- @arg i integer\n-- @arg l list\nreturn { 'OK' }")


def test_bind_puts_everything_into_order() -> None:
    assert BOUND.bind({"k": "key"}, {"l": ["a", b"b", 3], "i": 7, "s": "text"}) == (
        ["key"],
        ["text", "7", "a", b"b", "3"],
    )
    assert BOUND.bind({"k": "key"}, {"l": [], "i": -1, "s": b"\xff"}) == (["key"], [b"\xff", "-1"])


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        ({}, {}),
        ({"k": "a", "other": "b"}, {}),
        ({"k": "a"}, {"other": 1}),
        ({"k": "a"}, {"s": None}),
        ({"k": "a"}, {"s": 1}),
        ({"k": "a"}, {"i": "1"}),
        ({"k": "a"}, {"i": 1.0}),
        ({"k": "a"}, {"i": True}),
        ({"k": "a"}, {"l": "text"}),
        ({"k": "a"}, {"l": b"bytes"}),
        ({"k": "a"}, {"l": 1}),
    ],
)
def test_bind_refuses_what_does_not_fit(keys: dict[str, str], changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="test: "):
        BOUND.bind(keys, {"s": "", "i": 1, "l": [], **changes})


def test_bind_refuses_a_missing_argument() -> None:
    with pytest.raises(TypeError, match="takes keys"):
        BOUND.bind({"k": "a"}, {"s": "", "i": 1})


# --- how it ends ----------------------------------------------------------------------------------------------------


def test_a_refusal_from_however_deep_is_an_answer() -> None:
    refuse = "return function(word, ...) error({ refused = { word, ... } }, 0) end"
    loaded = script(
        "-- @include refuse\n-- @include a\na(1)\nreturn { 'OK' }",
        refuse=refuse,
        a="-- @include refuse\nreturn function(n) refuse('NOT_EMPTY', 'x', 'y') end",
    )
    assert run(loaded, [], []) == ["NOT_EMPTY", "x", "y"]


@pytest.mark.parametrize(
    ("raised", "answer"),
    [
        # As Redis 6.2 says it, with and without the place; as 7 and later do: a table.
        ("'@user_script:12: WRONGTYPE Operation against a key'", "WRONGTYPE Operation against a key"),
        ("'user_script:12: -WRONGTYPE Operation against a key'", "WRONGTYPE Operation against a key"),
        ("'@user_script: 12: Unknown Redis command'", "Unknown Redis command"),
        ("'@user_script: 5: -READONLY You can not write'", "READONLY You can not write"),
        ("'@user_script: 5: -OOM command not allowed'", "OOM command not allowed"),
        ("'WRONGTYPE Operation against a key'", "WRONGTYPE Operation against a key"),
        ("'OOM command not allowed'", "OOM command not allowed"),
        ("{ err = 'WRONGTYPE Operation' }", "WRONGTYPE Operation"),
        ("nil", "nil"),
    ],
)
def test_the_code_of_an_error_comes_first(raised: str, answer: str) -> None:
    assert run(script(f"error({raised}, 0)"), [], [])["err"] == answer


def test_a_mistake_in_a_script_is_an_error_and_names_it() -> None:
    error = run(script("local nothing\nreturn nothing.field"), [], [])["err"]
    assert "attempt to index" in error


@pytest.mark.parametrize("version", [(6, 2), (7, 0)])
def test_a_key_of_the_wrong_type_is_named_by_code(version: tuple[int, ...]) -> None:
    loaded = script("-- @key k\nredis.call('HGETALL', key.k)\nreturn { 'OK' }")
    with fake_group(shards=1, version=version) as group:
        group.client.set("text", "x")
        with pytest.raises(Exception, match=r"^(Operation|WRONGTYPE)"):
            group.client.eval(loaded.source, 1, "text")


def test_the_catalogue_is_read_once_and_complete() -> None:
    assert catalogue() is catalogue()
    assert {"ack", "claim", "create", "delete", "describe", "heartbeat", "publish", "read"} <= set(catalogue())
    assert all(loaded.name == name for name, loaded in catalogue().items())
