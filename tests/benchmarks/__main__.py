"""``python -m tests.benchmarks [name...] [--server redis7] [--rounds N]``: measure, and print small tables.

Timings depend on the machine and on what else it does. What is worth comparing between runs are the ratios, each of
two things measured in turn within one run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import redis

from tests import servers
from tests.benchmarks import consume, heartbeat, latency, publish, rebalance, reshard
from tests.benchmarks.measuring import Bench

BENCHMARKS: dict[str, Callable[[Bench], None]] = {
    "rebalance": rebalance.run,
    "heartbeat": heartbeat.run,
    "publish": publish.run,
    "consume": consume.run,
    "latency": latency.run,
    "reshard": reshard.run,
}
_DEFAULT_ROUNDS = 5


def main(arguments: list[str]) -> None:
    present = [name for name in ("redis7", "valkey9", "redis8", "redis62") if name in servers.available()]
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BENCHMARKS)}; all if none is given")
    parser.add_argument("--server", choices=present, default=present[0] if present else None)
    parser.add_argument("--rounds", type=int, default=_DEFAULT_ROUNDS, help="how often each thing is measured")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if options.server is None:
        parser.error("no server is installed; see tests/servers.py")
    with servers.Server(options.server) as server:
        with server.client() as client:
            info = client.info("server")
        version = info.get("valkey_version") or info["redis_version"]
        print(f"{options.server} {version}, redis-py {redis.__version__}, Python {sys.version.split()[0]}, ", end="")
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        for name in options.names or BENCHMARKS:
            BENCHMARKS[name](Bench(server, options.rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
