"""Commands that run on this machine, or on the login node of their cluster or run.

Nearly every command calls this, but most profiles have no `login`, so the modules for ssh are imported only if needed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import get_run
from ftkit.cli.commands import SERVED, SUBMITTING, ExamplesCommand, command, current_context
from ftkit.cli.output import current_output
from ftkit.config.context import Context, read_settings_layers, search_folders
from ftkit.errors import ConfigError, FtkitError, NotFoundError, Problem

if TYPE_CHECKING:
    from ftkit.remote.ssh import Login

_TYPED = "ftkit.typed"
"""Key of a context's `meta`: the words of the command line after the command's name."""


class ForwardedCommand(ExamplesCommand):
    """A command that runs on the login node of its cluster or run if the profile has a `login`, else here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the typed words, which are forwarded unchanged: a file of the cluster need not exist here."""
        ctx.meta[_TYPED] = list(args)
        try:
            return super().parse_args(ctx, list(args))
        except click.BadParameter:
            lenient = click.Context(self, parent=ctx.parent, resilient_parsing=True)
            super().parse_args(lenient, args)
            if self.name in SUBMITTING or find_login_node(lenient.params) is None:
                raise
            ctx.params = lenient.params
            return []

    def invoke(self, ctx: click.Context) -> Any:
        place = find_login_node(ctx.params)
        if place is None:
            if SERVED in os.environ and not sys.stdout.isatty():
                threading.Thread(target=_end_with_reader, daemon=True).start()
            return super().invoke(ctx)
        from ftkit.cli.forward import forward

        path = ctx.command_path.split()[1:]
        return ctx.exit(forward(*place, path, [*current_output().words, *ctx.meta[_TYPED]], ctx.params))


forwarded_command = partial(command, cls=ForwardedCommand)


def _end_with_reader() -> None:
    """End this process when its output has no reader anymore: without a terminal, sshd sends no signal."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    watched.poll()
    os.kill(os.getpid(), signal.SIGTERM)


def find_login_node(params: Mapping[str, object]) -> tuple[Login, Context] | None:
    """Return the login node on which a command with these parameters runs, and its project here; None for this machine.

    If the command selects a run that was submitted from here, its login node; else that of the selected cluster.
    """
    if SERVED in os.environ:
        return None
    ctx = current_context()
    references = params.get("references")
    reference = references[0] if isinstance(references, tuple) and references else params.get("reference")
    if isinstance(reference, str):
        from ftkit.remote.remote_runs import NO_MATCH, Records, rank_match

        found = Records.of(os.environ).find(reference)
        here = _find_here(reference) if found else ""
        rank = rank_match(reference, here)
        if here and rank == NO_MATCH:  # found by its job's id
            rank = (True, "9")
        if found and rank_match(reference, found.id) >= rank:
            return found.login, replace(ctx, project=found.project)
    cluster = params.get("cluster")
    with suppress(FtkitError):  # the command itself reports it
        cluster = cluster or read_settings_layers(ctx, ("cluster",)).value(("cluster",))
    names = str(cluster or "").split(",")
    logins = [_login_of(name, ctx) for name in names]
    if len(names) > 1 and any(logins):
        raise click.UsageError("a sweep over clusters can't be forwarded: give one --cluster that has a 'login'")
    return (logins[0], ctx) if logins[0] else None


def _login_of(name: str, ctx: Context) -> Login | None:
    """Return the login node of a profile; None also if it can't be read, which the command itself reports."""
    folders = search_folders("cluster", ctx)[:-1]  # shipped profiles have no login node
    if "/" not in name and not any((folder / f"{name}.yaml").is_file() for folder in folders):
        return None
    from ftkit.config.load import load_cluster
    from ftkit.remote.ssh import login_of

    try:
        login = login_of(load_cluster(name, ctx))
    except (ConfigError, NotFoundError):
        return None
    if login and "/" in name:
        what = f"{name} is remote, where a path of this machine does not exist."
        raise ConfigError([Problem("--cluster", "login", what, "Move it into clusters/ and give its name.")])
    return login


def _find_here(reference: str) -> str:
    """Return the id of a run in this machine's workspace; empty if there is none."""
    try:
        return get_run(reference).id
    except FtkitError:
        return ""
