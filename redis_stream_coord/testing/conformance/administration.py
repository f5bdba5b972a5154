"""Groups are created, deleted, moved; requests that come twice."""

from __future__ import annotations

from functools import partial
from typing import Any

from ... import commands
from ...commands import ack, claim, read
from ...errors import AlreadyExistsError, ConfigError, ConflictError, NotFoundError
from ...keys import StreamKeys
from .bench import GROUP, Bench, fields, refusal
from .catalogue import case


@case
def group_is_created_once(bench: Bench) -> None:
    """A second creation is refused, unless it is the same request again or accepts what exists."""
    first = bench.create(request_id="r1")
    assert refusal(bench.create, AlreadyExistsError).word == "EXISTS"
    assert bench.create(request_id="r1").incarnation == first.incarnation
    assert bench.create(exist_ok=True).incarnation == first.incarnation
    assert (bench.stream, GROUP) in bench.monitor.groups()
    assert set(first.shards) == {0, 1, 2, 3}
    assert first.timings == bench.timings
    layout = bench.run(commands.layout(StreamKeys(bench.stream, bench.settings.key_prefix)))
    assert (layout.shards, layout.state, layout.groups) == (4, "active", (GROUP,))


@case
def shard_count_is_the_streams(bench: Bench) -> None:
    """A new stream needs a number of shards; another group of it takes no other one."""
    refusal(lambda: bench.create(shards=None), ConfigError)
    bench.create(shards=3)
    assert refusal(lambda: bench.create(shards=5, group="shipping"), ConflictError).word == "SHARD_COUNT_MISMATCH"
    assert set(bench.create(shards=None, group="shipping").shards) == {0, 1, 2}


@case
def living_group_is_not_deleted(bench: Bench) -> None:
    """A group with live members is deleted only by force; then they are told that it is gone."""
    bench.create()
    a = bench.peer("a")
    a.beat()

    def delete(**options: Any) -> None:
        bench.admin.delete(bench.stream, group=GROUP, reason="a case", **options)

    assert refusal(delete, ConflictError).word == "NOT_EMPTY"
    delete(force=True, request_id="r1")
    delete(force=True, request_id="r1")
    assert refusal(a.beat).word == "GROUP_NOT_FOUND"
    assert refusal(delete, NotFoundError).word == "GROUP_NOT_FOUND"
    assert (bench.stream, GROUP) not in bench.monitor.groups()


@case
def sleeper_cannot_bring_a_deleted_group_back(bench: Bench) -> None:
    """A tombstone keeps a member of the deleted group from claiming, reading and acknowledging, now and later."""
    bench.create(shards=1)
    a = bench.peer("a")
    a.beat()
    fence = a.fence(0)
    bench.run(claim(bench.keys, fence))
    (entry,) = bench.fill(0)
    bench.run(read(bench.keys, fence, after="0-0", count=1))
    bench.admin.delete(bench.stream, group=GROUP, reason="a case", force=True)
    late = [claim(bench.keys, fence), read(bench.keys, fence, after="0-0", count=1), ack(bench.keys, fence, [entry])]
    for command in late:
        assert refusal(partial(bench.run, command)).word in ("AHEAD", "FENCED")
    again = bench.create(shards=1)
    assert again.incarnation > a.incarnation
    for command in late:
        assert refusal(partial(bench.run, command)).word in ("AHEAD", "FENCED")
    assert a.refused().word == "FENCED_MEMBER_EPOCH"


@case
def new_group_begins_where_it_was_told(bench: Bench) -> None:
    """With `start="new"` a group gets nothing of what is there; with `oldest` all of it."""
    bench.create(shards=1)
    old = bench.fill(0, 3)
    for group, start, expected in (("late", "new", []), ("all", "oldest", old)):
        bench.create(shards=None, group=group, start=start)
        infos = [fields(info) for info in bench.raw("XINFO GROUPS", bench.shard(0))]
        (last,) = [info["last-delivered-id"] for info in infos if info["name"] == group]
        found = bench.raw("XRANGE", bench.shard(0), f"({last}", "+")
        assert [entry_id.decode() for entry_id, _ in found] == expected


@case
def seek_moves_a_group(bench: Bench) -> None:
    """A moved group reads from its new place; what was pending is forgotten, and the owner needs a new token."""
    bench.create(shards=1)
    a = bench.peer("a")
    a.beat()
    bench.run(claim(bench.keys, a.fence(0)))
    entries = bench.fill(0, 4)
    old = a.fence(0)
    bench.run(read(bench.keys, old, after="0-0", count=3))
    bench.admin.seek(bench.stream, group=GROUP, to=entries[0], reason="a case")
    assert bench.pending() == {}
    assert refusal(lambda: bench.run(read(bench.keys, old, after="0-0", count=3))).word == "FENCED"
    a.beat(refused=[(0, old.token, old.token)])
    bench.until(lambda: a.beat() and a.assigned.get(0, 0) > old.token, "a new token")
    bench.run(claim(bench.keys, a.fence(0)))
    page = bench.run(read(bench.keys, a.fence(0), after="0-0", count=10))
    assert [entry.id for entry in page.entries] == entries[1:]
    bench.admin.seek(bench.stream, group=GROUP, to="newest", reason="a case")
    bench.admin.seek(bench.stream, group=GROUP, to="oldest", reason="a case")
    bench.groups.add("nobody")
    refusal(lambda: bench.admin.seek(bench.stream, group="nobody", to="oldest", reason="a case"), NotFoundError)


@case
def every_mutation_is_audited(bench: Bench) -> None:
    """Accepted and refused requests stand in the audit log, with who asked and why."""
    bench.create(request_id="r1", reason="because")
    refusal(lambda: bench.create(request_id="r2"), AlreadyExistsError)
    entries = [fields(flat) for _, flat in bench.raw("XRANGE", bench.keys.audit, "-", "+")]
    assert [(e["action"], e["outcome"], e["request_id"]) for e in entries] == [
        ("create", "accepted", "r1"),
        ("create", "refused", "r2"),
    ]
    assert entries[0]["reason"] == "because"
    assert entries[0]["requested_by"] == "conformance"
