"""An application: one invoice for each order, in the order in which a customer placed them. See test_billing.py."""

from __future__ import annotations

from redis_stream_coord import Consumer, DeadLetter, Message, RedisSettings, Retry

STREAM, GROUP = "orders", "billing"
REJECTED = "orders-rejected"


class Store:
    """Stands for a database with a unique key, so that an order that comes twice makes one invoice."""

    def __init__(self) -> None:
        self.invoices: dict[str, str] = {}  # order -> customer
        self.duplicates = 0

    def insert(self, order: str, customer: str) -> None:
        if order in self.invoices:
            self.duplicates += 1
        self.invoices.setdefault(order, customer)

    def of(self, customer: str) -> list[str]:
        return [order for order, whose in self.invoices.items() if whose == customer]


def handle(message: Message, store: Store) -> None:
    if message.text("amount") == "0":
        raise ValueError(f"order {message.text('order')} is for nothing")
    assert message.key is not None
    store.insert(message.text("order"), message.key.decode())


def make_consumer(redis: str | RedisSettings, store: Store, member: str | None = None) -> Consumer:
    """Return the consumer as it runs in production."""
    return Consumer(
        STREAM,
        group=GROUP,
        redis=redis,
        member=member,
        handler=lambda message: handle(message, store),
        retry=Retry(backoff_seconds=1.0, max_backoff_seconds=60.0),
        poison=DeadLetter(REJECTED, after_deliveries=3),
    )
