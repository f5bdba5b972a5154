"""The simulation's Redis against a real one: the same calls at the same times give the same answers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import redis

from redis_stream_coord.commands import Command
from redis_stream_coord.errors import CoordError
from tests.servers import Server
from tests.simulation.judge import Judge
from tests.simulation.profile import profile, schedule
from tests.simulation.store import BEGIN_MS, Store
from tests.simulation.world import World

# Gives a script the time that a key says, and ids of that time: what the clock of the server would say is not known.
_VIRTUAL_TIME = """
local redis = (function()
  local real = redis
  local function at(call)
    return function(name, ...)
      if name ~= 'TIME' and name ~= 'XADD' then return call(name, ...) end
      local now_ms = real.call('GET', 'now_ms')
      if name == 'TIME' then
        return { string.sub(now_ms, 1, -4), string.format('%.0f', tonumber(string.sub(now_ms, -3)) * 1000) }
      end
      local words = { ... }
      for i = 1, #words do
        if words[i] == '*' then
          words[i] = now_ms .. '-*'
          break
        end
      end
      return call(name, unpack(words))
    end
  end
  return setmetatable({ call = at(real.call), pcall = at(real.pcall) }, { __index = real })
end)()
"""
_PLAIN = "return redis.call(unpack(ARGV))"

LATE_DRIVERS = 9  # a seed with many reshardings
IDS = ("0-0", "5", "7-1", "1700000000000-0", "1700000000003-1", "1700000000009-18446744073709551615")


class Real:
    """A real server at a virtual time."""

    def __init__(self, server: Server) -> None:
        self.client: Any = redis.Redis(host="127.0.0.1", port=server.port, protocol=2)
        self._known: dict[str, str] = {}

    def at(self, ms: int) -> None:
        self.client.set("now_ms", ms)

    def script(self, source: str, keys: Iterable[Any], arguments: Iterable[Any]) -> Any:
        if source not in self._known:
            self._known[source] = self.client.script_load(_VIRTUAL_TIME + source)
        keys = list(keys)
        try:
            return self.client.execute_command("EVALSHA", self._known[source], len(keys), *keys, *arguments)
        except redis.ResponseError as error:
            return error

    def run(self, command: Command[Any]) -> Any:
        if command.script is not None:
            return self.script(command.script.source, command.keys, command.arguments)
        return self.plain(*command.name.split(), *command.arguments)

    def plain(self, *words: Any) -> Any:
        return self.script(_PLAIN, [], words)


@pytest.fixture
def real(server: Server) -> Real:
    return Real(server)


def _words(error: Exception | str) -> str:
    """The code of an error, without what each version says of it."""
    text = error.message if isinstance(error, CoordError) else str(error)
    return next((word for word in ("NOGROUP", "BUSYGROUP", "WRONGTYPE") if word in text), "ERR")


def _plainly(value: Any) -> Any:
    """Answers as lists, with errors as their codes."""
    if isinstance(value, (list, tuple)):
        return [_plainly(one) for one in value]
    return _words(value) if isinstance(value, Exception) else value


def _as_pairs(flat: list[Any]) -> list[Any]:
    return sorted(zip(flat[::2], flat[1::2], strict=True))


def _comparable(name: str, answer: Any) -> Any:
    answer = _plainly(answer)
    if name == "HGETALL":
        return _as_pairs(answer)
    if isinstance(answer, list) and answer[:1] == [b"OK"]:
        # Redis gives the fields of a hash in no order.
        if name == "describe":
            answer[2] = _as_pairs(answer[2])
        elif name == "resharding":
            answer = [sorted(map(repr, part)) if isinstance(part, list) else part for part in answer]
        elif name == "evidence":
            answer[8::4] = [None] * len(answer[8::4])  # the lag, which the store does not count and nobody trusts
    return answer


def recording(store: Store, seed: int) -> list[tuple[int, Command[Any], Any]]:
    """Run the schedule of a seed, without what takes calls back, and return its calls."""
    of = profile(seed)
    store.recorded = []
    world = World(store, of)
    without = {"rollback", "restore", "lose_leases", "lose_fence", "lose_events", "lose_consumer_group", "lose_route"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Judge, "twice", lambda *_: None)
        world.run([thing for thing in schedule(seed, of) if thing[0] not in without])
        world.heal()
    recorded, store.recorded = store.recorded, None
    return recorded


@pytest.mark.parametrize("server", ["redis7", "redis8", "valkey9"], indirect=True)
def test_the_calls_of_schedules_give_the_same_answers(real: Real, seed: int) -> None:
    store, count = Store(), 0
    for number in (LATE_DRIVERS, *range(seed, seed + 4)):
        calls = recording(store, number)
        real.client.flushdb()
        now = 0
        for ms, command, answer in calls:
            if ms != now:
                now = ms
                real.at(ms)
            theirs = _comparable(command.name, real.run(command))
            assert _comparable(command.name, answer) == theirs, f"call {count}: {command.name} {command.arguments}"
            count += 1
        _compare_contents(store, real)
    print(f"{count} calls")


def _compare_contents(store: Store, real: Real) -> None:
    for key in sorted(real.client.scan_iter()):
        kind = real.client.type(key)
        if kind == b"hash":
            assert store.hash(key) == real.client.hgetall(key), key
        elif kind == b"zset":
            assert {name: float(score) for name, score in store.hash(key).items()} == dict(
                real.client.zrange(key, 0, -1, withscores=True)
            ), key
        elif kind == b"stream":
            assert list(store.ids(key)) == [entry[0] for entry in real.plain("XRANGE", key, "-", "+")], key


# --- command by command ---------------------------------------------------------------------------------------------


def _hash_words(rng: random.Random) -> list[Any]:
    key, field = rng.choice(("h", "g")), lambda: rng.choice(("a", "b", "c", "d"))
    return rng.choice(
        (
            lambda: ["HSET", key, field(), rng.randrange(9), field(), "x"],
            lambda: ["HSETNX", key, field(), "y"],
            lambda: ["HGET", key, field()],
            lambda: ["HMGET", key, field(), field()],
            lambda: ["HDEL", key, field(), field()],
            lambda: ["HLEN", key],
            lambda: ["HGETALL", key],
            lambda: ["HKEYS", key],
            lambda: ["HEXISTS", key, field()],
            lambda: ["EXISTS", key, "z"],
            lambda: ["DEL", key],
            lambda: ["SADD", "set", field(), field()],
            lambda: ["SREM", "set", field()],
            lambda: ["SMEMBERS", "set"],
        )
    )()


def _sorted_set_words(rng: random.Random) -> list[Any]:
    key, member = "z", lambda: rng.choice(("a", "b", "c", "d"))
    score = lambda: rng.choice((1, 2.5, 1700000000123, 3))  # noqa: E731
    return rng.choice(
        (
            lambda: ["ZADD", key, score(), member(), score(), member()],
            lambda: ["ZREM", key, member()],
            lambda: ["ZSCORE", key, member()],
            lambda: ["ZCARD", key],
            lambda: ["ZRANGE", key, 0, -1, "WITHSCORES"],
            lambda: ["ZRANGE", key, 1, 2],
            lambda: ["ZREVRANGE", key, 0, 0, "WITHSCORES"],
            lambda: ["ZRANGEBYSCORE", key, "-inf", score()],
            lambda: ["DEL", key],
        )
    )()


def _stream_words(rng: random.Random) -> list[Any]:
    key, group, consumer = rng.choice(("s", "s", "t")), rng.choice(("g1", "g2")), rng.choice(("c1", "c2", "c3"))
    some = lambda: rng.choice(IDS)  # noqa: E731
    return rng.choice(
        (
            *[lambda: ["XADD", key, *rng.choice(([], ["NOMKSTREAM"])), "*", "f", rng.randrange(99)]] * 6,
            lambda: ["XADD", key, "MAXLEN", "5", "*", "f", "v", "g", "w"],
            lambda: ["XLEN", key],
            lambda: ["XDEL", key, some(), some()],
            lambda: ["XTRIM", key, "MINID", some()],
            lambda: ["XTRIM", key, "MAXLEN", rng.randrange(6)],
            lambda: ["XRANGE", key, rng.choice(("-", some(), "(" + some())), rng.choice(("+", some()))],
            lambda: ["XRANGE", key, "-", "+", "COUNT", rng.randrange(1, 4)],
            lambda: ["XREVRANGE", key, "+", "-", "COUNT", rng.randrange(1, 3)],
            *[lambda: ["XGROUP", "CREATE", key, group, rng.choice(("0", "$", some())), *rng.choice(([], ["MKSTREAM"]))]]
            * 3,
            lambda: ["XGROUP", "DESTROY", key, group],
            lambda: ["XGROUP", "DELCONSUMER", key, group, consumer],
            lambda: ["XINFO", "GROUPS", key],
            lambda: ["XINFO", "CONSUMERS", key, group],
            *[lambda: ["XREADGROUP", "GROUP", group, consumer, "COUNT", rng.randrange(1, 4), "STREAMS", key, ">"]] * 4,
            lambda: ["XACK", key, group, some(), some()],
            lambda: ["XPENDING", key, group],
            *[lambda: ["XPENDING", key, group, rng.choice(("-", "(" + some())), "+", rng.randrange(1, 9)]] * 2,
            lambda: ["XCLAIM", key, group, consumer, 0, some(), some(), *rng.choice(([], ["JUSTID"]))],
            lambda: ["XCLAIM", key, group, consumer, 0, some(), "RETRYCOUNT", 7, "JUSTID"],
            lambda: ["DEL", key],
        )
    )()


def _same_shape(words: list[Any], answer: Any) -> Any:
    """Leave out what the store does not count: idle times, and what newer versions add."""
    answer = _plainly(answer)
    if not isinstance(answer, list):
        return answer
    if words[0] in ("HGETALL", "HKEYS", "SMEMBERS"):
        return sorted(answer)
    if words[0] == "XPENDING" and len(words) > 3:
        return [[row[0], row[1], row[3]] for row in answer]
    if words[0] == "XINFO":
        wanted = (b"name", b"consumers", b"pending", b"last-delivered-id")
        found = [dict(zip(info[::2], info[1::2], strict=True)) for info in answer]
        return [{name: info[name] for name in wanted if name in info} for info in found]
    return answer


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
@pytest.mark.parametrize(
    "draw", [_hash_words, _sorted_set_words, _stream_words], ids=["hashes", "sorted sets", "streams"]
)
def test_random_commands_give_the_same_answers(
    real: Real, seed: int, draw: Callable[[random.Random], list[Any]]
) -> None:
    rng, store = random.Random(seed), Store()
    for number in range(3000):
        if number % 10 == 0:
            store.ms = BEGIN_MS + number // 100
            real.at(store.ms)
        words = draw(rng)
        try:
            ours = store.plain(str(words[1]), *words)
        except CoordError as error:
            ours = error
        theirs = real.plain(*words)
        assert _same_shape(words, ours) == _same_shape(words, theirs), f"command {number}: {words}"


def test_calls_can_be_taken_back(seed: int) -> None:
    """Whatever was done since a moment, and taken back, has left no trace."""
    rng, store = random.Random(seed), Store()

    def look() -> list[Any]:
        seen = [_plainly(store.plain("s", *words)) for words in (("XRANGE", "s", "-", "+"), ("XRANGE", "t", "-", "+"))]
        return [*seen, *(sorted(store.hash(key).items()) for key in (b"h", b"g", b"z"))]

    def act(count: int) -> None:
        for _ in range(count):
            words = rng.choice((_hash_words, _sorted_set_words, _stream_words))(rng)
            with contextlib.suppress(CoordError):
                store.plain(str(words[1]), *words)

    for _ in range(50):
        act(20)
        before, calls = look(), store.calls
        act(30)
        store.take_back(calls)
        assert look() == before
