"""What a case works with: a group on a server, real or in memory, and members that do only what the case wants."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import attrs

from ...admin import Admin
from ...commands import Command, Fence, HeartbeatReply, HeartbeatRequest, heartbeat
from ...consumer import Consumer
from ...errors import CoordError, RedisUnavailableError
from ...group_view import GroupView
from ...keys import GroupKeys, StreamKeys, index
from ...models import Held, Message, Timings
from ...monitor import Monitor
from ...producer import Producer
from ...runner import SyncRunner
from ...settings import RedisSettings
from ..environment import Environment

T = TypeVar("T")

GROUP = "billing"
_WITHIN_SECONDS = 20.0


class Bench:
    """A real server.

    Parameters:
        settings: how to reach it.
        stream: see below; a new name, if none is given.

    Attributes:
        settings: to give to consumers and so on. All keys of the library begin with the name of the stream, too: what
            is on the server, and who watches it, has nothing to do with the cases.
        stream: name of a logical stream that nobody else uses.
        others: keys that are neither the library's nor the stream's.
        groups: names of all groups that the case may have left something of.
        published: how many entries `fill` has published.
        timings: so short that a case may wait for a lease, and no shorter than a busy machine can keep.
    """

    timings = Timings(heartbeat_seconds=0.2, lease_seconds=0.8, rebalance_seconds=0.8)

    def __init__(self, settings: RedisSettings, *, stream: str | None = None) -> None:
        self.stream = stream or _new_name()
        self._settings = attrs.evolve(settings, key_prefix=self.stream)
        self.keys = GroupKeys(self.stream, GROUP, self.stream)
        self.runner = SyncRunner(self.settings)
        self.admin = Admin(self.settings, requested_by="conformance")
        self.monitor = Monitor(self.settings)
        self.producer = Producer(self.stream, redis=self.settings)
        self.published = 0
        self._consumers: list[Consumer] = []
        self.groups: set[str] = set()
        self.others: set[str] = set()

    @property
    def settings(self) -> RedisSettings:
        return self._settings

    def pass_time(self, seconds: float) -> None:
        """Let so many seconds pass."""
        time.sleep(seconds)

    def until(self, condition: Callable[[], T], what: str) -> T:
        """Wait for something to be true, and return it. Raises: AssertionError."""
        for _ in self._moments():
            if found := condition():
                return found
        raise AssertionError(f"in vain waited for {what}")

    def _moments(self) -> Iterator[None]:
        until = time.monotonic() + _WITHIN_SECONDS
        while time.monotonic() < until:
            yield
            time.sleep(0.005)

    # --- the group ----------------------------------------------------------------------------------------------------

    def create(self, *, shards: int | None = 4, group: str = GROUP, **options: Any) -> GroupView:
        """Create the group."""
        options = {"timings": self.timings, "reason": "a case", **options}
        self.groups.add(group)
        return self.admin.create(self.stream, group=group, shards=shards, **options)

    def view(self) -> GroupView:
        """Return the record of the group."""
        return self.monitor.describe(self.stream, group=GROUP)

    def run(self, command: Command[T]) -> T:
        """Send a command of the library."""
        return self.runner.run(command)

    def raw(self, name: str, key: str, *arguments: Any) -> Any:
        """Send a plain command on a key. Within a script, so that the answer is raw, whatever client and topology."""
        sent = ["return redis.call(unpack(ARGV))", "1", key, *name.split(), key, *map(str, arguments)]
        return self.runner.run(Command("EVAL", None, [key], sent, lambda answer: answer))

    def record(self) -> dict[str, str]:
        """Return the fields of the metadata."""
        return fields(self.raw("HGETALL", self.keys.metadata))

    def shard(self, index: int) -> str:
        """Return the key of a shard's stream."""
        return StreamKeys(self.stream).shard(index).stream

    @property
    def dead(self) -> str:
        """The key of a stream for dead letters."""
        return f"{self.stream}:dead"

    def key_of(self, shard: int) -> str:
        """Return a partition key that goes to a shard."""
        return next(key for key in map(str, range(10_000)) if self.producer.route(key).shard == shard)

    def fill(self, shard: int = 0, count: int = 1) -> list[str]:
        """Publish so many entries to a shard; return their ids."""
        key = self.key_of(shard)
        self.published += count
        return [self.producer.publish({"n": str(n)}, key=key).id for n in range(count)]

    def pending(self, shard: int = 0, group: str = GROUP) -> dict[str, tuple[str, int]]:
        """Return what is pending: id -> consumer, deliveries."""
        rows = self.raw("XPENDING", self.shard(shard), group, "-", "+", 1000)
        return {row[0].decode(): (row[1].decode(), int(row[3])) for row in rows}

    # --- members ------------------------------------------------------------------------------------------------------

    def peer(self, member: str, nonce: str = "n1") -> Peer:
        """Return a member that does only what it is told."""
        return Peer(self, member, nonce)

    def start(self, member: str, handler: Callable[[Message], None], **options: Any) -> Consumer:
        """Start a real consumer."""
        consumer = Consumer(self.stream, group=GROUP, redis=self.settings, member=member, handler=handler, **options)
        consumer.start()
        self._consumers.append(consumer)
        return consumer

    def settled(self, *members: str) -> GroupView:
        """Wait until exactly these are the members, and every shard is with its target."""

        def look() -> bool:
            view = self.view()
            holders = all(s.holder == s.target is not None and s.state == "assigned" for s in view.shards.values())
            return set(view.members) == set(members) and holders

        self.until(look, f"a settled group of {members}")
        return self.view()

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop everything, and delete every key of the case."""
        for consumer in self._consumers:
            consumer.request_stop()
        for consumer in self._consumers:
            with contextlib.suppress(CoordError):
                consumer.wait(10)
        with contextlib.suppress(RedisUnavailableError):
            self._delete_keys()
        for one in (self.runner, self.admin, self.monitor, self.producer):
            one.close()

    def _delete_keys(self) -> None:
        stream = StreamKeys(self.stream, self._settings.key_prefix)
        keys = [*_keys_of(stream), self.dead, index(self._settings.key_prefix), *self.others]
        for group in self.groups:
            names = GroupKeys(self.stream, group, self._settings.key_prefix)
            keys += [*_keys_of(names), *map(names.fence, range(16))]
        for number in range(16):
            shard = stream.shard(number)
            keys += [shard.stream, shard.route, shard.published]
        for key in keys:
            self.raw("DEL", key)


class MemoryBench(Bench):
    """The server in memory, with the default timings: virtual time costs nothing."""

    timings = Timings()

    def __init__(self, *, seed: int = 0) -> None:
        name = _new_name()
        self.env = Environment(seed=seed, key_prefix=name)
        super().__init__(self.env.redis, stream=name)

    @property
    def settings(self) -> RedisSettings:
        return self.env.redis

    def pass_time(self, seconds: float) -> None:
        self.env.advance(seconds)

    def _moments(self) -> Iterator[None]:
        until = self.env.now + 10 * _WITHIN_SECONDS
        while self.env.now < until:
            yield
            self.env.advance(0.01)

    def close(self) -> None:
        self.env.close()


class Peer:
    """A member by hand: each heartbeat is one call, and says what the case wants it to say."""

    def __init__(self, bench: Bench, member: str, nonce: str) -> None:
        self._bench = bench
        self.member = member
        self.nonce = nonce
        self.epoch = self.incarnation = self.version = self.assignment_epoch = 0
        self.assigned: dict[int, int] = {}
        self.revoking: dict[int, int] = {}
        self.pending: frozenset[int] = frozenset()

    def request(self, **said: Any) -> HeartbeatRequest:
        """Return what it would say now."""
        owned = [Held(shard, token) for shard, token in {**self.assigned, **self.revoking}.items()]
        usual: dict[str, Any] = {
            "member": self.member,
            "nonce": self.nonce,
            "epoch": self.epoch,
            "incarnation": self.incarnation,
            "version": self.version,
            "assignment_epoch": self.assignment_epoch,
            "weight": 1.0,
            "replaces": None,
            "leaving": False,
            "owned": owned,
            "revoked": [],
            "refused": [],
        }
        return HeartbeatRequest(**(usual | said))

    def send(self, request: HeartbeatRequest) -> HeartbeatReply:
        """Send a heartbeat, and forget the answer, as if it had been lost. Returns it all the same."""
        return self._bench.run(heartbeat(self._bench.keys, request))

    def beat(self, **said: Any) -> HeartbeatReply:
        """Send a heartbeat and take over what it brings. Raises: `CoordError`: it was refused."""
        reply = self.send(self.request(**said))
        self.epoch, self.incarnation, self.version = reply.epoch, reply.incarnation, reply.version
        self.assignment_epoch = reply.assignment_epoch
        if reply.holdings is not None:
            self.assigned, self.revoking = dict(reply.holdings.assigned), dict(reply.holdings.revoking)
            self.pending = reply.holdings.pending
        return reply

    def refused(self, **said: Any) -> CoordError:
        """Send a heartbeat that has to be refused, and to change nothing of the group; return the refusal."""
        before = self._bench.record()
        error = refusal(lambda: self.beat(**said))
        assert self._bench.record() == before
        return error

    def held(self, shard: int) -> Held:
        """Return a shard that it holds, with its token."""
        return Held(shard, {**self.assigned, **self.revoking}[shard])

    def drain(self) -> HeartbeatReply:
        """Report everything that it has to give up as drained."""
        return self.beat(revoked=[self.held(shard) for shard in self.revoking])

    def fence(self, shard: int) -> Fence:
        """Return its own fence of a shard that it holds."""
        return Fence(shard, self.member, self.nonce, self.incarnation, self.held(shard).token)


def refusal(call: Callable[[], object], kind: type[CoordError] = CoordError) -> CoordError:
    """Return the error that a call has to raise."""
    try:
        result = call()
    except kind as error:
        return error
    raise AssertionError(f"not refused, but answered with {result}")


def _new_name() -> str:
    return f"conformance-{uuid.uuid4().hex[:12]}"


def _keys_of(names: GroupKeys | StreamKeys) -> list[str]:
    """Return every key that has a name of its own there."""
    return [getattr(names, name) for name, kind in vars(type(names)).items() if isinstance(kind, property)]


def fields(flat: list[Any]) -> dict[str, str]:
    """Return what a flat answer says as text: name, value, name, value, ..."""
    texts = [part.decode() if isinstance(part, bytes) else str(part) for part in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))
