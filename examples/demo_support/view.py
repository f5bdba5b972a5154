"""How the demo shows itself: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .run import Member, News, Run, ranges

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_red", "bright_green", "bright_blue")
_NEWS_LINES = 5
_OTHER_LINES = 5 + _NEWS_LINES  # of the screen, besides the rows of the tables
_PER_BLOCK, _LONGEST_BAR = 20, 5  # events behind
_PLAIN_SECONDS = 2.0
_SETTLED_SECONDS = 1.0


class View(Protocol):
    def __enter__(self) -> View: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    def show(self, run: Run) -> None: ...
    def end(self, run: Run) -> None: ...


class Plain:
    """Lines for a log: what happens, and every few seconds how far it is."""

    def __init__(self) -> None:
        self._told = 0
        self._next = 0.0
        self._progress: list[News] = []

    def __enter__(self) -> Plain:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def show(self, run: Run) -> None:
        if run.elapsed >= self._next:
            self._next = run.elapsed + _PLAIN_SECONDS
            self._progress.append(self._totals(run))
        self._tell(run, before=run.elapsed - _SETTLED_SECONDS)

    def end(self, run: Run) -> None:
        self._progress.append(self._totals(run))
        self._tell(run, before=float("inf"))

    def _totals(self, run: Run) -> News:
        owned = ", ".join(f"{m.name} {len(m.shards)}" for m in run.members.values() if m.shards)
        text = f"published {len(run.published):,}, handled {run.done_count:,}"
        return News(run.elapsed, f"{text}; shards: {owned}" if owned else text)

    def _tell(self, run: Run, before: float) -> None:
        """Print what is older than that: younger news may still grow."""
        settled = [news for news in run.news[self._told :] if news.at <= before]
        self._told += len(settled)
        for news in sorted([*settled, *self._progress], key=lambda news: news.at):
            if news.at <= before:
                print(f"{news.at:5.1f} s  {news.text}", flush=True)
        self._progress = [news for news in self._progress if news.at > before]


class Terminal:
    """A live table. Parameters: console: where to; title: the first line."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Terminal:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, run: Run) -> None:
        self._live.update(self._screen(run), refresh=True)

    def end(self, run: Run) -> None:
        self.show(run)

    def _screen(self, run: Run) -> RenderableType:
        if run.shards <= max(4, self._console.height - _OTHER_LINES):
            tables = Table.grid(padding=(0, 3))
            tables.add_row(_shards(run), _members(run))
        else:
            tables = _members(run, with_shards=True)
        total = Text.assemble(
            ("published ", "dim"), (f"{len(run.published):,}", "bold"),
            ("   handled ", "dim"), (f"{run.done_count:,}", "bold"),
            ("   repeated ", "dim"), (f"{len(run.handled) - run.done_count:,}", "bold"),
            ("   per second ", "dim"), (f"{sum(run.rates.of(shard) for shard in run.owners):,.0f}", "bold"),
        )  # fmt: skip
        title = Text.assemble(
            (self._title, "bold"), (f"   {run.elapsed:.0f} s", "dim"), no_wrap=True, overflow="ellipsis"
        )
        recent = run.news[-_NEWS_LINES:]
        news = [_line(item, run) for item in recent] + [Text()] * (_NEWS_LINES - len(recent))
        return Group(title, total, Text(), tables, Text(), *news)


def _colour(name: str | None, run: Run) -> str:
    if name is None or name not in run.members:
        return "dim"
    return _COLOURS[list(run.members).index(name) % len(_COLOURS)]


def _line(news: News, run: Run) -> Text:
    line = Text.assemble((f"{news.at:5.1f} s  ", "dim"), news.text, no_wrap=True, overflow="ellipsis")
    for name in run.members:
        line.highlight_words([name], _colour(name, run))
    return line


def _shards(run: Run) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("shard", justify="right")
    table.add_column("owner", min_width=7)
    table.add_column("rate/s", justify="right")
    table.add_column("behind", min_width=4 + _LONGEST_BAR)
    for shard, owner in run.owners.items():
        table.add_row(str(shard), _owner(owner, run), f"{run.rates.of(shard):.0f}", _behind(run.behind[shard]))
    return table


def _owner(name: str | None, run: Run) -> Text:
    if name is None:
        return Text("nobody", "dim")
    dead = name in run.members and run.members[name].state in ("killed", "expired")
    return Text(name, "red strike" if dead else _colour(name, run))


def _behind(count: int) -> Text:
    bar = "█" * min(_LONGEST_BAR, count // _PER_BLOCK)
    return Text.assemble(f"{count:>3} ", (bar, "red" if len(bar) > 1 else "yellow"))


def _members(run: Run, *, with_shards: bool = False) -> Table:
    """The consumers; with the list of their shards where there are too many shards for rows of their own."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("consumer", min_width=8)
    table.add_column("", min_width=18 if with_shards else 13)
    table.add_column("shards", justify="right")
    table.add_column("rate/s", justify="right")
    if with_shards:
        table.add_column("behind", min_width=4 + _LONGEST_BAR)
        table.add_column("which shards")
    for member in run.members.values():
        name = Text(member.name, _colour(member.name, run))
        if member.state in ("left", "expired"):
            table.add_row(Text(member.name, "dim"), _state(member))
            continue
        cells: list[RenderableType] = [str(len(member.shards)), f"{run.rates.of(member.name):.0f}"]
        if with_shards:
            cells += [_behind(sum(run.behind[shard] for shard in member.shards)), ranges(sorted(member.shards))]
        table.add_row(name, _state(member), *cells)
    return table


def _state(member: Member) -> Text:
    if member.state == "killed" and member.lease_remaining_ms is not None:
        return Text(f"killed, {max(0, member.lease_remaining_ms) / 1000:.1f} s left", "bold red")
    if member.state == "expired":
        return Text("expired", "red")
    return Text(member.state, {"running": "green", "left": "dim"}.get(member.state, "yellow"))
