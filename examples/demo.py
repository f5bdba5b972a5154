"""The main job in half a minute: consumers share the shards of a stream, and nothing is lost when they come and go.

It starts a server of its own, a producer and some consumers, each a process. One more consumer joins, one leaves, one
is killed with SIGKILL. From what the handlers wrote down it then judges whether every event was handled, in the order
of its key, and repeated only where it had to be.

    make demo
    make demo ARGS="--redis redis://localhost:6379 --input events.ndjson --key customer"
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import redis
from demo_support.observe import check
from demo_support.processes import embedded_server
from demo_support.producer import from_file
from demo_support.run import DemoError, Run

from redis_stream_coord import Admin, CoordError, RedisSettings, Timings

try:
    from demo_support.view import Plain, Terminal, View
    from rich.console import Console
except ImportError as missing:
    sys.exit(f"{missing}. The demo needs more than the library: run it with `make demo`, or pip install '.[demo]'")

_GROUP = "demo"
_TIMINGS = Timings(heartbeat_seconds=0.5, lease_seconds=3, rebalance_seconds=10)
_WORK_MS = 2.0
_RATE, _MOST = 1200.0, 2500.0  # events per second: invented ones, and from a file at most
_FRAME_SECONDS = 0.125
_START_SECONDS = _LEAVE_SECONDS = 20.0
_GRACE_SECONDS = 60.0  # for what is left when the time is over


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="how long it takes, 5 or more (30)")
    parser.add_argument("--shards", type=int, default=12, help="1 to 256 (12)")
    parser.add_argument("--consumers", type=int, default=3, help="at the start, 2 to 16 (3)")
    parser.add_argument("--input", type=Path, metavar="FILE.ndjson", help="publish its lines, each one JSON object")
    parser.add_argument("--key", metavar="FIELD", help="with --input: the field that is the partition key")
    parser.add_argument("--redis", metavar="URL", help="a server of yours; what the demo makes there it deletes again")
    given = parser.parse_args()
    if given.seconds < 5 or not 1 <= given.shards <= 256 or not 2 <= given.consumers <= 16:
        parser.error("--seconds must be 5 or more, --shards 1 to 256, --consumers 2 to 16")
    if (given.input is None) != (given.key is None):
        parser.error("--input and --key go together")
    return given


def _script(run: Run, seconds: float) -> Iterator[tuple[float, Callable[[], None]]]:
    """What happens when."""

    def join() -> None:
        run.tell(f"{run.start_consumer().name} joins: shards move to it when their owners are done there")

    def leave() -> None:
        member = run.running()[0]
        run.tell(f"{member.name} leaves (SIGTERM): it finishes, acknowledges, hands over")
        run.leave(member)

    def kill() -> None:
        member = run.running()[0]
        kill = run.kill(member)
        run.tell(f"{member.name} was killed (SIGKILL); unacknowledged events: {len(kill.pending)}")

    yield 0.17 * seconds, join
    yield 0.37 * seconds, leave
    yield 0.53 * seconds, kill


def _start(run: Run, view: View, count: int) -> None:
    """Start consumers, and wait until each has its share."""
    run.tell(f"{count} consumers start, for {run.shards} shards")
    for _ in range(count):
        run.start_consumer()
    deadline = time.monotonic() + _START_SECONDS
    while len(run.running()) < count or not run.balanced:
        if time.monotonic() > deadline:
            raise DemoError("the consumers did not start in time")
        run.poll()
        view.show(run)
        time.sleep(_FRAME_SECONDS)


def _play(run: Run, view: View, given: argparse.Namespace, rate: float) -> None:
    _start(run, view, given.consumers)
    run.tell("a producer starts")
    run.start_producer(rate, (given.input, given.key) if given.input else None)

    began = run.elapsed
    script = list(_script(run, given.seconds))
    stopped = given.input is not None  # a file ends by itself
    while True:
        run.poll()
        view.show(run)
        now = run.elapsed - began
        if script and now >= script[0][0]:
            script.pop(0)[1]()
        if not stopped and now >= 0.9 * given.seconds:
            run.stop_producer()
            stopped = True
        if now >= given.seconds and run.settled:
            break
        if now > given.seconds + _GRACE_SECONDS and not run.publishing:
            run.tell("not everything was handled in time")
            break
        time.sleep(_FRAME_SECONDS)
    for member in run.running():
        run.leave(member)
    deadline = time.monotonic() + _LEAVE_SECONDS
    while any(member.state == "leaving" for member in run.members.values()):
        if time.monotonic() > deadline:
            raise DemoError("the consumers did not leave in time")
        run.poll()
        view.show(run)
        time.sleep(_FRAME_SECONDS)


def _judge(run: Run, seconds: float) -> int:
    findings = run.verdict()
    print(f"\nVerdict, from what the handlers wrote down ({len(run.published):,} events in {seconds:.0f} s):\n")
    for finding in findings:
        print("  " + "\n  ".join(finding.lines()))
    ok = all(finding.ok for finding in findings)
    print("\nEverything held." if ok else "\nNot everything held: see above.")
    return 0 if ok else 1


def _demo(given: argparse.Namespace, url: str, rate: float) -> int:
    settings = RedisSettings(url)
    check(settings)
    stream = f"demo-{secrets.token_hex(4)}"
    at = settings.address.path or ",".join(f"{host}:{port}" for host, port in settings.address.nodes)
    title = f"redis-stream-coord, stream {stream} at {at}"
    terminal = sys.stdout.isatty()
    view: View = Terminal(Console(), title) if terminal else Plain()
    if not terminal:
        print(title, flush=True)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-")))
        admin = stack.enter_context(Admin(settings, requested_by="demo"))
        admin.create(stream, group=_GROUP, shards=given.shards, timings=_TIMINGS, reason="demo")
        run = Run(settings, stream, _GROUP, given.shards, directory, _WORK_MS)

        def clean() -> None:
            admin.delete(stream, group=_GROUP, force=True, reason="the demo is over")
            run.observer.erase()

        # Backwards: the processes end before what they work on is deleted, and the connections are closed last.
        stack.callback(run.disconnect)
        stack.callback(clean)
        stack.callback(run.end_processes)
        with view:
            _play(run, view, given, rate)
            view.end(run)
        return _judge(run, run.elapsed)


def _rate(given: argparse.Namespace) -> float:
    """Events per second. Reads the whole file first, so that a wrong line is said at once."""
    if given.input is None:
        return _RATE
    count = sum(1 for _ in from_file(given.input, given.key))
    return float(max(1.0, min(_MOST, count / (0.8 * given.seconds))))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    given = _arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        rate = _rate(given)
        with contextlib.nullcontext(given.redis) if given.redis else embedded_server() as url:
            return _demo(given, url, rate)
    except KeyboardInterrupt:
        print("\nInterrupted: no verdict.")
        return 130
    except (DemoError, CoordError, redis.RedisError, ValueError, OSError) as error:
        print(f"\nThe demo cannot go on: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
