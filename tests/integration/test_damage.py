"""Stored records damaged by hand: whoever needs what is damaged refuses, by name, and writes nothing."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from redis_stream_coord import CoordError, CorruptMetadataError, Timings
from redis_stream_coord.commands import Command, ack, activate, claim, layout, read, register, unregister
from redis_stream_coord.keys import GroupKeys, StreamKeys
from tests.integration.kit import GROUP, STEADY, Bench, Crew, Peer

# Nothing of it may expire while a test goes through all fields.
CALM = Timings(heartbeat_seconds=20.0, lease_seconds=600.0, rebalance_seconds=600.0)
GARBAGE = ("garbage", "", "-1", "1e3", "nan", " 5", "{}", "x=1 y=2")
WORDS = ("CORRUPT_METADATA", "UNSUPPORTED_SCHEMA")


def content(redis: Any, key: str) -> Any:
    """What a key holds, whatever order the server keeps it in."""
    return redis.hgetall(key) if redis.type(key) == "hash" else redis.dump(key)


class Damage:
    """Puts damage on one field after another of a hash, and mends it again.

    Args:
        key: of the hash.
        watched: keys that no refused call may change.
    """

    def __init__(self, bench: Bench, key: str, watched: list[str]) -> None:
        self.redis = bench.redis
        self.key = key
        self.watched = watched

    def each(self) -> Iterator[tuple[str, str | None]]:
        """Yield (field, garbage), or (field, None) where it is removed; the damage is there meanwhile."""
        whole = self.redis.hgetall(self.key)
        for field, value in whole.items():
            for garbage in (None, *GARBAGE):
                if garbage is None:
                    self.redis.hdel(self.key, field)
                else:
                    self.redis.hset(self.key, field, garbage)
                yield field, garbage
                self.redis.hset(self.key, field, value)
                assert self.redis.hgetall(self.key) == whole, (field, garbage)

    def snapshot(self) -> list[Any]:
        return [content(self.redis, key) for key in self.watched]

    def refused(self, what: Any, call: Callable[[], Any], words: tuple[str, ...] = WORDS) -> None:
        """Check that a call is refused with one of these words, and changes nothing."""
        before = self.snapshot()
        with pytest.raises(CoordError) as caught:
            call()
        assert caught.value.word in words, (what, caught.value)
        assert not caught.value.retriable
        assert self.snapshot() == before, what


@pytest.fixture
def peers(bench: Bench) -> tuple[Peer, Peer]:
    """A live group of three shards: `a` owns 0 and 1 and has to drain 2, for which `b` waits."""
    bench.create(shards=3, timings=CALM)
    bench.admin.limit(bench.stream, group=GROUP, mutations=100_000, reason="a test")
    a, b = Peer(bench, "a"), Peer(bench, "b")
    a.beat()
    b.beat()
    for _ in range(2):
        a.beat()
        b.beat()
    assert (set(a.assigned), set(a.revoking), set(b.pending)) == ({0, 1}, {2}, {2})
    return a, b


def watched(bench: Bench) -> list[str]:
    return [bench.keys.metadata, bench.keys.leases, bench.record, *(bench.keys.fence(shard) for shard in range(3))]


# --- the record of a group ------------------------------------------------------------------------------------------


def test_damaged_group_is_refused_by_whoever_needs_the_damaged_field(bench: Bench, peers: tuple[Peer, Peer]) -> None:
    a, b = peers
    damage = Damage(bench, bench.keys.metadata, watched(bench))
    fields = set()
    for field, garbage in damage.each():
        fields.add(field)
        kind, _, name = field.partition(":")
        joiner = Peer(bench, f"joiner-{uuid.uuid4().hex[:6]}")
        calls: dict[str, Callable[[], Any]] = {
            "join": joiner.beat,
            "describe": bench.view,
            "delete": bench.delete,
            "create": lambda: bench.create(shards=3),
        }
        for call_name, call in calls.items():
            # Creating looks at the header only, and that is enough to refuse.
            enough = ("EXISTS",) if call_name == "create" and name and garbage is not None else WORDS
            damage.refused((field, garbage, call_name), call, enough)
        for peer in (a, b):
            if not name or garbage is None or (kind, name) == ("member", peer.member):
                damage.refused((field, garbage, peer.member), peer.beat)
            else:
                # By design a steady heartbeat does not read what belongs to others: then it renews its lease, no more.
                record = bench.record_of()
                peer.beat()
                assert bench.record_of() == record, (field, garbage, peer.member)
        if kind == "shard":
            damage.refused((field, garbage, "leaving"), lambda: a.beat(leaving=True))
        if field == "shard:2":
            damage.refused((field, garbage, "revoked"), lambda: a.beat(revoked=[a.held(2)]))
    assert {"schema", "version", "member:a", "member:b", "shard:0", "shard:2"} <= fields
    assert len(fields) >= 20
    a.beat()
    assert bench.view().violations() == []


@pytest.mark.parametrize("field", ["member:a", "shard:0", "shard:2"])
def test_member_and_shard_that_disagree_are_damage(bench: Bench, peers: tuple[Peer, Peer], field: str) -> None:
    damage = Damage(bench, bench.keys.metadata, watched(bench))
    whole = bench.record_of()
    token = peers[0].held(2 if field == "shard:2" else 0).token
    wrong = [whole[field].replace(str(token), str(token + 100))]
    if field == "shard:2":
        wrong += [whole[field].replace("revoking", "assigned"), whole[field].replace("holder=a", "holder=b")]
        wrong += ["target=b holder=- token=3 state=free deadline_ms=0 hold_until_ms=0"]
    if field == "member:a":
        wrong += [whole[field].replace(f"0:{token},", ""), whole[field].replace("assigned=0:", "assigned=7:")]
    for value in wrong:
        assert value != whole[field]
        bench.redis.hset(bench.keys.metadata, field, value)
        damage.refused((field, value, "join"), Peer(bench, "joiner").beat)
        damage.refused((field, value, "describe"), bench.view)
        damage.refused((field, value, "delete"), bench.delete)
        bench.redis.hset(bench.keys.metadata, field, whole[field])
    peers[0].beat()


@pytest.mark.parametrize("extra", ["member:ghost", "shard:7", "shard:x", "unknown"])
def test_field_too_many_is_damage(bench: Bench, peers: tuple[Peer, Peer], extra: str) -> None:
    damage = Damage(bench, bench.keys.metadata, watched(bench))
    lists = "assigned=- revoking=- pending=-"
    values = {
        "member:ghost": f"nonce=n epoch=9 changed=0 weight=1000 joined_ms=1 state=active {lists}",
        "shard:7": "target=- holder=- token=0 state=free deadline_ms=0 hold_until_ms=0",
    }
    bench.redis.hset(bench.keys.metadata, extra, values.get(extra, "1"))
    for what, call in {"join": Peer(bench, "joiner").beat, "describe": bench.view, "beat": peers[0].beat}.items():
        damage.refused((extra, what), call)
    # Also when the number of members was raised to match, or a field went for it.
    bench.redis.hdel(bench.keys.metadata, "shard:1")
    for what, call in {"join": Peer(bench, "joiner").beat, "describe": bench.view}.items():
        damage.refused((extra, what), call)


def test_unknown_schema_and_protocol_are_told_from_damage(bench: Bench, peers: tuple[Peer, Peer]) -> None:
    key = bench.keys.metadata
    damage = Damage(bench, key, watched(bench))
    bench.redis.hset(key, "schema", "2")
    for call in (peers[0].beat, Peer(bench, "joiner").beat, bench.view, bench.delete):
        damage.refused("schema 2", call, ("UNSUPPORTED_SCHEMA",))
    bench.redis.hset(key, mapping={"schema": "1", "protocol_min": "2", "protocol_max": "3"})
    for call in (peers[0].beat, Peer(bench, "joiner").beat):
        damage.refused("protocol 2 to 3", call, ("UNSUPPORTED_PROTOCOL",))
    bench.redis.hset(key, mapping={"protocol_min": "1"})
    peers[0].beat()


def test_record_of_another_group_is_damage(bench: Bench, peers: tuple[Peer, Peer]) -> None:
    """A backup that was restored under the wrong key."""
    other = GroupKeys(bench.stream, "other")
    bench.redis.restore(other.metadata, 0, raw_dump(bench, bench.keys.metadata))
    with pytest.raises(CorruptMetadataError):
        bench.monitor.describe(bench.stream, group="other")


def raw_dump(bench: Bench, key: str) -> bytes:
    value = bench.runner.run(Command("DUMP", None, [key], [key], lambda answer: answer))
    assert isinstance(value, bytes)
    return value


def test_damaged_group_can_be_deleted_by_force_only_and_is_made_anew(bench: Bench, peers: tuple[Peer, Peer]) -> None:
    before = bench.view()
    bench.redis.hdel(bench.keys.metadata, "version")
    bench.delete(force=True)
    after = bench.create(shards=3)
    assert after.incarnation > before.incarnation
    assert peers[0].refusal().word == "FENCED_MEMBER_EPOCH"


def test_damage_stops_a_running_consumer_until_it_is_mended(
    bench: Bench, crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    bench.create(shards=2, timings=STEADY)
    a = crew.start("a")
    a.owns(0, 1)
    version = bench.record_of()["version"]
    bench.redis.hset(bench.keys.metadata, "version", "garbage")
    a.called("lost")
    assert not a.consumer.health.ok
    assert "damaged" in a.consumer.health.waits_for
    assert "damaged" in caplog.text
    assert a.consumer.assignment == frozenset()
    ids = bench.fill(0)
    assert bench.record_of()["version"] == "garbage"
    bench.redis.hset(bench.keys.metadata, "version", version)
    a.finishes(*ids)
    a.owns(0, 1)
    assert a.consumer.health.ok


# --- the record of a stream -----------------------------------------------------------------------------------------


def test_damaged_stream_record_is_refused(bench: Bench) -> None:
    bench.create(shards=3, timings=CALM)
    keys = StreamKeys(bench.stream)
    damage = Damage(bench, keys.record, watched(bench))
    whole = bench.redis.hgetall(keys.record)
    calls: dict[str, Command[Any]] = {
        "layout": layout(keys),
        "register": register(GroupKeys(bench.stream, "other"), shards=None, routing="jump-v1"),
        "unregister": unregister(bench.keys, registered=1),
        "activate": activate(bench.keys, whole["layout"], incarnation=bench.view().incarnation),
    }
    # Any routing may stand there: it is the producer that knows the protocols, and refuses an unknown one. Of a
    # registered group only the name counts.
    for field, garbage in damage.each():
        if (field == "routing" and garbage) or (field.startswith("group:") and garbage is not None):
            continue
        for name, call in calls.items():
            damage.refused((field, garbage, name), lambda call=call: bench.runner.run(call))
        with pytest.raises(CoordError):
            bench.producer.refresh()


# --- fences ---------------------------------------------------------------------------------------------------------


def test_damaged_fence_lets_nobody_through(bench: Bench) -> None:
    bench.create(shards=1, timings=CALM)
    ids = bench.fill(0, 3)
    peer = Peer(bench, "a")
    peer.beat()
    fence = peer.fence(0)
    bench.runner.run(claim(bench.keys, fence))
    bench.runner.run(read(bench.keys, fence, after="0-0", count=2))
    bench.runner.run(ack(bench.keys, fence, ids[:1]))
    key = bench.keys.fence(0)
    damage = Damage(bench, key, [key])
    calls = {
        "read": read(bench.keys, fence, after=ids[1], count=10),
        "ack": ack(bench.keys, fence, [ids[1]]),
        "claim": claim(bench.keys, fence),
    }
    pending = bench.pending(0)
    seen = set()
    for field, garbage in damage.each():
        seen.add(field)
        if field in ("member", "position", "counts"):
            continue  # for people; see below; and a note about entries that are pending
        if (field, garbage) == ("passed", None):
            continue  # lost: no barrier is passed
        for name, call in calls.items():
            if field != "nonce" and garbage is not None:
                words: tuple[str, ...] = ("CORRUPT_METADATA",)
            elif name == "claim" and field != "nonce":
                continue  # lost, and so lower than any claim: claimed anew
            else:
                words = ("FENCED",)
            damage.refused((field, garbage, name), lambda call=call: bench.runner.run(call), words)
            assert bench.pending(0) == pending
    assert seen >= {"incarnation", "token", "member", "nonce", "position"}


@pytest.mark.parametrize("garbage", ["garbage", "", "-", "5", "5-", "$", "5-x"])
def test_group_is_not_made_anew_at_a_damaged_position(bench: Bench, garbage: str) -> None:
    bench.create(shards=1, timings=CALM)
    bench.fill(0, 3)
    peer = Peer(bench, "a")
    peer.beat()
    fence = peer.fence(0)
    bench.runner.run(claim(bench.keys, fence))
    bench.redis.hset(bench.keys.fence(0), "position", garbage)
    bench.redis.xgroup_destroy(bench.stream_key(0), GROUP)
    damage = Damage(bench, bench.keys.fence(0), [bench.keys.fence(0), bench.stream_key(0)])
    call = read(bench.keys, fence, after="0-0", count=10)
    damage.refused(garbage, lambda: bench.runner.run(call), ("CORRUPT_METADATA",))


# --- keys of the wrong type -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["metadata", "leases", "events"])
def test_group_key_of_the_wrong_type(bench: Bench, peers: tuple[Peer, Peer], which: str) -> None:
    key = getattr(bench.keys, which)
    bench.redis.delete(key)
    bench.redis.set(key, "something else")
    damage = Damage(bench, key, [*watched(bench), key])
    calls: dict[str, Callable[[], Any]] = {
        "join": Peer(bench, "joiner").beat,
        "beat": peers[0].beat,
        "leave": lambda: peers[0].beat(leaving=True),
        "revoked": lambda: peers[0].beat(revoked=[peers[0].held(2)]),
    }
    if which == "metadata":
        calls |= {"describe": bench.view, "delete": bench.delete, "create": lambda: bench.create(shards=3)}
    for what, call in calls.items():
        before = damage.snapshot()
        with pytest.raises(CorruptMetadataError):
            call()
        assert damage.snapshot() == before, what


@pytest.mark.parametrize("which", ["fence", "stream"])
def test_shard_key_of_the_wrong_type(bench: Bench, which: str) -> None:
    bench.create(shards=1, timings=CALM)
    peer = Peer(bench, "a")
    peer.beat()
    fence = peer.fence(0)
    bench.runner.run(claim(bench.keys, fence))
    key = bench.keys.fence(0) if which == "fence" else bench.stream_key(0)
    bench.redis.delete(key)
    bench.redis.set(key, "something else")
    damage = Damage(bench, key, [bench.keys.fence(0), bench.stream_key(0)])
    for call in (
        claim(bench.keys, fence),
        read(bench.keys, fence, after="0-0", count=1),
        ack(bench.keys, fence, ["1-1"]),
    ):
        if (call.name, which) == ("claim", "stream"):
            continue  # it touches the fence only
        before = damage.snapshot()
        with pytest.raises(CorruptMetadataError):
            bench.runner.run(call)
        assert damage.snapshot() == before, call.name


def test_record_key_of_the_wrong_type(bench: Bench) -> None:
    bench.create(shards=1, timings=CALM)
    bench.redis.delete(bench.record)
    bench.redis.set(bench.record, "something else")
    for call in (bench.producer.refresh, lambda: bench.create(shards=1, exist_ok=True)):
        with pytest.raises(CorruptMetadataError):
            call()
    assert bench.redis.get(bench.record) == "something else"
