"""Makes clients of redis-py as `RedisSettings` says.

Connections speak RESP2 and are never decoded by redis-py, so answers have one shape whatever the user's own client
does. The retries of redis-py are off: it would repeat what must not be repeated.
"""

from __future__ import annotations

from typing import Any

import redis
import redis.backoff

from .settings import RedisSettings


def _options(settings: RedisSettings, retry: Any, timeout_seconds: float) -> dict[str, Any]:
    username, password = settings.credentials()
    options: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": min(settings.timeout_seconds, timeout_seconds),
        "socket_keepalive": True,
        "health_check_interval": 0,
        "retry": retry,
    }
    if settings.password is not None and callable(settings.password):
        options["credential_provider"] = _Credentials(settings)
    else:
        options |= {"username": username, "password": password}
    return options


class _Credentials(redis.CredentialProvider):
    """Asks for the password at every connect, so that a rotated secret is used."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        username, password = self._settings.credentials()
        return (username, password or "") if username else (password or "",)


def make(settings: RedisSettings, kinds: Any, timeout_seconds: float) -> Any:
    """Make a client. Parameters: kinds: the classes of redis-py to use; see `machine`."""
    address = settings.address
    retry = kinds.retry(redis.backoff.NoBackoff(), 0)
    options = _options(settings, retry, timeout_seconds)
    if address.tls:
        options |= {
            "ssl": True,
            "ssl_ca_certs": settings.ssl_ca_file,
            "ssl_certfile": settings.ssl_cert_file,
            "ssl_keyfile": settings.ssl_key_file,
        }
    if address.topology == "cluster":
        nodes = [kinds.cluster_node(host, port) for host, port in address.nodes]
        # A redirection is no failure: it says that the command was not carried out there.
        options["retry"] = kinds.retry(redis.backoff.NoBackoff(), 3)
        return kinds.cluster(startup_nodes=nodes, **options)
    options["db"] = address.db
    if address.topology == "unix":
        options.pop("socket_keepalive")
        return kinds.client(unix_socket_path=address.path, **options)
    if address.topology == "sentinel":
        sentinel = kinds.sentinel(address.nodes, sentinel_kwargs={"socket_timeout": settings.timeout_seconds})
        return sentinel.master_for(address.service, redis_class=kinds.client, **options)
    host, port = address.nodes[0]
    return kinds.client(host=host, port=port, **options)


def sentinels(client: Any) -> list[Any]:
    """Return the clients that a client asks for the primary; closing it does not close them."""
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    return [] if manager is None else list(manager.sentinels)


def close(client: Any) -> None:
    for one in (*sentinels(client), client):
        one.close()
