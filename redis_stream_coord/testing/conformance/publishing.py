"""Producers: routing, event ids, fenced publishing."""

from __future__ import annotations

from ... import commands
from ...errors import PartialPublishError
from ...keys import StreamKeys
from ...models import Outgoing
from ...producer import Producer, Router
from .bench import Bench, refusal
from .catalogue import case


@case
def entries_go_where_their_key_says(bench: Bench) -> None:
    """A published entry is in the shard that the router names, with its key."""
    bench.create()
    with Router(bench.stream, redis=bench.settings) as router:
        for key in ("a", "b", "c", "\u00e9", ""):
            receipt = bench.producer.publish({"v": "1"}, key=key)
            assert receipt.shard == router.route(key).shard
            ((entry_id, flat),) = bench.raw("XRANGE", bench.shard(receipt.shard), receipt.id, receipt.id)
            assert entry_id.decode() == receipt.id
            assert flat == [b"rsc-key", key.encode(), b"v", b"1"]


@case
def event_id_is_stored_once(bench: Bench) -> None:
    """Publishing an event id again yields the entry that is there."""
    bench.create(shards=1)
    first = bench.producer.publish({}, key="k", event_id="e")
    again = bench.producer.publish({}, key="k", event_id="e")
    assert (again.id, again.duplicate, first.duplicate) == (first.id, True, False)
    assert not bench.producer.publish({}, key="k", event_id="other").duplicate
    assert bench.raw("XLEN", bench.shard(0)) == 2


@case
def batch_keeps_the_order_of_each_key(bench: Bench) -> None:
    """`publish_many` gives a receipt for each entry; those of one key are stored in the order given."""
    bench.create()
    receipts = bench.producer.publish_many(
        Outgoing(fields={"n": str(n)}, key=f"key-{n % 7}", event_id=str(n)) for n in range(250)
    )
    assert len({(receipt.shard, receipt.id) for receipt in receipts}) == 250
    for key in range(7):
        places = [tuple(map(int, receipt.id.split("-"))) for receipt in receipts[key::7]]
        assert places == sorted(places)
    again = bench.producer.publish_many([Outgoing(fields={}, key="key-0", event_id="0")])
    assert again[0].duplicate


@case
def remembered_event_ids_are_bounded(bench: Bench) -> None:
    """No more event ids are remembered than the window allows."""
    bench.create(shards=1)
    keys = StreamKeys(bench.stream, bench.settings.key_prefix)
    layout = bench.run(commands.layout(keys)).layout
    for n in range(10):
        entries = [(str(n), [b"v", b"1"])]
        publish = commands.publish(keys, 0, entries, layout=layout, window_ms=3_600_000, window_count=3)
        assert bench.run(publish)[0].word == "OK"
    publish = commands.publish(keys, 0, [("9", []), ("0", [b"v", b"1"])], layout=layout, window_ms=1, window_count=3)
    assert [outcome.word for outcome in bench.run(publish)] == ["DUPLICATE", "OK"]
    assert bench.raw("HLEN", keys.shard(0).published) <= 2 * 4 + 2


@case
def other_layout_is_refused(bench: Bench) -> None:
    """An entry routed by another layout, or to a closed shard, is not stored; an event id that is there is found."""
    bench.create(shards=1)
    keys = StreamKeys(bench.stream, bench.settings.key_prefix)
    layout = bench.run(commands.layout(keys)).layout
    first = bench.producer.publish({}, key="k", event_id="e")

    def word(layout: str, event_id: str | None = None) -> tuple[str, str]:
        publish = commands.publish(keys, 0, [(event_id, [b"v", b"1"])], layout=layout, window_ms=10**6, window_count=9)
        outcome = bench.run(publish)[0]
        return outcome.word, outcome.detail

    assert word("99:9:9")[0] == "STALE_ROUTE"
    assert word("99:9:9", "e") == ("DUPLICATE", first.id)
    bench.raw("HSET", keys.shard(0).route, "state", "closed")
    assert word(layout)[0] == "CLOSED"
    assert word(layout, "e") == ("DUPLICATE", first.id)
    bench.raw("DEL", keys.shard(0).route)
    assert word(layout)[0] == "ROUTE_MISSING"
    assert bench.raw("XLEN", bench.shard(0)) == 1


@case
def partial_failure_names_each_entry(bench: Bench) -> None:
    """When one shard is missing, `publish_many` says which entries were published and why the others were not."""
    bench.create(shards=2)
    keys = [bench.key_of(0), bench.key_of(1)]
    bench.raw("DEL", bench.shard(1))
    error = refusal(
        lambda: bench.producer.publish_many([Outgoing(fields={}, key=key, event_id=key) for key in keys]),
        PartialPublishError,
    )
    assert isinstance(error, PartialPublishError)
    assert error.receipts[0] is not None
    assert {position: failure.word for position, failure in error.failed.items()} == {1: "STREAM_MISSING"}


@case
def no_stream_no_entry(bench: Bench) -> None:
    """Publishing to a stream that was never created fails, and makes nothing."""
    with Producer(bench.stream, redis=bench.settings) as producer:
        error = refusal(lambda: producer.publish({}, key="k"))
    assert error.word == "STREAM_NOT_FOUND"
    assert bench.raw("EXISTS", bench.shard(0)) == 0
