"""Handle entries in lists: one write to your store for many. Set REDIS_STREAM_COORD_URL to run it."""

from redis_stream_coord import Admin, Batch, Consumer, Message, Outgoing, Producer, RedisSettings

ENTRIES = 20

redis = RedisSettings.from_env()
handled = 0

with Admin(redis, requested_by="batch example") as admin:
    admin.create("orders-batch", group="billing", shards=8, exist_ok=True, reason="to try it out")

with Producer("orders-batch", redis=redis) as producer:
    outgoing = [Outgoing(fields={"number": str(n)}, key=f"customer-{n % 5}") for n in range(ENTRIES)]
    producer.publish_many(outgoing)


def handle(messages: list[Message]) -> None:
    """The messages are of one shard. They are acknowledged together; if this raises, they come one by one."""
    global handled
    print(f"shard {messages[0].shard}: numbers {' '.join(message.text('number') for message in messages)}")
    handled += len(messages)
    if handled >= ENTRIES:
        consumer.request_stop()


consumer = Consumer(
    "orders-batch",
    group="billing",
    redis=redis,
    handler=Batch(handle, max_size=10, within_seconds=0.1),
    handler_threads=1,
)
consumer.run()
print(f"handled {handled} entries")
