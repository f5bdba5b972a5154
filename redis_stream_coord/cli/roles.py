"""Commands about the command line's surroundings: ACL rules of Redis, completion of the shell."""

from __future__ import annotations

from typing import Any, cast

import click
from click.shell_completion import get_completion_class

from .. import acl
from .output import View
from .session import CoordCommand, Session

PROGRAM = "redis-stream-coord"


@click.command("acl", cls=CoordCommand)
@click.argument("role", type=click.Choice(acl.ROLES, case_sensitive=False))
@click.option("--stream", help="Only for this stream. Default: all.")
@click.option("--group", help="Only for this group. Default: all.")
@click.option("--user", help="Name of the Redis user. Default: that of the role.")
@click.option("--acl-file", is_flag=True, help="A line for an ACL file in place of ACL SETUSER.")
@click.option("--no-selectors", is_flag=True, help="For Redis 6.2: weaker, see the docs.")
@click.option("--cluster", is_flag=True, help="Also what a client of a Cluster asks for.")
@click.option("--dead-letters", multiple=True, metavar="STREAM", help="A MEMBER may append to it; may be repeated.")
@click.option("--no-duties", is_flag=True, help="A MEMBER that carries no resharding on: only its own group.")
def acl_command(session: Session, *, role: str, user: str | None, acl_file: bool, **given: Any) -> View:
    """Print the ACL rules of a role; replace change-me by a password. Asks Redis nothing."""
    chosen = cast(acl.Role, role.upper())
    rules = acl.rules(
        chosen,
        stream=given["stream"],
        group=given["group"],
        prefix=session.key_prefix,
        selectors=not given["no_selectors"],
        cluster=given["cluster"],
        dead_letters=given["dead_letters"],
        duties=not given["no_duties"],
    )
    name = user or chosen.lower()
    head = ("user", name) if acl_file else ("ACL", "SETUSER", name)
    line = " ".join([*head, "reset", "on", ">change-me", *rules])
    return View({"role": chosen, "user": name, "rules": rules, "line": line}, [line])


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, *, shell: str) -> None:
    """Print what makes the shell complete this program: eval "$(redis-stream-coord completion bash)"."""
    made = get_completion_class(shell)
    assert made is not None
    variable = f"_{PROGRAM.replace('-', '_').upper()}_COMPLETE"
    click.echo(made(ctx.find_root().command, {}, PROGRAM, variable).source())


COMMANDS = (acl_command, completion)
