"""What the integration tests share: a group on a real server, consumers that note what happens to them, raw peers."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
import pytest
import redis

from redis_stream_coord import (
    Admin,
    Consumer,
    CoordError,
    GroupView,
    Message,
    Monitor,
    Producer,
    RedisSettings,
    Retry,
    Timings,
)
from redis_stream_coord.commands import Command, HeartbeatReply, HeartbeatRequest, Saga, Together, heartbeat
from redis_stream_coord.keys import GroupKeys, StreamKeys
from redis_stream_coord.runner import SyncRunner
from redis_stream_coord.scripts import catalogue
from redis_stream_coord.testing.conformance.bench import Peer as ConformancePeer
from tests.waiting import eventually

T = TypeVar("T")

GROUP = "billing"
# Nobody expires by accident, however busy the machine is.
STEADY = Timings(heartbeat_seconds=0.15, lease_seconds=6.0, rebalance_seconds=10.0)
# Where somebody has to expire.
FAST = Timings(heartbeat_seconds=0.2, lease_seconds=1.2, rebalance_seconds=3.0)
# So slow that nothing which a test waits for can have come by the interval or the lease.
SLOW = Timings(heartbeat_seconds=10.0, lease_seconds=60.0, rebalance_seconds=60.0)
# What a busy machine may add to a bound of the protocol.
SLACK_SECONDS = 1.0
QUICK_RETRY = Retry(backoff_seconds=0.01, max_backoff_seconds=0.05)

two_servers = pytest.mark.parametrize("server", ["redis7", "valkey9"], indirect=True)


class Bench:
    """One group on one server, and what a test needs to look at it and to disturb it.

    Args:
        url: of the server.
        client: a plain client of the same server, with decoded answers.
        stream: name of the logical stream.
    """

    def __init__(self, url: str, client: Any, stream: str) -> None:
        self.url = url
        self.redis = client
        self.stream = stream
        self.keys = GroupKeys(stream, GROUP)
        self.record = StreamKeys(stream).record
        self.runner = SyncRunner(RedisSettings(url))
        self.admin = Admin(url, requested_by="tests")
        self.monitor = Monitor(url)
        self.producer = Producer(stream, redis=url)

    def close(self) -> None:
        for one in (self.runner, self.admin, self.monitor, self.producer, self.redis):
            one.close()

    def create(self, *, shards: int | None = 4, timings: Timings = FAST, **options: Any) -> GroupView:
        return self.admin.create(self.stream, group=GROUP, shards=shards, timings=timings, reason="a test", **options)

    def delete(self, *, force: bool = False) -> None:
        self.admin.delete(self.stream, group=GROUP, reason="a test", force=force)

    def view(self) -> GroupView:
        return self.monitor.describe(self.stream, group=GROUP)

    def stream_key(self, shard: int) -> str:
        return StreamKeys(self.stream).shard(shard).stream

    def key_of(self, shard: int, number: int = 0) -> str:
        """The `number`-th partition key that is routed to a shard."""
        found = (f"key-{i}" for i in range(10_000) if self.producer.route(f"key-{i}").shard == shard)
        return next(key for position, key in enumerate(found) if position == number)

    def fill(self, shard: int, count: int = 1) -> list[str]:
        """Publish so many entries to a shard; return their ids."""
        key = self.key_of(shard)
        return [self.producer.publish({"n": str(n)}, key=key).id for n in range(count)]

    def pending(self, shard: int) -> dict[str, str]:
        """Entry id -> consumer, of everything that is pending on a shard."""
        rows = self.redis.xpending_range(self.stream_key(shard), GROUP, "-", "+", 1000)
        return {row["message_id"]: row["consumer"] for row in rows}

    def consumers(self, shard: int) -> set[str]:
        return {info["name"] for info in self.redis.xinfo_consumers(self.stream_key(shard), GROUP)}

    def fence(self, shard: int) -> dict[str, str]:
        return dict(self.redis.hgetall(self.keys.fence(shard)))

    def events(self, *types: str) -> list[dict[str, str]]:
        """The events of the group, of all types or only of these."""
        entries = [dict(fields) for _, fields in self.redis.xrange(self.keys.events)]
        return [fields for fields in entries if not types or fields["type"] in types]

    def record_of(self) -> dict[str, str]:
        return dict(self.redis.hgetall(self.keys.metadata))

    def state(self) -> tuple[dict[str, str], list[Any]]:
        """Everything that decides about the group: metadata and leases."""
        return self.record_of(), self.redis.zrange(self.keys.leases, 0, -1, withscores=True)

    def lease_ms(self, member: str) -> float | None:
        """What is left of a lease at this moment, by the server's clock."""
        seconds, micros = self.redis.time()
        deadline = self.redis.zscore(self.keys.leases, member)
        return None if deadline is None else deadline - (seconds * 1000 + micros / 1000)

    def heartbeats_pass(self, member: str, count: int = 3) -> None:
        """Wait until a member renewed its lease so many times."""
        for _ in range(count):
            before = self.redis.zscore(self.keys.leases, member)
            eventually(
                lambda before=before: self.redis.zscore(self.keys.leases, member) != before,
                what=f"a heartbeat of {member}",
            )

    def settled(self, members: Sequence[str], *, within_seconds: float = 10.0) -> GroupView:
        """Wait until exactly these are the members and every shard is with its target; return the record."""

        def look() -> GroupView | None:
            view = self.view()
            done = set(view.members) == set(members) and all(
                shard.holder == shard.target is not None and shard.state == "assigned" for shard in view.shards.values()
            )
            return view if done else None

        view = eventually(look, within_seconds=within_seconds, what=f"a settled group of {sorted(members)}")
        assert view.violations() == []
        return view

    def asleep_before(self, name: str, saga: Saga[T]) -> Saga[T]:
        """Let a driver carry a saga on up to a command of this name, and no further.

        Returns:
            The rest of it, from that command on, for `runner.drive` to wake the driver up.
        """
        step = next(saga)
        while not (isinstance(step, Command) and step.name == name):
            assert isinstance(step, Command | Together)
            step = saga.send(
                self.runner.run(step) if isinstance(step, Command) else self.runner.pipeline(step.commands)
            )
        return _rest(saga, step)

    def load_scripts(self) -> None:
        """Make every script known to the server, so that a call is one EVALSHA."""
        for script in catalogue().values():
            self.redis.script_load(script.source)


def _rest(saga: Saga[T], step: Command[Any]) -> Saga[T]:
    following: Any = step
    try:
        while True:
            try:
                result = yield following
            except CoordError as error:
                following = saga.throw(error)
            else:
                following = saga.send(result)
    except StopIteration as over:
        return cast(T, over.value)


def sha(script: str) -> bytes:
    """What only requests that run a script have in them."""
    return catalogue()[script].sha.encode()


@attrs.frozen
class Handled:
    """One call of a handler; times are those of `time.monotonic`, which all processes of a machine share."""

    shard: int
    id: str
    key: bytes | None
    token: tuple[int, int]
    deliveries: int
    began: float


class Recorder:
    """A handler that notes what it is given, and can be held up.

    Args:
        action: called with each message, for what a test wants to happen beside that.
    """

    def __init__(self, action: Callable[[Message], None] | None = None) -> None:
        self.action = action
        self.began: list[Handled] = []
        self.ended: list[tuple[Handled, float]] = []
        self._held: Callable[[Message], bool] = lambda _: False
        self._released = threading.Event()

    def hold(self, which: Callable[[Message], bool] = lambda _: True) -> None:
        """From now on, let calls with such messages wait for `release`."""
        self._released.clear()
        self._held = which

    def release(self) -> None:
        self._held = lambda _: False
        self._released.set()

    def __call__(self, message: Message) -> None:
        one = Handled(message.shard, message.id, message.key, message.token, message.deliveries, time.monotonic())
        self.began.append(one)
        if self._held(message):
            assert self._released.wait(30)
        if self.action is not None:
            self.action(message)
        self.ended.append((one, time.monotonic()))

    def ids(self, shard: int | None = None) -> list[str]:
        """Ids in the order in which they were handed out."""
        return [one.id for one in list(self.began) if shard in (None, one.shard)]

    def done(self, shard: int | None = None) -> list[str]:
        """Ids in the order in which they were finished."""
        return [one.id for one, _ in list(self.ended) if shard in (None, one.shard)]


@attrs.define
class Call:
    """One call of a callback."""

    kind: str
    shards: frozenset[int]
    began: float
    ended: float | None = None


class Watched:
    """A consumer in this process, with a recorder as its handler, and callbacks that note their calls."""

    def __init__(self, bench: Bench, member: str, recorder: Recorder, **options: Any) -> None:
        self.recorder = recorder
        self.calls: list[Call] = []
        self.on_call: Callable[[Call], object] = lambda _: None
        self.failure: CoordError | None = None
        chosen: dict[str, Any] = {
            "redis": bench.url,
            "group": GROUP,
            "member": member,
            "handler": recorder,
            "retry": QUICK_RETRY,
            "shutdown_seconds": 5.0,
            "on_assigned": lambda shards: self._called("assigned", shards),
            "on_revoked": lambda shards: self._called("revoked", shards),
            "on_lost": lambda shards: self._called("lost", shards),
        }
        self.consumer = Consumer(bench.stream, **(chosen | options))

    def _called(self, kind: str, shards: frozenset[int]) -> None:
        call = Call(kind, shards, time.monotonic())
        self.calls.append(call)
        try:
            self.on_call(call)
        finally:
            call.ended = time.monotonic()

    def kinds(self, shard: int) -> list[str]:
        """What was called for a shard, in order."""
        return [call.kind for call in list(self.calls) if shard in call.shards]

    def called(self, kind: str, *, within_seconds: float = 10.0) -> None:
        """Wait until the last call was one of this kind."""
        eventually(
            lambda: self.calls and self.calls[-1].kind == kind,
            within_seconds=within_seconds,
            what=f"on_{kind} of {self.consumer.member}",
        )

    def owns(self, *shards: int) -> None:
        """Wait until it owns exactly these shards."""
        eventually(
            lambda: self.consumer.assignment == frozenset(shards),
            what=f"{self.consumer.member} owns {shards}, not {set(self.consumer.assignment)}",
        )

    def finishes(self, *ids: str, within_seconds: float = 10.0) -> None:
        """Wait until all of these entries have been handled."""
        eventually(
            lambda: set(ids) <= set(self.recorder.done()),
            within_seconds=within_seconds,
            what=f"{self.consumer.member} handled {len(ids)} entries",
        )

    def check_callbacks(self) -> None:
        """Hold the calls against what is promised: none overlaps another, and each shard is assigned, then given up."""
        for one, following in itertools.pairwise(self.calls):
            assert one.ended is not None
            assert one.ended <= following.began, f"{one} and {following} overlap"
        for shard in {shard for call in self.calls for shard in call.shards}:
            kinds = self.kinds(shard)
            assert all((kind == "assigned") is (at % 2 == 0) for at, kind in enumerate(kinds)), (shard, kinds)


class Crew:
    """The consumers of one test, stopped at its end."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.members: list[Watched] = []
        self.children: list[Child] = []

    def prepare(self, member: str, recorder: Recorder | None = None, **options: Any) -> Watched:
        watched = Watched(self.bench, member, recorder or Recorder(), **options)
        self.members.append(watched)
        return watched

    def start(self, member: str, recorder: Recorder | None = None, **options: Any) -> Watched:
        watched = self.prepare(member, recorder, **options)
        watched.consumer.start()
        return watched

    def child(self, member: str, folder: Path, **options: Any) -> Child:
        child = Child(self.bench, member, folder, **options)
        self.children.append(child)
        return child

    def stop(self) -> None:
        for child in self.children:
            child.kill()
        for watched in self.members:
            watched.recorder.release()
            watched.consumer.request_stop()
        for watched in self.members:
            with suppress(CoordError):
                assert watched.consumer.wait(10), f"{watched.consumer.member} did not stop"
        for watched in self.members:
            watched.check_callbacks()


class Child:
    """A consumer in a process of its own; see `tests.integration.child`.

    Args:
        folder: where it writes what happens to it.
        options: see there.
    """

    def __init__(self, bench: Bench, member: str, folder: Path, **options: Any) -> None:
        self.member = member
        self.notes_file = folder / f"{member}-{time.monotonic_ns()}.jsonl"
        self.hold_file = folder / f"{member}.hold"
        given = {
            "url": bench.url,
            "stream": bench.stream,
            "group": GROUP,
            "member": member,
            "notes": str(self.notes_file),
            "hold": str(self.hold_file),
            **options,
        }
        self.notes_file.touch()
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.child", json.dumps(given)], cwd=root, stdin=subprocess.DEVNULL
        )

    def notes(self, *kinds: str) -> list[dict[str, Any]]:
        """What it wrote so far, in order: of all kinds or only of these."""
        lines = self.notes_file.read_text().split("\n")[:-1]
        return [note for note in map(json.loads, lines) if not kinds or note["kind"] in kinds]

    def hold(self) -> None:
        """Let its handlers wait for `release`."""
        self.hold_file.touch()

    def release(self) -> None:
        self.hold_file.unlink(missing_ok=True)

    def notes_eventually(self, kind: str, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """Wait for so many notes of a kind, with these values in them."""

        def look() -> list[dict[str, Any]]:
            assert self.process.poll() is None or kind == "ended", f"{self.member} ended: {self.notes('ended')}"
            found = [note for note in self.notes(kind) if fields.items() <= note.items()]
            return found if len(found) >= count else []

        return eventually(look, within_seconds=20, what=f"{count} x {kind} {fields} of {self.member}")

    def signal(self, number: signal.Signals) -> float:
        """Send a signal; return when."""
        os.kill(self.process.pid, number)
        return time.monotonic()

    def suspend(self) -> float:
        """SIGSTOP; return when nothing of it runs any more."""
        self.signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what=f"{self.member} stopped")
        return time.monotonic()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Peer(ConformancePeer):
    """A member by hand, of a bench of this kit."""

    def __init__(self, bench: Bench, member: str, nonce: str = "n1") -> None:
        super().__init__(bench, member, nonce)

    def send(self, request: HeartbeatRequest) -> HeartbeatReply:
        return self._bench.runner.run(heartbeat(self._bench.keys, request))

    def refusal(self, **said: Any) -> CoordError:
        """Send a heartbeat that has to be refused, and to change nothing of the group; return the refusal."""
        before = self._bench.state()
        with pytest.raises(CoordError) as caught:
            self.beat(**said)
        assert self._bench.state() == before
        return caught.value


@contextmanager
def taking_at_most(seconds: float, what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took <= seconds, f"{what} took {took:.2f} s, more than {seconds:.2f} s"


def flat(fields: Mapping[str, str]) -> list[str]:
    return [part for pair in fields.items() for part in pair]


def connect(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, decode_responses=True, protocol=2)
