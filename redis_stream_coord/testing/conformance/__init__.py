"""One set of tests over the public behaviour, for servers in memory and real ones.

``python -m redis_stream_coord.testing.conformance --redis URL`` runs it against a server of yours.
"""

from __future__ import annotations

from .bench import Bench, MemoryBench
from .catalogue import Case, cases

__all__ = ["Bench", "Case", "MemoryBench", "cases"]
