"""How to reach Redis: URLs, the environment, clients of redis-py; and the default member id."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

from redis_stream_coord import settings as module
from redis_stream_coord.errors import ConfigError
from redis_stream_coord.keys import DEFAULT_PREFIX, check_member
from redis_stream_coord.settings import RedisSettings, default_member

# --- URLs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://localhost", {"topology": "standalone", "nodes": (("localhost", 6379),), "db": 0, "tls": False}),
        ("redis://", {"nodes": (("localhost", 6379),)}),
        ("redis://host:6380/2", {"nodes": (("host", 6380),), "db": 2}),
        ("redis://host/?db=3", {"db": 3}),
        ("redis://host?db=3", {"db": 3}),
        ("rediss://host", {"topology": "standalone", "tls": True}),
        ("redis://[::1]:6380/1", {"nodes": (("::1", 6380),), "db": 1}),
        ("redis://[2001:db8::7]", {"nodes": (("2001:db8::7", 6379),)}),
        ("redis://user:secret@host", {"username": "user", "password": "secret", "nodes": (("host", 6379),)}),
        ("redis://:secret@host", {"username": None, "password": "secret"}),
        ("redis://us%40er:p%3Ass%2F@host", {"username": "us@er", "password": "p:ss/"}),
        ("redis://user:p@ss@host", {"username": "user", "password": "p@ss", "nodes": (("host", 6379),)}),
        ("unix:///run/redis.sock", {"topology": "unix", "path": "/run/redis.sock", "nodes": (), "db": 0}),
        ("unix:///run/redis.sock?db=4", {"topology": "unix", "path": "/run/redis.sock", "db": 4}),
        ("unix://user:secret@/run/redis.sock", {"username": "user", "password": "secret", "path": "/run/redis.sock"}),
        (
            "redis+cluster://a:7000,b:7001,[::1]",
            {"topology": "cluster", "nodes": (("a", 7000), ("b", 7001), ("::1", 6379)), "tls": False},
        ),
        ("rediss+cluster://u:p@a:7000,b", {"topology": "cluster", "tls": True, "username": "u", "password": "p"}),
        (
            "redis+sentinel://a,b:26380/primary/2",
            {
                "topology": "sentinel",
                "nodes": (("a", 26379), ("b", 26380)),
                "service": "primary",
                "db": 2,
            },
        ),
        ("rediss+sentinel://a/primary", {"topology": "sentinel", "service": "primary", "db": 0, "tls": True}),
    ],
)
def test_a_url_is_understood(url: str, expected: dict[str, Any]) -> None:
    address = RedisSettings(url).address
    assert {name: getattr(address, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "scheme ''"),
        ("localhost:6379", "scheme 'localhost'"),
        ("http://host", "scheme 'http'"),
        ("redis://host:port", "cannot understand 'host:port'"),
        ("redis://host:99999", "cannot understand 'host:99999'"),
        ("redis://[::1", "cannot understand"),
        ("redis://host/zero", "'zero' in a Redis URL is no number"),
        ("redis://host?db=", "is no number"),
        ("redis+sentinel://host", "names the primary"),
        ("redis+sentinel://host/", "names the primary"),
        ("redis+sentinel://host/primary/x", "is no number"),
    ],
)
def test_a_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RedisSettings(url)


@pytest.mark.parametrize(
    "arguments", [{"key_prefix": ""}, {"key_prefix": "a{b"}, {"key_prefix": "a}"}, {"timeout_seconds": 0}]
)
def test_other_settings_are_checked(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RedisSettings("redis://host", **arguments)


def test_secrets_are_not_shown() -> None:
    shown = repr(RedisSettings("redis://host", password="hunter2"))
    assert "hunter2" not in shown
    assert "hunter2" not in repr(RedisSettings("redis://u:hunter2@host").address)
    assert "url='redis://...@host:6380/1'" in repr(RedisSettings("redis://u:hunter2@host:6380/1"))
    assert "hunter2" not in repr(RedisSettings("redis://:hunter2@host"))


def test_what_is_given_comes_before_the_url() -> None:
    assert RedisSettings("redis://u:p@host").credentials() == ("u", "p")
    assert RedisSettings("redis://u:p@host", username="v", password="q").credentials() == ("v", "q")
    assert RedisSettings("redis://host").credentials() == (None, None)


def test_a_password_can_rotate() -> None:
    numbers = itertools.count(1)
    settings = RedisSettings("redis://host", password=lambda: f"secret{next(numbers)}")
    assert [settings.credentials()[1] for _ in range(2)] == ["secret1", "secret2"]


def test_of_takes_a_url_or_settings() -> None:
    settings = RedisSettings("redis://host")
    assert RedisSettings.of(settings) is settings
    assert RedisSettings.of("redis://host") == settings
    with pytest.raises(ConfigError, match="from_client"):
        RedisSettings.of(redis.Redis())  # type: ignore[arg-type]


# --- the environment ------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("URL", "USERNAME", "PASSWORD", "TIMEOUT_SECONDS", "KEY_PREFIX"):
        monkeypatch.delenv(f"REDIS_STREAM_COORD_{name}", raising=False)
    monkeypatch.delenv("POD_NAME", raising=False)
    return monkeypatch


def test_from_env(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("REDIS_STREAM_COORD_URL", "redis://host:6380/1")
    assert RedisSettings.from_env() == RedisSettings("redis://host:6380/1")
    environment.setenv("REDIS_STREAM_COORD_USERNAME", "user")
    environment.setenv("REDIS_STREAM_COORD_PASSWORD", "secret")
    environment.setenv("REDIS_STREAM_COORD_TIMEOUT_SECONDS", "2.5")
    environment.setenv("REDIS_STREAM_COORD_KEY_PREFIX", "mine")
    settings = RedisSettings.from_env()
    assert settings.credentials() == ("user", "secret")
    assert (settings.timeout_seconds, settings.key_prefix) == (2.5, "mine")


def test_from_env_with_a_prefix(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("APP_URL", "redis://host")
    assert RedisSettings.from_env("APP_").url == "redis://host"


@pytest.mark.parametrize("url", [None, ""])
def test_from_env_needs_a_url(environment: pytest.MonkeyPatch, url: str | None) -> None:
    if url is not None:
        environment.setenv("REDIS_STREAM_COORD_URL", url)
    with pytest.raises(ConfigError, match="REDIS_STREAM_COORD_URL is not set"):
        RedisSettings.from_env()


def test_from_env_checks_the_timeout(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("REDIS_STREAM_COORD_URL", "redis://host")
    environment.setenv("REDIS_STREAM_COORD_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ConfigError, match="'soon' is not a number"):
        RedisSettings.from_env()


# --- clients of redis-py --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [redis.Redis, redis.asyncio.Redis], ids=["sync", "async"])
class TestFromClient:
    def test_tcp(self, kind: Any) -> None:
        client = kind(host="h", port=6380, db=2, username="u", password="p/:@", socket_timeout=1.5)
        settings = RedisSettings.from_client(client, key_prefix="mine")
        assert settings.address.nodes == (("h", 6380),)
        assert (settings.address.db, settings.address.tls, settings.key_prefix) == (2, False, "mine")
        assert settings.credentials() == ("u", "p/:@")
        assert settings.timeout_seconds == 1.5

    def test_defaults(self, kind: Any) -> None:
        settings = RedisSettings.from_client(kind(socket_timeout=None))
        assert settings.address.nodes == (("localhost", 6379),)
        assert settings.timeout_seconds == 5.0
        assert settings.credentials() == (None, None)
        assert settings.key_prefix == DEFAULT_PREFIX

    def test_of_a_url(self, kind: Any) -> None:
        settings = RedisSettings.from_client(kind.from_url("redis://u:p@[::1]:6380/3"))
        assert settings.address.nodes == (("::1", 6380),)
        assert settings.address.db == 3
        assert settings.credentials() == ("u", "p")

    def test_unix(self, kind: Any) -> None:
        settings = RedisSettings.from_client(kind(unix_socket_path="/run/redis.sock", db=1))
        assert settings.address.topology == "unix"
        assert (settings.address.path, settings.address.db) == ("/run/redis.sock", 1)

    def test_tls(self, kind: Any) -> None:
        client = kind(host="h", ssl=True, ssl_ca_certs="ca.pem", ssl_certfile="c.pem", ssl_keyfile="k.pem")
        settings = RedisSettings.from_client(client)
        assert settings.address.tls
        assert (settings.ssl_ca_file, settings.ssl_cert_file, settings.ssl_key_file) == ("ca.pem", "c.pem", "k.pem")

    def test_a_provider_of_credentials(self, kind: Any) -> None:
        numbers = itertools.count(1)

        class Rotating(redis.CredentialProvider):
            def get_credentials(self) -> tuple[str, str]:
                return "u", f"p{next(numbers)}"

        settings = RedisSettings.from_client(kind(credential_provider=Rotating()))
        one, other = settings.credentials(), settings.credentials()
        assert (one[0], other[0]) == ("u", "u")
        assert one[1] != other[1] is not None


@pytest.mark.parametrize(
    "client",
    [
        redis.sentinel.Sentinel([("h", 26379)]).master_for("primary"),
        redis.asyncio.sentinel.Sentinel([("h", 26379)]).master_for("primary"),
        object(),
        "redis://host",
    ],
    ids=["sentinel", "async sentinel", "object", "text"],
)
def test_from_client_cannot_tell(client: Any) -> None:
    with pytest.raises(ConfigError, match="Pass a URL"):
        RedisSettings.from_client(client)


# --- the default member id ------------------------------------------------------------------------------------------


@pytest.fixture
def counting(environment: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    environment.setattr(module, "_members", itertools.count(1))
    return environment


def test_a_pod_has_a_stable_id(counting: pytest.MonkeyPatch) -> None:
    counting.setenv("POD_NAME", "worker-7")
    assert [default_member() for _ in range(3)] == ["worker-7", "worker-7.2", "worker-7.3"]


def test_elsewhere_it_is_random(counting: pytest.MonkeyPatch) -> None:
    names = {default_member() for _ in range(20)}
    assert len(names) == 20
    assert all(check_member(name) for name in names)


@pytest.mark.parametrize("pod", ["-.-", "a/b c", "ä", "_x", "x" * 300, "a-" + "." * 150 + "b" * 60, "-" * 300])
def test_whatever_the_platform_says_the_id_is_valid(counting: pytest.MonkeyPatch, pod: str) -> None:
    counting.setenv("POD_NAME", pod)
    for _ in range(11):
        assert check_member(default_member())
