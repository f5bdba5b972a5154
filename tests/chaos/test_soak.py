"""The soak, cut short: every kind of fault happens at least once, and the verdict is the same."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.chaos import soak
from tests.servers import available

SERVER = os.environ.get("REDIS_STREAM_COORD_CHAOS_SERVER", "redis7")
SECONDS = 20


@pytest.mark.chaos
@pytest.mark.skipif(SERVER not in available(), reason=f"{SERVER} is not installed")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_nothing_is_lost_and_nothing_leaks_while_signals_and_restarts_hit(
    stream: str, tmp_path: Path, seed: int
) -> None:
    with soak.server(SERVER) as server:
        report = soak.run(soak.Plan(seed=seed, seconds=SECONDS, pace_seconds=1.0), server, stream, tmp_path)
    print(report)
    assert report.ok, str(report)
    for what in ("SIGKILL", "SIGTERM", "SIGSTOP", "restarts"):
        assert f" 0 {what}" not in report.summary
