"""What a process of a chaos run says of itself while it lives: memory, threads, open files.

Measured from within, because only the process knows the names of its threads; written down as handlers' records are.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from examples.demo_support.records import Recorder

EVERY_SECONDS = 0.5
_PROC = Path("/proc/self")
AVAILABLE = (_PROC / "statm").exists()
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


class Sample(NamedTuple):
    """A look at one process.

    Attributes:
        name: of the process.
        at_ns: when, `time.monotonic_ns`.
        rss_kib: resident memory.
        files: open file descriptors, sockets among them.
        threads: names of the threads that were not there before the consumer.
        stopped: the consumer has ended, and the process has not.
    """

    name: str
    at_ns: int
    rss_kib: int
    files: int
    threads: tuple[str, ...]
    stopped: bool


def sample(line: dict[str, Any]) -> Sample:
    """Make a sample of a line of a file."""
    return Sample(**{**line, "threads": tuple(line["threads"])})


class Sampler:
    """Samples this process twice a second. Make it before the consumer: what is there by then is not the consumer's.

    Parameters:
        name: of the process.
        path: file to append to.
    """

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self._recorder = Recorder(path)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._before = {self._thread, *threading.enumerate()}
        self._thread.start()

    def _threads(self) -> tuple[str, ...]:
        return tuple(sorted(thread.name for thread in threading.enumerate() if thread not in self._before))

    def _take(self, *, stopped: bool = False) -> None:
        rss_kib = int((_PROC / "statm").read_text().split()[1]) * _PAGE_KIB
        files = len(os.listdir(_PROC / "fd"))
        self._recorder.add(
            Sample(self._name, time.monotonic_ns(), rss_kib, files, self._threads(), stopped)  # type: ignore[arg-type]
        )

    def _run(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            self._take()

    def stopped(self, *, within_seconds: float) -> None:
        """The consumer has ended. Its threads get so long to end too; what is there by then is written down."""
        self._over.set()
        self._thread.join()
        deadline = time.monotonic() + within_seconds
        while self._threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._take(stopped=True)


def steady(samples: Collection[Sample], warm_up_ns: int) -> list[Sample]:
    """Return the samples, in time, from so long after the first on, without the last word of a consumer that ended."""
    running = sorted((one for one in samples if not one.stopped), key=lambda one: one.at_ns)
    return [one for one in running if one.at_ns >= running[0].at_ns + warm_up_ns]
