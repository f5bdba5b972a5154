"""How to reach Redis: URLs, the environment, clients of redis-py; and the default member id."""

from __future__ import annotations

import gc
import itertools
import os
import re
import secrets
import subprocess
import sys
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

from redis_stream_coord.errors import ConfigError
from redis_stream_coord.keys import DEFAULT_PREFIX, check_member
from redis_stream_coord.settings import RedisSettings, default_member
from tests.waiting import eventually

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
    names = ("URL", "USERNAME", "PASSWORD", "TIMEOUT_SECONDS", "KEY_PREFIX")
    for name in (*names, "SSL_CA_FILE", "SSL_CERT_FILE", "SSL_KEY_FILE"):
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


def test_from_env_reads_the_files_for_tls(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("REDIS_STREAM_COORD_URL", "rediss://host")
    for name in ("CA", "CERT", "KEY"):
        environment.setenv(f"REDIS_STREAM_COORD_SSL_{name}_FILE", f"/tls/{name}.pem")
    expected = RedisSettings(
        "rediss://host", ssl_ca_file="/tls/CA.pem", ssl_cert_file="/tls/CERT.pem", ssl_key_file="/tls/KEY.pem"
    )
    assert RedisSettings.from_env() == expected


@pytest.mark.parametrize("url", ["redis://a,b", "rediss://a:1,b:2/0", "redis://user:pass,word@a,b"])
def test_several_servers_are_refused_where_only_one_can_be_used(url: str) -> None:
    with pytest.raises(ConfigError, match="name one server") as caught:
        RedisSettings(url)
    assert "word" not in str(caught.value)
    assert caught.value.hint is not None
    assert "+cluster://" in caught.value.hint


def test_comma_in_a_password_is_no_second_server() -> None:
    assert RedisSettings("redis://user:pass,word@a").address.nodes == (("a", 6379),)


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
def scope() -> str:
    """Numbers are unique on the whole machine: other tests must not get in the way."""
    return secrets.token_hex(8)


def names_of(scope: str, count: int) -> tuple[list[str], list[Any]]:
    taken = [default_member(scope) for _ in range(count)]
    return [name for name, _ in taken], [place for _, place in taken]


def test_consumers_of_a_pod_have_ids_that_come_back(environment: pytest.MonkeyPatch, scope: str) -> None:
    environment.setenv("POD_NAME", "worker-7")
    names, places = names_of(scope, 3)
    assert names == ["worker-7", "worker-7.2", "worker-7.3"]
    # Of another group: they do not get in each other's way.
    assert default_member(scope + "x")[0] == "worker-7"
    places[1].release()
    places[1].release()
    again = default_member(scope)
    assert again[0] == "worker-7.2"
    del places, again
    gc.collect()
    assert names_of(scope, 2)[0] == ["worker-7", "worker-7.2"]


def test_processes_of_a_pod_have_ids_of_their_own(environment: pytest.MonkeyPatch, scope: str) -> None:
    environment.setenv("POD_NAME", "worker-7")
    program = (
        "import sys\nfrom redis_stream_coord.settings import default_member\n"
        f"name, place = default_member({scope!r})\nprint(name, flush=True)\nsys.stdin.read()\n"
    )

    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    processes = [start() for _ in range(3)]
    try:
        assert [name for _, name in processes] == ["worker-7", "worker-7.2", "worker-7.3"]
        # Killed, so it had no time for anything.
        processes[1][0].kill()
        processes[1][0].wait()
        processes.append(start())
        assert processes[-1][1] == "worker-7.2"
    finally:
        for process, _ in processes:
            process.kill()
            process.communicate()


def test_forked_child_does_not_keep_the_id_of_its_parent(environment: pytest.MonkeyPatch, scope: str) -> None:
    environment.setenv("POD_NAME", "worker-7")
    name, place = default_member(scope)
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)
        os._exit(0)
    os.close(ready)
    try:
        assert place is not None
        place.release()
        eventually(lambda: names_of(scope, 1)[0] == [name], what="the id is free again")
    finally:
        os.close(go)
        os.waitpid(child, 0)


def test_elsewhere_it_is_random(environment: pytest.MonkeyPatch, scope: str) -> None:
    names, _ = names_of(scope, 20)
    assert len(set(names)) == 20
    assert all(check_member(name) for name in names)


def test_without_abstract_sockets_it_is_random_too(environment: pytest.MonkeyPatch, scope: str) -> None:
    environment.setenv("POD_NAME", "worker-7")
    environment.setattr("sys.platform", "darwin")
    names, _ = names_of(scope, 5)
    assert len(set(names)) == 5
    assert all(name.startswith("worker-7-") for name in names)


@pytest.mark.parametrize("pod", ["-.-", "a/b c", "ä", "_x", "x" * 300, "a-" + "." * 150 + "b" * 60, "-" * 300])
def test_whatever_the_platform_says_the_id_is_valid(environment: pytest.MonkeyPatch, scope: str, pod: str) -> None:
    environment.setenv("POD_NAME", pod)
    for name in names_of(scope, 11)[0]:
        assert check_member(name)
