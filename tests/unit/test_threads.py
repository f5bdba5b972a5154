"""Worker threads: daemons, few, in order; whoever waits gets the result, whatever it is."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Iterator

import pytest

from redis_stream_coord.threads import DaemonThreads
from tests.waiting import aeventually, eventually


@contextlib.contextmanager
def made(limit: int) -> Iterator[DaemonThreads]:
    threads = DaemonThreads(limit, "test")
    try:
        yield threads
    finally:
        threads.close()
        eventually(lambda: not any(thread.is_alive() for thread in threads.threads), what="all threads have ended")


class Gate:
    """Functions that block until it is opened, and how many do so."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.lock = threading.Lock()
        self.inside = 0
        self.most = 0

    def enter(self) -> str:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self.opened.wait(10)
        with self.lock:
            self.inside -= 1
        return threading.current_thread().name


def test_a_function_runs_in_a_daemon_thread_with_a_name() -> None:
    with made(2) as threads:
        thread = asyncio.run(threads.call(threading.current_thread))
        assert thread in threads.threads
        assert thread.daemon
        assert thread.name == "test-0"


def test_arguments_and_result() -> None:
    with made(1) as threads:
        assert asyncio.run(threads.call(divmod, 17, 5)) == (3, 2)
        assert asyncio.run(threads.call(lambda: None)) is None


@pytest.mark.parametrize("error", [ValueError("v"), KeyError("k"), TimeoutError()])
def test_an_exception_comes_to_whoever_waits(error: Exception) -> None:
    def fail() -> None:
        raise error

    async def scenario() -> None:
        with pytest.raises(type(error)) as raised:
            await threads.call(fail)
        assert raised.value is error
        assert await threads.call(lambda: 1) == 1

    with made(1) as threads:
        asyncio.run(scenario())


@pytest.mark.parametrize(
    "error", [StopIteration(), asyncio.CancelledError(), GeneratorExit(), SystemExit(1), KeyboardInterrupt()]
)
def test_what_asyncio_takes_for_something_else_comes_as_a_failure(error: BaseException) -> None:
    """A future cannot carry the first, which a bare `next()` raises; the others would end the wrong thing."""

    def fail() -> None:
        raise error

    async def scenario() -> None:
        with pytest.raises(RuntimeError, match=type(error).__name__) as raised:
            await asyncio.wait_for(threads.call(fail), 5)
        assert raised.value.__cause__ is error

    with made(1) as threads:
        asyncio.run(scenario())


def test_no_more_than_the_limit_at_once_and_all_of_it() -> None:
    async def scenario() -> None:
        calls = [asyncio.ensure_future(threads.call(gate.enter)) for _ in range(10)]
        await aeventually(lambda: gate.inside == 3, what="three at once")
        gate.opened.set()
        await asyncio.gather(*calls)

    gate = Gate()
    with made(3) as threads:
        asyncio.run(scenario())
        assert gate.most == 3
        assert len(threads.threads) == 3


def test_one_thread_is_enough_for_one_after_the_other() -> None:
    async def scenario() -> None:
        for _ in range(20):
            await threads.call(lambda: None)

    with made(8) as threads:
        asyncio.run(scenario())
        assert len(threads.threads) == 1


def test_with_one_thread_everything_comes_in_order() -> None:
    async def scenario() -> None:
        await asyncio.gather(*(threads.call(seen.append, number) for number in range(50)))

    seen: list[int] = []
    with made(1) as threads:
        asyncio.run(scenario())
    assert seen == list(range(50))


def test_a_thread_that_nobody_waits_for_any_more_is_still_occupied() -> None:
    """The next call would have been queued behind it, though another thread may be started."""

    async def scenario() -> None:
        stuck = asyncio.ensure_future(threads.call(gate.enter))
        await aeventually(lambda: gate.inside == 1)
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        assert await asyncio.wait_for(threads.call(lambda: 1), 5) == 1
        gate.opened.set()

    gate = Gate()
    with made(2) as threads:
        asyncio.run(scenario())


def test_a_thread_is_used_again_after_its_waiter_was_cancelled() -> None:
    async def scenario() -> None:
        for _ in range(5):
            gate.opened.clear()
            call = asyncio.ensure_future(threads.call(gate.enter))
            await aeventually(lambda: gate.inside == 1)
            call.cancel()
            gate.opened.set()
            await aeventually(lambda: gate.inside == 0)
            await threads.call(lambda: None)

    gate = Gate()
    with made(8) as threads:
        asyncio.run(scenario())
        assert len(threads.threads) <= 2


def test_context_variables_are_those_of_the_caller() -> None:
    variable = contextvars.ContextVar("variable", default="none")

    async def scenario() -> None:
        variable.set("mine")
        assert await threads.call(variable.get) == "mine"
        await threads.call(variable.set, "changed")
        assert variable.get() == "mine"

    with made(1) as threads:
        asyncio.run(scenario())


def test_a_thread_survives_the_loop_that_waited_for_it() -> None:
    async def begin() -> None:
        asyncio.ensure_future(threads.call(gate.enter))  # noqa: RUF006 - left behind on purpose
        await aeventually(lambda: gate.inside == 1)

    gate = Gate()
    with made(1) as threads:
        asyncio.run(begin())  # cancels the task, and closes the loop
        gate.opened.set()
        assert asyncio.run(threads.call(lambda: "next")) == "next"


def test_closing_lets_them_finish_what_they_were_given() -> None:
    async def scenario() -> None:
        calls = [asyncio.ensure_future(threads.call(seen.append, number)) for number in range(5)]
        await asyncio.sleep(0)
        threads.close()
        await asyncio.gather(*calls)

    seen: list[int] = []
    with made(1) as threads:
        asyncio.run(scenario())
        assert seen == [0, 1, 2, 3, 4]


def test_closing_without_a_thread() -> None:
    threads = DaemonThreads(2, "test")
    threads.close()
    assert threads.threads == []
