"""The command line as a whole."""

from __future__ import annotations

import click

from . import changing, declaring, looking, operating, repairing, roles, scaling


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="redis-stream-coord", prog_name="redis-stream-coord")
def cli() -> None:
    """Coordinated consumer groups on sharded Redis Streams: look, change, repair.

    Say where Redis is with --redis or REDIS_STREAM_COORD_URL. Every command takes --json. Exit codes: 0 done, 1 failed,
    2 wrong usage, 3 not found, 4 conflict, 5 permission denied, 6 frozen, 7 rate limited, 8 metadata unusable, 9 Redis
    unavailable, 10 problems found, 11 drift found, 12 aborted, 13 not finished yet.
    """


for _command in (
    *looking.COMMANDS,
    *changing.COMMANDS,
    *declaring.COMMANDS,
    *operating.COMMANDS,
    *repairing.COMMANDS,
    *scaling.COMMANDS,
    *roles.COMMANDS,
):
    cli.add_command(_command)
