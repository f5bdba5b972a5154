"""How to reach Redis."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import attrs

from .checks import check_number
from .errors import ConfigError
from .keys import DEFAULT_PREFIX
from .machine import MACHINE, Machine
from .places import Place, take

_SCHEMES = {
    "redis": ("standalone", False),
    "rediss": ("standalone", True),
    "unix": ("unix", False),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
}
# Of the settings that lead to the server in memory of `redis_stream_coord.testing`. Their URL alone leads nowhere.
MEMORY_SCHEME = "in-memory"


@attrs.frozen
class Address:
    """Where the servers are.

    Attributes:
        topology: ``standalone``, ``unix``, ``cluster`` or ``sentinel``.
        nodes: (host, port) of each server named in the URL.
        path: of the socket, for ``unix``.
        service: name of the primary, for ``sentinel``.
        db: number of the database.
        tls: whether the connection is encrypted.
    """

    topology: str
    nodes: tuple[tuple[str, int], ...]
    path: str
    service: str
    db: int
    tls: bool
    username: str | None
    password: str | None = attrs.field(repr=False)

    def __str__(self) -> str:
        return self.path or ", ".join(f"{_bracket(host)}:{port}" for host, port in self.nodes)


@attrs.frozen(kw_only=True)
class RedisSettings:
    """How to reach Redis. Makes no connection; everything that takes ``redis=`` also takes just a URL.

    Parameters:
        url: ``redis://host:port/db``, ``rediss://`` (TLS), ``unix:///path``, ``redis+cluster://host:port,host:port``,
            ``redis+sentinel://host:port,host:port/name-of-the-primary/db``, with ``user:password@`` if needed.
        username: takes precedence over the URL's.
        password: takes precedence over the URL's; a function is asked at every connect, so secrets can rotate.
        ssl_ca_file: certificates to trust instead of the system's, with ``rediss``.
        ssl_cert_file, ssl_key_file: certificate of this client.
        timeout_seconds: for connecting and for one answer. Blocking commands add it to their own time.
        key_prefix: of every key of the library; the streams themselves have their own names.

    Raises:
        ConfigError: the URL cannot be understood.
    """

    url: str = attrs.field(kw_only=False, repr=lambda url: repr(re.sub("//[^/]*@", "//...@", url)))
    username: str | None = None
    password: str | Callable[[], str] | None = attrs.field(default=None, repr=False)
    ssl_ca_file: str | None = None
    ssl_cert_file: str | None = None
    ssl_key_file: str | None = None
    timeout_seconds: float = 5.0
    key_prefix: str = DEFAULT_PREFIX
    address: Address = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        if "{" in self.key_prefix or "}" in self.key_prefix or not self.key_prefix:
            raise ConfigError(
                f"key_prefix={self.key_prefix!r} cannot be used",
                hint="Braces would change the Cluster slot of every key.",
            )
        check_number("timeout_seconds", self.timeout_seconds, 0.001, 86_400.0, hint="These are seconds.")
        object.__setattr__(self, "address", self._parsed())

    def _parsed(self) -> Address:
        given: object = self.url
        if not isinstance(given, str):
            raise ConfigError(
                f"url={given!r} must be text", hint="What takes redis= takes RedisSettings as they are, too."
            )
        return _parse(given)

    @property
    def machine(self) -> Machine:
        """Where everything that uses these settings runs."""
        return MACHINE

    @classmethod
    def of(cls, redis: str | RedisSettings) -> RedisSettings:
        """Return settings for what a user passed as ``redis=``. Raises: `ConfigError`."""
        if isinstance(redis, RedisSettings):
            return redis
        if isinstance(redis, str):
            return cls(redis)
        raise ConfigError(
            f"redis= takes a URL or RedisSettings, not {type(redis).__name__}",
            hint="For a redis-py client use RedisSettings.from_client(client).",
        )

    @classmethod
    def from_env(cls, prefix: str = "REDIS_STREAM_COORD_") -> RedisSettings:
        """Read ``<prefix>URL``, and ``USERNAME``, ``PASSWORD``, ``SSL_CA_FILE``, ``SSL_CERT_FILE``, ``SSL_KEY_FILE``,
        ``TIMEOUT_SECONDS`` and ``KEY_PREFIX`` where they are set, all with the prefix.

        The only place where the library looks at the environment.

        Raises:
            ConfigError: ``URL`` is not set, or a value is wrong.
        """
        url = os.environ.get(f"{prefix}URL")
        if not url:
            raise ConfigError(
                f"{prefix}URL is not set", hint="Set it in the environment, for example to redis://localhost:6379/0."
            )
        timeout = os.environ.get(f"{prefix}TIMEOUT_SECONDS", "5")
        try:
            timeout_seconds = float(timeout)
        except ValueError:
            raise ConfigError(f"{prefix}TIMEOUT_SECONDS={timeout!r} is not a number") from None
        return cls(
            url,
            username=os.environ.get(f"{prefix}USERNAME"),
            password=os.environ.get(f"{prefix}PASSWORD"),
            ssl_ca_file=os.environ.get(f"{prefix}SSL_CA_FILE"),
            ssl_cert_file=os.environ.get(f"{prefix}SSL_CERT_FILE"),
            ssl_key_file=os.environ.get(f"{prefix}SSL_KEY_FILE"),
            timeout_seconds=timeout_seconds,
            key_prefix=os.environ.get(f"{prefix}KEY_PREFIX", DEFAULT_PREFIX),
        )

    @classmethod
    def from_client(cls, client: Any, *, key_prefix: str = DEFAULT_PREFIX) -> RedisSettings:
        """Take over where a redis-py client connects to, but not its connections.

        Connections are not shared because ours need their own timeouts, RESP2 and undecoded answers, whatever the
        client's options are.

        Parameters:
            client: a ``Redis`` (sync or asyncio) over TCP or a Unix socket.
            key_prefix: see the class.

        Raises:
            ConfigError: a Cluster or Sentinel client, whose addresses cannot be told from outside: pass a URL.
        """
        in_memory = getattr(client, "stream_coord_settings", None)
        if isinstance(in_memory, RedisSettings):
            return attrs.evolve(in_memory, key_prefix=key_prefix)
        pool = getattr(client, "connection_pool", None)
        kwargs = getattr(pool, "connection_kwargs", None)
        if not isinstance(kwargs, dict) or not ({"host", "path"} & set(kwargs)):
            raise ConfigError(
                f"cannot tell from a {type(client).__name__} where it connects to",
                hint="Pass a URL: redis+cluster://host:port or redis+sentinel://host:port/name.",
            )
        tls = "SSL" in getattr(pool, "connection_class", type(None)).__name__
        db = kwargs.get("db") or 0
        if kwargs.get("path"):
            url = f"unix://{kwargs['path']}?db={db}"
        else:
            url = f"{'rediss' if tls else 'redis'}://{_bracket(kwargs['host'])}:{kwargs.get('port') or 6379}/{db}"
        timeout = kwargs.get("socket_timeout")
        username, password = kwargs.get("username"), kwargs.get("password")
        if (provider := kwargs.get("credential_provider")) is not None:
            username = (None, *provider.get_credentials())[-2]
            password = lambda: provider.get_credentials()[-1]  # noqa: E731 - asked at every connect, as it is there
        return cls(
            url,
            username=username,
            password=password,
            ssl_ca_file=kwargs.get("ssl_ca_certs"),
            ssl_cert_file=kwargs.get("ssl_certfile"),
            ssl_key_file=kwargs.get("ssl_keyfile"),
            timeout_seconds=timeout if isinstance(timeout, (int, float)) and timeout > 0 else 5.0,
            key_prefix=key_prefix,
        )

    def credentials(self) -> tuple[str | None, str | None]:
        """Return (username, password) as they are at this moment."""
        password = self.password() if callable(self.password) else self.password
        return (
            self.username or self.address.username,
            password if password is not None else self.address.password,
        )


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _parse(url: str) -> Address:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"cannot understand the Redis URL: {error}") from None
    if parts.scheme == MEMORY_SCHEME:
        raise ConfigError(
            "a server in memory cannot be reached by a URL",
            hint="Pass redis=env.redis itself to whatever the test makes; attrs.evolve changes its other fields.",
        )
    if parts.scheme not in _SCHEMES:
        raise ConfigError(
            f"cannot understand the Redis URL scheme {parts.scheme!r}",
            hint=f"Use one of {', '.join(_SCHEMES)}.",
        )
    topology, tls = _SCHEMES[parts.scheme]
    path = [part for part in parts.path.split("/") if part]
    service = ""
    if topology == "sentinel":
        if not path:
            raise ConfigError("a redis+sentinel URL names the primary", hint="redis+sentinel://host:26379/primary/0")
        service = path.pop(0)
    credentials, _, hosts = parts.netloc.rpartition("@")
    if topology == "standalone" and "," in hosts:
        raise ConfigError(
            f"{parts.scheme} URLs name one server, not {hosts!r}",
            hint=f"For several servers use {parts.scheme}+cluster:// or {parts.scheme}+sentinel://.",
        )
    db = _db(parts, path if topology != "unix" else [])
    if topology == "cluster" and db != 0:
        raise ConfigError(f"a Cluster has no database {db}", hint="Leave it out of the URL.")
    username, _, password = credentials.partition(":")
    return Address(
        topology=topology,
        nodes=() if topology == "unix" else _nodes(parts, 26379 if topology == "sentinel" else 6379),
        path=parts.path if topology == "unix" else "",
        service=service,
        db=db,
        tls=tls,
        username=unquote(username) or None,
        password=unquote(password) or None,
    )


def _nodes(parts: SplitResult, default_port: int) -> tuple[tuple[str, int], ...]:
    nodes = []
    for node in parts.netloc.rpartition("@")[2].split(","):
        try:
            one = urlsplit(f"//{node}")
            nodes.append((one.hostname or "localhost", one.port or default_port))
        except ValueError:
            raise ConfigError(f"cannot understand {node!r} in a Redis URL", hint="Use host:port.") from None
    return tuple(nodes)


def _db(parts: SplitResult, path: list[str]) -> int:
    value = path[0] if path else dict(p.partition("=")[::2] for p in parts.query.split("&")).get("db", "0")
    if not value.isdigit():
        raise ConfigError(f"{value!r} in a Redis URL is no number of a database")
    return int(value)


def default_member(scope: str, machine: Machine = MACHINE) -> tuple[str, Place | None]:
    """Return a member id for a consumer that was given none.

    Where the platform names the pod (``POD_NAME``, as Kubernetes' downward API sets it), the id is that name, with a
    number for each further consumer of the pod, in whatever process: the lowest that no living one has. So a pod that
    restarts has the same ids again, and gets its shards back. Elsewhere, and where the platform has no such numbers,
    host name, process id and a random word: a host name alone is not one process's.

    Parameters:
        scope: names stream and group; ids of different groups do not get in each other's way.
        machine: what the consumer runs on.

    Returns:
        The id, and what has to be kept, and released at the end, if it is one with a number.
    """
    if (given := machine.default_member()) is not None:
        return given, None
    pod = os.environ.get("POD_NAME")
    place = take(f"{pod} {scope}") if pod else None
    if place is None:
        return _member(f"{pod or socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"), None
    return _member(f"{pod}" if place.number == 1 else f"{pod}.{place.number}"), place


def _member(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._:@-]", "-", name)[-200:].lstrip("._:@-") or secrets.token_hex(8)
