"""The same administrative request again: what its id stands for, and what it does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from redis_stream_coord import commands
from redis_stream_coord.commands import Fence, HeartbeatRequest, Pause, Together
from redis_stream_coord.errors import (
    AlreadyExistsError,
    ConflictError,
    CoordError,
    MetadataRegressionError,
    NotFoundError,
)
from redis_stream_coord.models import Timings
from redis_stream_coord.sagas import Sagas
from tests.unit.fake import FakeGroup, fake_group


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    with fake_group(shards=2) as group:
        yield group


def drive(group: FakeGroup, saga: Any) -> Any:
    try:
        step = next(saga)
        while True:
            assert not isinstance(step, Pause)
            try:
                if isinstance(step, Together):
                    result: Any = [group.run(command) for command in step.commands]
                else:
                    result = group.run(step) if step.name != "CLIENT INFO" else {}
            except CoordError as error:
                step = saga.throw(error)
            else:
                step = saga.send(result)
    except StopIteration as end:
        return end.value


def create(group: FakeGroup, request_id: str | None) -> Any:
    sagas = Sagas("redis://nowhere", requested_by="test")
    keys = group.keys
    return drive(
        group, sagas.create(keys.stream, keys.group, 2, "oldest", Timings(), "jump-v1", "all", False, "r", request_id)
    )


def delete(group: FakeGroup, request_id: str | None) -> None:
    sagas = Sagas("redis://nowhere", requested_by="test")
    drive(group, sagas.delete(group.keys.stream, group.keys.group, True, "r", request_id))


def works(group: FakeGroup) -> bool:
    """Whether a member of the group can claim and read."""
    view = group.view()
    fence = Fence(0, "a", "n", view.incarnation, 1)
    group.run(commands.claim(group.keys, fence))
    page = group.run(commands.read(group.keys, fence, after="0-0", count=1, max_bytes=1))
    return page.recreated_at is None


def test_a_deletion_again_is_done_already(group: FakeGroup) -> None:
    delete(group, "d1")
    delete(group, "d1")
    with pytest.raises(NotFoundError):
        delete(group, "d2")


def test_a_deletion_again_leaves_the_group_alone_that_was_created_since(group: FakeGroup) -> None:
    """It would have removed the consumer groups of the new one, and left it with tombstones above its incarnation."""
    delete(group, "d1")
    create(group, "c2")
    delete(group, "d1")
    assert works(group)


def test_a_creation_again_returns_what_it_made(group: FakeGroup) -> None:
    delete(group, "d1")
    first = create(group, "c2")
    again = create(group, "c2")
    assert again.incarnation == first.incarnation
    with pytest.raises(AlreadyExistsError):
        create(group, "c3")


def test_one_id_for_two_kinds_of_request_is_two_requests(group: FakeGroup) -> None:
    """The second kind would have been taken for done."""
    delete(group, "d1")
    create(group, "same")
    delete(group, "same")
    with pytest.raises(NotFoundError):
        group.view()
    create(group, "c2")
    assert works(group)


@pytest.mark.parametrize("lost", [False, True])
def test_a_group_with_live_members_is_not_deleted_even_if_their_leases_were_lost(group: FakeGroup, lost: bool) -> None:
    """Without the set of leases nobody looked alive, though everybody gets a full lease at the next heartbeat."""
    request = HeartbeatRequest(
        member="a",
        nonce="n",
        epoch=0,
        incarnation=0,
        version=0,
        assignment_epoch=0,
        weight=1.0,
        replaces=None,
        leaving=False,
        owned=[],
        revoked=[],
        refused=[],
    )
    group.run(commands.heartbeat(group.keys, request))
    if lost:
        group.client.delete(group.keys.leases)
    delete_gently = commands.delete(group.keys, force=False, request_id="d1", audit={})
    with pytest.raises(ConflictError, match="live members: a"):
        group.run(delete_gently)
    if not lost:
        group.clock.advance(16)
        with pytest.raises(ConflictError, match="live members: a"):
            group.run(delete_gently)
        group.run(commands.delete(group.keys, force=False, request_id="d2", audit={}))


@pytest.mark.parametrize("sought", [False, True])
def test_who_slept_through_a_deletion_cannot_claim(group: FakeGroup, sought: bool) -> None:
    """A fence that a seek has taken from its owner was mistaken for a tombstone."""
    old = Fence(0, "a", "n", group.view().incarnation, 1)
    group.run(commands.claim(group.keys, old))
    if sought:
        group.run(commands.seek(group.keys, 0, "0-0", incarnation=old.incarnation))
    delete(group, "d1")
    with pytest.raises(MetadataRegressionError):
        group.run(commands.claim(group.keys, old))
