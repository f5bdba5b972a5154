"""Create a group, publish twenty entries, handle them, and end. Set REDIS_STREAM_COORD_URL to run it."""

from redis_stream_coord import Admin, Consumer, Message, Producer, RedisSettings

ENTRIES = 20

# Reads REDIS_STREAM_COORD_URL, for example redis://localhost:6379/0.
redis = RedisSettings.from_env()
handled = 0

# The stream "orders" gets eight shards. Entries are kept in the Redis streams orders:0 to orders:7.
with Admin(redis, requested_by="first program") as admin:
    admin.create("orders", group="billing", shards=8, exist_ok=True, reason="to try it out")

# Entries with the same key go to the same shard, and are handled in the order in which they were published.
with Producer("orders", redis=redis) as producer:
    for number in range(ENTRIES):
        producer.publish({"number": str(number)}, key=f"customer-{number % 5}")


def handle(message: Message) -> None:
    """Called in a worker thread. When it returns, the entry is acknowledged; when it raises, it is called again."""
    global handled
    print(f"shard {message.shard}: number {message.text('number')} of {message.key!r}")
    handled += 1
    if handled >= ENTRIES:
        consumer.request_stop()


# With one handler thread the counter needs no lock. Without that argument, shards are handled in parallel.
consumer = Consumer("orders", group="billing", redis=redis, handler=handle, handler_threads=1)
consumer.run()  # until request_stop(), SIGTERM or SIGINT
print(f"handled {handled} entries")
