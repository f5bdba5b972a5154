"""Publishing across a resharding: each event id once, no key out of order, a pause of milliseconds; and quiescing."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from redis_stream_coord import (
    AsyncProducer,
    DrainTimeoutError,
    LifecycleError,
    NoShardError,
    Outgoing,
    PartialPublishError,
    Producer,
    PublishError,
    RedisSettings,
    RoutingRegressionError,
    RoutingUnavailableError,
    telemetry,
)
from tests.integration.by_hand import ByHand
from tests.integration.kit import FAST, Bench, Crew, Recorder, sha, taking_at_most, two_servers
from tests.proxy import LossyProxy
from tests.waiting import eventually

SHARDS = 4
redis7 = pytest.mark.parametrize("server", ["redis7"], indirect=True)


@pytest.fixture
def lossy(bench: Bench, proxy: LossyProxy) -> Iterator[Producer]:
    """A producer behind the proxy, whose scripts the server knows."""
    bench.create(shards=SHARDS)
    bench.load_scripts()
    with Producer(bench.stream, redis=RedisSettings(proxy.url, timeout_seconds=0.3)) as producer:
        producer.refresh()
        yield producer
        proxy.resume()
        proxy.accept()
        proxy.keep_replies()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def stored(bench: Bench, shards: int = 16) -> list[tuple[int, str, dict[str, str]]]:
    """Every entry: shard, id, fields."""
    return [
        (shard, entry_id, fields)
        for shard in range(shards)
        for entry_id, fields in bench.redis.xrange(bench.stream_key(shard))
    ]


def total(bench: Bench) -> int:
    return sum(bench.redis.xlen(bench.stream_key(shard)) for shard in range(16))


def mover(bench: Bench, shards: int) -> str:
    """A key that changes its shard when the stream gets so many."""
    from redis_stream_coord.routing import PROTOCOLS

    shard_of, now = PROTOCOLS["jump-v1"].shard, int(bench.redis.hget(bench.record, "shards"))
    return next(
        key
        for key in (f"key-{n}" for n in range(1000))
        if shard_of(key.encode(), now) != shard_of(key.encode(), shards)
    )


def lose_all(proxy: LossyProxy, publish: Callable[[], Any]) -> None:
    """Publish, and get no answer however often it is tried: the entry is there all the same."""
    proxy.drop_next_reply(sha("publish"), count=1000)
    with pytest.raises(PublishError, match="may or may not"):
        publish()
    proxy.keep_replies()


# --- once ---------------------------------------------------------------------------------------------------------


def test_lost_replies_then_a_resharding_yield_the_entry_that_is_there(
    bench: Bench, proxy: LossyProxy, lossy: Producer
) -> None:
    key = mover(bench, 12)
    lose_all(proxy, lambda: lossy.publish({}, key=key, event_id="e"))
    ((shard, entry_id, _),) = stored(bench)
    ByHand(bench, 12).run()
    lossy.refresh()
    assert lossy.route(key).shard != shard
    again = lossy.publish({}, key=key, event_id="e")
    assert (again.shard, again.id, again.duplicate) == (shard, entry_id, True)
    # Neither does another process, which knows nothing of the first attempt; nor one of many.
    with Producer(bench.stream, redis=bench.url) as other:
        assert other.publish({}, key=key, event_id="e") == again
        fresh, found = other.publish_many(
            [Outgoing(fields={}, key=key, event_id="new"), Outgoing(fields={}, key=key, event_id="e")]
        )
        assert found == again
        assert (fresh.shard, fresh.duplicate) == (lossy.route(key).shard, False)
    assert Counter(fields["rsc-event"] for _, _, fields in stored(bench)) == {"e": 1, "new": 1}


def test_lost_replies_of_many_then_a_resharding(bench: Bench, proxy: LossyProxy, lossy: Producer) -> None:
    entries = [Outgoing(fields={"n": str(n)}, key=f"key-{n % 40}", event_id=f"e{n}") for n in range(400)]
    proxy.drop_next_reply(sha("publish"), count=1000)
    with pytest.raises(PartialPublishError) as caught:
        lossy.publish_many(entries)
    proxy.keep_replies()
    assert set(caught.value.failed) == set(range(400))
    assert 0 < len(stored(bench)) < 400
    ByHand(bench, 9).run()
    ByHand(bench, 3).run()
    receipts = lossy.publish_many(entries)
    assert Counter(fields["rsc-event"] for _, _, fields in stored(bench)) == {f"e{n}": 1 for n in range(400)}
    assert {(r.shard, r.id) for r in receipts} == {(shard, entry_id) for shard, entry_id, _ in stored(bench)}
    assert lossy.publish_many(entries) == [type(r)(r.id, r.shard, True) for r in receipts]


def test_an_attempt_that_arrives_long_after_its_sender_gave_up_lands_nowhere(
    bench: Bench, proxy: LossyProxy, lossy: Producer
) -> None:
    key = mover(bench, 12)
    proxy.pause()
    with pytest.raises(PublishError):
        lossy.publish({"from": "the past"}, key=key, event_id="e")
    ByHand(bench, 12).run()
    with Producer(bench.stream, redis=bench.url) as other:
        receipt = other.publish({}, key=key, event_id="e")
        assert not receipt.duplicate
        proxy.resume()
        lossy.refresh()
        assert lossy.publish({}, key=key, event_id="e").id == receipt.id
    bench.producer.publish({}, key=key)
    assert [(fields.get("rsc-event"), fields.get("from")) for _, _, fields in stored(bench)] == [
        ("e", None),
        (None, None),
    ]


def test_the_memory_of_a_producer_is_enough_where_the_record_has_forgotten(
    bench: Bench, proxy: LossyProxy, lossy: Producer
) -> None:
    key = mover(bench, 12)
    lose_all(proxy, lambda: lossy.publish({}, key=key, event_id="e"))
    ByHand(bench, 12).run()
    bench.redis.hset(bench.record, "earlier", "-")
    lossy.refresh()
    assert lossy.publish({}, key=key, event_id="e").duplicate
    assert len(stored(bench)) == 1


def test_a_shard_that_cannot_be_asked_is_not_passed_over(bench: Bench, proxy: LossyProxy, lossy: Producer) -> None:
    """Its route is lost: nobody knows what it takes. An operator has it rebuilt, closed."""
    key = mover(bench, 12)
    old = lossy.route(key).shard
    lose_all(proxy, lambda: lossy.publish({}, key=key, event_id="e"))
    ByHand(bench, 12).run()
    names = bench.producer._publishing.keys.shard(old)
    bench.redis.delete(names.route, names.published)
    lossy.refresh()
    with pytest.raises(RoutingUnavailableError) as caught:
        lossy.publish({}, key=key, event_id="e")
    assert (caught.value.word, caught.value.shard) == ("ROUTE_MISSING", old)
    assert not lossy.publish({}, key=key, event_id="another").duplicate if old >= 12 else True
    bench.redis.hset(names.route, mapping={"epoch": "2", "state": "closed"})
    # What the shard knew of ids is lost too, so the entry is there twice now: the documented limit.
    assert not lossy.publish({}, key=key, event_id="e").duplicate


def test_no_shards(bench: Bench, proxy: LossyProxy, lossy: Producer) -> None:
    lose_all(proxy, lambda: lossy.publish({}, key="k", event_id="e"))
    ByHand(bench, 0).run()
    lossy.refresh()
    assert lossy.publish({}, key="k", event_id="e").duplicate
    for call in (
        lambda: lossy.publish({}, key="k", event_id="f"),
        lambda: lossy.publish({}, key="k"),
        lambda: lossy.publish_many([Outgoing(fields={}, key="k", event_id="f")]),
        lambda: lossy.route("k"),
    ):
        with taking_at_most(0.25, "finding no shard"), pytest.raises(NoShardError) as caught:
            call()
        assert caught.value.retriable
    ByHand(bench, 5).run()
    # Looked for at once, not when the lease of the layout ends.
    assert not lossy.publish({}, key="k", event_id="f").duplicate
    assert lossy.publish({}, key="k", event_id="e").duplicate
    assert len(stored(bench)) == 2


@redis7
def test_plain_entries_are_never_sent_again(bench: Bench, proxy: LossyProxy) -> None:
    """An event id protects nothing there: the stream remembers none."""
    bench.create(shards=1)
    with Producer(bench.stream, redis=RedisSettings(proxy.url, timeout_seconds=0.3), fenced=False) as producer:
        producer.refresh()
        proxy.drop_next_reply(b"XADD")
        with pytest.raises(PartialPublishError) as caught:
            producer.publish_many([Outgoing(fields={}, key="k", event_id="e")])
        assert "may make a duplicate" in str(caught.value.failed[0])
    assert len(stored(bench)) == 1


# --- at the cut-over ----------------------------------------------------------------------------------------------


@two_servers
def test_a_publish_at_the_cut_over_waits_for_the_next_layout(bench: Bench, pool: ThreadPoolExecutor) -> None:
    bench.create(shards=SHARDS)
    key = mover(bench, 12)
    with Producer(bench.stream, redis=bench.url) as producer:
        producer.refresh()
        asked_at = producer._publishing.layouts.asked_at
        resharding = ByHand(bench, 12)
        resharding.close()
        waiting: list[Future[Any]] = [
            pool.submit(lambda: (producer.publish({}, key=key), time.monotonic())),
            pool.submit(lambda: (producer.publish({}, key=key, event_id="e"), time.monotonic())),
            pool.submit(lambda: (producer.publish_many([Outgoing(fields={}, key=key)])[0], time.monotonic())),
        ]
        eventually(lambda: producer._publishing.layouts.asked_at > asked_at, what="a look for another layout")
        assert not any(future.done() for future in waiting)
        resharding.decide()
        assert not any(future.done() for future in waiting)
        resharding.open()
        opened = time.monotonic()
        for future in waiting:
            receipt, at = future.result(5)
            assert receipt.shard == producer.route(key).shard
            assert at - opened < 0.5  # some 20 ms on an idle machine
    assert {shard for shard, _, _ in stored(bench)} == {producer.route(key).shard}


@redis7
@pytest.mark.parametrize("event_ids", [True, False])
@pytest.mark.parametrize("targets", [(12,), (2,), (7, 1, 5)])
def test_many_keep_the_order_of_each_key_through_reshardings(
    bench: Bench, pool: ThreadPoolExecutor, targets: tuple[int, ...], event_ids: bool
) -> None:
    bench.create(shards=SHARDS)
    entries = [
        Outgoing(fields={"n": str(n)}, key=f"key-{n % 30}", event_id=f"e{n}" if event_ids else None)
        for n in range(30_000)
    ]
    epoch_of: dict[tuple[int, str], int] = {}
    with Producer(bench.stream, redis=bench.url) as producer:
        publishing = pool.submit(producer.publish_many, entries)
        for number, target in enumerate(targets, 1):
            eventually(lambda number=number: publishing.done() or total(bench) > 1500 * number, what="some entries")
            assert not publishing.done()
            resharding = ByHand(bench, target)
            resharding.close()
            for shard, entry_id, _ in stored(bench):
                epoch_of.setdefault((shard, entry_id), resharding.epoch)
            resharding.decide()
            resharding.open()
        receipts = publishing.result(60)
    assert len(receipts) == len(entries)
    found = stored(bench)
    assert Counter(int(fields["n"]) for _, _, fields in found) == Counter(range(len(entries)))
    last: dict[str, int] = {}
    for shard, entry_id, fields in sorted(
        found, key=lambda entry: (epoch_of.get(entry[:2], 99), entry[0], [int(part) for part in entry[1].split("-")])
    ):
        assert last.get(fields["rsc-key"], -1) < int(fields["n"]), (shard, entry_id)
        last[fields["rsc-key"]] = int(fields["n"])


@redis7
def test_what_a_producer_meets_while_nobody_drives_on(bench: Bench) -> None:
    bench.create(shards=1)
    ByHand(bench, 2).close()
    with Producer(bench.stream, redis=RedisSettings(bench.url, timeout_seconds=0.3)) as producer:
        entry = Outgoing(fields={}, key="k", event_id="e")
        for call in (lambda: producer.publish({}, key="k"), lambda: producer.publish_many([entry])):
            with taking_at_most(1.5, "giving up"), pytest.raises((RoutingUnavailableError, PartialPublishError)) as e:
                call()
            assert "takes over within a heartbeat" in str(e.value)
            failed = getattr(e.value, "failed", {0: e.value})
            assert (failed[0].word, failed[0].retriable) == ("CLOSED", True)
        assert len(producer._publishing.attempts) == 0
    assert stored(bench) == []


@redis7
def test_a_regression_stops_publishing_that_is_under_way(bench: Bench, pool: ThreadPoolExecutor) -> None:
    bench.create(shards=1)
    ByHand(bench, 1).run()
    before = bench.redis.hgetall(bench.record)
    with Producer(bench.stream, redis=bench.url) as producer:
        producer.refresh()
        ByHand(bench, 2).close()
        future = pool.submit(lambda: producer.publish({}, key="k", event_id="e"))
        bench.redis.hset(bench.record, "version", str(int(before["version"]) - 1))
        with pytest.raises(RoutingRegressionError):
            future.result(5)
        with pytest.raises(RoutingRegressionError):
            producer.resume()


# --- threads, faults and reshardings at once -----------------------------------------------------------------------


@redis7
@pytest.mark.parametrize("seed", range(3))
def test_threads_that_publish_the_same_ids_while_replies_get_lost(
    bench: Bench, proxy: LossyProxy, lossy: Producer, pool: ThreadPoolExecutor, seed: int
) -> None:
    chance = random.Random(seed)
    ids = [f"e{n}" for n in range(300)]
    done = threading.Event()

    def publish(order: list[str]) -> list[Any]:
        receipts = []
        for event_id in order:
            while True:
                try:
                    receipts.append(lossy.publish({}, key=f"key-{event_id}", event_id=event_id))
                    break
                except (PublishError, RoutingUnavailableError, NoShardError):
                    continue
        return receipts

    def disturb() -> None:
        while not done.wait(0.02):
            before = proxy.dropped
            proxy.drop_next_reply(sha("publish"))
            while proxy.dropped == before and not done.wait(0.002):
                pass

    disturbing = pool.submit(disturb)
    futures = [pool.submit(publish, chance.sample(ids, len(ids))) for _ in range(4)]
    ends = time.monotonic() + 60
    while not all(future.done() for future in futures):
        assert time.monotonic() < ends, f"it does not end, seed {seed}"
        ByHand(bench, chance.choice((0, 1, 3, 5, 9))).run()
        if bench.redis.hget(bench.record, "shards") == "0":
            ByHand(bench, 4).run()
        time.sleep(0.02)
    done.set()
    disturbing.result(5)
    places = {(r.shard, r.id) for future in futures for r in future.result()}
    assert len(places) == len(ids)
    assert Counter(fields["rsc-event"] for _, _, fields in stored(bench)) == dict.fromkeys(ids, 1)
    assert len(lossy._publishing.attempts) == 0


# --- quiescing ----------------------------------------------------------------------------------------------------


@two_servers
def test_quiesce_waits_for_what_is_under_way_and_says_what_is_unknown(
    bench: Bench, proxy: LossyProxy, lossy: Producer, pool: ThreadPoolExecutor
) -> None:
    lossy.publish({}, key="k", event_id="known")
    proxy.pause()
    futures = [
        pool.submit(lambda: lossy.publish({}, key="k", event_id="lost")),
        pool.submit(lambda: lossy.publish({}, key="k")),
    ]
    eventually(lambda: lossy._publishing.gate.inside == 2, what="both calls")
    with pytest.raises(DrainTimeoutError, match="2 calls") as caught:
        lossy.quiesce(timeout_seconds=0.05)
    assert caught.value.retriable
    for call in (lambda: lossy.publish({}, key="k"), lambda: lossy.publish_many([Outgoing(fields={}, key="k")])):
        with pytest.raises(LifecycleError, match="quiesced") as refused:
            call()
        assert refused.value.retriable
    quiesced = lossy.quiesce()
    assert all(isinstance(future.exception(5), PublishError) for future in futures)
    assert (quiesced.event_ids, quiesced.unknown_count) == (("lost",), 1)
    with pytest.raises(RoutingUnavailableError):
        lossy.resume()
    with pytest.raises(LifecycleError):
        lossy.publish({}, key="k")
    proxy.resume()
    ByHand(bench, 5).run()
    assert lossy.resume().shards == 5
    assert lossy.publish({}, key="k", event_id="lost").id
    assert lossy.quiesce() == type(quiesced)((), 0)


@redis7
def test_quiesce_from_coroutines(bench: Bench, proxy: LossyProxy) -> None:
    bench.create(shards=1)
    bench.load_scripts()

    async def main() -> None:
        settings = RedisSettings(proxy.url, timeout_seconds=0.3)
        async with AsyncProducer(bench.stream, redis=settings) as producer:
            await producer.publish({}, key="k")
            proxy.pause()
            publishing = asyncio.ensure_future(producer.publish({}, key="k", event_id="e"))
            cancelled = asyncio.ensure_future(producer.publish({}, key="k", event_id="c"))
            await asyncio.sleep(0)
            with pytest.raises(DrainTimeoutError):
                await producer.quiesce(timeout_seconds=0.05)
            cancelled.cancel()
            with pytest.raises(LifecycleError):
                await producer.publish({}, key="k")
            quiesced = await producer.quiesce()
            with pytest.raises(PublishError):
                await publishing
            assert sorted(quiesced.event_ids) == ["c", "e"]
            proxy.resume()
            await producer.resume()
            assert [(await producer.publish({}, key="k", event_id=one)).shard for one in quiesced.event_ids] == [0, 0]
            assert await producer.quiesce() == type(quiesced)((), 0)

    asyncio.run(main())
    assert Counter(fields.get("rsc-event") for _, _, fields in stored(bench)) == {None: 1, "c": 1, "e": 1}


# --- what an operator sees ------------------------------------------------------------------------------------------


class Counted:
    """A counter of OpenTelemetry that can be read."""

    def __init__(self) -> None:
        self.values: Counter[str] = Counter()

    def add(self, number: int, attributes: dict[str, str]) -> None:
        self.values[attributes.get(telemetry.OUTCOME) or attributes[telemetry.STATUS]] += number


@redis7
def test_each_entry_is_counted_once_by_what_became_of_it(
    bench: Bench, proxy: LossyProxy, lossy: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishes, reads = Counted(), Counted()
    monkeypatch.setattr(telemetry, "publishes", publishes)
    monkeypatch.setattr(telemetry, "routing_requests", reads)
    ByHand(bench, 9).run()
    entries = [Outgoing(fields={}, key=f"key-{n}", event_id=f"e{n}") for n in range(50)]
    proxy.drop_next_reply(sha("publish"))
    receipts = lossy.publish_many(entries)  # by a stale layout, and with a reply that got lost
    found = sum(receipt.duplicate for receipt in receipts)
    assert publishes.values == Counter(OK=50 - found, DUPLICATE=found)
    assert reads.values == {"OK": 1}
    lossy.publish({}, key="k", event_id="e")
    lossy.publish({}, key="k", event_id="e")
    lose_all(proxy, lambda: lossy.publish({}, key="k", event_id="f"))
    bench.redis.delete(*(bench.stream_key(shard) for shard in range(9)))
    with pytest.raises(PartialPublishError):
        lossy.publish_many([Outgoing(fields={}, key="k")] * 300)
    assert publishes.values == Counter(
        OK=50 - found + 1, DUPLICATE=found + 1, UNKNOWN=1, STREAM_MISSING=200, NOT_SENT=100
    )
    bench.redis.hset(bench.record, "routing", "rendezvous-v9")
    for _ in range(2):
        with pytest.raises(Exception, match="rendezvous-v9"):
            lossy.refresh()
    assert reads.values == {"OK": 1, "UNSUPPORTED_ROUTING": 2}


@redis7
def test_an_entry_carries_the_span_in_which_it_was_published(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracer", provider.get_tracer("tests"))
    bench.create(shards=1)
    bench.producer.refresh()
    exporter.clear()
    bench.producer.publish({}, key="k")
    bench.producer.publish_many([Outgoing(fields={}, key="k")] * 2)
    spans = exporter.get_finished_spans()

    def named(name: str) -> list[ReadableSpan]:
        return [span for span in spans if span.name == name]

    one, many = named(f"{bench.stream} publish")
    assert one.kind == trace.SpanKind.PRODUCER
    (call,) = named("redis_stream_coord publish")
    assert call.parent is not None
    assert one.context is not None
    assert call.parent.span_id == one.context.span_id
    assert many.context is not None
    parents = [fields["rsc-traceparent"].split("-")[2] for _, _, fields in stored(bench)]
    assert parents == [f"{span.context.span_id:016x}" for span in (one, many, many) if span.context is not None]


# --- all of it, with the real saga ----------------------------------------------------------------------------------


class Pusher:
    """Publishes numbered entries of its own keys, each until it has a receipt, one by one or many at once.

    Args:
        url: of the server, with faults on the way.
        stream: name of the stream.
        number: whose keys.
        count: how many entries.
        chance: decides how.
    """

    def __init__(self, url: str, stream: str, number: int, count: int, chance: random.Random) -> None:
        self._settings = RedisSettings(url, timeout_seconds=0.5)
        self._stream = stream
        self._chance = chance
        self.left = [
            Outgoing(fields={"n": str(n)}, key=f"{number}:{n % 12}", event_id=f"{number}-{n}") for n in range(count)
        ]
        self.receipts: dict[str, Any] = {}
        self.count = count

    def run(self) -> None:
        while self.left:
            # A new producer now and then: the process died, and what has no receipt is published again.
            with Producer(self._stream, redis=self._settings) as producer:
                for _ in range(15):
                    self._publish(producer)
                    time.sleep(0.002)

    def _publish(self, producer: Producer) -> None:
        if not self.left:
            return
        size = self._chance.choice((1, 1, 25))
        sent = self.left[:size]
        try:
            if len(sent) == 1:
                receipts: list[Any] = [producer.publish(sent[0].fields, key=sent[0].key, event_id=sent[0].event_id)]
            else:
                receipts = list(producer.publish_many(sent))
        except PartialPublishError as error:
            receipts = list(error.receipts)
        except (PublishError, RoutingUnavailableError, NoShardError):
            return
        pairs = list(zip(sent, receipts, strict=True))
        self.receipts.update({str(outgoing.event_id): receipt for outgoing, receipt in pairs if receipt is not None})
        self.left = [outgoing for outgoing, receipt in pairs if receipt is None] + self.left[size:]


@two_servers
def test_once_and_in_order_through_real_reshardings_with_lost_replies(
    bench: Bench, proxy: LossyProxy, crew: Crew, pool: ThreadPoolExecutor
) -> None:
    bench.create(shards=SHARDS, timings=FAST)
    bench.load_scripts()
    recorders = [Recorder(), Recorder()]
    for name, recorder in zip("ab", recorders, strict=True):
        crew.start(name, recorder)
    pushers = [Pusher(proxy.url, bench.stream, number, 800, random.Random(number)) for number in range(3)]
    futures = [pool.submit(pusher.run) for pusher in pushers]
    done = threading.Event()

    def disturb() -> None:
        while not done.wait(0.05):
            before = proxy.dropped
            proxy.drop_next_reply(sha("publish"))
            while proxy.dropped == before and not done.wait(0.002):
                pass

    disturbing = pool.submit(disturb)
    for shards, after in ((9, 300), (3, 800), (0, 1400), (5, 1400)):
        eventually(
            lambda after=after: sum(len(p.receipts) for p in pushers) > after,
            within_seconds=60,
            what="some entries",
        )
        bench.admin.scale(bench.stream, shards=shards, reason="a test", timeout_seconds=60)
    for future in futures:
        future.result(60)
    done.set()
    disturbing.result(5)
    expected = {event_id: (r.shard, r.id) for pusher in pushers for event_id, r in pusher.receipts.items()}
    assert len(expected) == sum(pusher.count for pusher in pushers)
    assert proxy.dropped > 5
    found = {fields["rsc-event"]: (shard, entry_id) for shard, entry_id, fields in stored(bench)}
    assert found == expected
    assert total(bench) == len(expected)
    eventually(
        lambda: sum(len(recorder.ended) for recorder in recorders) >= len(expected),
        within_seconds=30,
        what="all of it handled",
    )
    number_of = {place: int(event_id.split("-")[1]) for event_id, place in expected.items()}
    last: dict[bytes, int] = {}
    seen: set[tuple[int, str]] = set()
    for one in sorted((handled for recorder in recorders for handled in recorder.began), key=lambda one: one.began):
        place = (one.shard, one.id)
        if place not in seen:
            assert one.key is not None
            assert last.get(one.key, -1) < number_of[place], one
            last[one.key] = number_of[place]
            seen.add(place)
    assert seen == set(number_of)
