"""The data plane of a shard: claim, read and acknowledge under its fence; what vanished."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs

from ...commands import Command, Page, ack, claim, note_deliveries, outstanding, read, trim
from ...keys import StreamKeys
from .bench import GROUP, Bench, Peer, refusal
from .catalogue import case


def owner(bench: Bench, shards: int = 1, name: str = "a") -> Peer:
    """Return a member that has claimed shard 0 of a new group."""
    bench.create(shards=shards)
    peer = bench.peer(name)
    peer.beat()
    bench.run(claim(bench.keys, peer.fence(0)))
    return peer


def page(bench: Bench, peer: Peer, after: str = "0-0", count: int = 10, max_bytes: int = 1 << 20) -> Page:
    return bench.run(read(bench.keys, peer.fence(0), after=after, count=count, max_bytes=max_bytes))


def ids(page: Page) -> list[str]:
    return [entry.id for entry in page.entries]


def takes_over(bench: Bench, old: Peer, name: str = "b") -> Peer:
    """Let another member have shard 0."""
    new = bench.peer(name)
    old.beat(leaving=True, revoked=[old.held(shard) for shard in old.assigned])
    new.beat()
    bench.run(claim(bench.keys, new.fence(0)))
    return new


def acked(bench: Bench, peer: Peer, entries: Sequence[str], *, delete: bool = False) -> int:
    return bench.run(ack(bench.keys, peer.fence(0), entries, delete=delete))


@case
def fence_only_goes_up(bench: Bench) -> None:
    """A claim under a lower token, or the same one of another session, is refused; the same claim again is not."""
    a = owner(bench)
    fence = a.fence(0)
    bench.run(claim(bench.keys, fence))
    assert refusal(lambda: bench.run(claim(bench.keys, attrs.evolve(fence, nonce="other")))).word == "FENCED"
    assert refusal(lambda: bench.run(claim(bench.keys, attrs.evolve(fence, token=fence.token - 1)))).word == "FENCED"
    bench.run(claim(bench.keys, attrs.evolve(fence, token=fence.token + 1, nonce="next")))
    error = refusal(lambda: bench.run(claim(bench.keys, fence)))
    assert error.detail.split()[:2] == [str(fence.incarnation), str(fence.token + 1)]
    older = attrs.evolve(fence, incarnation=fence.incarnation - 1, token=99)
    assert refusal(lambda: bench.run(claim(bench.keys, older))).word == "AHEAD"


@case
def zombie_can_do_nothing(bench: Bench) -> None:
    """Who lost a shard cannot read from it, acknowledge on it, note deliveries or trim it."""
    a = owner(bench)
    entries = bench.fill(0, 3)
    page(bench, a, count=1)
    fence = a.fence(0)
    b = takes_over(bench, a)
    before = bench.pending()
    zombie: list[Command[Any]] = [
        read(bench.keys, fence, after="0-0", count=10),
        ack(bench.keys, fence, entries[:1]),
        note_deliveries(bench.keys, fence, {entries[0]: 7}),
        outstanding(bench.keys, fence, after="0-0", count=10),
        trim(bench.keys, fence, keep=0, groups=[GROUP]),
    ]
    for command in zombie:
        assert refusal(partial(bench.run, command)).word == "FENCED"
    assert bench.pending() == before
    assert ids(page(bench, b)) == entries


@case
def takeover_begins_with_what_is_pending(bench: Bench) -> None:
    """A new owner gets everything pending, whoever's it was, in order, then what is new."""
    a = owner(bench)
    entries = bench.fill(0, 8)
    assert ids(page(bench, a, count=5)) == entries[:5]
    assert acked(bench, a, [entries[1], entries[3]]) == 2
    b = takes_over(bench, a)
    first = page(bench, b)
    assert ids(first) == [entries[0], entries[2], *entries[4:]]
    assert [entry.deliveries for entry in first.entries] == [2, 1, 1, 1, 1, 1]
    assert first.caught_up
    assert first.wait_after == entries[-1]
    assert {consumer for consumer, _ in bench.pending().values()} == {"b"}


@case
def owner_asks_what_is_pending(bench: Bench) -> None:
    """The ids, whoever has them, page by page; and that changes nothing."""
    a = owner(bench)
    fence = a.fence(0)
    assert bench.run(outstanding(bench.keys, fence, after="0-0", count=10)) == []
    entries = bench.fill(0, 6)
    page(bench, a, count=5)
    acked(bench, a, entries[1:2])
    before = bench.pending()
    assert bench.run(outstanding(bench.keys, fence, after="0-0", count=3)) == [entries[0], *entries[2:4]]
    assert bench.run(outstanding(bench.keys, fence, after=entries[3], count=3)) == [entries[4]]
    assert bench.pending() == before
    acked(bench, a, entries[:5])
    assert bench.run(outstanding(bench.keys, fence, after="0-0", count=3)) == []


@case
def lost_read_loses_nothing(bench: Bench) -> None:
    """A read whose reply was lost, sent again, brings the same entries; none counts as delivered twice."""
    a = owner(bench)
    entries = bench.fill(0, 4)
    assert ids(page(bench, a, count=1)) == entries[:1]
    for _ in range(3):
        again = page(bench, a, after=entries[0])
        assert ids(again) == entries[1:]
        assert {entry.deliveries for entry in again.entries} == {1}


@case
def page_is_bounded(bench: Bench) -> None:
    """A read brings no more entries and bytes than asked for, but always one, and says whether there is more."""
    a = owner(bench)
    key = bench.key_of(0)
    entries = [bench.producer.publish({"v": "x" * 1000}, key=key).id for _ in range(5)]
    first = page(bench, a, count=10, max_bytes=2500)
    assert ids(first) == entries[:2]
    assert first.wait_after is None
    second = page(bench, a, after=entries[1], count=10, max_bytes=10)
    assert ids(second) == entries[2:3]
    third = page(bench, a, after=entries[2], count=2)
    assert ids(third) == entries[3:]
    assert third.wait_after == entries[-1]


@case
def position_is_before_the_first_unacknowledged(bench: Bench) -> None:
    """Acknowledging records the position: just before the smallest pending entry, or the last one delivered."""
    a = owner(bench)
    entries = bench.fill(0, 3)
    page(bench, a)
    assert acked(bench, a, [entries[2]]) == 1
    stored = bench.raw("HGET", bench.keys.fence(0), "position").decode()
    assert tuple(map(int, stored.split("-"))) < tuple(map(int, entries[0].split("-")))
    assert acked(bench, a, [entries[0], entries[1], entries[2]]) == 2
    assert bench.raw("HGET", bench.keys.fence(0), "position").decode() == entries[2]
    assert bench.pending() == {}
    assert acked(bench, a, entries) == 0


@case
def vanished_group_goes_on_at_its_position(bench: Bench) -> None:
    """A consumer group that vanished is made anew where it was; nothing comes again that was acknowledged."""
    a = owner(bench)
    entries = bench.fill(0, 4)
    page(bench, a, count=2)
    acked(bench, a, entries[:2])
    bench.raw("XGROUP DESTROY", bench.shard(0), GROUP)
    again = page(bench, a, after=entries[1])
    assert again.recreated_at == entries[1]
    assert ids(again) == entries[2:]


@case
def vanished_stream_is_said(bench: Bench) -> None:
    """A stream that vanished is refused by name, and not made anew, neither by a read nor by a publish."""
    a = owner(bench)
    bench.fill(0)
    bench.raw("DEL", bench.shard(0))
    assert refusal(lambda: page(bench, a)).word == "STREAM_MISSING"
    assert refusal(lambda: bench.producer.publish({}, key=bench.key_of(0))).word == "STREAM_MISSING"
    assert bench.raw("EXISTS", bench.shard(0)) == 0


@case
def deleted_entries_are_named(bench: Bench) -> None:
    """An entry deleted while it was pending is said to be gone, and is pending no more."""
    a = owner(bench)
    entries = bench.fill(0, 3)
    page(bench, a)
    bench.raw("XDEL", bench.shard(0), entries[1])
    b = takes_over(bench, a)
    first = page(bench, b)
    assert list(first.gone) == [entries[1]]
    assert ids(first) == [entries[0], entries[2]]
    assert set(bench.pending()) == {entries[0], entries[2]}


@case
def delivery_counts_outlive_their_owner(bench: Bench) -> None:
    """How often an entry was tried is written down, and the next owner goes on counting."""
    a = owner(bench)
    entries = bench.fill(0, 2)
    page(bench, a)
    bench.run(note_deliveries(bench.keys, a.fence(0), {entries[0]: 5}))
    assert bench.pending()[entries[0]] == ("a", 5)
    b = takes_over(bench, a)
    assert [entry.deliveries for entry in page(bench, b).entries] == [6, 1]


@case
def takeover_presumes_no_delivery_where_each_is_written_down(bench: Bench) -> None:
    """Counts of an owner that writes each delivery down are taken as they are; what was only read ahead has none."""
    a = owner(bench)
    entries = bench.fill(0, 3)
    bench.run(read(bench.keys, a.fence(0), after="0-0", count=10, each=True))
    bench.run(note_deliveries(bench.keys, a.fence(0), {entries[1]: 2, entries[2]: 4}))
    b = takes_over(bench, a)
    assert [entry.deliveries for entry in page(bench, b).entries] == [1, 2, 4]
    # This one hands out one after another again.
    c = takes_over(bench, b, "c")
    assert [entry.deliveries for entry in page(bench, c).entries] == [2, 2, 4]


@case
def takeover_presumes_no_delivery_after_a_drain(bench: Bench) -> None:
    """An owner that drained says that nothing was with a handler."""
    a = owner(bench)
    bench.fill(0, 2)
    page(bench, a)
    bench.run(note_deliveries(bench.keys, a.fence(0), {}, all_known=True))
    b = takes_over(bench, a)
    assert [entry.deliveries for entry in page(bench, b).entries] == [1, 1]


@case
def takeover_is_counted_once_however_often_it_is_read(bench: Bench) -> None:
    """A takeover that is read again, because its answer was lost, presumes no second delivery."""
    a = owner(bench)
    bench.fill(0, 2)
    page(bench, a)
    b = takes_over(bench, a)
    for _ in range(3):
        assert [entry.deliveries for entry in page(bench, b).entries] == [2, 1]


@case
def entry_is_deleted_after_the_last_group(bench: Bench) -> None:
    """Acknowledging with deletion deletes an entry when no group of the stream needs it any more."""
    a = owner(bench)
    bench.create(shards=None, group="shipping", start="oldest")
    (entry,) = bench.fill(0)
    page(bench, a)
    assert acked(bench, a, [entry], delete=True) == 1
    assert bench.raw("XLEN", bench.shard(0)) == 1
    bench.admin.delete(bench.stream, group="shipping", reason="a case", force=True)
    (other,) = bench.fill(0)
    page(bench, a, after=entry)
    acked(bench, a, [other], delete=True)
    assert bench.raw("XLEN", bench.shard(0)) == 1


@case
def consumers_left_behind_are_removed(bench: Bench) -> None:
    """Consumers of earlier owners go from the group as soon as nothing is pending for them."""
    a = owner(bench)
    entries = bench.fill(0, 4)
    page(bench, a)
    b = takes_over(bench, a)
    assert ids(page(bench, b, count=2)) == entries[:2]
    assert {consumer for consumer, _ in bench.pending().values()} == {"a", "b"}
    page(bench, b, after=entries[1])
    infos = bench.raw("XINFO CONSUMERS", bench.shard(0), GROUP)
    assert len(infos) == 1


@case
def trimming_spares_what_is_needed(bench: Bench) -> None:
    """The owner trims no further than every registered group has acknowledged, and not at all if one is missing."""
    a = owner(bench)
    bench.create(shards=None, group="shipping", start="oldest")
    entries = bench.fill(0, 4)
    page(bench, a)
    acked(bench, a, entries[:3])
    groups = [GROUP, "shipping"]
    assert bench.run(trim(bench.keys, a.fence(0), keep=0, groups=groups)) == (0, "")
    bench.raw("XGROUP SETID", bench.shard(0), "shipping", entries[1])
    assert bench.run(trim(bench.keys, a.fence(0), keep=0, groups=groups)) == (1, "")
    bench.raw("XGROUP DESTROY", bench.shard(0), "shipping")
    assert bench.run(trim(bench.keys, a.fence(0), keep=0, groups=groups)) == (0, "shipping")
    assert bench.raw("XLEN", StreamKeys(bench.stream).shard(0).stream) == 3
