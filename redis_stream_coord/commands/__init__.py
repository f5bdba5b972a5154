"""One builder for each call to Redis: keys, arguments, and what to make of the answer.

A `Command` is a value. The runners of `redis_stream_coord.runner` send it, synchronously or not; nothing here does
any I/O. Work that takes several commands is a *saga*: a generator that yields commands and is sent their results.
"""

from .base import PROTOCOL, Command, Pause, Saga, Together, text
from .membership import Heard, HeartbeatReply, HeartbeatRequest, Holdings, heard, heartbeat
from .plain import append_to, client_id, client_info, unblock, wait
from .reads import audit_log, entries, event_log, inspect, pending_of, ping, published, route
from .records import announce, create, delete, describe, enlist, groups, record
from .shards import Entry, Fence, Page, ack, claim, lag, note_deliveries, read, seek, trim
from .streams import Published, activate, append, layout, provision, publish, register, retain, retire, unregister

__all__ = [
    "Command",
    "Entry",
    "Fence",
    "Heard",
    "HeartbeatReply",
    "HeartbeatRequest",
    "Holdings",
    "PROTOCOL",
    "Page",
    "Pause",
    "Published",
    "Saga",
    "Together",
    "ack",
    "activate",
    "announce",
    "append",
    "append_to",
    "audit_log",
    "claim",
    "client_id",
    "client_info",
    "create",
    "delete",
    "describe",
    "enlist",
    "entries",
    "event_log",
    "groups",
    "heard",
    "heartbeat",
    "inspect",
    "lag",
    "layout",
    "note_deliveries",
    "pending_of",
    "ping",
    "provision",
    "publish",
    "published",
    "read",
    "record",
    "register",
    "retain",
    "retire",
    "route",
    "seek",
    "text",
    "trim",
    "unblock",
    "unregister",
    "wait",
]
