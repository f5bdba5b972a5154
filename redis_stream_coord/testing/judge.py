"""Looks at the server from outside, and says what the protocol does not allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from ..engine import Engine
from ..keys import StreamKeys
from ..monitor import Monitor
from .server import Call, MemoryServer


@attrs.define
class _Progress:
    """What became of the entries of one shard for one group, since it was there or was moved.

    Attributes:
        base: everything up to it was never to be delivered.
        acknowledged: id -> nothing, in order.
    """

    base: tuple[int, int]
    acknowledged: dict[str, None] = attrs.field(factory=dict)


@attrs.frozen
class _Claim:
    incarnation: int
    token: int
    nonce: str


class Judge:
    """Watches every script that a server carries out.

    Parameters:
        server: the server.
    """

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._claims: dict[str, _Claim] = {}  # key of the fence -> the last claim
        self._progress: dict[tuple[str, str], _Progress] = {}
        self._violations: list[str] = []
        server.watchers.append(self._watch)

    def acknowledged(self, stream: str, group: str) -> list[str]:
        """Return the ids that were acknowledged. Parameters: stream: key of a shard's stream."""
        progress = self._progress.get((stream, group))
        return [] if progress is None else list(progress.acknowledged)

    # --- while it happens ---------------------------------------------------------------------------------------------

    def _watch(self, call: Call) -> None:
        if not isinstance(call.answer, list) or not call.answer or call.answer[0] != b"OK":
            return
        handler = getattr(self, f"_{call.name}", None)
        if handler is not None:
            handler(call)

    def _claim(self, call: Call) -> None:
        fence, arguments = call.keys["fence"], call.arguments
        claim = _Claim(int(arguments["incarnation"]), int(arguments["token"]), arguments["nonce"])
        last = self._claims.get(fence)
        if last is not None:
            before, now = (last.incarnation, last.token), (claim.incarnation, claim.token)
            if now < before or (now == before and claim.nonce != last.nonce):
                self._violations.append(f"the fence {fence} went from {last} to {claim}")
        self._claims[fence] = claim
        group = fence.rpartition(":fence:")[2]
        if (call.keys["stream"], group) not in self._progress:
            delivered = self._delivered(call.keys["stream"]).get(group)
            if delivered is not None:
                self._progress[call.keys["stream"], group] = _Progress(delivered)

    def _read(self, call: Call) -> None:
        self._check_fence(call, "reads from")
        progress = self._progress.get((call.keys["stream"], call.arguments["group"]))
        if progress is None:
            return
        for gone in call.answer[5]:
            progress.acknowledged[gone.decode()] = None

    def _ack(self, call: Call) -> None:
        self._check_fence(call, "acknowledges on")
        progress = self._progress.get((call.keys["stream"], call.arguments["group"]))
        if progress is not None:
            progress.acknowledged |= {_text(entry_id): None for entry_id in call.arguments["ids"]}

    def _check_fence(self, call: Call, does: str) -> None:
        arguments = call.arguments
        claim = _Claim(int(arguments["incarnation"]), int(arguments["token"]), arguments["nonce"])
        last = self._claims.get(call.keys["fence"])
        if last is not None and claim != last:
            self._violations.append(f"{claim} {does} {call.keys['stream']}, which {last} claimed last")

    def _seek(self, call: Call) -> None:
        self._progress[call.keys["stream"], call.arguments["group"]] = _Progress(_id(call.answer[1].decode()))

    def _retire(self, call: Call) -> None:
        self._progress.pop((call.keys["stream"], call.arguments["group"]), None)

    # --- when asked ---------------------------------------------------------------------------------------------------

    def look(self, monitor: Monitor, engines: Sequence[Engine]) -> list[str]:
        """Return a sentence for each thing that is wrong.

        Parameters:
            monitor: to read records with.
            engines: of the consumers that run.
        """
        found, self._violations = self._violations, []
        for stream, group in monitor.groups():
            view = monitor.describe(stream, group=group)
            found += [f"{stream}, {group}: {violation}" for violation in view.violations()]
            live = {member.nonce for member in view.members.values()}
            owners: dict[int, str] = {}
            for engine in engines:
                keys = engine.config.keys
                if (keys.stream, keys.group) != (stream, group) or engine.session.nonce not in live:
                    continue  # it has been replaced or fenced, and has yet to hear of it
                for shard in engine.assignment:
                    if shard in owners:
                        found.append(f"{stream}, {group}: {owners[shard]} and {engine.config.member} own shard {shard}")
                    owners[shard] = engine.config.member
            for shard in view.shards:
                found += self._lost(StreamKeys(stream).shard(shard).stream, group)
        return found

    def _lost(self, stream: str, group: str) -> list[str]:
        """Every entry up to the last that was delivered is pending or acknowledged."""
        progress, delivered = self._progress.get((stream, group)), self._delivered(stream).get(group)
        if progress is None or delivered is None or delivered <= progress.base:
            return []
        begin, end = (f"{part[0]}-{part[1]}" for part in (progress.base, delivered))
        rows = self._server.do("XPENDING", stream, group, "-", "+", 1_000_000)
        pending = {_text(row[0]) for row in rows}
        entries = {_text(entry_id) for entry_id, _ in self._server.do("XRANGE", stream, f"({begin}", end)}
        lost = sorted(entries - pending - progress.acknowledged.keys(), key=_id)
        if not lost:
            return []
        return [f"{stream}, {group}: {len(lost)} entries were delivered, and neither acknowledged nor kept: {lost[:5]}"]

    def _delivered(self, stream: str) -> dict[str, tuple[int, int]]:
        if not self._server.do("EXISTS", stream):
            return {}
        groups = [dict(zip(info[::2], info[1::2], strict=True)) for info in self._server.do("XINFO GROUPS", stream)]
        return {_text(group[b"name"]): _id(_text(group[b"last-delivered-id"])) for group in groups}


def _id(entry_id: str) -> tuple[int, int]:
    ms, _, sequence = entry_id.partition("-")
    return int(ms), int(sequence or 0)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
