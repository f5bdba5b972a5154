"""The consumer processes of a chaos run."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from examples.demo_support.judge import Kill
from examples.demo_support.observe import Observer
from examples.demo_support.processes import Child
from examples.demo_support.records import Handled, Tail, handled

LEAVE_SECONDS = 20.0
_FACES = ("plain", "async")


class Fleet:
    """Starts and ends processes, and reads what their handlers wrote down. Half use `Consumer`, half `AsyncConsumer`.

    Parameters:
        url: of Redis.
        stream, group: names.
        directory: for records and logs.
    """

    def __init__(self, url: str, stream: str, group: str, directory: Path) -> None:
        self._url, self._stream, self._group, self._directory = url, stream, group, directory
        self._numbers = itertools.count(1)
        self.alive: dict[str, Child] = {}
        self.dead: dict[str, Child] = {}
        self._tails: list[Tail[Handled]] = []
        self.handled: list[Handled] = []
        self._seen: set[tuple[int, str]] = set()
        self._busy: set[str] = set()

    def start(self, face: str | None = None, options: Sequence[str] = ()) -> str:
        """Start one more; return its name.

        Parameters:
            face: ``plain`` or ``async``; by default the two in turn.
            options: of `tests.chaos.consumer`. ``{}`` in them becomes the process's name.
        """
        number = next(self._numbers)
        name = f"consumer-{number}"
        records = self._directory / f"{name}.records"
        arguments = [face or _FACES[number % 2], self._stream, self._group, name, str(records)]
        arguments += [option.replace("{}", name) for option in options]
        self.alive[name] = Child("tests.chaos.consumer", arguments, log=self._directory / f"{name}.log", url=self._url)
        self._tails.append(Tail(records, handled))
        return name

    def kill(self, name: str, observer: Observer) -> Kill:
        """Kill one, whose name is its member id; return what it left."""
        at_ns = self.sigkill(name)
        return Kill(name, at_ns, observer.pending(name))

    def sigkill(self, name: str) -> int:
        """Kill one; return when it was dead, `time.monotonic_ns`."""
        child = self.dead[name] = self.alive.pop(name)
        child.kill()
        return time.monotonic_ns()

    def read(self) -> None:
        """Take in what the handlers wrote down since the last call."""
        for tail in self._tails:
            new = tail.new()
            self.handled += new
            self._seen.update((run.shard, run.id) for run in new)
            self._busy.update(run.member for run in new)

    @property
    def done_count(self) -> int:
        """How many different events were handled."""
        return len(self._seen)

    def has_handled(self, name: str) -> bool:
        """Whether a process has handled anything yet."""
        return name in self._busy

    def fallen(self) -> list[str]:
        """Return, in words, which processes ended without having been told to."""
        ended = {name: child.status for name, child in self.alive.items()}
        return [f"{name} ended with status {status}" for name, status in ended.items() if status is not None]

    def leave(self) -> list[str]:
        """Let all leave; return, in words, which did not leave in good order."""
        for child in self.alive.values():
            child.terminate()
        for child in [*self.alive.values(), *self.dead.values()]:
            child.end(LEAVE_SECONDS)
        self.read()
        return [
            f"{name} left with status {child.status}"
            for name, child in self.alive.items()
            # A replacement started a moment ago may not have been ready for SIGTERM yet.
            if child.status != 0 and not (child.status == -signal.SIGTERM and not self.has_handled(name))
        ]

    def logs(self) -> str:
        """Return the end of what each process said."""
        children = {**self.dead, **self.alive}
        return "\n".join(f"--- {name}\n{said}" for name, child in children.items() if (said := child.said()))
