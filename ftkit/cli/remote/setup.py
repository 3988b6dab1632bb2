"""`ftkit cluster connect`: install this ftkit on a cluster's login node."""

from __future__ import annotations

import click

from ftkit.cli.arguments import complete_cluster
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Terminal
from ftkit.config.context import Context


@click.command(
    "connect",
    cls=ExamplesCommand,
    short_help="Install this ftkit on a cluster's login node.",
    examples=("ftkit cluster connect mycluster", "ftkit cluster connect mycluster --extra train --extra report"),
)
@click.argument("cluster", metavar="CLUSTER", shell_complete=complete_cluster)
@click.option(
    "--extra", "extras", metavar="NAME", multiple=True, help="Also install this extra of ftkit: train, images, …"
)
def command(cluster: str, *, extras: tuple[str, ...]) -> None:
    """Install this ftkit, with exactly the code that runs here, on the login node of a cluster.

    It is installed into a virtual environment in 'login_folder' there (~/ftkit by default), with uv, or with Python
    3.11 or later. Repeat this after ftkit changes here: two different versions do not work together. A profile with
    runtime 'none' needs --extra train.
    """
    from ftkit.config.load import load_cluster
    from ftkit.errors import ConfigError, Problem
    from ftkit.remote.install import code_identity, install
    from ftkit.remote.login import login_of

    terminal = Terminal()
    login = login_of(load_cluster(cluster, Context.here()))
    if login is None:
        fix = "Add 'login: user@host' to the profile."
        raise ConfigError([Problem("", "login", f"the profile '{cluster}' sets none, or sets this machine.", fix)])
    terminal.say(f"installing ftkit {code_identity()} on {login.address}, in {login.folder}/venv …")
    install(login, extras)
    terminal.say(f"ready. Try: ftkit run demo --cluster {cluster}")
