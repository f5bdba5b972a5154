"""A loop instead of a handler. Set REDIS_STREAM_COORD_URL to run it."""

from redis_stream_coord import Admin, Consumer, Producer, RedisSettings

ENTRIES = 20

redis = RedisSettings.from_env()
handled = 0

with Admin(redis, requested_by="iterate example") as admin:
    admin.create("orders-iterate", group="billing", shards=8, exist_ok=True, reason="to try it out")

with Producer("orders-iterate", redis=redis) as producer:
    for number in range(ENTRIES):
        producer.publish({"number": str(number)}, key=f"customer-{number % 5}")

# One message at a time, of whichever shard has one. Asking for the next message acknowledges the last one.
# `with` makes the consumer finish and leave its group, however the loop ends; Ctrl-C too.
with Consumer("orders-iterate", group="billing", redis=redis) as consumer:
    for message in consumer:
        print(f"shard {message.shard}: number {message.text('number')} of {message.key!r}")
        handled += 1
        if handled >= ENTRIES:
            # `break` would leave this message unacknowledged; so would an exception in the loop.
            consumer.request_stop()
print(f"handled {handled} entries")
