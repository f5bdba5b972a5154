"""A resharding step by step, in the hands of a test: the routes by the real scripts, the record by a plain write."""

from __future__ import annotations

from redis_stream_coord.commands.resharding import SagaRecord, close, open_route
from redis_stream_coord.keys import StreamKeys
from tests.integration.kit import GROUP, Bench


class ByHand:
    """One resharding.

    Args:
        bench: of the stream.
        shards: how many it will have.
    """

    def __init__(self, bench: Bench, shards: int) -> None:
        self.bench = bench
        self.keys = StreamKeys(bench.stream)
        record = bench.redis.hgetall(bench.record)
        self.source, self.target, self.epoch = int(record["shards"]), shards, int(record["epoch"]) + 1
        self.layout = f"{self.epoch}:{shards}:byhand{self.epoch}"
        self._saga = SagaRecord(
            id="byhand",
            state="CUTOVER",
            epoch=self.epoch,
            source=self.source,
            target=shards,
            ordered=False,
            quiesce=False,
            back=False,
            opened=False,
            void=0,
            began_ms=0,
            changed_ms=0,
        )

    def run(self) -> None:
        """All of it."""
        self.close()
        self.decide()
        self.open()

    def close(self) -> None:
        """Close the shards of both layouts; make those that are not there."""
        for shard in self._saga.union:
            names = self.keys.shard(shard)
            if not self.bench.redis.exists(names.stream):
                self.bench.redis.xgroup_create(names.stream, GROUP, "0", mkstream=True)
            if not self.bench.redis.exists(names.route):
                self.bench.redis.hset(names.route, mapping={"epoch": "0", "state": "closed"})
            self.bench.runner.run(close(self.keys, shard, self._saga))

    def decide(self) -> None:
        """Make the new layout the stream's."""
        record = self.bench.redis.hgetall(self.bench.record)
        seconds, micros = self.bench.redis.time()
        ended = f"{record['layout']}@{seconds * 1000 + micros // 1000}"
        self.bench.redis.hset(
            self.bench.record,
            mapping={
                "epoch": str(self.epoch),
                "drawn": str(self.epoch),
                "shards": str(self.target),
                "top": str(max(int(record["top"]), self.target)),
                "layout": self.layout,
                "earlier": ended if record["earlier"] == "-" else f"{record['earlier']},{ended}",
                "version": str(int(record["version"]) + 1),
            },
        )

    def open(self) -> None:
        """Open the shards of the new layout."""
        for shard in range(self.target):
            self.bench.runner.run(open_route(self.keys, shard, epoch=self.epoch, layout=self.layout))
