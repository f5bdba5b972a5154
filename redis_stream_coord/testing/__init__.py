"""For the tests of applications that use this library: groups in memory, on a virtual clock.

See docs/testing-your-consumer.md.
Needs the extra: ``pip install 'redis-stream-coord[testing]'``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .environment import AsyncEnvironment, Environment
    from .recorder import AsyncRecorder, Recorder

__all__ = ["AsyncEnvironment", "AsyncRecorder", "Environment", "Recorder"]


def __getattr__(name: str) -> Any:
    # Not before it is asked for: pytest imports this package in every project that has the library installed.
    if name in ("AsyncEnvironment", "Environment"):
        from . import environment

        return getattr(environment, name)
    if name in ("AsyncRecorder", "Recorder"):
        from . import recorder

        return getattr(recorder, name)
    raise AttributeError(name)
