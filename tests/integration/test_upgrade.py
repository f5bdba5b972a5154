"""Two releases in one group at once: scripts of another text, and another version of the protocol."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from redis_stream_coord import UnsupportedProtocolError
from redis_stream_coord.commands import membership
from redis_stream_coord.scripts import catalogue
from tests.integration.kit import STEADY, Bench, Crew, Peer, two_servers
from tests.waiting import eventually


def accept(bench: Bench, low: int, high: int) -> None:
    """What an operator does before the first peer of a new protocol starts, and after the last old one."""
    for key in (bench.keys.metadata, bench.record):
        bench.redis.hset(key, mapping={"protocol_min": low, "protocol_max": high})


def known_scripts(bench: Bench) -> list[bool]:
    text = "\n-- of another release"
    shas = [hashlib.sha1((script.source + text).encode()).hexdigest() for script in catalogue().values()]
    return list(bench.redis.script_exists(*shas))


@two_servers
def test_a_group_is_replaced_member_by_member_by_a_release_with_other_scripts(
    bench: Bench, crew: Crew, tmp_path: Path
) -> None:
    bench.create(shards=4, timings=STEADY)
    old = [crew.start("a"), crew.start("b")]
    bench.settled(["a", "b"])
    ids = [entry for shard in range(4) for entry in bench.fill(shard, 5)]
    first = crew.child("c", tmp_path, protocol=1)
    bench.settled(["a", "b", "c"])
    assert any(known_scripts(bench)), "they are the scripts of another release"
    ids += [entry for shard in range(4) for entry in bench.fill(shard, 5)]
    old[0].consumer.request_stop()
    assert old[0].consumer.wait(10)
    second = crew.child("d", tmp_path, protocol=1)
    bench.settled(["b", "c", "d"])
    old[1].consumer.request_stop()
    assert old[1].consumer.wait(10)
    bench.settled(["c", "d"])
    ids += [entry for shard in range(4) for entry in bench.fill(shard, 5)]

    def handled() -> list[str]:
        children = [note["id"] for child in (first, second) for note in child.notes("finished")]
        return [*children, *(entry for member in old for entry in member.recorder.done())]

    eventually(lambda: set(ids) <= set(handled()), within_seconds=20, what="all entries are handled")
    assert len(handled()) == len(ids), "each of them once"
    assert bench.view().violations() == []


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_a_release_with_a_new_protocol_waits_until_the_group_accepts_it(
    bench: Bench, crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.create(shards=2, timings=STEADY)
    a = crew.start("a")
    a.owns(0, 1)
    newer = crew.child("n", tmp_path, protocol=2)
    # What it is told, asked in its place.
    with monkeypatch.context() as patch:
        patch.setattr(membership, "PROTOCOL", 2)
        error = Peer(bench, "p").refusal()
    assert isinstance(error, UnsupportedProtocolError)
    bench.heartbeats_pass("a", 5)
    assert newer.notes("assigned") == []
    a.finishes(*bench.fill(0, 3))
    assert set(bench.view().members) == {"a"}

    accept(bench, 1, 2)
    newer.notes_eventually("assigned")
    bench.settled(["a", "n"])
    accept(bench, 2, 2)
    eventually(lambda: not a.consumer.health.ok, what="the old release stops")
    assert "protocol" in a.consumer.health.waits_for
    eventually(lambda: set(bench.view().members) == {"n"}, within_seconds=20, what="the old member expires")
    alone = {0: "n", 1: "n"}
    eventually(lambda: bench.view().owners == alone, within_seconds=10, what="the new one has everything")
