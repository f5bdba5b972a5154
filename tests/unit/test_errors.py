"""The hierarchy, the table of refusals, and the translation of redis-py's exceptions."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import redis.exceptions

from redis_stream_coord import commands, errors
from redis_stream_coord.errors import REFUSALS, CoordError, PartialPublishError, RateLimitedError, Refusal, refused
from redis_stream_coord.keys import GroupKeys
from redis_stream_coord.models import Receipt
from redis_stream_coord.settings import RedisSettings
from redis_stream_coord.translation import translate

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CoordError)]


def make(kind: type[CoordError]) -> CoordError:
    """An instance with everything that it can carry."""
    where = {"stream": "orders", "hint": "Do this."}
    if issubclass(kind, PartialPublishError):
        return kind("m", receipts=[Receipt("1-0", 0, False), None], failed={1: CoordError("why")}, **where)
    if issubclass(kind, RateLimitedError):
        return kind("m", retry_after_seconds=1.5, **where)
    return kind("m", group="billing", member="a", shard=3, retriable=True, **where)


def test_the_docstring_draws_the_hierarchy() -> None:
    """Every class stands in it, under its base."""
    assert errors.__doc__ is not None
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"(?:    )([│ ]*)(?:[├└]── )?([A-Z]\w+Error)\b", line)
        if match:
            depth = 0 if "──" not in line else 1 + len(match[1]) // 4
            path[depth:] = [match[2]]
            drawn[match[2]] = path[depth - 1] if depth else "Exception"
    assert drawn == {kind.__name__: kind.__bases__[0].__name__ for kind in CLASSES}


def test_all_is_complete() -> None:
    assert len(errors.__all__) == len(set(errors.__all__))
    assert {kind.__name__ for kind in CLASSES} <= set(errors.__all__)
    assert all(hasattr(errors, name) for name in errors.__all__)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("remake", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_an_error_survives_being_sent_to_another_process(kind: type[CoordError], remake: object) -> None:
    error = make(kind)
    error.word, error.detail = "WORD", "detail"
    again = remake(error)  # type: ignore[operator]
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.args == error.args
    mine, its = dict(vars(again)), dict(vars(error))
    if issubclass(kind, PartialPublishError):
        assert [str(e) for e in mine.pop("failed").values()] == [str(e) for e in its.pop("failed").values()]
    assert mine == its


def test_the_text_says_what_happened_to_whom_and_what_to_do() -> None:
    error = CoordError("it broke", stream="orders", group="billing", member="a", shard=0, hint="Do this.")
    assert str(error) == "it broke (stream 'orders', group 'billing', member 'a', shard 0). Do this."
    assert str(CoordError("it broke")) == "it broke"
    assert str(CoordError("it broke", hint="Do this.")) == "it broke. Do this."


def test_retriable_is_of_the_class_unless_said_otherwise() -> None:
    assert not CoordError("m").retriable
    assert errors.RedisUnavailableError("m").retriable
    assert not errors.RedisUnavailableError("m", retriable=False).retriable
    assert errors.PublishError("m", retriable=True).retriable


def test_a_wrong_setting_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="wrong"):
        raise errors.ConfigError("wrong")


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", REFUSALS)
def test_a_refusal_becomes_its_exception(word: str) -> None:
    error = refused(word, "some detail", stream="orders", group="billing", member="a", shard=1)
    assert type(error) is REFUSALS[word].error
    assert (error.word, error.detail, error.retriable) == (word, "some detail", REFUSALS[word].retriable)
    assert (error.stream, error.group, error.member, error.shard) == ("orders", "billing", "a", 1)
    assert "{" not in str(error)
    assert error.hint
    assert ("{detail}" in REFUSALS[word].message) == ("some detail" in error.message)


@pytest.mark.parametrize("word", REFUSALS)
def test_a_refusal_without_details_still_reads_well(word: str) -> None:
    text = str(refused(word))
    assert "{" not in text
    assert ": ." not in text
    assert not REFUSALS[word].message.endswith(".")


@pytest.mark.parametrize("word", REFUSALS)
def test_every_refusal_says_what_to_do_next(word: str) -> None:
    refusal: Refusal = REFUSALS[word]
    assert refusal.hint.endswith((".", "milliseconds."))
    assert re.fullmatch("[A-Z][A-Z_]*[A-Z]", word)


def test_an_unknown_word_comes_from_another_release() -> None:
    error = refused("SOMETHING_NEW", "x")
    assert type(error) is CoordError
    assert error.word == "SOMETHING_NEW"
    assert "SOMETHING_NEW x" in str(error)
    assert "release" in error.hint


def test_details_with_braces_are_left_alone() -> None:
    assert "{x}" in str(refused("FENCED", "key {x}"))


# --- what redis-py raises -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.ConnectionError("gone"),
        redis.exceptions.TimeoutError("slow"),
        redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
        redis.exceptions.ReadOnlyError("You can't write against a read only replica."),
        redis.exceptions.ClusterDownError("CLUSTERDOWN The cluster is down"),
        redis.exceptions.MasterDownError("Link with MASTER is down"),
        redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        redis.exceptions.ResponseError("OOM command not allowed when used memory > 'maxmemory'."),
        redis.exceptions.ResponseError("READONLY You can't write against a read only replica."),
        redis.exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."),
        redis.exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
        redis.exceptions.ResponseError("BUSY Redis is busy running a script."),
        ConnectionResetError("reset"),
        TimeoutError("slow"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_redis_is_away(error: Exception) -> None:
    translated = translate(error, "heartbeat")
    assert type(translated) is errors.RedisUnavailableError
    assert translated.retriable
    assert "heartbeat" in str(translated)


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.NoPermissionError("this user has no permissions to run the 'evalsha' command"),
        redis.exceptions.ResponseError("NOPERM this user has no permissions"),
        redis.exceptions.AuthenticationError("invalid username-password pair"),
        redis.exceptions.ResponseError("WRONGPASS invalid username-password pair"),
        redis.exceptions.AuthenticationError("NOAUTH Authentication required."),
    ],
)
def test_redis_refuses_the_user(error: Exception) -> None:
    translated = translate(error, "heartbeat")
    assert type(translated) is errors.PermissionDeniedError
    assert not translated.retriable
    assert translated.hint


def test_somebody_else_wrote_to_our_keys() -> None:
    error = redis.exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
    assert type(translate(error, "read")) is errors.CorruptMetadataError


def test_it_is_said_where_redis_should_be_and_whom_it_concerns() -> None:
    settings = RedisSettings("redis://user:secret@[::1]:6380/0")
    command = commands.claim(GroupKeys("orders", "billing"), commands.Fence(3, "a", "nonce", 1, 1))
    away = translate(redis.exceptions.TimeoutError("Timeout connecting"), "claim", command, settings)
    assert (away.stream, away.group, away.member, away.shard) == ("orders", "billing", "a", 3)
    assert "claim got no answer from Redis at [::1]:6380: TimeoutError: Timeout connecting (stream" in str(away)
    assert "secret" not in str(away)
    assert "can be reached" in away.hint
    odd = redis.exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
    wrong = translate(odd, "claim", command, settings)
    assert wrong.shard == 3
    assert "redis-stream:coord:{orders:3}:fence:billing with TYPE" in wrong.hint


@pytest.mark.parametrize(
    ("url", "error", "remedy"),
    [
        ("redis+cluster://a", "Cluster mode is not enabled on this node", "take redis://"),
        ("redis+sentinel://a/b", "unknown command 'SENTINEL', with args beginning with: 'MASTERS'", "name one"),
        ("redis://a/99", "DB index is out of range", "smaller number"),
    ],
)
def test_the_url_of_another_kind_of_server(url: str, error: str, remedy: str) -> None:
    translated = translate(redis.exceptions.ResponseError(error), "layout", settings=RedisSettings(url))
    assert type(translated) is errors.ConfigError
    assert remedy in translated.hint
    assert str(RedisSettings(url).address) in str(translated)


def test_a_node_of_a_cluster_by_the_url_of_a_single_server() -> None:
    moved = redis.exceptions.MovedError("1 127.0.0.1:7001")
    assert "redis+cluster://" in translate(moved, "layout", settings=RedisSettings("redis://a")).hint
    # On a Cluster it only says that slots are on the move.
    assert translate(moved, "layout", settings=RedisSettings("redis+cluster://a")).retriable


def test_a_sentence_ends_once() -> None:
    assert str(CoordError("it broke.", hint="Do this.")) == "it broke. Do this."
    assert str(CoordError("is it right?", hint="Do this.")) == "is it right? Do this."


def test_anything_else_keeps_its_text() -> None:
    translated = translate(redis.exceptions.ResponseError("something odd"), "read")
    assert type(translated) is CoordError
    assert "ResponseError: something odd" in str(translated)
