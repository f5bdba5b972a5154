"""4 -> 12 -> 3 -> 0 -> 5 -> 4 shards under load, drivers killed on the way: nothing lost or doubled, and order holds.

A long run: python -m tests.chaos.resharding --rounds 20 --server cluster
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.chaos.resharding import PATH, Plan, judge, on_cluster, on_server
from tests.servers import ClusterServers, Server

ROUNDS = int(os.environ.get("REDIS_STREAM_COORD_CHAOS_ROUNDS", "1"))


@pytest.mark.chaos
@pytest.mark.parametrize("server", ["redis7", "redis8", "valkey9"], indirect=True)
def test_nothing_is_lost_or_doubled_and_order_holds(server: Server, stream: str, seed: int) -> None:
    report = on_server(Plan(seed=seed, rounds=ROUNDS, first_point=1 + seed % 40), server, stream)
    print(report)
    assert report.ok, str(report)


@pytest.mark.chaos
def test_nothing_is_lost_or_doubled_on_a_cluster(cluster: ClusterServers, stream: str, seed: int) -> None:
    report = on_cluster(Plan(seed=seed, rounds=ROUNDS, first_point=1 + seed % 40), cluster, stream)
    print(report)
    assert report.ok, str(report)


def test_the_judge_finds_what_is_wrong() -> None:
    stored = Counter({"0-0": 1, "0-1": 2, "0-2": 1})
    handled = {"billing": [("k", "0-0"), ("k", "0-2"), ("k", "0-1"), ("k", "0-0")], "audit": [("k", "0-0")]}
    found = judge(["0-0", "0-1", "0-2", "0-3"], stored, handled)
    assert found == [
        "event 0-3 was accepted and is not in any stream",
        "event 0-1 is 2 times in the streams",
        "group billing never handled 0-3",
        "group billing: event 0-1 of key k after number 2",
        "group audit never handled 0-1",
        "group audit never handled 0-2",
        "group audit never handled 0-3",
    ]
    assert max(PATH) == 12
