"""A Redis in memory on a virtual clock: fakeredis with Lua, and what it lacks.

What is added here: the clock (fakeredis asks the operating system in several places), errors of `redis.pcall` as
text, blocking XREAD and CLIENT UNBLOCK without threads, connections that can be refused and replies that can be lost.
All else is fakeredis; `redis_stream_coord.testing.conformance` holds it against real servers.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time as real_time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import redis

from ..acl import scripts_of
from ..errors import ConfigError
from ..scripts import Script, catalogue

try:
    import fakeredis
    from fakeredis._helpers import SimpleError
    from fakeredis.commands_mixins.scripting_mixin import ScriptingCommandsMixin
except ImportError as _error:  # pragma: no cover - the extra is there in our own tests
    raise ConfigError(
        f"the in-memory environment needs more packages: {_error}",
        hint="pip install 'redis-stream-coord[testing]'",
    ) from _error

# What the server's clock shows when the virtual one shows 0.
EPOCH_SECONDS = 1_700_000_000

# Scripts and commands that change nothing.
_QUIET = scripts_of("READ") | {"CLIENT", "XREAD", "XINFO", "TIME", "PING", "SCAN", "SMEMBERS", "heard", "outstanding"}
_READ_HEADER = 8  # what stands before the entries in the answer of a read

_of_thread = threading.local()


class _Time:
    """In place of the module `time` in fakeredis: virtual while one of our servers runs a command, else real."""

    def time(self) -> float:
        clock: Callable[[], float] | None = getattr(_of_thread, "clock", None)
        return real_time.time() if clock is None else clock()

    def __getattr__(self, name: str) -> Any:
        return getattr(real_time, name)


# Where fakeredis begins an error with another word than Redis: command, how it begins -> how it should.
_ERROR_WORDS = {
    (b"XGROUP", "ERR BUSYGROUP "): "BUSYGROUP ",
    (b"XREADGROUP", "ERR The XGROUP subcommand requires the key to exist"): "NOGROUP No such key",
}


def _pcall(self: Any, runtime: Any, expected: Any, *command: Any) -> Any:
    """As fakeredis does it, but with the error as text, as in Redis, and not as an object of Python."""
    try:
        return self._lua_redis_call(runtime, expected, *command)
    except Exception as error:  # noqa: BLE001 - becomes a value in Lua
        text = str(error)
        for (name, theirs), ours in _ERROR_WORDS.items():
            if command[0].upper() == name and text.startswith(theirs):
                text = ours + text.removeprefix(theirs)
        return runtime.table_from({b"err": text.encode()})


_COLLECT_EVERY = 500


class _Compiled:
    """The Lua of one server, which compiles each script once, and collects garbage now and then, not after each.

    Parameters:
        runtime: as fakeredis made it.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._functions: dict[bytes, Any] = {}
        self._runs = 0

    def execute(self, source: Any) -> Any:
        if source == "collectgarbage()":
            self._runs += 1
            if self._runs % _COLLECT_EVERY:
                return None
        if source not in self._functions:
            self._functions[source] = self._runtime.compile(source)
        return self._functions[source]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


def _prepare_fakeredis() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("fakeredis") and getattr(module, "time", None) is real_time:
            module.time = _Time()  # type: ignore[attr-defined]
    ScriptingCommandsMixin._lua_redis_pcall = _pcall  # type: ignore[assignment]


class _Connection(fakeredis.FakeRedisConnection):
    """Has its commands carried out at the time of its server. Derived from for each server.

    Attributes:
        server_time: server time in seconds.
    """

    server_time: Callable[[], float]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        with _virtual(self.server_time):  # it remembers when it was made
            super().__init__(*arguments, **options)

    def _connect(self) -> Any:
        socket: Any = super()._connect()
        socket._blocking = _refuse_to_block
        return socket

    def send_packed_command(self, *arguments: Any, **options: Any) -> Any:
        send: Any = super().send_packed_command
        with _virtual(self.server_time):
            return send(*arguments, **options)


def _refuse_to_block(_timeout: Any, look: Callable[[bool], Any], *_: Any, **options: Any) -> Any:
    """In place of a wait in real time, in which nothing could come: everything else stands still meanwhile."""
    found, shape = look(True), options.get("shape")
    if found is None:
        raise SimpleError("ERR there is nothing yet, and env.client cannot block: ask again after env.advance()")
    return found if shape is None else shape(found)


@contextlib.contextmanager
def _virtual(clock: Callable[[], float]) -> Iterator[None]:
    before, _of_thread.clock = getattr(_of_thread, "clock", None), clock
    try:
        yield
    finally:
        _of_thread.clock = before


@attrs.frozen
class Call:
    """A command that was carried out.

    Attributes:
        at: server time in seconds.
        connection: number of the connection.
        name: of the script, or of the plain command.
        keys, arguments: of a script by name; of a plain command the arguments alone, by position.
        answer: raw.
    """

    at: float
    connection: int
    name: str
    keys: Mapping[str, str]
    arguments: Mapping[str, Any]
    answer: Any


class MemoryServer:
    """One server. Everything it does is done at once, at the time that its clock shows.

    Parameters:
        clock: virtual seconds.
        version: of Redis, as fakeredis takes it.

    Attributes:
        away: connections are refused.
        changes: grows with every command that changed more than a lease.
        watchers: are told of every command that was carried out.
    """

    def __init__(self, clock: Callable[[], float], *, version: tuple[int, ...] = (7, 0)) -> None:
        _prepare_fakeredis()
        self._clock = clock
        self._fake = fakeredis.FakeServer(version=version)
        self._clients: list[Any] = []
        self._connection = self._kind_of_connection("Connection")
        self._telling = self._kind_of_connection("TellingConnection", self.touched)
        self._scripts = {script.sha: script for script in catalogue().values()}
        self._versions: dict[str, Any] = {}
        self.away = False
        self.changes = 0
        self.watchers: list[Callable[[Call], None]] = []
        self.blocked: dict[int, Callable[[bool], None]] = {}  # connection -> ends its wait: whether its time is up
        self._plain = self.connect(raw=True)
        self.do("EVAL", "return 1", "0")
        self._fake._lua_runtime = _Compiled(self._fake._lua_runtime)  # type: ignore[attr-defined]
        if abs(self.time() - self.now()) > 1:
            raise ConfigError("this release of fakeredis reads the time in another way", hint="Install an older one.")

    def now(self) -> float:
        """Server time in seconds."""
        return EPOCH_SECONDS + self._clock()

    def time(self) -> float:
        """Server time as TIME says it."""
        seconds, micros = self.do("TIME")
        return int(seconds) + int(micros) / 1e6

    def connect(self, db: int = 0, *, raw: bool = False) -> Connection:
        """Return a new connection. `raw`: with answers as the server gives them, not as redis-py shows them."""
        client = self._client(db, self._connection)
        if raw:
            client.response_callbacks.clear()
        return Connection(self, client)

    def client(self, db: int = 0) -> Any:
        """Return a client as redis-py has them, over connections of its own. It cannot block, and watchers are not told
        of it; but whoever waits for entries sees what it brings.
        """
        return self._client(db, self._telling)

    def _client(self, db: int, connection_class: Any) -> Any:
        client = fakeredis.FakeRedis(
            server=self._fake, db=db, protocol=2, single_connection_client=True, connection_class=connection_class
        )
        self._clients.append(client)
        return client

    def _kind_of_connection(self, name: str, afterwards: Callable[[], None] | None = None) -> Any:
        """Return a class of connections to this server. Parameters: afterwards: called after each command."""

        def send(connection: Any, *arguments: Any, **options: Any) -> None:
            _Connection.send_packed_command(connection, *arguments, **options)
            if afterwards is not None:
                afterwards()

        return type(name, (_Connection,), {"server_time": staticmethod(self.now), "send_packed_command": send})

    def do(self, *command: Any) -> Any:
        """Carry out a plain command for whoever looks from outside; also while it is away. Returns the raw answer."""
        return self._plain.do(*command)

    def carried_out(self, connection: int, command: Sequence[Any], answer: Any) -> None:
        """Tell everybody of a command."""
        call = self._call(connection, command, answer)
        if self._is_change(call):
            self.changes += 1
        for watcher in self.watchers:
            watcher(call)
        if self.blocked and call.name not in ("CLIENT", "XREAD"):
            self._wake()

    def touched(self) -> None:
        """Somebody from outside may have changed something."""
        self.changes += 1
        self._wake()

    def _wake(self) -> None:
        for wake in list(self.blocked.values()):
            wake(False)

    def _script(self, command: Sequence[Any]) -> Script | None:
        word = _text(command[0]).upper()
        if word == "EVALSHA":
            return self._scripts.get(_text(command[1]))
        sources = (one for one in self._scripts.values() if word == "EVAL" and one.source == command[1])
        return next(sources, None)

    def name_of(self, command: Sequence[Any]) -> str:
        """Return the name of the script that a command runs, or of the plain command."""
        script = self._script(command)
        return _text(command[0]).upper().split()[0] if script is None else script.name

    def _call(self, connection: int, command: Sequence[Any], answer: Any) -> Call:
        script = self._script(command)
        if script is not None:
            count = int(command[2])
            keys = dict(zip(script.keys, map(_text, command[3 : 3 + count]), strict=True))
            given = list(command[3 + count :])
            arguments: dict[str, Any] = {}
            for position, (name, kind) in enumerate(script.arguments):
                arguments[name] = given[position:] if kind == "list" else _text(given[position])
            return Call(self.now(), connection, script.name, keys, arguments, answer)
        words = _text(command[0]).upper().split()
        rest = [*words[1:], *command[1:]]
        return Call(self.now(), connection, words[0], {}, {str(i): part for i, part in enumerate(rest)}, answer)

    def _is_change(self, call: Call) -> bool:
        if call.name == "read":
            return isinstance(call.answer, list) and (len(call.answer) > _READ_HEADER or any(call.answer[4:6]))
        if call.name == "trim":
            return isinstance(call.answer, list) and call.answer[1:2] != [0]
        if call.name == "heartbeat":
            if not isinstance(call.answer, list) or len(call.answer) < 4:
                return True
            key, version = call.keys["metadata"], call.answer[3]
            before, self._versions[key] = self._versions.get(key), version
            return bool(before != version)
        return call.name not in _QUIET

    def leave(self) -> None:
        """Refuse connections, and end those that wait, until `come_back`. What is stored stays."""
        self.away = True
        self._wake()

    def come_back(self) -> None:
        """Accept connections again."""
        self.away = False

    def close(self) -> None:
        """Forget everything."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.watchers.clear()


class Connection:
    """One connection. Use it from one place at a time.

    Attributes:
        number: as CLIENT ID says it.
    """

    def __init__(self, server: MemoryServer, client: Any) -> None:
        self._server = server
        self._client = client
        self.number = int(self.do("CLIENT ID"))

    def do(self, *command: Any) -> Any:
        """Carry a command out, whatever the state of the server."""
        return self._client.execute_command(*command)

    def send(self, *command: Any) -> Any:
        """Carry a command out, as for a client.

        Raises:
            redis.RedisError: as redis-py does.
        """
        if self._server.away:
            raise redis.ConnectionError("the server was taken away")
        word = _text(command[0]).upper()
        if word == "CLIENT UNBLOCK":
            wake = self._server.blocked.get(int(command[1]))
            if wake is not None:
                wake(True)
            return int(wake is not None)
        answer = self.do(*command)
        self._server.carried_out(self.number, command, answer)
        return answer

    def close(self) -> None:
        """Close it."""
        self._client.close()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
