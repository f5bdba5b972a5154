"""``python -m redis_stream_coord.testing.conformance --redis URL``: run the cases against a server, print a table."""

from __future__ import annotations

import argparse
import fnmatch
import linecache
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ...commands import Command
from ...errors import CoordError, RedisUnavailableError
from ...runner import SyncRunner
from ...settings import RedisSettings
from .bench import Bench, MemoryBench
from .catalogue import Case, cases

_FAILED, _UNUSABLE, _INTERRUPTED = 1, 2, 128
_HERE = Path(__file__).parent
# Where no case stands.
_MACHINERY = {"__main__.py", "bench.py", "catalogue.py"}
_SHOWN = (str, bytes, int, float, list, tuple, dict, set, frozenset)
_VALUE_CHARACTERS = 160


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for.

    Returns:
        0 if every case passed, 1 if one did not, 2 if none could be run, 128 and more after a signal.
    """
    parser = argparse.ArgumentParser(
        prog="python -m redis_stream_coord.testing.conformance",
        description="Check that a server does what redis_stream_coord needs. All keys that it makes are named "
        "conformance-..., and deleted; nothing else is touched.",
        epilog="Ends with 0 if every case passed, 1 if one did not, 2 if the server cannot be used.",
    )
    parser.add_argument("--redis", metavar="URL", help="the server; without it the one in memory")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=5.0, help="for one answer")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="cases whose name matches, such as 'reading.*'")
    parser.add_argument("--list", action="store_true", help="only print what the cases promise")
    given = parser.parse_args(arguments)
    chosen = [case for case in cases() if fnmatch.fnmatch(case.name, given.only)]
    if not chosen:
        parser.error(f"no case matches {given.only!r}")
    if given.list:
        width = max(len(case.name) for case in chosen)
        for case in chosen:
            _say(f"{case.name:{width}}  {case.promise}")
        return 0
    if not __debug__:
        return _unusable("assertions are switched off (python -O, PYTHONOPTIMIZE): every case would pass")
    settings = None
    try:
        if given.redis is not None:
            settings = RedisSettings(given.redis, timeout_seconds=given.timeout)
            _ask(settings)
    except CoordError as error:
        return _unusable(str(error))
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return _run_all(chosen, settings)
    except _Signalled as signalled:
        _say(f"ended by {signalled.name}; the keys of the case that ran are deleted")
        return _INTERRUPTED + signalled.number
    except KeyboardInterrupt:
        _say("interrupted; the keys of the case that ran are deleted")
        return _INTERRUPTED + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)


class _Signalled(BaseException):
    """Not an error of a case."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = signal.Signals(number).name


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    # Once: what is to be deleted is deleted, however impatient whoever sent it.
    signal.signal(number, signal.SIG_IGN)
    raise _Signalled(number)


def _run_all(chosen: Sequence[Case], settings: RedisSettings | None) -> int:
    width = max(len(case.name) for case in chosen)
    failed = 0
    for case in chosen:
        began = time.perf_counter()
        error = _run(case, settings)
        failed += error is not None
        took = time.perf_counter() - began
        verdict = "ok    " if error is None else "FAILED"
        _say(f"{case.name:{width}}  {verdict} {took:6.2f} s" + ("" if error is None else _explain(case, error)))
        if isinstance(error, RedisUnavailableError) and settings is not None and not _answers(settings):
            _say("the server answers no more: the rest was not run")
            return _FAILED
    _say(f"{len(chosen) - failed} of {len(chosen)} passed")
    return _FAILED if failed else 0


def _run(case: Case, settings: RedisSettings | None) -> Exception | None:
    """Run a case; return what went wrong."""
    bench = MemoryBench() if settings is None else Bench(settings)
    try:
        try:
            case.run(bench)
        finally:
            bench.close()
    except Exception as error:  # noqa: BLE001 - said, and the next case is run
        return error
    return None


def _ask(settings: RedisSettings) -> None:
    """See whether the server can be used at all: else every case would say the same. Raises: `CoordError`."""
    runner = SyncRunner(settings)
    try:
        arguments = ["return redis.call('EXISTS', KEYS[1])", "1", "conformance-"]
        runner.run(Command("EVAL", None, ["conformance-"], arguments, lambda answer: answer), retry=False)
    finally:
        runner.close()


def _answers(settings: RedisSettings) -> bool:
    try:
        _ask(settings)
    except CoordError:
        return False
    return True


def _explain(case: Case, error: Exception) -> str:
    """Return what was promised, where it was not kept, and what was there instead."""
    lines = [case.promise, f"{type(error).__name__}: {error}".rstrip(": ")]
    steps = [
        (frame, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if (file := Path(frame.f_code.co_filename)).parent == _HERE and file.name not in _MACHINERY
    ]
    for frame, number in steps[-2:]:
        path = frame.f_code.co_filename
        lines.append(f"{Path(path).name}:{number}: {linecache.getline(path, number).strip()}")
    if steps and isinstance(error, AssertionError):
        lines += [f"    {name} = {value}" for name, value in _values(steps[-1][0].f_locals)]
    return "".join(f"\n    {line}" for line in lines)


def _values(local: dict[str, Any]) -> list[tuple[str, str]]:
    found = [(name, repr(value)) for name, value in local.items() if isinstance(value, _SHOWN)]
    return [
        (name, text if len(text) <= _VALUE_CHARACTERS else text[:_VALUE_CHARACTERS] + "...") for name, text in found
    ]


def _unusable(why: str) -> int:
    sys.stderr.write(f"{why}\n")
    return _UNUSABLE


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
