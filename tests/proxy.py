"""A TCP proxy that breaks the way between a client and a Redis server on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field

from tests.servers import HOST, free_port

_CHUNK_BYTES = 64 * 1024
_CALL_SECONDS = 10.0
_PORT_ATTEMPTS = 10

# What clients send on their own when they connect: "the next request" of a test does not mean these.
_SETTING_UP = frozenset({b"AUTH", b"CLIENT", b"HELLO", b"READONLY", b"SELECT"})


class FrameSplitter:
    """Cuts a RESP byte stream, of either direction, into whole requests or replies.

    Knows RESP2, RESP3 and inline commands; a frame is handed out when its last byte arrived.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        # Values still to come until the frame is whole. One number is enough, without a stack: where a nested
        # array ends does not matter, only where the outermost does.
        self._missing = 1

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes; return the frames that they complete, in order."""
        self._buffer += data
        frames: list[bytes] = []
        while self._scan_value():
            if self._missing == 0:
                frames.append(bytes(self._buffer[: self._scanned]))
                del self._buffer[: self._scanned]
                self._scanned, self._missing = 0, 1
        return frames

    def rest(self) -> bytes:
        """The bytes of the frame that is not whole yet."""
        return bytes(self._buffer)

    def _scan_value(self) -> bool:
        line_end = self._buffer.find(b"\r\n", self._scanned)
        if line_end < 0:
            return False
        kind = bytes(self._buffer[self._scanned : self._scanned + 1])
        value_end = line_end + 2
        inside = 0
        if kind in (b"$", b"=", b"!"):
            length = int(self._buffer[self._scanned + 1 : line_end])
            if length >= 0:
                value_end += length + 2
            if len(self._buffer) < value_end:
                return False
        elif kind in (b"*", b"~", b">"):
            inside = int(self._buffer[self._scanned + 1 : line_end])
        elif kind == b"%":
            inside = 2 * int(self._buffer[self._scanned + 1 : line_end])
        elif kind == b"|":
            # Attributes stand before the value that they belong to, which is one more.
            inside = 2 * int(self._buffer[self._scanned + 1 : line_end]) + 1
        self._scanned = value_end
        self._missing += max(inside, 0) - 1
        return True


def command_name(request: bytes) -> bytes:
    """The upper-case name of the command in a whole request, inline or not."""
    if not request.startswith(b"*"):
        return request.split(maxsplit=1)[0].upper() if request.split() else b""
    return request.split(b"\r\n", 3)[2].upper()


@dataclass
class _DropRule:
    match: bytes | None
    remaining: int

    def takes(self, request: bytes) -> bool:
        if self.match is None:
            return command_name(request) not in _SETTING_UP
        return self.match in request


@dataclass(eq=False)
class _Link:
    """One client connection and its connection to the server."""

    client_reader: asyncio.StreamReader
    client_writer: asyncio.StreamWriter
    server_reader: asyncio.StreamReader
    server_writer: asyncio.StreamWriter
    sent: int = 0
    answered: int = 0
    doomed: int | None = None  # the number of the request whose reply is thrown away

    def close(self) -> None:
        for writer in (self.client_writer, self.server_writer):
            writer.close()

    def abort(self) -> None:
        for writer in (self.client_writer, self.server_writer):
            writer.transport.abort()


@dataclass(eq=False)
class _State:
    """What the event loop of the proxy owns; touched on its thread only."""

    loop: asyncio.AbstractEventLoop
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    listener: asyncio.Server | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    links: set[_Link] = field(default_factory=set)
    rules: deque[_DropRule] = field(default_factory=deque)


class LossyProxy:
    """Stands on a loopback port of its own in front of a server; works from plain and from async tests.

    Each method has taken effect when it returns. Replies are matched to requests by counting, so a connection
    that subscribes in RESP2 or asks for `CLIENT REPLY OFF` can pass through, but not be dropped from.

    Args:
        server_port: the loopback port of the server.
    """

    def __init__(self, server_port: int) -> None:
        self.dropped = 0
        self._server_port = server_port
        self._port: int | None = None
        self._state: _State | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LossyProxy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        if self._port is None:
            raise RuntimeError("the proxy was not started: it has no port")
        return self._port

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def start(self) -> None:
        """Listen; requests and replies flow."""
        if self._thread is not None:
            return
        started: Future[_State] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(started)), name="lossy-proxy", daemon=True
        )
        self._thread.start()
        try:
            self._state = started.result(_CALL_SECONDS)
        except BaseException:
            self._thread = None
            raise

    def stop(self) -> None:
        """Close everything and end the thread. Harmless when not started."""
        thread, state = self._thread, self._state
        if thread is None or state is None:
            return
        state.loop.call_soon_threadsafe(state.stopping.set)
        thread.join(_CALL_SECONDS)
        self._thread = self._state = None
        if thread.is_alive():
            raise RuntimeError("the proxy's thread did not end")

    def drop_next_reply(self, match: bytes | None = None, *, count: int = 1) -> None:
        """Lose the reply of the next request: the server carries it out, its client sees a closed connection.

        What stands behind that request in the same pipeline does not reach the server; replies to what stands
        before it reach the client.

        Args:
            match: only of a request with these raw bytes in it; by default of any but the ones that a client
                sends to set up its connection (HELLO, AUTH, CLIENT, SELECT, READONLY).
            count: so many times, each on another connection.
        """
        self._call(lambda state: state.rules.append(_DropRule(match, count)))

    def keep_replies(self) -> None:
        """Forget what `drop_next_reply` ordered and has not happened yet."""
        self._call(lambda state: state.rules.clear())

    def pause(self) -> None:
        """Hold back all bytes in both directions; connections stay open, and new ones can be made."""
        self._call(lambda state: state.flowing.clear())

    def resume(self) -> None:
        """Undo `pause`: what was held back goes on."""
        self._call(lambda state: state.flowing.set())

    def cut(self) -> None:
        """Close all connections at once; new ones can be made."""
        self._wait_for(self._abort_all)

    def refuse(self) -> None:
        """Refuse new connections; those that exist go on."""

        def close(state: _State) -> None:
            if state.listener is not None:
                state.listener.close()
                state.listener = None

        self._call(close)

    def accept(self) -> None:
        """Undo `refuse`, on the same port."""
        self._wait_for(self._listen)

    def _call(self, action: Callable[[_State], None]) -> None:
        async def act(state: _State) -> None:
            action(state)

        self._wait_for(act)

    def _wait_for(self, action: Callable[[_State], Coroutine[None, None, None]]) -> None:
        state = self._state
        if state is None:
            raise RuntimeError("the proxy is not started")
        asyncio.run_coroutine_threadsafe(action(state), state.loop).result(_CALL_SECONDS)

    async def _main(self, started: Future[_State]) -> None:
        state = _State(asyncio.get_running_loop())
        state.flowing.set()
        try:
            await self._listen_somewhere(state)
        except OSError as error:
            started.set_exception(error)
            return
        started.set_result(state)
        await state.stopping.wait()
        if state.listener is not None:
            state.listener.close()
        await self._abort_all(state)

    async def _abort_all(self, state: _State) -> None:
        for link in state.links:
            link.abort()
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)

    async def _listen_somewhere(self, state: _State) -> None:
        for attempt in range(_PORT_ATTEMPTS):
            self._port = free_port()
            try:
                await self._listen(state)
            except OSError as error:
                # Between the probe and the bind another process may have taken the port.
                if error.errno != errno.EADDRINUSE or attempt == _PORT_ATTEMPTS - 1:
                    raise
            else:
                return

    async def _listen(self, state: _State) -> None:
        if state.listener is None:

            def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.ensure_future(self._serve(state, reader, writer))
                state.tasks.add(task)
                task.add_done_callback(state.tasks.discard)

            state.listener = await asyncio.start_server(connected, HOST, self.port, reuse_address=True)

    async def _serve(
        self, state: _State, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter
    ) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(HOST, self._server_port)
        except OSError:
            client_writer.transport.abort()
            return
        except asyncio.CancelledError:
            client_writer.transport.abort()
            raise
        link = _Link(client_reader, client_writer, server_reader, server_writer)
        state.links.add(link)
        directions = [
            asyncio.ensure_future(self._forward_requests(state, link)),
            asyncio.ensure_future(self._forward_replies(state, link)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            link.close()
            state.links.discard(link)
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)

    async def _forward_requests(self, state: _State, link: _Link) -> None:
        splitter = FrameSplitter()
        with contextlib.suppress(OSError):
            while data := await link.client_reader.read(_CHUNK_BYTES):
                for request in splitter.feed(data):
                    await state.flowing.wait()
                    if self._is_doomed(state, request):
                        link.doomed = link.sent
                    link.sent += 1
                    link.server_writer.write(request)
                    if link.doomed is not None:
                        # Nothing more of this client is carried out; the other direction closes the link.
                        await state.stopping.wait()
                    await link.server_writer.drain()
            await state.flowing.wait()

    async def _forward_replies(self, state: _State, link: _Link) -> None:
        splitter = FrameSplitter()
        with contextlib.suppress(OSError):
            while data := await link.server_reader.read(_CHUNK_BYTES):
                for reply in splitter.feed(data):
                    await state.flowing.wait()
                    if not reply.startswith(b">"):
                        if link.answered == link.doomed:
                            self.dropped += 1
                            return
                        link.answered += 1
                    link.client_writer.write(reply)
                await link.client_writer.drain()
            await state.flowing.wait()
            link.client_writer.write(splitter.rest())

    def _is_doomed(self, state: _State, request: bytes) -> bool:
        for rule in state.rules:
            if rule.takes(request):
                rule.remaining -= 1
                if rule.remaining == 0:
                    state.rules.remove(rule)
                return True
        return False
