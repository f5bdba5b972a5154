"""The chaos run from the command line: python -m tests.chaos.sigkill --help"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
from pathlib import Path

from tests import servers
from tests.chaos.harness import Plan, run


def main() -> int:
    default = Plan(seed=0)
    parser = argparse.ArgumentParser(description="Kill consumer processes while events are published, and judge.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--events", type=int, default=default.events)
    parser.add_argument("--seconds", type=int, default=default.seconds, help="for publishing them")
    parser.add_argument("--kill-seconds", type=float, default=default.kill_seconds, help="between two kills")
    parser.add_argument("--consumers", type=int, default=default.consumers)
    parser.add_argument("--shards", type=int, default=default.shards)
    parser.add_argument("--keys", type=int, default=default.keys)
    parser.add_argument("--server", choices=list(servers.available()), default="redis7")
    given = vars(parser.parse_args())
    name = given.pop("server")
    plan = Plan(**given)
    print(f"{name}, {plan}")
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory, servers.Server(name) as server:
        report = run(plan, server.url, f"chaos-{secrets.token_hex(4)}", Path(directory))
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
