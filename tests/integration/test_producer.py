"""Publishing: each entry once where an event id says so, and never by guessing where it goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from redis_stream_coord import (
    Admin,
    AsyncProducer,
    ConfigError,
    Consumer,
    CoordError,
    NotFoundError,
    Outgoing,
    PartialPublishError,
    Producer,
    PublishError,
    RedisSettings,
    RedisUnavailableError,
    Router,
    RoutingRegressionError,
    RoutingUnavailableError,
    UnsupportedProtocolError,
)
from redis_stream_coord.commands import Command
from redis_stream_coord.keys import StreamKeys
from redis_stream_coord.runner import SyncRunner
from tests.integration.kit import GROUP, Bench, sha, taking_at_most, two_servers
from tests.proxy import LossyProxy
from tests.waiting import eventually


@pytest.fixture
def lossy(bench: Bench, proxy: LossyProxy) -> Iterator[Producer]:
    """A producer behind the proxy, whose scripts the server knows: each call is one EVALSHA."""
    bench.create()
    bench.load_scripts()
    with Producer(bench.stream, redis=RedisSettings(proxy.url, timeout_seconds=2.0)) as producer:
        producer.refresh()
        yield producer
        proxy.resume()
        proxy.accept()


def lengths(bench: Bench, shards: int = 4) -> list[int]:
    return [bench.redis.xlen(bench.stream_key(shard)) for shard in range(shards)]


# --- one entry ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fenced", [True, False])
def test_publish_appends_to_the_shard_of_the_key(bench: Bench, fenced: bool) -> None:
    bench.create()
    with Producer(bench.stream, redis=bench.url, fenced=fenced) as producer:
        for number in range(20):
            key = f"key-{number}"
            receipt = producer.publish({"n": str(number)}, key=key)
            assert not receipt.duplicate
            assert receipt.shard == producer.route(key).shard
            ((entry_id, fields),) = bench.redis.xrange(producer.route(key).stream_key, receipt.id, receipt.id)
            assert (entry_id, fields) == (receipt.id, {"rsc-key": key, "n": str(number)})
    assert sum(lengths(bench)) == 20
    assert min(lengths(bench)) > 0


def test_event_id_yields_one_entry(bench: Bench) -> None:
    bench.create()
    first = bench.producer.publish({"n": "1"}, key="k", event_id="e-1")
    again = bench.producer.publish({"n": "2"}, key="k", event_id="e-1")
    other = bench.producer.publish({"n": "3"}, key="k", event_id="e-2")
    assert (again.id, again.shard, again.duplicate) == (first.id, first.shard, True)
    assert not other.duplicate
    assert other.id != first.id
    assert sum(lengths(bench)) == 2
    # Another producer, in another process, sees the same.
    with Producer(bench.stream, redis=bench.url) as another:
        assert another.publish({"n": "4"}, key="k", event_id="e-1") == again


def test_remembered_event_ids_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redis_stream_coord.publishing.EVENT_ID_WINDOW_COUNT", 10)
    bench.create(shards=1)
    for number in range(40):
        bench.producer.publish({}, key="k", event_id=f"e-{number}")
    published = StreamKeys(bench.stream).shard(0).published
    assert bench.redis.hlen(published) <= 2 * 10 + 2
    assert bench.producer.publish({}, key="k", event_id="e-39").duplicate
    assert bench.producer.publish({}, key="k", event_id="e-30").duplicate
    assert not bench.producer.publish({}, key="k", event_id="e-0").duplicate


@pytest.mark.parametrize("fields", [{"n": 1}, {"rsc-x": "reserved"}, {1: "x"}])
def test_what_cannot_be_stored_is_refused_and_not_sent(bench: Bench, fields: dict[str, str]) -> None:
    bench.create()
    with pytest.raises(ConfigError):
        bench.producer.publish(fields, key="k")
    with pytest.raises(ConfigError):
        bench.producer.publish_many([Outgoing(fields={}, key="k"), Outgoing(fields=fields, key="k")])
    assert sum(lengths(bench)) == 0


# --- what is not there ----------------------------------------------------------------------------------------------


def test_unknown_stream_is_refused_with_the_remedy(bench: Bench) -> None:
    with pytest.raises(NotFoundError, match=r"Admin\(.*\)\.create\(") as caught:
        bench.producer.publish({}, key="k")
    assert caught.value.word == "STREAM_NOT_FOUND"
    assert bench.redis.keys() == []


@pytest.mark.parametrize("fenced", [True, False])
def test_vanished_stream_is_not_made_by_publishing(bench: Bench, fenced: bool) -> None:
    bench.create()
    with Producer(bench.stream, redis=bench.url, fenced=fenced) as producer:
        route = producer.route("k")
        bench.redis.delete(route.stream_key)
        with pytest.raises(NotFoundError, match="exist_ok=True") as caught:
            producer.publish({}, key="k", event_id="e")
        assert (caught.value.word, caught.value.shard) == ("STREAM_MISSING", route.shard)
        assert not bench.redis.exists(route.stream_key)
        bench.create(shards=None, exist_ok=True)
        assert not producer.publish({}, key="k", event_id="e").duplicate


def test_missing_route_is_refused(bench: Bench) -> None:
    bench.create(shards=1)
    bench.redis.delete(StreamKeys(bench.stream).shard(0).route)
    with pytest.raises(RoutingUnavailableError) as caught:
        bench.producer.publish({}, key="k")
    assert caught.value.word == "ROUTE_MISSING"
    assert lengths(bench, 1) == [0]


def test_closed_shard_is_waited_for(bench: Bench) -> None:
    bench.create(shards=1)
    route = StreamKeys(bench.stream).shard(0).route
    bench.redis.hset(route, "state", "closed")
    with (
        Producer(bench.stream, redis=RedisSettings(bench.url, timeout_seconds=0.3)) as producer,
        taking_at_most(1.5, "giving up"),
        pytest.raises(RoutingUnavailableError) as caught,
    ):
        producer.publish({}, key="k")
    assert caught.value.word == "CLOSED"
    assert caught.value.retriable
    assert lengths(bench, 1) == [0]
    bench.redis.hset(route, "state", "open")
    bench.producer.publish({}, key="k")


def test_stale_layout_is_noticed_by_the_shard_and_routed_anew(bench: Bench) -> None:
    bench.create(shards=1)
    bench.producer.refresh()
    layout = bench.redis.hget(bench.record, "layout")
    nonce = layout.split(":")[2]
    bench.redis.hset(bench.record, mapping={"epoch": "2", "layout": f"2:1:{nonce}"})
    bench.redis.hset(StreamKeys(bench.stream).shard(0).route, mapping={"epoch": "2", "layout": f"2:1:{nonce}"})
    bench.producer.publish({}, key="k")
    assert bench.producer.route("k").epoch == 2
    assert lengths(bench, 1) == [1]


# --- many -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fenced", [True, False])
def test_many_keep_their_order_and_get_receipts_in_it(bench: Bench, fenced: bool) -> None:
    bench.create()
    entries = [Outgoing(fields={"n": str(n)}, key=f"key-{n % 7}") for n in range(500)]
    with Producer(bench.stream, redis=bench.url, fenced=fenced) as producer:
        receipts = producer.publish_many(iter(entries))
        assert len(receipts) == len(entries)
        for shard in range(4):
            stored = [(entry_id, fields["n"]) for entry_id, fields in bench.redis.xrange(bench.stream_key(shard))]
            expected = [(r.id, e.fields["n"]) for r, e in zip(receipts, entries, strict=True) if r.shard == shard]
            assert stored == expected
        assert producer.publish_many([]) == []


def test_many_with_event_ids_yield_each_one_entry(bench: Bench) -> None:
    bench.create()
    entries = [Outgoing(fields={}, key=f"k{n}", event_id=f"e{n % 5}-{n % 5}") for n in range(5)]
    first = bench.producer.publish_many(entries)
    again = bench.producer.publish_many([*entries, *entries])
    assert [receipt.duplicate for receipt in first] == [False] * 5
    assert all(receipt.duplicate for receipt in again)
    assert [receipt.id for receipt in again] == [receipt.id for receipt in first] * 2
    assert sum(lengths(bench)) == 5


@pytest.mark.parametrize("fenced", [True, False])
def test_partly_published_says_which_and_why(bench: Bench, fenced: bool) -> None:
    bench.create()
    bench.redis.delete(bench.stream_key(2))
    entries = [Outgoing(fields={"n": str(n)}, key=f"key-{n}") for n in range(40)]
    with Producer(bench.stream, redis=bench.url, fenced=fenced) as producer:
        bad = {n for n in range(40) if producer.route(f"key-{n}").shard == 2}
        with pytest.raises(PartialPublishError) as caught:
            producer.publish_many(entries)
    assert set(caught.value.failed) == bad
    assert all(error.word == "STREAM_MISSING" for error in caught.value.failed.values())
    assert [n for n, receipt in enumerate(caught.value.receipts) if receipt is None] == sorted(bad)
    assert sum(lengths(bench)) == 40 - len(bad)


# --- replies that get lost ------------------------------------------------------------------------------------------


def test_lost_reply_with_an_event_id_yields_one_entry(bench: Bench, proxy: LossyProxy, lossy: Producer) -> None:
    proxy.drop_next_reply(sha("publish"), count=2)
    receipt = lossy.publish({}, key="k", event_id="e")
    assert proxy.dropped == 2
    assert receipt.duplicate
    assert sum(lengths(bench)) == 1
    assert bench.redis.xrange(bench.stream_key(receipt.shard))[0][0] == receipt.id


def test_lost_reply_without_an_event_id_is_reported_and_not_repeated(
    bench: Bench, proxy: LossyProxy, lossy: Producer
) -> None:
    proxy.drop_next_reply(sha("publish"))
    with pytest.raises(PublishError, match="may or may not") as caught:
        lossy.publish({}, key="k")
    assert caught.value.retriable
    assert proxy.dropped == 1
    assert sum(lengths(bench)) == 1
    lossy.publish({}, key="k")
    assert sum(lengths(bench)) == 2


def test_lost_reply_of_a_plain_append_is_not_repeated(bench: Bench, proxy: LossyProxy) -> None:
    bench.create()
    with Producer(bench.stream, redis=proxy.url, fenced=False) as producer:
        producer.refresh()
        proxy.drop_next_reply(b"XADD")
        with pytest.raises(PublishError):
            producer.publish({}, key="k")
    assert sum(lengths(bench)) == 1


@pytest.mark.parametrize("event_ids", [True, False])
def test_lost_replies_of_many(bench: Bench, proxy: LossyProxy, lossy: Producer, event_ids: bool) -> None:
    entries = [Outgoing(fields={}, key=f"k{n}", event_id=f"e{n}" if event_ids else None) for n in range(30)]
    proxy.drop_next_reply(sha("publish"))
    if event_ids:
        receipts = lossy.publish_many(entries)
        assert len({(receipt.shard, receipt.id) for receipt in receipts}) == 30
        assert sum(lengths(bench)) == 30
    else:
        with pytest.raises(PartialPublishError) as caught:
            lossy.publish_many(entries)
        assert all(isinstance(error, PublishError) for error in caught.value.failed.values())
        published = sum(receipt is not None for receipt in caught.value.receipts)
        assert published + len(caught.value.failed) == 30
        assert published <= sum(lengths(bench)) <= 30
    assert proxy.dropped == 1


# --- routing --------------------------------------------------------------------------------------------------------


def test_route_does_no_io_while_its_lease_is_valid(bench: Bench, proxy: LossyProxy) -> None:
    bench.create()
    expected = [bench.producer.route(f"key-{n}") for n in range(1000)]
    with Router(bench.stream, redis=proxy.url, lease_seconds=30.0) as router:
        layout = router.refresh()
        proxy.pause()
        with taking_at_most(1.0, "a thousand routes"):
            assert [router.route(f"key-{n}") for n in range(1000)] == expected
        assert {route.epoch for route in expected} == {layout.epoch}
        assert expected[0].stream_key == bench.stream_key(expected[0].shard)
        proxy.resume()


def test_layout_is_renewed_in_the_background(bench: Bench) -> None:
    bench.create()
    with Router(bench.stream, redis=bench.url, lease_seconds=0.3) as router:
        assert router.refresh().epoch == 1
        nonce = bench.redis.hget(bench.record, "layout").split(":")[2]
        bench.redis.hset(bench.record, mapping={"epoch": "2", "layout": f"2:4:{nonce}"})
        eventually(lambda: router.route("k").epoch == 2, within_seconds=2, what="the new layout")


@two_servers
def test_expired_layout_is_not_used(bench: Bench, proxy: LossyProxy) -> None:
    bench.create()
    settings = RedisSettings(proxy.url, timeout_seconds=0.3)
    with Producer(bench.stream, redis=settings, lease_seconds=0.5) as producer:
        producer.publish({}, key="k")
        proxy.pause()
        until = time.monotonic() + 0.6

        def fails() -> bool:
            try:
                producer.route("k")
            except RoutingUnavailableError as error:
                return error.retriable
            return False

        eventually(fails, what="the end of the lease")
        assert time.monotonic() > until - 0.2
        for call in (
            lambda: producer.publish({}, key="k", event_id="e"),
            lambda: producer.publish_many([Outgoing(fields={}, key="k")]),
        ):
            with pytest.raises(RoutingUnavailableError):
                call()
        proxy.resume()
        eventually(lambda: producer.publish({}, key="k"), ignoring=(CoordError,), what="publishing again")
    assert sum(lengths(bench)) == 2


@pytest.mark.parametrize("what", ["epoch", "incarnation"])
def test_layout_that_went_backwards_is_refused_for_good(bench: Bench, what: str) -> None:
    bench.create()
    stored = bench.redis.hgetall(bench.record)
    nonce = stored["layout"].split(":")[2]
    later = {"epoch": "5", "layout": f"5:4:{nonce}"} if what == "epoch" else {what: str(int(stored[what]) + 1)}
    bench.redis.hset(bench.record, mapping=later)
    with Producer(bench.stream, redis=bench.url) as producer:
        producer.refresh()
        bench.redis.hset(bench.record, mapping=stored)
        with pytest.raises(RoutingRegressionError):
            producer.refresh()
        bench.redis.hset(bench.record, mapping=later)
        with pytest.raises(RoutingRegressionError):
            producer.publish({}, key="k")
        with pytest.raises(RoutingRegressionError):
            producer.publish_many([Outgoing(fields={}, key="k")])
    assert sum(lengths(bench)) == 0


def test_unknown_routing_protocol_is_refused(bench: Bench) -> None:
    bench.create()
    bench.redis.hset(bench.record, "routing", "rendezvous-v9")
    with pytest.raises(UnsupportedProtocolError, match="rendezvous-v9"):
        bench.producer.publish({}, key="k")
    with Router(bench.stream, redis=bench.url) as router, pytest.raises(UnsupportedProtocolError):
        router.route("k")
    assert sum(lengths(bench)) == 0


def test_stream_that_is_being_created_takes_nothing_yet(bench: Bench) -> None:
    bench.create()
    bench.redis.hset(bench.record, "state", "creating")
    with pytest.raises(RoutingUnavailableError, match="still being created"):
        bench.producer.publish({}, key="k")
    bench.create(shards=None, exist_ok=True)
    bench.producer.publish({}, key="k")


# --- from coroutines ------------------------------------------------------------------------------------------------


def test_async_producer_does_the_same(bench: Bench, proxy: LossyProxy) -> None:
    bench.create()
    bench.load_scripts()

    async def main() -> None:
        async with AsyncProducer(bench.stream, redis=proxy.url) as producer:
            route = await producer.route("k")
            assert route == bench.producer.route("k")
            first = await producer.publish({}, key="k", event_id="e")
            proxy.drop_next_reply(sha("publish"))
            assert (await producer.publish({}, key="k", event_id="e2")).duplicate
            assert (await producer.publish({}, key="k", event_id="e")).id == first.id
            proxy.drop_next_reply(sha("publish"))
            with pytest.raises(PublishError):
                await producer.publish({}, key="k")
            receipts = await producer.publish_many([Outgoing(fields={}, key=f"k{n}") for n in range(300)])
            assert len(receipts) == 300
            bench.redis.delete(route.stream_key)
            with pytest.raises(NotFoundError):
                await producer.publish({}, key="k")

    asyncio.run(main())


@pytest.mark.parametrize("with_event_ids", [True, False])
def test_entries_after_a_lost_round_trip_do_not_overtake_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, with_event_ids: bool
) -> None:
    bench.create(shards=1)
    honest, calls = SyncRunner.pipeline, []

    def lose_the_first(runner: SyncRunner, commands: Sequence[Command[Any]]) -> Sequence[Any]:
        calls.append(len(commands))
        if len(calls) == 1:
            return [RedisUnavailableError("lost")] * len(commands)
        return honest(runner, commands)

    monkeypatch.setattr(SyncRunner, "pipeline", lose_the_first)
    count = 64 * 100 + 50  # more than one round trip takes
    entries = [
        Outgoing(fields={"n": str(n)}, key="k", event_id=str(n) if with_event_ids else None) for n in range(count)
    ]
    with Producer(bench.stream, redis=bench.url) as producer:
        if with_event_ids:
            producer.publish_many(entries)
        else:
            with pytest.raises(PartialPublishError) as caught:
                producer.publish_many(entries)
            assert sorted(caught.value.failed) == list(range(count))
    stored = [int(fields["n"]) for _, fields in bench.redis.xrange(f"{bench.stream}:0")]
    assert stored == (list(range(count)) if with_event_ids else [])


def test_creating_again_goes_on_where_a_consumer_group_that_vanished_was(bench: Bench) -> None:
    bench.create(shards=1)
    done: list[str] = []
    with Producer(bench.stream, redis=bench.url) as producer:
        producer.publish({"n": "1"}, key="k")
        with Consumer(bench.stream, group=GROUP, redis=bench.url, handler=lambda m: done.append(m.text("n"))):
            eventually(lambda: done == ["1"], what="the first entry")
        bench.redis.xgroup_destroy(f"{bench.stream}:0", GROUP)
        with Admin(bench.url, requested_by="test") as admin:
            admin.create(bench.stream, group=GROUP, exist_ok=True, reason="mend")
        producer.publish({"n": "2"}, key="k")
        with Consumer(bench.stream, group=GROUP, redis=bench.url, handler=lambda m: done.append(m.text("n"))):
            eventually(lambda: "2" in done, what="the second entry")
    assert done == ["1", "2"]
