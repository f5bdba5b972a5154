"""Eight consumers, 100,000 events, somebody killed every three seconds: nothing is lost, and order holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.harness import Plan, run
from tests.servers import Server

SERVER = os.environ.get("REDIS_STREAM_COORD_CHAOS_SERVER", "redis7")
EVENTS = int(os.environ.get("REDIS_STREAM_COORD_CHAOS_EVENTS", "100000"))


@pytest.mark.chaos
@pytest.mark.parametrize("server", [SERVER], indirect=True)
def test_nothing_is_lost_and_order_holds_while_consumers_are_killed(
    server: Server, stream: str, tmp_path: Path, seed: int
) -> None:
    plan = Plan(seed=seed, events=EVENTS, seconds=max(20, EVENTS // 4_000))
    report = run(plan, server.url, stream, tmp_path)
    print(report)
    assert report.ok, str(report)
    assert len(report.kills) >= 6
