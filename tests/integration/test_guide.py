"""Every program of the guide runs as it stands, prints what stands below it, and leaves its group in good order."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import redis

from tests.integration.test_examples import ROOT, environment
from tests.servers import Server

GUIDE = ROOT / "docs" / "guide"
SHARDS = 4
_SECONDS = 60.0
_BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


class Program(NamedTuple):
    """A block of a page. `prints`: the lines that stand below it; ``...`` in one stands for anything."""

    page: str
    name: str
    code: str
    prints: tuple[str, ...]

    @property
    def is_endless(self) -> bool:
        """Whether it goes on until it is told to stop: nothing comes after the call that runs its consumer."""
        return self.code.rstrip().splitlines()[-1] in ("consumer.run()", "asyncio.run(main())")


def _programs() -> Iterator[Program]:
    for page in sorted(GUIDE.glob("*.md")):
        for code, prints in _BLOCK.findall(page.read_text("utf-8")):
            name = re.match(r"# (\w+)\.py\n", code)
            yield Program(page.stem, name[1] if name else "", code, tuple(prints.splitlines()))


PROGRAMS = list(_programs())
BY_NAME = {program.name: program for program in PROGRAMS}
FILL = BY_NAME["fill"]
# What is done by commands only.
WITHOUT_PROGRAMS = {"upgrading"}


def _missing(expected: tuple[str, ...], lines: list[str]) -> list[str]:
    """Return the expected lines that are not there, in whatever order."""
    left = list(lines)
    missing = []
    for line in expected:
        pattern = ".*".join(map(re.escape, line.split("...")))
        found = next((one for one in left if re.fullmatch(pattern, one)), None)
        if found is None:
            missing.append(line)
        else:
            left.remove(found)
    return missing


def _finished(client: redis.Redis) -> bool:
    """Whether the group has nothing left to do."""
    for shard in range(SHARDS):
        if not client.exists(f"orders:{shard}"):
            return False
        for group in client.xinfo_groups(f"orders:{shard}"):
            if group["pending"] or client.xrange(f"orders:{shard}", f"({group['last-delivered-id']}", "+", count=1):
                return False
    return True


def test_each_program_has_a_name_and_a_page_has_one_at_least() -> None:
    names = [program.name for program in PROGRAMS]
    assert all(names)
    assert len(set(names)) == len(names)
    assert {program.page for program in PROGRAMS} == {page.stem for page in GUIDE.glob("*.md")} - WITHOUT_PROGRAMS


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program_of_the_guide(
    program: Program, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program is not FILL:
        monkeypatch.setenv("REDIS_STREAM_COORD_URL", server.url)
        exec(compile(FILL.code, "fill.py", "exec"), {"__name__": "__main__"})
    monkeypatch.chdir(tmp_path)
    if program.name == "restore":
        # After a backup the group's record is lost.
        exec(compile(BY_NAME["backup"].code, "backup.py", "exec"), {"__name__": "__main__"})
        with server.client() as client:
            client.delete("redis-stream:coord:{orders:billing}:metadata")
    source, output, errors = (tmp_path / name for name in (f"{program.name}.py", "out", "errors"))
    source.write_text(program.code, "utf-8")

    def lines() -> list[str]:
        return output.read_text("utf-8").splitlines()

    def failure() -> str:
        return f"{program.page}.md, {program.name}.py: printed\n{output.read_text()}\n{errors.read_text()}"

    with server.client(protocol=2) as client, output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", source], env=environment(server.url), stdout=out, stderr=err, text=True
        )
        try:
            deadline = time.monotonic() + _SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                if program.is_endless and not _missing(program.prints, lines()) and _finished(client):
                    process.send_signal(signal.SIGTERM)
                    process.wait(_SECONDS)
                time.sleep(0.02)
            assert process.poll() == 0, failure()
        finally:
            process.kill()
            process.wait()
        assert errors.read_text() == ""
        assert not _missing(program.prints, lines()), failure()
        assert len(lines()) == len(program.prints) or not program.prints, failure()
        record = client.hgetall("redis-stream:coord:{orders:billing}:metadata")
        assert [name for name in record if name.startswith("member:")] == []
        if program.is_endless:
            assert _finished(client), failure()


@pytest.mark.parametrize("lines", [["a"], ["a", "c"], ["b", "a", "b"]])
def test_missing_lines_are_noticed(lines: list[str]) -> None:
    assert _missing(("a", "b 1 of ..."), lines) == ["b 1 of ..."]
    assert _missing(("a", "b 1 of ..."), [*lines, "b 1 of 20"]) == []
    assert _missing(("a", "a"), ["a"]) == ["a"]
