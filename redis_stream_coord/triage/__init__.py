"""The two checklists of the runbook, walked on what is stored: which member, which shard, which step is stuck, and what
to do next. Decisions only: what they are made of is handed in.
"""

from .finding import Finding
from .rebalance import rebalance
from .resharding import resharding

__all__ = ["Finding", "rebalance", "resharding"]
