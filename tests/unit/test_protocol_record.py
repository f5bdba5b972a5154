"""What peers of a release have said and written is understood by this one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from redis_stream_coord import CoordError, commands
from redis_stream_coord.commands import HeartbeatRequest
from redis_stream_coord.models import Held
from redis_stream_coord.scripts import catalogue
from tests.unit.fake import FakeGroup, fake_group
from tests.unit.protocol_record import FILE, GROUP, STREAM, record, request

KEPT = json.loads(FILE.read_text("utf-8"))


def test_this_release_says_and_writes_what_is_kept_of_its_protocol() -> None:
    """If this fails, older peers would meet something else; see `tests.unit.protocol_record`."""
    now = json.loads(json.dumps(record()))
    for ours, theirs in zip(now["steps"], KEPT["steps"], strict=False):
        assert ours == theirs
    assert now["records"] == KEPT["records"]
    assert len(now["steps"]) == len(KEPT["steps"])


def test_nearly_every_script_is_in_it() -> None:
    missing = set(catalogue()) - {step["script"] for step in KEPT["steps"]}
    # They are answers to what only goes wrong.
    assert missing <= {"abandon", "rebuild", "create", "register", "activate", "provision"}, missing


@pytest.fixture(params=["consume", "administer", "scale"])
def group(request: pytest.FixtureRequest) -> Iterator[FakeGroup]:
    """A server with the records that peers of that release have left."""
    with fake_group(shards=2) as group:
        group.client.flushall()
        for key, fields in KEPT["records"][request.param].items():
            group.client.hset(key, mapping={name: value.encode("latin-1") for name, value in fields.items()})
        group.clock.ms = KEPT["steps"][-1]["at_ms"] + 1000
        yield group


def test_records_of_that_release_are_read(group: FakeGroup) -> None:
    view = group.run(commands.describe(GROUP))
    assert view.protocol == (1, 1)
    assert view.violations() == []
    assert group.run(commands.resharding(STREAM)).layout.shards in (2, 3)


def test_members_of_that_release_go_on(group: FakeGroup) -> None:
    view = group.run(commands.describe(GROUP))
    for member in view.members.values():
        held = {**member.assigned, **member.revoking}
        said: HeartbeatRequest = attrs.evolve(
            request(member.id),
            nonce=member.nonce,
            epoch=member.epoch,
            incarnation=view.incarnation,
            version=view.version,
            assignment_epoch=view.assignment_epoch,
            owned=[Held(*pair) for pair in sorted(held.items())],
        )
        assert group.run(commands.heartbeat(GROUP, said)).epoch >= member.epoch
    joined: Any = group.run(commands.heartbeat(GROUP, request("new")))
    assert joined.status in ("OK", "REVOKE_PENDING")


@pytest.mark.parametrize(("low", "high", "speaks"), [(1, 2, True), (1, 1, True), (2, 3, False)])
def test_whoever_speaks_none_of_the_recorded_versions_is_refused(
    group: FakeGroup, low: int, high: int, speaks: bool
) -> None:
    for key in (GROUP.metadata, STREAM.record):
        group.client.hset(key, mapping={"protocol_min": low, "protocol_max": high})
    before = group.client.hgetall(GROUP.metadata)
    for command in (commands.heartbeat(GROUP, request("new")), commands.layout(STREAM)):
        if speaks:
            group.run(command)
            continue
        with pytest.raises(CoordError) as refused:
            group.run(command)
        assert refused.value.word == "UNSUPPORTED_PROTOCOL"
        assert f"{low} to {high}" in refused.value.detail
        assert group.client.hgetall(GROUP.metadata) == before
