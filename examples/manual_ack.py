"""Acknowledge later than the handler returns: collect, store together, then acknowledge.

Set REDIS_STREAM_COORD_URL to run it. To handle entries in lists `Batch` is simpler: see batch.py.
"""

import threading

from redis_stream_coord import Admin, Consumer, FencedError, Message, Producer, RedisSettings

ENTRIES = 20

redis = RedisSettings.from_env()
lock = threading.Lock()  # handlers of several shards and the callback run in different threads
collected: list[Message] = []
stored = 0

with Admin(redis, requested_by="manual example") as admin:
    admin.create("orders-manual", group="billing", shards=8, exist_ok=True, reason="to try it out")

with Producer("orders-manual", redis=redis) as producer:
    for number in range(ENTRIES):
        producer.publish({"number": str(number)}, key=f"customer-{number % 5}")


def store() -> None:
    global stored
    print(f"storing numbers {' '.join(message.text('number') for message in collected)}")
    for message in collected:
        try:
            message.ack()
        except FencedError:
            print(f"lost shard {message.shard}: {message.id} is handled by another member")
    stored += len(collected)
    collected.clear()


def handle(message: Message) -> None:
    with lock:
        collected.append(message)
        if len(collected) >= 7:
            store()
        if stored + len(collected) >= ENTRIES:
            consumer.request_stop()


# A shard counts as drained when no handler runs, acknowledged or not. So what was collected has to be stored here.
def on_revoked(shards: frozenset[int]) -> None:
    print(f"giving up shards {sorted(shards)}")
    with lock:
        store()


consumer = Consumer("orders-manual", group="billing", redis=redis, handler=handle, ack="manual", on_revoked=on_revoked)
consumer.run()
print(f"stored {stored} entries")
