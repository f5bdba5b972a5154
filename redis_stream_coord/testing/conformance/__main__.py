"""``python -m redis_stream_coord.testing.conformance --redis URL``: run the cases against a server, print a table."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Sequence

from ...settings import RedisSettings
from .bench import Bench, MemoryBench
from .catalogue import Case, cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for.

    Returns:
        0 if every case passed, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m redis_stream_coord.testing.conformance",
        description="Check that a server does what redis_stream_coord needs. It makes keys of its own, named "
        "conformance-..., and deletes them; nothing else is touched.",
    )
    parser.add_argument("--redis", metavar="URL", help="the server; without it the one in memory")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=5.0, help="for one answer")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="cases whose name matches, such as 'reading.*'")
    parser.add_argument("--list", action="store_true", help="only print what the cases promise")
    given = parser.parse_args(arguments)
    chosen = [case for case in cases() if fnmatch.fnmatch(case.name, given.only)]
    if not chosen:
        parser.error(f"no case matches {given.only!r}")
    width = max(len(case.name) for case in chosen)
    if given.list:
        for case in chosen:
            _say(f"{case.name:{width}}  {case.promise}")
        return 0
    failed = 0
    for case in chosen:
        began = time.perf_counter()
        problem = _run(case, given.redis, given.timeout)
        failed += problem is not None
        took = time.perf_counter() - began
        _say(f"{case.name:{width}}  {'ok    ' if problem is None else 'FAILED'} {took:6.2f} s" + (problem or ""))
    _say(f"{len(chosen) - failed} of {len(chosen)} passed")
    return 1 if failed else 0


def _run(case: Case, url: str | None, timeout_seconds: float) -> str | None:
    """Run a case; return what went wrong."""
    bench = MemoryBench() if url is None else Bench(RedisSettings(url, timeout_seconds=timeout_seconds))
    try:
        try:
            case.run(bench)
        finally:
            bench.close()
    except Exception as error:  # noqa: BLE001 - said, and the next case is run
        return f"\n    {case.promise}\n    {type(error).__name__}: {error}"
    return None


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
