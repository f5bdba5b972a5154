"""Running the command line in this process, and looking at what it answers."""

from __future__ import annotations

import json
from typing import Any

import attrs
from click.testing import CliRunner

from redis_stream_coord.cli.app import cli

WHO = ("--requested-by", "tests", "--reason", "a test")


@attrs.frozen
class Answer:
    """What one run of the program printed, and its exit code."""

    exit: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document that it printed."""
        (line,) = self.out.splitlines()
        found: dict[str, Any] = json.loads(line)
        return found

    @property
    def data(self) -> Any:
        """What a command that did its work has in its document."""
        assert self.document["ok"], self.document
        return self.document["data"]


class CommandLine:
    """The program against one server.

    Args:
        url: of the server; goes into the environment.
    """

    def __init__(self, url: str) -> None:
        self.environment = {"REDIS_STREAM_COORD_URL": url, "COLUMNS": "200", "NO_COLOR": "1"}

    def __call__(self, *words: str, **environment: str) -> Answer:
        result = CliRunner().invoke(
            cli, list(words), env=self.environment | environment, prog_name="redis-stream-coord"
        )
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    def json(self, *words: str) -> Any:
        """Run it with ``--json``; it has to do its work, with exit code 0."""
        answer = self(*words, "--json")
        assert answer.exit == 0, answer
        return answer.data

    def ok(self, *words: str) -> str:
        """Run it for a person; it has to end with exit code 0. Returns what it printed."""
        answer = self(*words)
        assert answer.exit == 0, answer
        return answer.out
