"""A signal stops a consumer even if it does not wake the main thread.

The kernel may hand a signal to any thread, and one that comes just before the main thread begins to wait does not end
that wait either. Python notes it, and runs its handler when the main thread next runs: so that has to happen by itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from redis_stream_coord import Admin
from tests.servers import Server

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import signal, sys, threading
from redis_stream_coord import Consumer

consumer = Consumer(sys.argv[1], group="workers", redis=sys.argv[2], handler=lambda message: None)

def signal_this_thread():
    while not consumer.assignment:
        pass
    print("owns", flush=True)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=signal_this_thread, daemon=True).start()
consumer.run()
print("left", flush=True)
"""


@pytest.mark.parametrize("server", ["redis7"], indirect=True)
def test_a_signal_taken_by_another_thread_stops_the_consumer(server: Server, stream: str) -> None:
    with Admin(server.url, requested_by="test") as admin:
        admin.create(stream, group="workers", shards=2, reason="test")
    child = [sys.executable, "-c", CHILD, stream, server.url]
    done = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.split() == ["owns", "left"], done.stderr
    assert done.returncode == 0
