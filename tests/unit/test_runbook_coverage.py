"""The table of docs/runbook-coverage.md: no line is missing, and whatever it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import redis_stream_coord
from redis_stream_coord import telemetry
from redis_stream_coord.cli.app import cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "runbook-coverage.md").read_text("utf-8")
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")
][2:]
LINES = 87


def test_no_line_is_missing() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, LINES + 1))
    for row in ROWS:
        assert len(row) == 4, row
        assert row[1]
        assert row[2], f"line {row[0]}: nothing does it"
        heading = row[2] == "heading"
        assert heading is (row[3] == ""), f"line {row[0]}: no test runs it"
        assert not heading or re.fullmatch(r"\*\*.*\*\*", row[1])


def test_no_line_says_not_yet() -> None:
    assert not re.search(r"not yet|later|todo", " ".join(row[2] for row in ROWS), re.IGNORECASE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_a_line_names_is_there(row: list[str]) -> None:
    for command in re.findall(r"`redis-stream-coord (\w+)", row[2]):
        assert command in cli.commands, command
    for command, option in re.findall(r"`redis-stream-coord (\w+) (--[\w-]+)`", row[2]):
        options = [name for parameter in cli.commands[command].params for name in parameter.opts]
        assert option in options, option
    for name, member in re.findall(r"`(Admin|Monitor|Producer|RedisSettings)\.(\w+)`", row[2]):
        owner = getattr(redis_stream_coord, name)
        assert hasattr(owner, member) or member in {field.name for field in getattr(owner, "__attrs_attrs__", ())}
    for metric in re.findall(rf"`{telemetry.PREFIX}(\w+)`", row[2]):
        counters = {getattr(one, "_name", "") for one in vars(telemetry).values()}
        base = telemetry.PREFIX + metric.removesuffix("_total")
        assert metric in telemetry.GAUGES or base in counters, metric


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_tests_of_a_line_are_there(row: list[str]) -> None:
    for path, name in re.findall(r"`([\w/.]+)::([\w*]+)`", row[3]):
        source = (ROOT / path).read_text("utf-8")
        assert name == "*" or re.search(rf"^(?:async )?def {name}\(", source, re.MULTILINE), f"{path}::{name}"
