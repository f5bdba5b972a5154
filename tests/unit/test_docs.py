"""The documentation says what the code does, as far as a table can be held against it."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from opentelemetry.metrics import Counter, Histogram

import redis_stream_coord
from redis_stream_coord import (
    Admin,
    AsyncConsumer,
    Batch,
    Collector,
    Consumer,
    DeadLetter,
    Monitor,
    Outgoing,
    Poison,
    Producer,
    RedisSettings,
    Retry,
    Router,
    Timings,
    commands,
    telemetry,
)
from redis_stream_coord.errors import REFUSALS
from redis_stream_coord.keys import GroupKeys, StreamKeys, index
from redis_stream_coord.session import Input, ShardInput, ShardState, State

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])


def _read(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def _section(text: str, heading: str) -> str:
    """Return what stands between a heading and the next one of its level or above."""
    level = heading.split()[0]
    match = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", text, re.DOTALL | re.MULTILINE)
    assert match, f"there is no section {heading!r}"
    return match[1]


def _rows(text: str) -> list[list[str]]:
    """Return the cells of all rows of all tables, without their headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    ruled = [number for number, row in enumerate(rows) if set("".join(row)) <= set("-: ")]
    return [row for number, row in enumerate(rows) if number not in ruled and number + 1 not in ruled]


# --- links --------------------------------------------------------------------------------------------------------


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        if anchor:
            assert anchor in _anchors(other), target


def test_index_names_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w./-]+\.md)\)", _read("README.md"))) - {"../CHANGELOG.md"}
    assert linked == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_of_the_package_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for owner, name in re.findall(r"`(?:redis_stream_coord\.)?([A-Z]\w+)\.([a-z_]\w*)", text):
        cls = getattr(redis_stream_coord, owner, None)
        if cls is not None:
            fields = {field.name for field in attrs.fields(cls)} if attrs.has(cls) else set()
            assert hasattr(cls, name) or name in fields, f"{owner}.{name}"


# --- protocol.md --------------------------------------------------------------------------------------------------


def test_error_words_are_those_of_the_code() -> None:
    rows = _rows(_section(_read("protocol.md"), "## Error words"))
    documented = {word.strip("`"): (error.strip("`"), retriable) for word, error, retriable, _ in rows}
    assert documented == {
        word: (refusal.error.__name__, "yes" if refusal.retriable else "no") for word, refusal in REFUSALS.items()
    }


def test_keys_are_those_of_the_code() -> None:
    names = [row[0].strip("`") for row in _rows(_section(_read("protocol.md"), "## Keys"))]
    group, stream = GroupKeys("S", "G", "P"), StreamKeys("S", "P")
    shard = stream.shard(0)
    keys = [
        *(getattr(group, name) for name in _properties(GroupKeys)),
        *(getattr(stream, name) for name in _properties(StreamKeys)),
        *(attrs.asdict(shard)[field.name] for field in attrs.fields(type(shard))),
        group.fence(0),
        index("P"),
    ]
    assert sorted(names) == sorted(key.replace("S:0", "S:i") for key in keys)


def _properties(cls: type) -> list[str]:
    return [name for name, value in vars(cls).items() if isinstance(value, property)]


@pytest.mark.parametrize(
    ("heading", "states", "inputs"),
    [
        ("## States of a member", State, Input),
        ("## States of a shard, as its holder sees it", ShardState, ShardInput),
    ],
)
def test_states_and_inputs_are_explained(heading: str, states: Any, inputs: Any) -> None:
    names = [row[0].strip("`") for row in _rows(_section(_read("protocol.md"), heading))]
    assert names == [one.value for one in [*states, *inputs]]


def test_events_are_those_of_the_scripts() -> None:
    rows = _rows(_section(_read("protocol.md"), "## Events"))
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    lua = ROOT / "redis_stream_coord" / "lua"
    source = "".join(path.read_text("utf-8") for path in lua.rglob("*.lua"))
    written = set(re.findall(r"(?:note\(log, |events\.add\(key\.events, |remove\([^')]*, )'(\w+)'", source))
    python = "".join(path.read_text("utf-8") for path in (ROOT / "redis_stream_coord").glob("*.py"))
    written |= set(re.findall(r"commands\.announce\((?:keys|group|GroupKeys\([^)]*\)), \"(\w+)\"", python))
    assert documented == written


def test_every_script_of_the_data_plane_is_described() -> None:
    text = _section(_read("protocol.md"), "## The data plane of a shard")
    assert {"claim", "read", "ack", "note_deliveries", "trim"} <= set(re.findall(r"\*\*(\w+)\*\*", text))


def test_versions_are_those_of_the_code() -> None:
    rows = _rows(_section(_read("protocol.md"), "## Compatibility"))
    header = (ROOT / "redis_stream_coord" / "lua" / "lib" / "header.lua").read_text("utf-8")
    schema = re.search(r"SCHEMA = '(\d+)'", header)
    assert schema is not None
    assert rows[-1][1:] == [str(commands.PROTOCOL), schema[1]]
    assert str(commands.SCHEMA) == schema[1]


# --- metrics.md ---------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_code() -> None:
    expected = {telemetry.PREFIX + name: "gauge" for name in telemetry.GAUGES}
    for instrument in vars(telemetry).values():
        # A proxy until an SDK is set, which knows its name all the same.
        name = getattr(instrument, "_name", getattr(instrument, "name", None))
        if isinstance(instrument, Counter):
            expected[f"{name}_total"] = "counter"
        elif isinstance(instrument, Histogram):
            expected[f"{name}"] = "histogram, seconds"
    rows = _rows(_read("metrics.md"))
    documented = {row[0].strip("`"): row[1] for row in rows if row[0].startswith(f"`{telemetry.PREFIX}")}
    assert documented == expected


def test_runbooks_name_metrics_that_exist() -> None:
    known = set(re.findall(rf"{telemetry.PREFIX}\w+", _read("metrics.md")))
    for page in ("runbook.md", "runbook.ko.md"):
        named = set(re.findall(rf"{telemetry.PREFIX}\w+", _read(page)))
        assert named <= known
        assert named


# --- configuration.md ---------------------------------------------------------------------------------------------

CONFIGURED: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "## `RedisSettings`": (RedisSettings,),
    "## `Timings`": (Timings,),
    "## `Consumer` and `AsyncConsumer`": (Consumer, AsyncConsumer),
    "## `Retry`": (Retry,),
    "## `Batch`": (Batch,),
    "## `Poison` and `DeadLetter`": (Poison, DeadLetter),
    "## `Producer` and `Router`": (Producer, Router, Outgoing),
    "## `Admin`": (Admin,),
    "### `Admin.create`": (Admin.create,),
    "### `Admin.delete`": (Admin.delete,),
    "### `Admin.retain`": (Admin.retain,),
    "### `Admin.trim`": (Admin.trim,),
    "### `Admin.seek`": (Admin.seek,),
    "## `Monitor`": (Monitor,),
    "## `Collector`": (Collector,),
}


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if attrs.has(type(value)):
        assert value == type(value)()
        return f"{type(value).__name__}()"
    return repr(value)


@pytest.mark.parametrize("heading", CONFIGURED)
def test_parameters_and_defaults_are_those_of_the_code(heading: str) -> None:
    section = _section(_read("configuration.md"), heading)
    section = section.partition("\n### ")[0]
    rows = [row for row in _rows(section) if len(row) == 4]
    documented = {row[0].strip("`"): row[2].strip("`") for row in rows}
    assert len(documented) == len(rows)
    expected: dict[str, str] = {}
    for function in CONFIGURED[heading]:
        for name, parameter in inspect.signature(function).parameters.items():
            if name != "self":
                assert expected.setdefault(name, _default(parameter.default)) == _default(parameter.default)
    assert documented == expected


def test_environment_variables_are_those_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    section = _section(_read("configuration.md"), "## `RedisSettings`")
    documented = {row[0].strip("`") for row in _rows(section) if len(row) == 2}
    asked = set()

    class Environment(dict[str, str]):
        def get(self, name: str, default: Any = None) -> Any:
            if name.startswith("REDIS_STREAM_COORD_"):  # others look at it too, hypothesis for one
                asked.add(name)
            return "redis://localhost" if name.endswith("_URL") else default

    monkeypatch.setattr("redis_stream_coord.settings.os.environ", Environment())
    RedisSettings.from_env()
    assert documented == asked


def test_fixed_values_are_those_of_the_code() -> None:
    rows = _rows(_section(_read("configuration.md"), "## Fixed values"))
    assert rows
    for name, value, _ in rows:
        module, _, constant = name.strip("`").partition(".")
        assert str(getattr(importlib.import_module(f"redis_stream_coord.{module}"), constant)) == value, name


def test_readme_names_the_windows_as_they_are() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    from redis_stream_coord import acks, publishing

    assert f"{acks.ACK_DELAY_SECONDS} s after the first one (`acks.ACK_DELAY_SECONDS`)" in text
    assert f"when {acks.ACK_BATCH} wait (`acks.ACK_BATCH`)" in text
    assert f"{publishing.EVENT_ID_WINDOW_SECONDS:.0f} s (`publishing.EVENT_ID_WINDOW_SECONDS`)" in text
    assert f"{publishing.EVENT_ID_WINDOW_COUNT:,} of them (`publishing.EVENT_ID_WINDOW_COUNT`)" in text
