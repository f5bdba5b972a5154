"""A producer that calls XADD itself, with the shard that Router names. Set REDIS_STREAM_COORD_URL to run it.

Without Producer nothing checks in the shard that the layout is current, and no event id is remembered.
"""

import os

import redis

from redis_stream_coord import Admin, Consumer, Message, RedisSettings, Router

ENTRIES = 20

settings = RedisSettings.from_env()
client = redis.Redis.from_url(os.environ["REDIS_STREAM_COORD_URL"])
handled = 0

with Admin(settings, requested_by="router example") as admin:
    admin.create("orders-router", group="billing", shards=8, exist_ok=True, reason="to try it out")

with Router("orders-router", redis=settings) as router:
    for number in range(ENTRIES):
        key = f"customer-{number % 5}"
        route = router.route(key)  # no I/O while the cached layout is valid
        # "rsc-key" is where consumers look for the key; without it Message.key is None.
        # NOMKSTREAM: a shard that is gone must not come back as a stream without its group.
        if client.xadd(route.stream_key, {"rsc-key": key, "number": str(number)}, nomkstream=True) is None:
            raise SystemExit(f"the stream {route.stream_key} does not exist")
client.close()


def handle(message: Message) -> None:
    global handled
    print(f"shard {message.shard}: number {message.text('number')} of {message.key!r}")
    handled += 1
    if handled >= ENTRIES:
        consumer.request_stop()


consumer = Consumer("orders-router", group="billing", redis=settings, handler=handle, handler_threads=1)
consumer.run()
print(f"handled {handled} entries")
