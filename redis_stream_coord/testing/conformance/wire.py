"""The commands that the scripts use answer as they do in memory: random sequences, both sides compared step by step.

Within a script, as the library's scripts see the answers. Idle times are left out; so is the lag of a group, which
differs between versions of Redis, and which the library only shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ...commands import Command
from ...runner import SyncRunner
from ..environment import Environment
from .bench import Bench
from .catalogue import case

_SOURCE = """
local answer = redis.pcall(unpack(ARGV))
if type(answer) == 'table' and answer.err then return { 'error', string.match(answer.err, '^%-?(%u+)') } end
if type(answer) == 'table' and answer.ok then return { 'status', answer.ok } end
return { 'answer', answer }
"""
_STEPS = 300
_SEEDS = (1, 2, 3)
_NAMES = ("a", "b", "c")


@attrs.define
class Model:
    """What the generator has to know to ask sensible questions.

    Attributes:
        chance: decides.
        keys: of a stream, a hash and a sorted set.
        live: ids in the stream, or that were.
        deleted: ids that were deleted.
    """

    chance: random.Random
    keys: tuple[str, str, str]
    live: list[str] = attrs.field(factory=list)
    deleted: set[str] = attrs.field(factory=set)
    last: tuple[int, int] = (1, 0)

    def next_id(self) -> str:
        ms, sequence = self.last
        self.last = (ms + self.chance.randint(1, 3), 0) if self.chance.random() < 0.5 else (ms, sequence + 1)
        self.live.append("{}-{}".format(*self.last))
        return self.live[-1]

    def some_id(self) -> str:
        return self.chance.choice(self.live) if self.live else "1-1"

    def claimable(self) -> list[str]:
        """Ids that were never deleted or trimmed: servers differ in what they do with others."""
        found = [entry_id for entry_id in self.live if entry_id not in self.deleted]
        chosen = sorted(self.chance.sample(range(len(found)), min(len(found), 3)))
        return [found[position] for position in chosen] or ["999999-1"]


def _stream(model: Model) -> list[str]:
    chance, stream = model.chance, model.keys[0]
    group, consumer = chance.choice("gh"), chance.choice(_NAMES)
    count = str(chance.randint(1, 4))
    kind = chance.choices(
        ("add", "range", "read", "ack", "pending", "claim", "groups", "consumers", "group", "del", "trim", "other"),
        (30, 10, 20, 10, 10, 8, 8, 6, 5, 3, 2, 3),
    )[0]
    if kind == "add":
        options = chance.choice([[], [], ["NOMKSTREAM"], ["MAXLEN", "~", "1000"]])
        return [
            "XADD",
            stream,
            *options,
            model.next_id(),
            "f",
            str(chance.randint(0, 99)),
            "g",
            "x" * chance.randint(0, 9),
        ]
    if kind == "range":
        return chance.choice(
            [
                ["XRANGE", stream, f"({model.some_id()}", "+", "COUNT", count],
                ["XRANGE", stream, model.some_id(), model.some_id()],
                ["XREVRANGE", stream, "+", "-", "COUNT", "1"],
                ["XLEN", stream],
            ]
        )
    if kind == "read":
        return ["XREADGROUP", "GROUP", group, consumer, "COUNT", count, "STREAMS", stream, ">"]
    if kind == "ack":
        return ["XACK", stream, group, model.some_id(), model.some_id()]
    if kind == "pending":
        one = model.some_id()
        ranges = [["XPENDING", stream, group], ["XPENDING", stream, group, one, one, "1"]]
        return chance.choice([*ranges, ["XPENDING", stream, group, f"({one}", "+", count]])
    if kind == "claim":
        retry = chance.choice([[], ["RETRYCOUNT", count]])
        return ["XCLAIM", stream, group, consumer, "0", *model.claimable(), *retry, "JUSTID"]
    if kind == "groups":
        return ["XINFO", chance.choice(["GROUPS", "STREAM"]), stream]
    if kind == "consumers":
        return ["XINFO", "CONSUMERS", stream, group]
    if kind == "group":
        start = chance.choice(["0", "$", model.some_id()])
        return chance.choice(
            [
                ["XGROUP", "CREATE", stream, group, start, "MKSTREAM"],
                ["XGROUP", "CREATE", stream, group, start],
                ["XGROUP", "CREATE", stream, group, start, "MKSTREAM"],
                ["XGROUP", "DELCONSUMER", stream, group, consumer],
                ["XGROUP", "DESTROY", stream, group],
            ]
        )
    if kind == "del":
        gone = model.some_id()
        model.deleted.add(gone)
        return ["XDEL", stream, gone]
    if kind == "trim":
        least = model.some_id()
        model.deleted.update(model.live)
        return ["XTRIM", stream, "MINID", *chance.choice([[], ["~"]]), least]
    return chance.choice([["EXISTS", stream], ["HGET", stream, "f"], ["XLEN", model.keys[1]], ["ZSCORE", stream, "m"]])


def _hash(model: Model) -> list[str]:
    chance, key = model.chance, model.keys[1]
    field, value = (chance.choice("pqrst") for _ in range(2))
    return chance.choice(
        [
            ["HSET", key, field, value, "u", str(chance.randint(0, 10**16))],
            ["HGET", key, field],
            ["HMGET", key, field, value, "u"],
            ["HDEL", key, field],
            ["HLEN", key],
            ["HKEYS", key],
            ["HGETALL", key],
            ["EXISTS", key],
            ["DEL", key] if chance.random() < 0.2 else ["HGETALL", key],
        ]
    )


def _zset(model: Model) -> list[str]:
    chance, key = model.chance, model.keys[2]
    member, score = chance.choice(_NAMES), str(1_700_000_000_000 + chance.randint(0, 50_000))
    return chance.choice(
        [
            ["ZADD", key, score, member],
            ["ZADD", key, score, member],
            ["ZCARD", key],
            ["ZSCORE", key, member],
            ["ZRANGE", key, "0", "-1", "WITHSCORES"],
            ["ZRANGEBYSCORE", key, "-inf", score],
            ["ZREVRANGE", key, "0", "0", "WITHSCORES"],
            ["ZREM", key, member],
            ["DEL", key] if chance.random() < 0.1 else ["ZCARD", key],
        ]
    )


def plain(words: Sequence[str], answer: Any) -> Any:
    """Return an answer without what may differ: times, the order of unordered things, fields of some versions only."""
    kind, value = answer[0], answer[1] if len(answer) > 1 else None
    if kind != b"answer" or not isinstance(value, list):
        return kind, value
    if words[:2] == ["XINFO", "STREAM"]:
        info = dict(zip(value[::2], value[1::2], strict=False))
        return [info[name] for name in (b"length", b"last-generated-id", b"groups")]
    if words[0] == "XINFO":
        fields = (b"name", b"pending", b"last-delivered-id")
        infos = [dict(zip(info[::2], info[1::2], strict=False)) for info in value]
        # Whether a consumer that never got anything is there differs too.
        shown = [info for info in infos if words[1] == "GROUPS" or info[b"pending"]]
        return sorted([(name, info[name]) for name in fields if name in info] for info in shown)
    if words[0] == "XPENDING" and len(words) == 3:
        consumers = value[3] if len(value) > 3 and value[3] else []
        return value[:3], sorted((name, int(count)) for name, count in consumers)
    if words[0] == "XPENDING":
        return [[row[0], row[1], row[3]] for row in value]
    if words[0] in ("HKEYS",):
        return sorted(value)
    if words[0] == "HGETALL":
        return sorted(zip(value[::2], value[1::2], strict=True))
    return value


def compare(seed: int, keys: tuple[str, str, str], one: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Carry out the same random commands on two servers.

    Parameters:
        seed: decides which.
        keys: of a stream, a hash and a sorted set, of one slot; nothing is there.
        one, other: carry out a command, given as a list, on one key; return the raw answer of the script.

    Raises:
        AssertionError: they answer differently; says where.
    """
    model = Model(random.Random(seed), keys)  # noqa: S311 - has to be repeatable
    for step in range(_STEPS):
        words = model.chance.choices((_stream, _hash, _zset), (6, 2, 2))[0](model)
        answers = plain(words, one(words)), plain(words, other(words))
        assert answers[0] == answers[1], f"seed {seed}, step {step}: {words}: {answers[0]}, in memory {answers[1]}"


def send_with(runner: SyncRunner, key: str) -> Callable[[Sequence[str]], Any]:
    """Return what carries out a command within a script, on a server."""

    def send(words: Sequence[str]) -> Any:
        arguments = [_SOURCE, "1", key, *words]
        return runner.run(Command("EVAL", None, [key], arguments, lambda answer: answer))

    return send


@case
def commands_answer_as_in_memory(bench: Bench) -> None:
    """Streams, consumer groups, hashes and sorted sets answer random commands as the server in memory does."""
    keys = (f"{bench.stream}:{{wire}}:stream", f"{bench.stream}:{{wire}}:hash", f"{bench.stream}:{{wire}}:zset")
    bench.others.update(keys)
    for seed in _SEEDS:
        for key in keys:
            bench.raw("DEL", key)
        with Environment() as env:
            compare(seed, keys, send_with(bench.runner, keys[0]), send_with(env.monitor._runner, keys[0]))
