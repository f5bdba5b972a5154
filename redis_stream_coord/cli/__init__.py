"""The command line ``redis-stream-coord``: `Admin` and `Monitor` for people, scripts and pipelines.

It needs the extra ``cli`` (click and rich). Everything else of the package works without.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; the entry point of the package."""
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        sys.stderr.write(
            f"redis-stream-coord needs the extra 'cli' ({error.name} is not installed): "
            "pip install 'redis-stream-coord[cli]'\n"
        )
        raise SystemExit(1) from None
    from .app import cli

    cli(prog_name="redis-stream-coord")
