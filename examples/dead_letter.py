"""Move an entry that cannot be handled to another stream, and go on. Set REDIS_STREAM_COORD_URL to run it.

Without `poison=` such an entry is tried for ever, and its shard waits.
"""

import os

import redis

from redis_stream_coord import Admin, Consumer, DeadLetter, Message, Producer, RedisSettings, Retry

ENTRIES = 20
DEAD = "orders-failing-dead"

settings = RedisSettings.from_env()
handled = 0

with Admin(settings, requested_by="dead letter example") as admin:
    admin.create("orders-failing", group="billing", shards=8, exist_ok=True, reason="to try it out")

with Producer("orders-failing", redis=settings) as producer:
    for number in [*range(ENTRIES), -1]:
        producer.publish({"number": str(number)}, key="customer-1")


def handle(message: Message) -> None:
    global handled
    number = int(message.text("number"))
    if number == 13:
        raise ValueError(f"delivery {message.deliveries} of number 13")
    if number < 0:
        consumer.request_stop()
    else:
        handled += 1


consumer = Consumer(
    "orders-failing",
    group="billing",
    redis=settings,
    handler=handle,
    handler_threads=1,
    retry=Retry(backoff_seconds=0.01),
    poison=DeadLetter(DEAD, after_deliveries=3),
)
consumer.run()

with redis.Redis.from_url(os.environ["REDIS_STREAM_COORD_URL"]) as client:
    print(f"{client.xlen(DEAD)} entries in {DEAD}; look with: redis-cli XRANGE {DEAD} - +")
print(f"handled {handled} entries")
