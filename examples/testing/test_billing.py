"""Ten tests of an application, without a server and without waiting. Run them with pytest."""

from __future__ import annotations

import itertools

import pytest
from billing import GROUP, REJECTED, STREAM, Store, make_consumer

from redis_stream_coord import Consumer, FencedError, Message, Producer, PublishError
from redis_stream_coord.testing import Environment, Recorder

_numbers = itertools.count(1)


@pytest.fixture
def env(coord_env: Environment) -> Environment:
    """Four shards, and no consumer yet."""
    coord_env.create(STREAM, group=GROUP, shards=4)
    return coord_env


@pytest.fixture
def store() -> Store:
    return Store()


def start(env: Environment, store: Store, member: str) -> Consumer:
    # Each time it is asked for, env.redis stands for another process.
    consumer = make_consumer(env.redis, store, member)
    consumer.start()
    return consumer


def place(env: Environment, count: int, *, customers: int = 5, amount: str = "10") -> list[str]:
    """Publish so many orders; return their names."""
    orders = [f"order-{next(_numbers)}" for _ in range(count)]
    with Producer(STREAM, redis=env.redis) as producer:
        for number, order in enumerate(orders):
            producer.publish({"order": order, "amount": amount}, key=f"customer-{number % customers}", event_id=order)
    return orders


def test_each_order_makes_an_invoice(env: Environment, store: Store) -> None:
    start(env, store, "a")
    orders = place(env, 20)
    env.settle()
    assert set(store.invoices) == set(orders)
    assert store.duplicates == 0
    assert env.pending(STREAM, group=GROUP) == {}


def test_invoices_of_a_customer_come_in_order(env: Environment, store: Store) -> None:
    start(env, store, "a")
    start(env, store, "b")
    orders = place(env, 20, customers=2)
    env.settle()
    assert store.of("customer-0") == orders[0::2]
    assert store.of("customer-1") == orders[1::2]


def test_order_that_cannot_be_billed_is_put_aside(env: Environment, store: Store) -> None:
    start(env, store, "a")
    place(env, 1, amount="0")
    good = place(env, 5)
    env.advance(10)  # two pauses before the second and the third try
    assert set(store.invoices) == set(good)
    assert len(env.raw(REJECTED)) == 1
    assert env.pending(STREAM, group=GROUP) == {}


def test_newcomer_takes_over_half_of_the_shards(env: Environment, store: Store) -> None:
    a = start(env, store, "a")
    env.settle()
    assert a.assignment == {0, 1, 2, 3}
    b = start(env, store, "b")
    env.settle()
    assert len(a.assignment) == len(b.assignment) == 2
    orders = place(env, 20)
    env.settle()
    assert set(store.invoices) == set(orders)
    assert store.duplicates == 0


def test_orderly_stop_hands_over_without_a_second_delivery(env: Environment, store: Store) -> None:
    a, _ = start(env, store, "a"), start(env, store, "b")
    orders = place(env, 20)
    env.advance(0.001)  # in the midst of it
    a.stop()
    env.settle()
    assert set(store.invoices) == set(orders)
    assert store.duplicates == 0
    assert set(env.owners(STREAM, group=GROUP).values()) == {"b"}


def test_orders_of_a_crashed_process_are_billed_after_its_lease(env: Environment, store: Store) -> None:
    stuck = Recorder(lambda message: env.sleep(3600))
    a = Consumer(STREAM, group=GROUP, redis=env.redis, member="a", handler=stuck)
    a.start()
    orders = place(env, 20)
    env.advance(1)
    env.crash(a)
    start(env, store, "b")
    env.advance(10)
    assert store.invoices == {}  # its lease is still good
    env.advance(env.timings.lease_seconds)
    assert set(store.invoices) == set(orders)


def test_process_that_was_suspended_cannot_acknowledge_what_it_lost(env: Environment, store: Store) -> None:
    kept: list[Message] = []
    a = Consumer(STREAM, group=GROUP, redis=env.redis, member="a", handler=kept.append, ack="manual")
    a.start()
    (order,) = place(env, 1)
    env.settle()
    start(env, store, "b")
    env.expire(a)  # frozen for so long that its lease ran out
    assert set(store.invoices) == {order}
    env.thaw(a)
    assert not kept[0].owned
    with pytest.raises(FencedError):
        kept[0].ack()
    env.settle()
    assert len(a.assignment) == 2  # it is a member again


def test_producer_that_got_no_answer_may_publish_again(env: Environment, store: Store) -> None:
    start(env, store, "a")
    with Producer(STREAM, redis=env.redis) as producer:
        env.lose_replies(of="publish")
        with pytest.raises(PublishError):
            producer.publish({"order": "o", "amount": "1"}, key="c")  # without an event id nobody knows
        env.lose_replies(of="publish")
        receipt = producer.publish({"order": "p", "amount": "1"}, key="c", event_id="p")
    assert receipt.duplicate  # the second try found what the first one had stored
    env.settle()
    assert store.of("c") == ["o", "p"]


def test_outage_of_redis_is_survived(env: Environment, store: Store) -> None:
    a = start(env, store, "a")
    before = place(env, 10)
    env.advance(0.001)
    env.take_redis_away()
    env.advance(60)
    assert a.assignment == set()
    env.bring_redis_back()
    env.advance(5)
    after = place(env, 10)
    env.settle()
    assert a.health.ok
    assert set(store.invoices) == set(before + after)


def test_more_shards_in_the_midst_of_it_keep_the_order(env: Environment, store: Store) -> None:
    start(env, store, "a")
    start(env, store, "b")
    first = place(env, 20)
    env.advance(0.001)
    env.admin.scale(STREAM, shards=8, reason="more customers", wait=False)
    second = place(env, 20)
    env.settle()
    assert set(env.owners(STREAM, group=GROUP)) == set(range(8))
    for number in range(5):
        assert store.of(f"customer-{number}") == first[number::5] + second[number::5]
    assert store.duplicates == 0
