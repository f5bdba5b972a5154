"""Every Redis key of the library, with its reason.

The slot of a key with braces is that of the text inside the first pair. So the keys of one group share the
slot of ``S:G``, and those of one shard the slot of its stream ``S:i``, in Cluster too.
"""

from __future__ import annotations

import binascii
import re

import attrs

from .errors import ConfigError

DEFAULT_PREFIX = "redis-stream:coord"

# Without ':' in the group, {a:b}+c and {a}+b:c cannot be one key.
_STREAM_NAME = re.compile(r"[A-Za-z0-9._:-]{1,200}")
_GROUP_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
# '-' alone stands for "nobody" in the metadata.
_MEMBER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}")


def check_stream(name: str) -> str:
    """Return `name` if it can name a stream. Raises: `ConfigError`."""
    return _check(_STREAM_NAME, "stream", name, "1 to 200 characters of A-Z a-z 0-9 . _ : -")


def check_group(name: str) -> str:
    """Return `name` if it can name a group. Raises: `ConfigError`."""
    return _check(_GROUP_NAME, "group", name, "1 to 200 characters of A-Z a-z 0-9 . _ -")


def check_member(name: str) -> str:
    """Return `name` if it can be a member id. Raises: `ConfigError`."""
    return _check(
        _MEMBER_NAME,
        "member",
        name,
        "1 to 200 characters of A-Z a-z 0-9 . _ : @ - beginning with a letter or digit",
    )


def _check(pattern: re.Pattern[str], what: str, name: str, rule: str) -> str:
    if not isinstance(name, str) or pattern.fullmatch(name) is None:
        raise ConfigError(f"{name!r} cannot name a {what}", hint=f"Use {rule}.")
    return name


@attrs.frozen
class ShardKeys:
    """The keys of one shard; all in the slot of its stream."""

    stream: str  # the shard itself: a plain Redis stream
    route: str  # layout the shard accepts entries for, open or closed
    published: str  # event ids published lately, for duplicate detection


@attrs.frozen
class StreamKeys:
    """The keys of one logical stream.

    Parameters:
        stream: name of the logical stream, which is the prefix of its shards' keys.
        prefix: key prefix of the library.
    """

    stream: str = attrs.field(converter=check_stream)
    prefix: str = DEFAULT_PREFIX

    @property
    def record(self) -> str:
        """Hash with the layout: shard count, routing, registered groups."""
        return f"{self.prefix}:{{{self.stream}}}:stream"

    @property
    def audit(self) -> str:
        """Stream with one entry per administrative mutation of the record itself, trimmed."""
        return f"{self.prefix}:{{{self.stream}}}:audit"

    @property
    def limits(self) -> str:
        """Hash Redis user or ``*`` -> ``count/seconds``: changes of the record that it may ask for. Lost: defaults."""
        return f"{self.prefix}:{{{self.stream}}}:limits"

    def shard(self, index: int) -> ShardKeys:
        tag = f"{self.prefix}:{{{self.stream}:{index}}}"
        return ShardKeys(stream=f"{self.stream}:{index}", route=f"{tag}:route", published=f"{tag}:published")


@attrs.frozen
class GroupKeys:
    """The keys of one group.

    Parameters:
        stream: name of the logical stream.
        group: name of the consumer group.
        prefix: key prefix of the library.
    """

    stream: str = attrs.field(converter=check_stream)
    group: str = attrs.field(converter=check_group)
    prefix: str = DEFAULT_PREFIX

    def _of_group(self, what: str) -> str:
        return f"{self.prefix}:{{{self.stream}:{self.group}}}:{what}"

    @property
    def metadata(self) -> str:
        """Hash, the source of truth: header, members, shards. Lost: everything fails closed."""
        return self._of_group("metadata")

    @property
    def leases(self) -> str:
        """Sorted set member -> lease deadline in Redis server ms. Lost: everybody gets one full lease."""
        return self._of_group("leases")

    @property
    def events(self) -> str:
        """Stream of transitions, trimmed. Members block on it to be woken."""
        return self._of_group("events")

    @property
    def audit(self) -> str:
        """Stream with one entry per administrative mutation, trimmed."""
        return self._of_group("audit")

    @property
    def limits(self) -> str:
        """Hash Redis user or ``*`` -> ``count/seconds``: mutations that it may ask for. Lost: defaults."""
        return self._of_group("limits")

    @property
    def deleted(self) -> str:
        """The latest lifecycle that was deleted, and whether that is finished. Stays: a witness against old backups."""
        return self._of_group("deleted")

    def fence(self, shard: int) -> str:
        """Hash in the slot of the shard: who may read and acknowledge it, and how far the group got."""
        return f"{self.prefix}:{{{self.stream}:{shard}}}:fence:{self.group}"


def index(prefix: str = DEFAULT_PREFIX) -> str:
    """Key of the set of all groups, as ``stream:group``; lost: rebuilt by a scan."""
    return f"{prefix}:groups"


def slot(key: str) -> int:
    """Return the Cluster slot of a key: CRC-16 (XMODEM) of its hash tag, or of all of it, modulo 16384."""
    begin = key.find("{")
    end = key.find("}", begin + 1)
    tag = key[begin + 1 : end] if begin >= 0 and end > begin + 1 else key
    return binascii.crc_hqx(tag.encode(), 0) % 16384
