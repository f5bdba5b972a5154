"""Fenced publishing against a plain XADD, one at a time and many at once."""

from __future__ import annotations

from collections.abc import Callable

from redis_stream_coord import Outgoing, Producer
from redis_stream_coord.keys import GroupKeys
from tests.benchmarks.measuring import Bench, Table, cost, median, seconds, streams

_SHARDS = 16
_SINGLE = 1_000
_MANY = 5_000
_FIELDS = {"order": "4711", "amount": "19.90", "currency": "EUR"}


def run(bench: Bench) -> None:
    """Print rates, and their ratios to the plain form."""
    with bench.group(_SHARDS) as keys, bench.client() as client:
        fenced = Producer(keys.stream, redis=bench.url)
        plain = Producer(keys.stream, redis=bench.url, fenced=False)
        names = streams(keys, _SHARDS)

        def xadd() -> None:
            for i in range(_SINGLE):
                client.xadd(names[i % _SHARDS], _FIELDS, nomkstream=True)

        def pipelined() -> None:
            for first in range(0, _MANY, 1_000):
                pipe = client.pipeline(transaction=False)
                for i in range(first, first + 1_000):
                    pipe.xadd(names[i % _SHARDS], _FIELDS, nomkstream=True)
                pipe.execute()

        with fenced, plain:
            _compare(
                bench,
                "publish: one at a time",
                _SINGLE,
                {
                    "redis-py XADD": xadd,
                    "publish": lambda: _singles(fenced),
                    "publish, event_id": lambda: _singles(fenced, event_ids=True),
                    "publish, fenced=False": lambda: _singles(plain),
                },
            )
            _compare(
                bench,
                f"publish: {_MANY} at once",
                _MANY,
                {
                    "redis-py pipeline of 1000 XADD": pipelined,
                    "publish_many": lambda: _many(fenced),
                    "publish_many, event_id": lambda: _many(fenced, event_ids=True),
                    "publish_many, fenced=False": lambda: _many(plain),
                },
            )
            _server_cost(bench, keys, fenced)


_numbers = iter(range(10**9))


def _singles(producer: Producer, *, event_ids: bool = False) -> None:
    for i in range(_SINGLE):
        producer.publish(_FIELDS, key=f"key-{i}", event_id=f"event-{next(_numbers)}" if event_ids else None)


def _many(producer: Producer, *, event_ids: bool = False) -> None:
    producer.publish_many(
        Outgoing(fields=_FIELDS, key=f"key-{i}", event_id=f"event-{next(_numbers)}" if event_ids else None)
        for i in range(_MANY)
    )


def _compare(bench: Bench, title: str, count: int, forms: dict[str, Callable[[], None]]) -> None:
    """Measure the forms in turn, so that whatever else the machine does hits all of them."""
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for form in forms.values():
        form()
    for _ in range(bench.rounds):
        for name, form in forms.items():
            taken[name].append(seconds(form))
    base, *_ = taken.values()
    table = Table(title, "form", "entries/s", "us each", "time vs plain")
    for name, times in taken.items():
        ratio = median([mine / plain for mine, plain in zip(times, base, strict=True)])
        table.row(name, count / median(times), median(times) / count * 1e6, f"{ratio:.2f}")
    table.show()


def _server_cost(bench: Bench, keys: GroupKeys, producer: Producer) -> None:
    table = Table("publish: what it costs Redis", "form", "server us/entry")
    with bench.client() as client:
        name = streams(keys, _SHARDS)[0]
        for title, work, command in (
            ("XADD", lambda: [client.xadd(name, _FIELDS) for _ in range(_SINGLE)], "xadd"),
            ("publish", lambda: _singles(producer), "evalsha"),
            ("publish, event_id", lambda: _singles(producer, event_ids=True), "evalsha"),
        ):
            table.row(title, cost(client, command, work).usec / _SINGLE)
    table.show()
