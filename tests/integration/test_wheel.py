"""The wheel is whole: installed into an empty environment, away from the checkout, it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.servers import Server

ROOT = Path(__file__).parents[2]
_SECONDS = 300.0


def _run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    package = ROOT / "redis_stream_coord"
    expected = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith(".lua") for name in expected)
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_first_program_runs_from_the_wheel_in_an_empty_environment(server: Server, wheel: Path, tmp_path: Path) -> None:
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    _run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=elsewhere)
    program = elsewhere / "first_program.py"
    program.write_text((ROOT / "examples" / "first_program.py").read_text("utf-8"), "utf-8")
    where = _run(python, "-c", "import redis_stream_coord; print(redis_stream_coord.__file__)", cwd=elsewhere)
    assert Path(where.strip()).is_relative_to(environment)
    printed = _run(python, "-W", "error", program, cwd=elsewhere, REDIS_STREAM_COORD_URL=server.url)
    assert printed.splitlines()[-1] == "handled 20 entries"
