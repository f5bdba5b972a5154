"""A real server for a test run, if one is installed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from types import TracebackType

import redis

from ..errors import RedisUnavailableError

_START_SECONDS = 20.0
_NAMES = ("redis-server", "valkey-server")


def find_server() -> str | None:
    """Return the path of a server's binary on the PATH, or ``None``."""
    return next((path for name in _NAMES if (path := shutil.which(name)) is not None), None)


class RealServer:
    """A server of its own on loopback, without persistence, in a temporary directory. A context manager.

    Parameters:
        binary: of Redis or Valkey.

    Raises:
        RedisUnavailableError: it does not start.
    """

    def __init__(self, binary: str) -> None:
        self._binary = binary
        self._folder = tempfile.TemporaryDirectory(prefix="redis-stream-coord-")
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> RealServer:
        # Somebody else may take the port in between: then another one.
        for _ in range(5):
            port = _free_port()
            options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
            self._process = subprocess.Popen(
                [self._binary, *options, "--dir", self._folder.name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            if self._answers(port):
                self.url = f"redis://127.0.0.1:{port}/0"
                return self
            self._stop()
        self._folder.cleanup()
        raise RedisUnavailableError(f"{self._binary} does not start")

    def _answers(self, port: int) -> bool:
        until = time.monotonic() + _START_SECONDS
        assert self._process is not None
        with redis.Redis(port=port) as client:
            while time.monotonic() < until and self._process.poll() is None:
                with contextlib.suppress(redis.ConnectionError, redis.exceptions.BusyLoadingError):
                    # Its own process, not another server that took the port first.
                    return int(client.info("server")["process_id"]) == self._process.pid
                time.sleep(0.02)
        return False

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        self._folder.cleanup()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
