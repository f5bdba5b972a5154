"""What a soak sees in Redis, with plain commands and none of the library's own."""

from __future__ import annotations

import re

from examples.demo_support.judge import Entry, order
from examples.demo_support.observe import Observer
from redis_stream_coord import RedisSettings
from tests.chaos.soak_judge import Redis

_NAME = "soak"


class Witness(Observer):
    """An `Observer` that also counts what may leak. Its own connection does not count.

    Parameters:
        url: of Redis.
        stream, group: names.
        shards: number of shards.
    """

    def __init__(self, url: str, stream: str, group: str, shards: int) -> None:
        super().__init__(RedisSettings(f"{url}?client_name={_NAME}"), stream, group, shards)
        self._record = f"{self._prefix}:{{{stream}:{group}}}:metadata"

    def left_by(self, member: str) -> tuple[frozenset[Entry], dict[int, str]]:
        """Return what is delivered to a member that cannot act, and its first entry on shards that are only its own.

        Where the first unacknowledged entry is another's, somebody is taking the shard over already.
        """
        pending = self.pending(member)
        firsts: dict[int, str] = {}
        for shard, entry_id in pending:
            firsts[shard] = min(firsts.get(shard, entry_id), entry_id, key=order)
        for shard in list(firsts):
            (first,) = self._client.xpending_range(self._key(shard), self.group, "-", "+", 1) or ({"consumer": ""},)
            if first["consumer"] != member:
                del firsts[shard]
        return pending, firsts

    def look(self) -> Redis:
        """Return what there is at this moment."""
        record = self._client.hgetall(self._record)
        owners = {}
        for shard in range(self.shards):
            held = re.search(r"\bholder=(\S+)", record.get(f"shard:{shard}", ""))
            owners[shard] = held[1] if held and held[1] != "-" else None
        return Redis(
            connections=sum(1 for one in self._client.client_list() if one["name"] != _NAME),
            consumers={shard: self._consumers(shard) for shard in range(self.shards)},
            owners=owners,
            members=frozenset(name.removeprefix("member:") for name in record if name.startswith("member:")),
        )

    def _consumers(self, shard: int) -> frozenset[str]:
        return frozenset(one["name"] for one in self._client.xinfo_consumers(self._key(shard), self.group))
