"""Looking at Redis from outside, with plain commands and none of the library's own."""

from __future__ import annotations

import time
from typing import Any

import redis
from redis.cluster import ClusterNode, RedisCluster

from redis_stream_coord import RedisSettings

from .judge import Entry, order
from .records import Published

_PAGE = 1000
# After a process died Redis may have yet to read what it sent before. Far shorter than any lease.
_SETTLE_SECONDS = 0.1


class Observer:
    """Reads the shards of one stream.

    Parameters:
        settings: how to reach Redis; not through Sentinel.
        stream, group: names.
        shards: number of shards.
    """

    def __init__(self, settings: RedisSettings, stream: str, group: str, shards: int) -> None:
        self.stream = stream
        self.group = group
        self.shards = shards
        self._prefix = settings.key_prefix
        # Any: redis-py's annotations mix the answers of both its faces.
        self._client: Any = _connect(settings)

    def close(self) -> None:
        self._client.close()

    def _key(self, shard: int) -> str:
        return f"{self.stream}:{shard}"

    def pending(self, member: str) -> frozenset[Entry]:
        """Return what is delivered to a member that is dead, and not acknowledged."""
        time.sleep(_SETTLE_SECONDS)
        found: set[Entry] = set()
        for shard in range(self.shards):
            after = "-"
            while True:
                page = self._client.xpending_range(self._key(shard), self.group, after, "+", _PAGE, consumername=member)
                found.update((shard, row["message_id"]) for row in page)
                if len(page) < _PAGE:
                    break
                after = f"({page[-1]['message_id']}"
        return frozenset(found)

    def left_over(self) -> dict[int, str]:
        """Return shard -> what the group has yet to acknowledge or to be given; shards without are left out."""
        found = {}
        for shard in range(self.shards):
            key = self._key(shard)
            group = next((g for g in self._client.xinfo_groups(key) if g["name"] == self.group), None)
            if group is None:
                found[shard] = "no consumer group"
            elif group["pending"]:
                found[shard] = f"{group['pending']} unacknowledged entries"
            elif self._client.xrange(key, f"({group['last-delivered-id']}", "+", count=1):
                found[shard] = "entries not delivered yet"
        return found

    def published(self) -> list[Published]:
        """Return every entry of every shard. The producer put the number within the key into ``sequence``."""
        entries = []
        for shard in range(self.shards):
            after = "-"
            while page := self._client.xrange(self._key(shard), after, "+", count=_PAGE):
                entries += [Published(shard, at, fields["rsc-key"], int(fields["sequence"])) for at, fields in page]
                after = f"({page[-1][0]}"
        return sorted(entries, key=lambda entry: (entry.shard, order(entry.id)))

    def erase(self) -> None:
        """Delete the streams, and every key that the library made for them."""
        ours, group = f"{self._prefix}:{{{self.stream}", self.group
        keys = [f"{ours}}}:stream"]
        keys += [f"{ours}:{group}}}:{what}" for what in ("metadata", "leases", "events", "audit", "deleted")]
        for shard in range(self.shards):
            keys.append(self._key(shard))
            keys += [f"{ours}:{shard}}}:{what}" for what in ("route", "published", f"fence:{group}")]
        for key in keys:  # one by one: in a Cluster they are on several nodes
            self._client.delete(key)


def check(settings: RedisSettings) -> None:
    """See whether Redis answers. Raises: `ConnectionError`; `ValueError`: a URL that the demo cannot use."""
    client = _connect(settings)
    try:
        client.ping()
    except redis.RedisError as error:
        raise ConnectionError(f"Redis does not answer: {error}") from error
    finally:
        client.close()


def _connect(settings: RedisSettings) -> Any:
    address = settings.address
    if address.topology == "sentinel":
        raise ValueError("a Sentinel URL does not work here: give the address of the primary")
    if address.topology == "cluster":
        username, password = settings.credentials()
        make: Any = ClusterNode
        nodes = [make(host, port) for host, port in address.nodes]
        return RedisCluster(
            startup_nodes=nodes,
            username=username,
            password=password,
            ssl=address.tls,
            protocol=2,
            decode_responses=True,
        )
    return redis.Redis.from_url(settings.url, protocol=2, decode_responses=True)
