"""What the benchmarks share: a group on a server, percentiles, tables, and what Redis counted."""

from __future__ import annotations

import contextlib
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import attrs
import redis

from redis_stream_coord import Admin, Timings
from redis_stream_coord.keys import GroupKeys, StreamKeys
from redis_stream_coord.runner import SyncRunner
from redis_stream_coord.settings import RedisSettings
from tests.servers import Server

GROUP = "bench"


@attrs.frozen
class Bench:
    """Where a benchmark runs.

    Attributes:
        server: a running server.
        rounds: how often each thing is measured.
    """

    server: Server
    rounds: int

    @property
    def url(self) -> str:
        return self.server.url

    @contextlib.contextmanager
    def group(self, shards: int, timings: Timings | None = None) -> Iterator[GroupKeys]:
        """Create a group on a stream of its own; everything is flushed at the end."""
        stream = f"bench-{uuid.uuid4().hex[:8]}"
        with Admin(self.url, requested_by="benchmark") as admin:
            admin.create(stream, group=GROUP, shards=shards, timings=timings or Timings(), reason="benchmark")
        try:
            yield GroupKeys(stream, GROUP)
        finally:
            self.server.flush()

    @contextlib.contextmanager
    def client(self) -> Iterator[redis.Redis]:
        """A plain redis-py client that decodes nothing, as the library's own."""
        client = self.server.client(decode_responses=False, protocol=2)
        try:
            yield client
        finally:
            client.close()

    @contextlib.contextmanager
    def runner(self) -> Iterator[SyncRunner]:
        """A runner of the library."""
        runner = SyncRunner(RedisSettings(self.url))
        try:
            yield runner
        finally:
            runner.close()


def streams(keys: GroupKeys, shards: int) -> list[str]:
    """Redis keys of the shards."""
    names = StreamKeys(keys.stream, keys.prefix)
    return [names.shard(shard).stream for shard in range(shards)]


@attrs.frozen
class Cost:
    """What Redis counted for one command.

    Attributes:
        calls: how many.
        usec: microseconds spent in all of them, nested commands included.
    """

    calls: int
    usec: int

    @property
    def per_call(self) -> float:
        return self.usec / self.calls if self.calls else 0.0


def costs(client: redis.Redis) -> dict[str, Cost]:
    """What each command cost Redis since CONFIG RESETSTAT."""
    stats = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): Cost(int(stat["calls"]), int(stat["usec"])) for name, stat in stats.items()}


def cost(client: redis.Redis, command: str, work: Callable[[], object]) -> Cost:
    """Run `work` and return what `command` cost Redis meanwhile. Nothing else may use the server."""
    client.config_resetstat()
    work()
    return costs(client).get(command, Cost(0, 0))


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent of `values` do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100).__trunc__() - 1)]


median = statistics.median


class Table:
    """A small table on standard output; the first column is left-aligned, numbers are right-aligned."""

    def __init__(self, title: str, *columns: str) -> None:
        self._title = title
        self._rows: list[tuple[str, ...]] = [columns]

    def row(self, *cells: object) -> None:
        """Add a row. Floats are shown with three significant digits."""
        self._rows.append(tuple(_cell(cell) for cell in cells))

    def show(self, *notes: str) -> None:
        """Print the table, and notes below."""
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        print(f"\n{self._title}")
        for number, row in enumerate(self._rows):
            cells = [row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
            print("  " + "  ".join(cells))
            if number == 0:
                print("  " + "  ".join("-" * width for width in widths))
        for note in notes:
            print(f"  {note}")


def _cell(cell: object) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"
