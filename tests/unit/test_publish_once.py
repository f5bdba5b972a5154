"""Each event id exactly once, whatever gets lost, arrives late or dies while the stream is resharded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.fake import FakeGroup, fake_group
from tests.unit.publish_world import World


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    with fake_group(shards=2) as group:
        yield group


@pytest.mark.parametrize("seed", range(25))
def test_each_event_id_once_through_random_faults_and_reshardings(group: FakeGroup, seed: int) -> None:
    world = World(group, seed)
    world.run(250)
    world.check()


@pytest.mark.parametrize("seed", range(25))
def test_a_producer_remembers_where_its_unanswered_attempts_went(group: FakeGroup, seed: int) -> None:
    """Without the history in the record, as when it is longer than what the record keeps."""
    world = World(group, seed, history=False)
    world.run(250)
    world.check()
