"""What a type checker says to users. `make check` reads it; an error that is expected and does not come is one, too."""

from __future__ import annotations

from redis_stream_coord import (
    Admin,
    AsyncConsumer,
    AsyncProducer,
    Batch,
    Consumer,
    Message,
    Outgoing,
    Poison,
    Producer,
    Receipt,
    Router,
)

URL = "redis://localhost"


def plain(message: Message) -> None: ...
def plain_list(messages: list[Message]) -> None: ...
def plain_shards(shards: frozenset[int]) -> None: ...
async def coroutine(message: Message) -> None: ...
async def coroutine_list(messages: list[Message]) -> None: ...
async def coroutine_shards(shards: frozenset[int]) -> None: ...


def what_fits() -> None:
    Consumer("s", group="g", redis=URL, handler=plain, poison=Poison(plain, after_deliveries=3))
    Consumer("s", group="g", redis=URL, handler=Batch(plain_list), on_lost=plain_shards)
    AsyncConsumer("s", group="g", redis=URL, handler=coroutine, poison=Poison(coroutine, after_deliveries=3))
    AsyncConsumer("s", group="g", redis=URL, handler=Batch(coroutine_list), on_lost=coroutine_shards)
    with Router("s", redis=URL) as router:
        stream_key: str = router.route("k").stream_key
    with Producer("s", redis=URL) as producer:
        receipt: Receipt = producer.publish({"a": "1", "b": b"2"}, key=stream_key)
    print(receipt)


async def what_fits_coroutines() -> None:
    async with AsyncProducer("s", redis=URL) as producer:
        receipt: Receipt = await producer.publish({"a": "1"}, key=b"k")
    async with AsyncConsumer("s", group="g", redis=URL) as consumer:
        async for message in consumer:
            print(message.text("a"), receipt)


def functions_of_the_other_kind() -> None:
    Consumer("s", group="g", redis=URL, handler=coroutine)  # type: ignore[arg-type]
    Consumer("s", group="g", redis=URL, handler=Batch(coroutine_list))  # type: ignore[arg-type]
    Consumer("s", group="g", redis=URL, poison=Poison(coroutine, after_deliveries=3))  # type: ignore[arg-type]
    Consumer("s", group="g", redis=URL, on_lost=coroutine_shards)  # type: ignore[arg-type]
    AsyncConsumer("s", group="g", redis=URL, handler=plain)  # type: ignore[arg-type]
    AsyncConsumer("s", group="g", redis=URL, handler=Batch(plain_list))  # type: ignore[arg-type]
    AsyncConsumer("s", group="g", redis=URL, poison=Poison(plain, after_deliveries=3))  # type: ignore[arg-type]
    AsyncConsumer("s", group="g", redis=URL, on_lost=plain_shards)  # type: ignore[arg-type]


def other_mistakes() -> None:
    Consumer("s", group="g", redis=URL, handler=plain_list)  # type: ignore[arg-type]
    Consumer("s", group="g", redis=URL, handler=plain, ack="none")  # type: ignore[arg-type]
    Consumer("s", "g", redis=URL, handler=plain)  # type: ignore[call-arg]
    with Producer("s", redis=URL) as producer:
        producer.publish({"a": 1}, key="k")  # type: ignore[dict-item]
        producer.publish({"a": "1"}, key=1)  # type: ignore[arg-type]
        producer.publish({"a": "1"})  # type: ignore[call-arg]
        producer.publish_many([{"a": "1"}])  # type: ignore[list-item]
        producer.publish_many(Outgoing(fields={"a": "1"}, key="k"))  # type: ignore[arg-type]
    with Admin(URL, requested_by="me") as admin:
        admin.create("s", group="g", shards=2)  # type: ignore[call-arg]
        admin.create("s", group="g", shards=2, reason="r", start="latest")  # type: ignore[arg-type]
