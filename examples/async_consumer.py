"""The same with coroutines. Set REDIS_STREAM_COORD_URL to run it."""

import asyncio

from redis_stream_coord import AsyncAdmin, AsyncConsumer, AsyncProducer, Message, RedisSettings

ENTRIES = 20


async def main() -> None:
    redis = RedisSettings.from_env()
    handled = 0

    async with AsyncAdmin(redis, requested_by="async example") as admin:
        await admin.create("orders-async", group="billing", shards=8, exist_ok=True, reason="to try it out")

    async with AsyncProducer("orders-async", redis=redis) as producer:
        for number in range(ENTRIES):
            await producer.publish({"number": str(number)}, key=f"customer-{number % 5}")

    async def handle(message: Message) -> None:
        nonlocal handled
        await asyncio.sleep(0.001)  # where your own work waits for something
        print(f"shard {message.shard}: number {message.text('number')} of {message.key!r}")
        handled += 1
        if handled >= ENTRIES:
            consumer.request_stop()

    consumer = AsyncConsumer("orders-async", group="billing", redis=redis, handler=handle)
    await consumer.run()  # until request_stop(), SIGTERM or SIGINT
    print(f"handled {handled} entries")


asyncio.run(main())
