"""What all commands share: where Redis is, how to print, and how errors end the program."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ..admin import Admin
from ..errors import CoordError
from ..keys import DEFAULT_PREFIX
from ..monitor import Monitor
from ..settings import RedisSettings
from .exits import Exit, exit_of
from .output import View, document, error_document, show_error


class Session:
    """One run of the program. Connections are made when first needed."""

    def __init__(self, command: str, given: dict[str, Any]) -> None:
        self.command = command
        self.as_json: bool = given.pop("as_json")
        self._url: str | None = given.pop("redis")
        self._username: str | None = given.pop("username")
        self._password: str | None = given.pop("password")
        self._key_prefix: str = given.pop("key_prefix")
        self._timeout: float = given.pop("timeout")
        self.out = Console(highlight=False)
        self.err = Console(stderr=True, highlight=False)
        self._open: list[Admin | Monitor] = []
        self._monitor: Monitor | None = None

    @property
    def settings(self) -> RedisSettings:
        """How to reach Redis."""
        if not self._url:
            raise click.UsageError("say where Redis is: --redis URL, or REDIS_STREAM_COORD_URL in the environment")
        return RedisSettings(
            self._url,
            username=self._username,
            password=self._password,
            timeout_seconds=self._timeout,
            key_prefix=self._key_prefix,
        )

    @property
    def key_prefix(self) -> str:
        """Of the library's keys."""
        return self._key_prefix

    @property
    def monitor(self) -> Monitor:
        """For reads."""
        if self._monitor is None:
            self._monitor = Monitor(self.settings)
            self._open.append(self._monitor)
        return self._monitor

    def admin(self, requested_by: str) -> Admin:
        """For mutations by somebody."""
        admin = Admin(self.settings, requested_by=requested_by)
        self._open.append(admin)
        return admin

    @property
    def interactive(self) -> bool:
        """Whether a person looks on."""
        return not self.as_json and self.out.is_terminal

    def say(self, text: str) -> None:
        """Tell a person something beside the result."""
        self.err.print(Text(text), soft_wrap=True)

    def show(self, view: View) -> None:
        """Print a result."""
        if self.as_json:
            click.echo(document(self.command, view.data))
            return
        for one in view.shown:
            # Names and reasons may look like markup. Nothing is cut off where nobody sees how wide the screen is.
            text = Text(one) if isinstance(one, str) else one
            self.out.print(text, soft_wrap=isinstance(text, Text), width=None if self.out.is_terminal else 200)

    def failed(self, error: CoordError) -> Exit:
        """Print an error; return the exit code."""
        code = exit_of(error)
        if self.as_json:
            click.echo(error_document(self.command, error, code))
        else:
            show_error(self.err, error)
        return code

    def close(self) -> None:
        """Close the connections."""
        for one in self._open:
            one.close()


_CONNECTION = (
    click.Option(["--redis"], metavar="URL", envvar="REDIS_STREAM_COORD_URL", show_envvar=True, help="Where Redis is."),
    click.Option(["--username"], envvar="REDIS_STREAM_COORD_USERNAME", show_envvar=True, help="If not in the URL."),
    # Not to be given on a command line, where everybody on the machine sees it.
    click.Option(["--password"], envvar="REDIS_STREAM_COORD_PASSWORD", hidden=True),
    click.Option(
        ["--key-prefix"],
        envvar="REDIS_STREAM_COORD_KEY_PREFIX",
        default=DEFAULT_PREFIX,
        show_default=True,
        help="Prefix of the library's keys.",
    ),
    click.Option(
        ["--timeout"],
        type=click.FloatRange(min=0.01),
        envvar="REDIS_STREAM_COORD_TIMEOUT_SECONDS",
        default=5.0,
        show_default=True,
        metavar="SECONDS",
        help="For one answer of Redis.",
    ),
    click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document, also for an error."),
)
_WATCH = (
    click.Option(["--watch"], is_flag=True, help="Again and again, until Ctrl-C."),
    click.Option(
        ["--interval"],
        type=click.FloatRange(min=0.05),
        default=2.0,
        show_default=True,
        metavar="SECONDS",
        help="Between two looks with --watch.",
    ),
)
_MUTATION = (
    click.Option(
        ["--requested-by"],
        envvar="REDIS_STREAM_COORD_REQUESTED_BY",
        show_envvar=True,
        help="Who asks; goes into the audit log.",
    ),
    click.Option(["--reason"], help="Why; goes into the audit log."),
    click.Option(["--request-id"], help="The same one again returns what was recorded. Default: a new one."),
    click.Option(["--dry-run"], is_flag=True, help="Say what would happen, and change nothing."),
)
_YES = click.Option(["--yes", "-y"], is_flag=True, help="Do not ask.")


class CoordCommand(click.Command):
    """A command that gets a `Session` as its first argument and returns a `View`."""

    own: tuple[click.Option, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [*self.own, *_CONNECTION]

    def invoke(self, ctx: click.Context) -> None:
        assert self.callback is not None
        session = Session(self.name or "", ctx.params)
        try:
            code = self._run(ctx, session, self.callback)
        except CoordError as error:
            code = session.failed(error)
        except click.Abort:
            session.say("aborted: nothing was changed")
            code = Exit.ABORTED
        finally:
            session.close()
        ctx.exit(int(code))

    def _run(self, ctx: click.Context, session: Session, callback: Callable[..., View]) -> Exit:
        view = callback(session, **ctx.params)
        session.show(view)
        return view.exit


class ReadCommand(CoordCommand):
    """A command that changes nothing; it can be repeated with ``--watch``."""

    own = _WATCH

    def _run(self, ctx: click.Context, session: Session, callback: Callable[..., View]) -> Exit:
        watch, interval = ctx.params.pop("watch"), ctx.params.pop("interval")
        if not watch:
            return super()._run(ctx, session, callback)
        code = Exit.OK
        try:
            while True:
                try:
                    view = callback(session, **ctx.params)
                except CoordError as error:
                    code = session.failed(error)
                else:
                    if session.interactive:
                        session.out.clear()
                    session.show(view)
                    code = view.exit
                time.sleep(interval)
        except KeyboardInterrupt:
            return code


class Request:
    """Who asks for a mutation, and why."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.requested_by: str = (given.pop("requested_by") or "").strip()
        self.reason: str = (given.pop("reason") or "").strip()
        self.request_id: str = given.pop("request_id") or str(uuid.uuid4())
        self.dry_run: bool = given.pop("dry_run")
        if not self.dry_run and not (self.requested_by and self.reason):
            missing = [
                name for name, value in (("--requested-by", self.requested_by), ("--reason", self.reason)) if not value
            ]
            raise click.UsageError(f"{' and '.join(missing)} must be given: it goes into the audit log")

    @property
    def words(self) -> dict[str, Any]:
        """What every method of `Admin` takes."""
        return {"reason": self.reason, "request_id": self.request_id}


class MutationCommand(CoordCommand):
    """A command that changes something: it also gets a `Request`. A destructive one asks before."""

    own: tuple[click.Option, ...] = _MUTATION

    def _run(self, ctx: click.Context, session: Session, callback: Callable[..., View]) -> Exit:
        request = Request(ctx.params)
        view = callback(session, request, **ctx.params)
        session.show(view)
        if not request.dry_run and not session.as_json:
            session.say(f"request id {request.request_id}")
        return view.exit


class DestructiveCommand(MutationCommand):
    """A command that destroys something: it asks before, unless ``--yes``."""

    own: tuple[click.Option, ...] = (*_MUTATION, _YES)


def confirm(session: Session, question: str, *, yes: bool) -> None:
    """Ask, unless `yes`. Raises: `click.Abort`: the answer was no, or there is nobody to answer."""
    if yes:
        return
    if session.as_json or not sys.stdin.isatty():
        session.say(f"{question} Say so with --yes.")
        raise click.Abort
    click.confirm(question, abort=True, err=True)
