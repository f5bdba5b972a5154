"""Every Lua file of the package, read as text: its header is its contract, and what it promises holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources

import pytest

from redis_stream_coord.errors import REFUSALS
from redis_stream_coord.scripts import catalogue

_FOLDER = resources.files("redis_stream_coord") / "lua"
OPERATIONS = {f.name[:-4]: f.read_text("utf-8") for f in _FOLDER.iterdir() if f.name.endswith(".lua")}
LIBRARIES = {f.name[:-4]: f.read_text("utf-8") for f in (_FOLDER / "lib").iterdir() if f.name.endswith(".lua")}
FILES = {**{f"{name}.lua": text for name, text in OPERATIONS.items()}, **{f"lib/{n}": t for n, t in LIBRARIES.items()}}

OPERATION_LINES = 110
LIBRARY_LINES = 240
_FORBIDDEN = r"\b(cjson|cmsgpack|struct|bit)\s*\.|sha1hex|replicate_commands|setresp|^#!"

# Words in capitals that are no refusal: answers, and what scripts say to Redis outside of a call or look for in it.
_ANSWERS = {"OK", "REVOKE_PENDING", "SYNC_METADATA", "LEFT", "DUPLICATE"}
# States of a resharding, and the note that its routes are open.
_STATES = {"PREPARING", "CUTOVER", "DRAINING", "COMPLETED", "REOPENING", "ABANDONED", "FAILED", "OPENED"}
_OF_REDIS = {"JUSTID", "NOGROUP", "BUSYGROUP", "GROUP", "HGETALL", "ZADD", "XADD"}
# What the roles of a principal are called.
_OF_REDIS |= {"READ", "WRITE", "MEMBER", "PRODUCER"}

# Which arguments of a Redis command are keys, counted from the command; `None`: the one after STREAMS.
_KEY_AT: dict[str, int | None] = {"XGROUP": 2, "XINFO": 2, "XREADGROUP": None, "XREAD": None, "MEMORY": 2}


def code_of(text: str) -> str:
    """The text without its comments."""
    return re.sub(r"--[^\n]*", "", text)


def calls_of(text: str) -> Iterator[list[str]]:
    """The arguments of each `redis.call` and `redis.pcall`."""
    code = code_of(text)
    for match in re.finditer(r"redis\.p?call\(", code):
        yield arguments_of(code, match.end())


def arguments_of(code: str, at: int) -> list[str]:
    """Split what stands in parentheses, from `at` to its end, at the commas of its own level."""
    found, depth, quoted = [""], 1, ""
    for char in code[at:]:
        if quoted:
            quoted = "" if char == quoted else quoted
        elif char in "'\"":
            quoted = char
        elif char in "({[":
            depth += 1
        elif char in ")}]":
            depth -= 1
            if depth == 0:
                break
        elif char == "," and depth == 1:
            found.append("")
            continue
        found[-1] += char
    return [" ".join(argument.split()) for argument in found]


def words_of(text: str) -> set[str]:
    """The error words that stand in a file: literals in capitals that are neither answers nor for Redis."""
    code = code_of(text)
    for call in calls_of(text):
        for argument in call:
            if re.fullmatch(r"'[^']*'", argument):
                code = code.replace(f"{argument},", "", 1) if f"{argument}," in code else code.replace(argument, "", 1)
    return set(re.findall(r"'([A-Z][A-Z_]*[A-Z])'", code)) - _ANSWERS - _STATES - _of_redis(text)


def _of_redis(text: str) -> set[str]:
    """Words within a call to Redis, and in tables that are unpacked into one."""
    in_calls = {word for call in calls_of(text) for word in re.findall(r"'([A-Z]+)'", ",".join(call))}
    in_tables = set(re.findall(r"\{ '(X[A-Z]+)'", code_of(text)))
    return (in_calls | in_tables | _OF_REDIS) - set(REFUSALS)


def included(text: str) -> set[str]:
    names = set(re.findall(r"^-- @include (\w+)", text, re.MULTILINE))
    return names.union(*(included(LIBRARIES[name]) for name in names))


def promised(text: str) -> set[str]:
    return set(re.findall(r"^-- @error (\w+)", text, re.MULTILINE))


# --- form -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_file_begins_with_its_purpose(name: str) -> None:
    first = FILES[name].splitlines()[0]
    assert re.match(r"-- [A-Z]", first), first


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_says_what_it_answers(name: str) -> None:
    assert re.search(r"^-- @returns OK", OPERATIONS[name], re.MULTILINE)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_fits_on_a_page(name: str) -> None:
    assert len(OPERATIONS[name].splitlines()) <= OPERATION_LINES


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_stays_small(name: str) -> None:
    assert len(LIBRARIES[name].splitlines()) <= LIBRARY_LINES
    assert "@key" not in LIBRARIES[name]
    assert "@arg" not in LIBRARIES[name]


@pytest.mark.parametrize("name", FILES)
def test_lines_are_not_too_long(name: str) -> None:
    assert [line for line in FILES[name].splitlines() if len(line) > 120] == []


@pytest.mark.parametrize("name", FILES)
def test_only_what_every_server_has_is_used(name: str) -> None:
    assert re.findall(_FORBIDDEN, code_of(FILES[name]), re.MULTILINE) == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_only_what_is_used_is_included(name: str) -> None:
    code = code_of(OPERATIONS[name])
    for library in re.findall(r"^-- @include (\w+)", OPERATIONS[name], re.MULTILINE):
        assert re.search(rf"\b{library}\b[.(]", code), f"{name} includes {library} for nothing"


@pytest.mark.parametrize("name", FILES)
def test_what_is_used_is_included(name: str) -> None:
    text = FILES[name]
    own = name.removeprefix("lib/")
    direct = set(re.findall(r"^-- @include (\w+)", text, re.MULTILINE))
    for library in LIBRARIES:
        code = re.sub(r"'[^']*'", "''", code_of(text))
        local = re.search(rf"\blocal [\w, ]*\b{library}\b|\bfunction[^(]*\([^)]*\b{library}\b", code)
        if library != own and not local and re.search(rf"(?<![.\w]){library}[.(]", code):
            assert library in direct, f"{name} uses {library} of another file's include"


def test_every_library_is_used() -> None:
    used = set().union(*(included(text) for text in OPERATIONS.values()))
    assert used == set(LIBRARIES)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_every_word_that_a_file_refuses_with_is_promised(name: str) -> None:
    text = FILES[name]
    everywhere = promised(text).union(*(promised(LIBRARIES[library]) for library in included(text)))
    assert words_of(text) - everywhere == set()


@pytest.mark.parametrize("name", FILES)
def test_every_word_that_a_file_promises_can_come(name: str) -> None:
    text = FILES[name]
    everywhere = words_of(text).union(*(words_of(LIBRARIES[library]) for library in included(text)))
    assert promised(text) - everywhere == set()


def test_words_and_refusals_are_the_same() -> None:
    can_come = set().union(*(script.refusals for script in catalogue().values()))
    assert can_come == set(REFUSALS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_loader_knows_them(name: str) -> None:
    text = OPERATIONS[name]
    expected = promised(text).union(*(promised(LIBRARIES[library]) for library in included(text)))
    assert catalogue()[name].refusals == expected


def test_the_reader_of_words_finds_each_form() -> None:
    text = """
    -- refuse('IN_COMMENT')
    refuse('CALLED', 'detail')
    if x then return 'RETURNED', key.route end
    return a and answer('LEFT', false) or { 'TABLED', 'rebalance timeout' }
    local g = header.read(key, TEXTS, NUMBERS, 'HANDED_ON')
    redis.call('HSET', key.a, 'field', 'EXAMPLE')
    local claim = { 'XCLAIM', key.a }
    """
    assert words_of(text) == {"CALLED", "RETURNED", "TABLED", "HANDED_ON"}


# --- keys -----------------------------------------------------------------------------------------------------------


def key_of(call: list[str]) -> str | None:
    """The argument that names the key, or `None` if the command has none."""
    command = call[0].strip("'")
    if command in ("TIME",):
        return None
    if command.startswith("unpack("):
        return None  # see below
    at = _KEY_AT.get(command, 1)
    return call[call.index("'STREAMS'") + 1] if at is None else call[at]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_touches_only_keys_that_are_declared(name: str) -> None:
    declared = {f"key.{key}" for key in catalogue()[name].keys}
    for call in calls_of(OPERATIONS[name]):
        key = key_of(call)
        # In a function of its own, a key may be a parameter; then it comes from a caller in this file.
        assert key is None or key in declared or _is_parameter(OPERATIONS[name], key), call


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_touches_only_keys_that_it_is_given(name: str) -> None:
    for call in calls_of(LIBRARIES[name]):
        key = key_of(call)
        assert key is None or key in ("g.key", "leases.key") or _is_parameter(LIBRARIES[name], key), call


def _is_parameter(text: str, name: str) -> bool:
    parameters = re.findall(r"\bfunction\b[^(]*\(([^)]*)\)", code_of(text))
    return any(name in re.split(r",\s*", names) for names in parameters)


@pytest.mark.parametrize("name", FILES)
def test_a_command_that_is_unpacked_begins_with_a_declared_key(name: str) -> None:
    code = code_of(FILES[name])
    for call in calls_of(FILES[name]):
        if call[0].startswith("unpack("):
            variable = call[0][len("unpack(") : -1].split(",")[0]
            assert re.search(rf"local {variable}\b[^\n]*= \{{ '[A-Z]+', key\.\w+", code), call


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_declared_key_is_used(name: str) -> None:
    text = OPERATIONS[name]
    for key in catalogue()[name].keys:
        only_names_the_slot = re.search(rf"^-- @key {key}\s+names the slot", text, re.MULTILINE)
        assert only_names_the_slot or re.search(rf"\bkey\.{key}\b", code_of(text)), f"{key} of {name}"


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_argument_is_used(name: str) -> None:
    together = OPERATIONS[name] + "".join(LIBRARIES[library] for library in included(OPERATIONS[name]))
    for argument, _ in catalogue()[name].arguments:
        assert re.search(rf"\barg\.{argument}\b", code_of(together)), f"{argument} of {name}"


@pytest.mark.parametrize("name", FILES)
def test_numbers_are_not_written_by_tostring(name: str) -> None:
    """On Redis 7 that of a microsecond time gives '1.79e+15'."""
    assert "tostring(" not in code_of(FILES[name])


@pytest.mark.parametrize("name", FILES)
def test_no_names_are_global(name: str) -> None:
    """Redis refuses them, but only where the line is reached."""
    code = re.sub(r"'[^']*'", "''", code_of(FILES[name]))
    assert [line for line in code.splitlines() if re.match(r"\s*function \w+\(", line)] == []
