"""Requests and replies of every script, and the records that they leave, as this release speaks protocol 1.

``python -m tests.unit.protocol_record`` writes ``protocol/1.json`` anew. Until 0.1.0 is released that follows each
deliberate change of a script. From then on never: what is in the file is what peers of that release have written, and
will go on writing.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from redis_stream_coord import CoordError, Timings, commands
from redis_stream_coord.commands import Command, Fence, HeartbeatRequest
from redis_stream_coord.keys import GroupKeys, StreamKeys
from redis_stream_coord.models import Held
from tests.unit.fake import FakeGroup, fake_group
from tests.unit.resharding_world import Driver, World

FILE = Path(__file__).parent / "protocol" / "1.json"
GROUP, STREAM = GroupKeys("orders", "billing"), StreamKeys("orders")
AUDIT = {"reason": "OPS-1", "principal": "admin", "fingerprint": "f", "stream": "orders", "group": "billing"}


def plain(value: Any) -> Any:
    """Make text of an answer, with what Redis gives in no order sorted."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value.decode("latin-1") if isinstance(value, bytes) else value


def records(group: FakeGroup) -> dict[str, dict[str, str]]:
    """Every hash of the library."""
    found = {}
    for key in sorted(group.client.keys("redis-stream:coord:*")):
        if group.client.type(key) == b"hash":
            fields = {name.decode(): value.decode("latin-1") for name, value in group.client.hgetall(key).items()}
            found[key.decode()] = dict(sorted(fields.items()))
    return found


class Recorder:
    """Notes each call of a script with the time at which it was made."""

    def __init__(self, group: FakeGroup) -> None:
        self.group = group
        self.steps: list[dict[str, Any]] = []
        self._answer = group.answer
        group.answer = self.answer  # type: ignore[method-assign]

    def answer(self, command: Command[Any]) -> Any:
        answer = self._answer(command)
        if command.script is not None:
            said = plain(answer)
            if command.name in ("describe", "resharding", "inspect"):
                said = said[:1]  # the rest are records, which stand below
            step = {"script": command.name, "at_ms": self.group.clock.ms, "keys": list(command.keys)}
            self.steps.append({**step, "argv": plain(list(command.arguments)), "answer": said})
        return answer


def request(member: str, **changes: Any) -> HeartbeatRequest:
    values: dict[str, Any] = {
        "member": member,
        "nonce": f"{member}1",
        "epoch": 0,
        "incarnation": 0,
        "version": 0,
        "assignment_epoch": 0,
        "weight": 1.0,
        "replaces": None,
        "leaving": False,
        "owned": [],
        "revoked": [],
        "refused": [],
    }
    return HeartbeatRequest(**(values | changes))


def consume(group: FakeGroup) -> None:
    """Join, claim, publish, read, acknowledge; a second member; a record that went back; leave."""
    run, layout = group.run, group.run(commands.layout(STREAM)).layout

    def beat(said: HeartbeatRequest) -> HeartbeatRequest:
        reply = run(commands.heartbeat(GROUP, said))
        held = {} if reply.holdings is None else {**reply.holdings.assigned, **reply.holdings.revoking}
        owned = said.owned if reply.holdings is None else [Held(*pair) for pair in sorted(held.items())]
        seen = {"version": reply.version, "assignment_epoch": reply.assignment_epoch, "epoch": reply.epoch}
        return attrs.evolve(said, owned=owned, incarnation=reply.incarnation, revoked=[], round=reply.round, **seen)

    run(commands.rights(GROUP))
    a = beat(request("a"))
    fence = Fence(a.owned[0].shard, "a", "a1", a.incarnation, a.owned[0].token)
    run(commands.claim(GROUP, fence))
    entries = [("e1", ["rsc-key", "k", "n", "1"]), (None, ["rsc-key", "k", "n", "2"])]
    for _ in range(2):
        run(commands.publish(STREAM, fence.shard, entries, layout=layout, window_ms=1000, window_count=10))
    page = run(commands.read(GROUP, fence, after="0-0", count=10))
    run(commands.note_deliveries(GROUP, fence, {page.entries[0].id: 2}))
    run(commands.ack(GROUP, fence, [page.entries[0].id]))
    run(commands.outstanding(GROUP, fence, after="0-0", count=10))
    run(commands.trim(GROUP, fence, keep=0, groups=["billing"]))
    run(commands.inspect(GROUP, fence.shard))
    run(commands.pending_of(GROUP, fence.shard, [page.entries[1].id]))
    b = beat(request("b"))
    run(commands.heard(GROUP, "a", after="0-0"))
    old = group.client.hgetall(GROUP.metadata)
    a = beat(a)
    drained = [held for held in a.owned if held.shard in group.view().members["a"].revoking]
    a = beat(attrs.evolve(a, owned=[held for held in a.owned if held not in drained], revoked=drained))
    b = beat(b)
    group.clock.advance(1)
    group.client.delete(GROUP.metadata)
    group.client.hset(GROUP.metadata, mapping=old)
    kept = list(a.owned)
    a = beat(a)
    a = beat(attrs.evolve(a, owned=kept, not_held=[held for held in a.owned if held not in kept]))
    with suppress(CoordError):
        beat(attrs.evolve(a, nonce="another"))
    beat(attrs.evolve(a, not_held=[], leaving=True))


def administer(group: FakeGroup) -> None:
    """Every mutation that is one script."""
    run = group.run

    def said(number: str) -> dict[str, Any]:
        return {"request_id": number, "audit": AUDIT}

    run(commands.begin(GROUP, "seek", **said("1")))
    run(commands.record(GROUP, "seek", "0-0 on 0", **said("1")))
    run(commands.seek(GROUP, 0, "0-0", incarnation=group.view().incarnation))
    run(commands.freeze(GROUP, on=True, **said("2")))
    run(commands.freeze(GROUP, on=False, **said("3")))
    run(commands.limit(GROUP, "robot", "5/60", **said("4")))
    run(commands.failed(GROUP, "scale", CoordError("no"), final=True, **said("5")))
    run(commands.retain(STREAM, "consumed", **said("6")))
    run(commands.revise(STREAM, expected=run(commands.layout(STREAM)).version, **said("7")))
    run(commands.note_repair(STREAM, "routes", **said("8")))
    run(commands.note_trim(STREAM, "3 entries on 1 shards", **said("8")))
    run(commands.forget_leases(GROUP, **said("9")))
    run(commands.reconcile(GROUP, **said("10")))
    record, stream = run(commands.fields_of(GROUP.metadata)), run(commands.fields_of(STREAM.record))
    last = run(commands.last_event(GROUP))
    run(commands.restore(GROUP, record, last, **said("11")))
    run(commands.restore_stream(STREAM, stream, **said("12")))
    run(commands.describe(GROUP))


def scale(group: FakeGroup) -> None:
    """A resharding that is taken back, one that completes, and one that is given up."""
    world = World(group, random.Random(1))
    for target, back in ((3, True), (3, False)):
        world.scale(target)
        driver = Driver(world)
        for number in range(600):
            if back and number == 12:
                world.rollback()
            if driver.over:
                break
            if driver.step():
                catch_up(group)
                group.clock.advance(1)
        if back:
            group.run(commands.removed(STREAM, 2))
            group.run(commands.trim_removed(STREAM, 2, world.view(), keep=0))


def catch_up(group: FakeGroup) -> None:
    """Let the group have consumed everything: nobody here does."""
    for shard in range(3):
        stream = STREAM.shard(shard).stream
        if group.client.exists(stream):
            for row in group.client.xpending_range(stream, GROUP.group, "-", "+", 100):
                group.client.xack(stream, GROUP.group, row["message_id"])
            group.client.xgroup_setid(stream, GROUP.group, "$")


def delete(group: FakeGroup) -> None:
    run = group.run
    incarnation = run(commands.delete(GROUP, force=True, request_id="d1", audit=AUDIT))
    run(commands.retire(GROUP, 0, incarnation=incarnation))
    registered = run(commands.resharding(STREAM)).groups[GROUP.group].registered
    run(commands.unregister(GROUP, registered=registered))
    run(commands.deleted(GROUP, incarnation))


def record() -> dict[str, Any]:
    """Run through everything. Returns the steps, and the records that were there after each part."""
    after: dict[str, Any] = {}
    with fake_group(shards=2, timings=Timings()) as group:
        recorder = Recorder(group)
        for part in (consume, administer, scale, delete):
            part(group)
            group.clock.advance(1)
            after[part.__name__] = records(group)
    return {"protocol": 1, "schema": 1, "steps": recorder.steps, "records": after}


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(), indent=0, sort_keys=True) + "\n", "utf-8")
    print(f"{FILE}: {FILE.stat().st_size} bytes")
