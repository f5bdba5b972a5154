"""Whoever asks Redis for something gets an answer in time, whatever happens to the connection meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from redis_stream_coord import RedisSettings, RedisUnavailableError
from redis_stream_coord.commands import Command
from redis_stream_coord.runner import AsyncRunner, SyncRunner
from tests.integration.kit import SLACK_SECONDS, Bench
from tests.proxy import LossyProxy

pytestmark = pytest.mark.parametrize("server", ["redis7"], indirect=True)


def write(key: str, *, idempotent: bool = False) -> Command[None]:
    return Command("SET", None, [key], [key, "v"], lambda _: None, idempotent)


@pytest.mark.parametrize("together", [True, False])
def test_whoever_waits_for_an_answer_gets_one_when_the_primary_has_become_a_replica(
    bench: Bench, proxy: LossyProxy, together: bool
) -> None:
    """READONLY closes the connections, under commands that are on their way and others that wait behind them."""

    async def main() -> list[Any]:
        runner = AsyncRunner(RedisSettings(proxy.url, timeout_seconds=5.0), together=together)
        try:
            await runner.run(write("before"), retry=False)
            proxy.pause()
            asked = [asyncio.ensure_future(runner.run(write(f"k{n}"), retry=False)) for n in range(150)]
            await asyncio.sleep(0)
            bench.redis.replicaof("127.0.0.1", 1)
            proxy.resume()
            answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
            bench.redis.replicaof("NO", "ONE")
            await runner.run(write("after"), retry=False)
            return answers
        finally:
            await runner.close()

    try:
        answers = asyncio.run(main())
    finally:
        bench.redis.replicaof("NO", "ONE")
    assert len(answers) == 150
    assert all(isinstance(answer, RedisUnavailableError) for answer in answers), answers
    assert any("READONLY" in str(answer) or "read only" in str(answer) for answer in answers)


@pytest.mark.parametrize("cut", ["close", "the server ends the connections"])
def test_whoever_waits_for_an_answer_gets_one_when_the_connections_go(
    bench: Bench, proxy: LossyProxy, cut: str
) -> None:
    async def main() -> list[Any]:
        runner = AsyncRunner(RedisSettings(proxy.url, timeout_seconds=5.0), together=True)
        try:
            await runner.run(write("before"), retry=False)
            proxy.pause()
            # Some are on their way, the others wait for them.
            asked = [asyncio.ensure_future(runner.run(write(f"k{n}"), retry=False)) for n in range(150)]
            await asyncio.sleep(0.05)
            if cut == "close":
                await asyncio.wait_for(runner.close(), 5)
            else:
                proxy.cut()
                proxy.resume()
            return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
        finally:
            await runner.close()

    answers = asyncio.run(main())
    if cut == "close":
        assert all(isinstance(answer, RedisUnavailableError) for answer in answers), answers
    else:
        assert isinstance(answers[0], RedisUnavailableError)
        assert all(answer is None or isinstance(answer, RedisUnavailableError) for answer in answers), answers


@pytest.mark.parametrize("face", ["plain", "coroutine"])
def test_retries_are_over_within_the_timeout(bench: Bench, proxy: LossyProxy, face: str) -> None:
    """The first try is refused, so others follow; and one of those meets silence."""
    settings = RedisSettings(proxy.url, timeout_seconds=2.0)
    proxy.refuse()
    silence = threading.Timer(1.0, lambda: (proxy.pause(), proxy.accept()))

    async def main() -> None:
        runner = AsyncRunner(settings)
        try:
            await runner.run(write("k", idempotent=True))
        finally:
            await runner.close()

    def call() -> None:
        if face == "plain":
            SyncRunner(settings).run(write("k", idempotent=True))
        else:
            asyncio.run(main())

    silence.start()
    began = time.monotonic()
    try:
        with pytest.raises(RedisUnavailableError):
            call()
        took = time.monotonic() - began
    finally:
        silence.join()
        proxy.resume()
    assert 1.5 < took < 2.0 + SLACK_SECONDS
