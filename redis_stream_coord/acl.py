"""Which rights each kind of process needs from Redis, as ACL rules: pure functions, no input or output.

The rules are made of the scripts themselves: the commands that their text calls, and the keys that their headers name.
A script runs with the rights of its caller, so a role can do with a script only what it could do by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Literal, get_args

import attrs

from . import keys as redis_keys
from .errors import ConfigError
from .keys import DEFAULT_PREFIX, GroupKeys, StreamKeys
from .scripts import catalogue

Role = Literal["READ", "WRITE", "MEMBER", "PRODUCER"]
ROLES: tuple[Role, ...] = get_args(Role)

# What writes. A test knows every other command that a script calls, so that none of these is forgotten.
_HASH = frozenset(["HSET", "HSETNX", "HDEL", "HINCRBY"])
_SORTED = frozenset(["ZADD", "ZREM"])
_SET = frozenset(["SADD", "SREM"])
_APPEND = frozenset(["XADD"])
_CONSUME = frozenset(["XACK", "XCLAIM", "XDEL", "XGROUP|CREATE", "XGROUP|DELCONSUMER", "XREADGROUP", "XTRIM"])
_DESTROY = frozenset(["DEL", "UNLINK", "RENAME", "XGROUP|DESTROY", "XGROUP|SETID", "XSETID", "RESTORE", "DUMP"])
_WRITES = _HASH | _SORTED | _SET | _APPEND | _CONSUME | _DESTROY
# Of the connection, not of any key.
_CONNECTION = ("PING", "SELECT")
_CLUSTER = ("CLUSTER|SLOTS", "COMMAND")

# Scripts by who runs them. WRITE runs all of them but those of `_DATA_PLANE`: who administers neither consumes nor
# publishes.
_SCRIPTS: Mapping[Role, frozenset[str]] = MappingProxyType(
    {
        "READ": frozenset(["describe", "evidence", "inspect", "layout", "pending", "removed", "resharding"]),
        "MEMBER": frozenset(
            ["ack", "claim", "heard", "heartbeat", "layout", "note_deliveries", "outstanding", "read", "rights", "trim"]
        ),
        "PRODUCER": frozenset(["layout", "publish"]),
    }
)
_DATA_PLANE = (_SCRIPTS["MEMBER"] | _SCRIPTS["PRODUCER"]) - {"layout"}

# How a member carries a resharding on, for all groups of its stream, and trims the shards that went. What begins one
# and takes it back writes the audit log, and so is not among them.
_DUTIES = frozenset(
    [
        "abandon",
        "advance",
        "close",
        "decide",
        "evidence",
        "mark",
        "note_cuts",
        "open",
        "pass",
        "provision",
        "readable",
        "rebuild",
        "resharding",
        "settle",
        "trim_removed",
    ]
)

_OF_DUTIES = ("record", "route", "published")

# Plain commands that are sent beside the scripts.
_PLAIN: Mapping[Role, frozenset[str]] = MappingProxyType(
    {
        "READ": frozenset(["HGET", "HGETALL", "SCAN", "SMEMBERS", "TIME", "XRANGE", "XREVRANGE"]),
        "MEMBER": frozenset(["XREAD", "XINFO|GROUPS", "CLIENT|ID", "CLIENT|UNBLOCK", "HMGET"]),
        "PRODUCER": frozenset(["HGETALL", "XADD"]),
        "WRITE": frozenset(
            [
                "CLIENT|INFO",
                "EXISTS",
                "HGET",
                "HGETALL",
                "HMGET",
                "SADD",
                "SCAN",
                "SMEMBERS",
                "SREM",
                "TIME",
                "XADD",
                "XRANGE",
                "XREVRANGE",
            ]
        ),
    }
)

# What a role may write where, by the names that keys have in the headers of the scripts. Only servers with selectors
# (Redis 7, Valkey) can tell apart which command may touch which key.
_WRITABLE: Mapping[Role, Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "MEMBER": MappingProxyType(
            {
                "metadata": _HASH,
                "fence": _HASH,
                "record": _HASH,
                "route": _HASH,
                "published": _HASH,
                "leases": _SORTED,
                "events": _APPEND,
                "stream": _CONSUME,
            }
        ),
        "PRODUCER": MappingProxyType({"published": _HASH, "stream": _APPEND}),
    }
)

# What the commands of a type, by their first letter, find under the names that keys have in the scripts.
_KINDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "H": frozenset(["metadata", "fence", "record", "route", "published"]),
        "Z": frozenset(["leases"]),
        "X": frozenset(["stream", "events"]),
    }
)

_CALL = re.compile(r"redis\.p?call\(\s*'([A-Z]+)'(?:\s*,\s*'([A-Z]+)')?")
# A call whose arguments are put together in a table first.
_TABLE = re.compile(r"\{ '(X[A-Z]+)', key\.")
_CONTAINERS = ("CLIENT", "MEMORY", "OBJECT", "SCRIPT", "XGROUP", "XINFO")
_ANY, _ANY_SHARD = "0any0", 987_654_321


def rules(
    role: Role,
    *,
    stream: str | None = None,
    group: str | None = None,
    prefix: str = DEFAULT_PREFIX,
    selectors: bool = True,
    cluster: bool = False,
    dead_letters: Sequence[str] = (),
    duties: bool = True,
) -> tuple[str, ...]:
    """Return the ACL rules of a role, for ``ACL SETUSER <user> <rules>`` or an ACL file.

    Parameters:
        role: ``READ`` looks at everything and changes nothing; ``WRITE`` administers; ``MEMBER`` consumes; ``PRODUCER``
            publishes.
        stream: only for this stream; ``None``: for all.
        group: a ``MEMBER`` or ``READ`` only of this group; ``None``: of all.
        prefix: key prefix of the library.
        selectors: the server knows selectors (Redis 7 and later, Valkey). Without them a role may use each of its
            commands on each of its keys: a MEMBER could append to shards, a PRODUCER could open and close routes.
        cluster: also what a client of a Cluster asks for.
        duties: a ``MEMBER`` carries reshardings on, as any does, and trims shards that went: it may write the stream's
            record, routes and remembered event ids, and the records, events and fences of the stream's other groups.
            Without, it touches only its own group, and an administrator has to see each resharding through and to trim.
        dead_letters: streams that a ``MEMBER`` appends what it gave up to (see `DeadLetter`).

    Returns:
        The rules, without the name of the user and its password. They begin with taking everything away.

    Raises:
        ConfigError: a name is wrong, or there is no such role.
    """
    if role not in ROLES:
        raise ConfigError(f"role={role!r} must be one of {', '.join(ROLES)}")
    duties = duties and role == "MEMBER"
    patterns = _patterns(role, stream, group, prefix, duties=duties)
    dead = [_escape(name) for name in dead_letters] if role == "MEMBER" else []
    wanted = commands_of(role, duties=duties)
    connection = (*_CONNECTION, *(_CLUSTER if cluster else ()), "EVALSHA", "EVAL")
    writable = _WRITABLE.get(role)
    if not selectors or writable is None:
        return (*_BEGIN, *_keys([*patterns.values(), *dead]), *_allowed([*connection, *wanted]))
    plain = [command for command in wanted if command not in _WRITES]
    own = {name: c for name, c in writable.items() if role != "MEMBER" or duties or name not in _OF_DUTIES}
    selected = [(patterns[name], [c for c in wanted if c in allowed]) for name, allowed in own.items()]
    selected += [(name, list(_APPEND)) for name in dead]
    return (
        *_BEGIN,
        *_keys(patterns.values()),
        *_allowed([*connection, *plain]),
        *(f"({' '.join([*_keys([key]), *_allowed(chosen)])})" for key, chosen in selected if chosen),
    )


_BEGIN = ("resetkeys", "resetchannels", "-@all")


@cache
def commands_of(role: Role, *, duties: bool = False) -> tuple[str, ...]:
    """Return the commands that a role sends or that its scripts call, sorted; subcommands as ``XGROUP|CREATE``."""
    found = set(_PLAIN[role]).union(*(calls(name) for name in scripts_of(role, duties=duties)))
    if role == "READ":
        # A script includes more than it uses: what writes is in the same files.
        found -= _WRITES
    elif role != "WRITE":
        found -= _DESTROY
    if role == "WRITE":
        found |= set(commands_of("READ"))
    return tuple(sorted(found))


def scripts_of(role: Role, *, duties: bool = False) -> frozenset[str]:
    """Return the names of the scripts that a role runs."""
    if role == "WRITE":
        return frozenset(catalogue()) - _DATA_PLANE
    return (_SCRIPTS[role] | (_DUTIES if duties else frozenset())) & frozenset(catalogue())


@cache
def calls(script: str) -> frozenset[str]:
    """Return every command that the text of a script calls, its includes included."""
    text = re.sub(r"--[^\n]*", "", catalogue()[script].source)
    found = {f"{name}|{sub}" if name in _CONTAINERS else name for name, sub in _CALL.findall(text)}
    return frozenset(found | set(_TABLE.findall(text)))


@cache
def at_once(role: Role) -> tuple[tuple[str, str], ...]:
    """Return what a user of a role has to have for its scripts to do all of their work or nothing.

    A script that writes with one command only is refused before it has written. One that writes with several may be
    refused in its midst, be it months later: some are needed only now and then.

    Parameters:
        role: without the duties of a member.

    Returns:
        Commands, each with the name of a key that it is given for, or with '' if for none.
    """
    found = set()
    for name in scripts_of(role):
        if len(calls(name) & _WRITES) < 2:
            continue
        for command in calls(name):
            kinds = _KINDS.get(command[0])
            keys = set(catalogue()[name].keys) & kinds if kinds else {""}
            if command in _WRITES:
                own = _WRITABLE.get(role, {})
                keys = {key for key in keys if key not in _OF_DUTIES and command in own.get(key, ())}
            found |= {(command, key) for key in keys}
    return tuple(sorted(found))


def spoken(command: str, key: str) -> list[str]:
    """Return a command as its words, so far as Redis needs them to say who may give it."""
    if command == "XREADGROUP":
        return ["XREADGROUP", "GROUP", "-", "-", "STREAMS", key, ">"]
    return [*command.split("|"), key] if key else command.split("|")


def _patterns(role: Role, stream: str | None, group: str | None, prefix: str, *, duties: bool) -> dict[str, str]:
    """Return the pattern of every key that a role touches, by the name that it has in the scripts."""
    names = GroupKeys(stream or _ANY, group or _ANY, _escape(prefix))
    streams = StreamKeys(names.stream, names.prefix)
    # Every key there is, so that none is forgotten when one is added. A group and its stream have some names in common.
    everything = {f"stream {name}": getattr(streams, name) for name in _properties(StreamKeys)}
    everything |= {"record": everything.pop("stream record"), "index": redis_keys.index(names.prefix)}
    everything |= {name: getattr(names, name) for name in _properties(GroupKeys)}
    everything |= attrs.asdict(streams.shard(_ANY_SHARD)) | {"fence": names.fence(_ANY_SHARD)}
    if duties:
        # A resharding concerns every group of the stream.
        others = GroupKeys(names.stream, _ANY, names.prefix)
        everything |= {"metadata": others.metadata, "events": others.events, "fence": others.fence(_ANY_SHARD)}
    wanted = set(everything)
    if role in ("MEMBER", "PRODUCER"):
        wanted = {key for name in scripts_of(role, duties=duties) for key in catalogue()[name].keys}
    return {
        name: key.replace(_ANY, "*").replace(str(_ANY_SHARD), "[0-9]*")
        for name, key in everything.items()
        if name in wanted
    }


def _properties(cls: type) -> list[str]:
    return [name for name, value in vars(cls).items() if isinstance(value, property)]


def _escape(prefix: str) -> str:
    return re.sub(r"([*?\[\]\\^])", r"\\\1", prefix)


def _keys(patterns: Iterable[str]) -> list[str]:
    return [f"~{pattern}" for pattern in patterns]


def _allowed(commands: Sequence[str]) -> list[str]:
    return [f"+{command.lower()}" for command in commands]


def missing(text: str, *, command: str, keys: Sequence[str], script: str | None = None) -> str:
    """Say which rule a user lacks, of what Redis answered to it.

    Parameters:
        text: the error of Redis.
        command: that was sent.
        keys: that it named.
        script: its name, if it was one.

    Returns:
        Rules as ``+hset`` or ``~key``, as many as it may be; Redis does not always say which one.
    """
    if named := re.search(r"(?:run|execute) the '([\w|]+)' command", text):
        return f"+{named[1].lower()}"
    if named := re.search(r"access the '([^']+)' (?:key|channel)", text):
        return f"~{named[1]}"
    if re.search(r"access (?:a|at least one|one) ?(?:key|of the keys)|keys used as arguments", text):
        return "one of " + " ".join(f"~{key}" for key in keys) if len(keys) > 1 else "".join(f"~{key}" for key in keys)
    if script is not None:
        return "one of " + " ".join(_allowed(sorted(calls(script))))
    return f"+{command.lower().replace(' ', '|')}"
