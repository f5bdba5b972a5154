"""Chaos: a stream is resharded again and again under load, its drivers are killed at every step, a judge looks.

What was published is read from the streams themselves. From the command line: python -m tests.chaos.resharding --help
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import redis

from redis_stream_coord import (
    Admin,
    ConflictError,
    Consumer,
    CoordError,
    Message,
    Monitor,
    NoShardError,
    Producer,
    PublishError,
    RedisSettings,
    RedisUnavailableError,
    Resharding,
    RoutingUnavailableError,
    Timings,
)
from redis_stream_coord.commands import Command
from redis_stream_coord.duties import Duties
from redis_stream_coord.keys import StreamKeys
from redis_stream_coord.runner import SyncRunner
from tests import servers
from tests.proxy import LossyProxy

TIMINGS = Timings(heartbeat_seconds=0.3, lease_seconds=6, rebalance_seconds=10)
GROUPS = ("billing", "audit")
_CLUSTER_SERVER = "redis7"
PATH = (12, 3, 0, 5, 4)
_STUCK_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """What to do.

    Attributes:
        seed: of all that is random.
        rounds: so many times 4 -> 12 -> 3 -> 0 -> 5 -> 4.
        first_point: the first driver of all dies after so many commands, each later one after one more.
        producers: threads, each with its own keys, and a reply lost now and then.
        consumers: threads of a process, half of them in each group.
        keys: of each producer.
        lost_seconds: between two lost replies, on average; 0: none is lost.
        rollbacks: some of the reshardings are taken back.
    """

    seed: int
    rounds: int = 1
    first_point: int = 1
    producers: int = 8
    consumers: int = 6
    keys: int = 20
    lost_seconds: float = 0.05
    rollbacks: bool = True


@dataclass
class Report:
    """What was found: sentences in `findings` if anything is wrong."""

    findings: list[str] = field(default_factory=list)
    summary: str = ""

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        return "\n".join([self.summary, *self.findings[:20], "FAILED" if self.findings else "ok"])


class Writer(threading.Thread):
    """Publishes numbered events of its own keys, each until it is known to be there, whatever happens."""

    def __init__(self, number: int, url: str, stream: str, keys: int) -> None:
        super().__init__(daemon=True)
        self.number = number
        self.keys = keys
        self.done: list[str] = []
        self.again = 0
        self.longest = 0.0
        self.failure: BaseException | None = None
        self._stop_asked = threading.Event()
        self._producer = Producer(stream, redis=RedisSettings(url, timeout_seconds=2.0))

    def run(self) -> None:
        try:
            for n in itertools.count():
                if self._stop_asked.is_set():
                    return
                self._publish(n)
                time.sleep(0.004)
        except BaseException as error:
            self.failure = error

    def _publish(self, n: int) -> None:
        event_id, key = f"{self.number}-{n}", f"{self.number}-{n % self.keys}"
        began = time.monotonic()
        while True:
            try:
                self._producer.publish({"n": str(n)}, key=key, event_id=event_id)
            except NoShardError:
                time.sleep(0.02)
                began = time.monotonic()
            except (PublishError, RoutingUnavailableError, RedisUnavailableError):
                self.again += 1
            else:
                break
        self.longest = max(self.longest, time.monotonic() - began)
        self.done.append(event_id)

    def end(self) -> None:
        """Stop after the event that is under way."""
        self._stop_asked.set()
        self.join()
        self._producer.close()


class Readers:
    """Consumers of all groups, and what they have handled, in order.

    Attributes:
        idle: while set, none of them carries a resharding on, so that a driver gets as far as it shall.
    """

    def __init__(self, url: str, stream: str, count: int) -> None:
        self.handled: Mapping[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        self.idle = threading.Event()
        self.consumers = []
        for number in range(count):
            group = GROUPS[number % len(GROUPS)]
            note = self.handled[group].append
            self.consumers.append(
                Consumer(stream, group=group, redis=url, member=f"c{number}", handler=lambda m, note=note: note(_of(m)))
            )

    def __enter__(self) -> Readers:
        take, idle = Duties.take, self.idle

        def take_unless_idle(duties: Duties, until: float) -> None:
            if not idle.is_set():
                take(duties, until)

        self._patch = mock.patch.object(Duties, "take", take_unless_idle)
        self._patch.start()
        for consumer in self.consumers:
            consumer.start()
        return self

    def __exit__(self, *_: object) -> None:
        for consumer in self.consumers:
            consumer.stop()
        self._patch.stop()


def _of(message: Message) -> tuple[str, str]:
    assert message.key is not None
    assert message.event_id is not None
    return message.key.decode(), message.event_id


def run(
    plan: Plan,
    url: str,
    client: Any,
    stream: str,
    *,
    lossy_url: str | None = None,
    lose: Callable[[], None] | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Carry out a plan, and judge it.

    Parameters:
        plan: see `Plan`.
        url: of Redis.
        client: a plain client of it, not decoded.
        stream: a name that was not used before.
        lossy_url: for producers; on this way replies can be lost.
        lose: loses the next reply to a publish.
        say: told what happens.
    """
    report, draw, began = Report(), random.Random(plan.seed), time.monotonic()
    lost: list[float] = []
    with Admin(url, requested_by="chaos") as admin, Monitor(url) as monitor:
        for group in GROUPS:
            admin.create(stream, group=group, shards=4, timings=TIMINGS, reason="chaos")
        writers = [Writer(n, lossy_url or url, stream, plan.keys) for n in range(plan.producers)]
        with Readers(url, stream, plan.consumers) as readers, _losing(plan, lose, lost):
            for writer in writers:
                writer.start()
            kills, ended = 0, Counter[str]()
            try:
                for number, target in enumerate(itertools.islice(itertools.cycle(PATH), plan.rounds * len(PATH))):
                    point = plan.first_point + number
                    back = plan.rollbacks and draw.random() < 0.25
                    result, killed = _reshard(admin, monitor, readers, url, stream, target, point, back)
                    kills += killed
                    ended[result.state] += 1
                    say(
                        f"{time.monotonic() - began:5.1f} s  {result.source} -> {target}: {result.state} after "
                        f"{result.age_seconds:.1f} s, driver dead after {point} commands; "
                        f"{sum(len(w.done) for w in writers):,} published"
                    )
                    if monitor.routing(stream).layout.shards != target:
                        admin.scale(stream, shards=target, reason="chaos", timeout_seconds=_STUCK_SECONDS)
            except CoordError as error:
                report.findings.append(f"a resharding did not end: {error}")
            finally:
                for writer in writers:
                    writer.end()
            total = sum(len(writer.done) for writer in writers)
            report.findings += [f"producer {w.number}: {w.failure!r}" for w in writers if w.failure is not None]
            deadline = time.monotonic() + _STUCK_SECONDS
            while time.monotonic() < deadline and any(len(set(h)) < total for h in readers.handled.values()):
                time.sleep(0.05)
    stored = _stored(client, stream)
    report.findings += judge([one for w in writers for one in w.done], stored, readers.handled)
    again, longest = sum(w.again for w in writers), max(w.longest for w in writers)
    seconds = time.monotonic() - began
    report.summary = (
        f"{total:,} events, {kills} drivers killed, {dict(ended)}, {len(lost)} replies lost, {again} publishes "
        f"repeated by the application, longest publish {longest:.2f} s, {seconds:.1f} s, seed {plan.seed}"
    )
    return report


def _reshard(
    admin: Admin, monitor: Monitor, readers: Readers, url: str, stream: str, target: int, point: int, back: bool
) -> tuple[Resharding, int]:
    """Begin a resharding, kill its first driver after so many commands, and see it end by the consumers alone."""
    readers.idle.set()
    time.sleep(TIMINGS.heartbeat_seconds)  # whoever has the duty now has it no longer
    found = admin.scale(stream, shards=target, reason="chaos", wait=False)
    driver = subprocess.run(
        [sys.executable, "-m", "tests.chaos.reshard_driver", url, stream, str(point)],
        check=False,
        timeout=_STUCK_SECONDS,
    )
    if back:
        with contextlib.suppress(ConflictError):
            admin.rollback(found, reason="chaos", wait=False)
    readers.idle.clear()
    deadline = time.monotonic() + _STUCK_SECONDS
    while True:
        now = monitor.resharding(stream)
        assert now is not None
        if not now.active:
            return now, int(driver.returncode < 0)
        if time.monotonic() > deadline:
            raise CoordError(f"still {now.state} after {now.age_seconds} s; waits for {[str(w) for w in now.waits]}")
        time.sleep(0.02)


@contextlib.contextmanager
def _losing(plan: Plan, lose: Callable[[], None] | None, lost: list[float]) -> Iterator[None]:
    """Lose replies to publishes meanwhile."""
    stop = threading.Event()

    def go_on() -> None:
        draw = random.Random(plan.seed)
        while lose is not None and plan.lost_seconds and not stop.wait(plan.lost_seconds * draw.uniform(0.5, 1.5)):
            lose()
            lost.append(time.monotonic())

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _stored(client: Any, stream: str) -> Counter[str]:
    """Return how often each event id lies in the shards."""
    found: Counter[str] = Counter()
    for shard in range(max(PATH) + 1):
        for _, fields in client.xrange(StreamKeys(stream).shard(shard).stream):
            found[_text(next(value for name, value in fields.items() if _text(name) == "rsc-event"))] += 1
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def judge(published: list[str], stored: Counter[str], handled: Mapping[str, list[tuple[str, str]]]) -> list[str]:
    """Find what is wrong.

    Parameters:
        published: event ids that producers were told of.
        stored: event id -> how often it lies in the streams.
        handled: group -> (key, event id) in the order in which handlers were called.
    """
    wanted = set(published)
    findings = [f"event {one} was accepted and is not in any stream" for one in sorted(wanted - set(stored))]
    findings += [f"event {one} is {count} times in the streams" for one, count in stored.items() if count > 1]
    for group, entries in handled.items():
        seen = {event_id for _, event_id in entries}
        findings += [f"group {group} never handled {one}" for one in sorted(wanted - seen)]
        last: dict[str, int] = defaultdict(lambda: -1)
        first: set[str] = set()
        for key, event_id in entries:
            if event_id in first:
                continue  # delivered again
            first.add(event_id)
            n = int(event_id.split("-")[1])
            if n < last[key]:
                findings.append(f"group {group}: event {event_id} of key {key} after number {last[key]}")
            last[key] = max(n, last[key])
    return findings


def on_server(plan: Plan, server: servers.Server, stream: str, say: Callable[[str], None] = print) -> Report:
    """Run on one server, with lost replies."""
    with LossyProxy(server.port) as proxy, server.client(protocol=2) as client:
        return run(
            plan,
            server.url,
            client,
            stream,
            lossy_url=proxy.url,
            lose=lambda: proxy.drop_next_reply(b"published"),
            say=say,
        )


def on_cluster(plan: Plan, cluster: servers.ClusterServers, stream: str, say: Callable[[str], None] = print) -> Report:
    """Run on a Cluster. Its clients find their own way past a proxy: so replies are lost in the client itself."""
    client = cluster.client()
    lose, send = threading.Event(), SyncRunner._send

    def send_and_lose(runner: SyncRunner, command: Command[Any], *rest: Any) -> Any:
        answer = send(runner, command, *rest)
        if command.name == "publish" and lose.is_set():
            lose.clear()
            raise redis.ConnectionError("the reply was lost")
        return answer

    try:
        with mock.patch.object(SyncRunner, "_send", send_and_lose):
            return run(plan, cluster.url, client, stream, lose=lose.set, say=say)
    finally:
        client.close()


def main() -> int:
    default = Plan(seed=0)
    parser = argparse.ArgumentParser(description="Reshard under load, kill the drivers, and judge.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--rounds", type=int, default=6, help="times 4 -> 12 -> 3 -> 0 -> 5 -> 4")
    parser.add_argument("--first-point", type=int, default=default.first_point, help="commands of the first driver")
    parser.add_argument("--producers", type=int, default=default.producers)
    parser.add_argument("--consumers", type=int, default=default.consumers)
    parser.add_argument("--keys", type=int, default=default.keys, help="of each producer")
    parser.add_argument("--lost-seconds", type=float, default=default.lost_seconds, help="between two lost replies")
    parser.add_argument("--server", choices=[*servers.available(), "cluster"], default="redis7")
    given = vars(parser.parse_args())
    name = given.pop("server")
    plan = Plan(**given)
    print(f"{name}, {plan}")
    stream = f"chaos-{secrets.token_hex(4)}"
    if name == "cluster":
        with servers.ClusterServers(_CLUSTER_SERVER) as cluster:
            report = on_cluster(plan, cluster, stream)
    else:
        with servers.Server(name) as server:
            report = on_server(plan, server, stream)
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
