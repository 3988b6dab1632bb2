"""`ftkit config completion`: print the shell completion script."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.main import COMPLETE_VARIABLE, PROGRAM, cli
from ftkit.cli.terminal.console import Terminal
from ftkit.errors import PrerequisiteError


@click.command(
    "completion",
    cls=ExamplesCommand,
    short_help="Print the shell completion script.",
    examples=(
        'eval "$(ftkit config completion bash)"    # in ~/.bashrc',
        'eval "$(ftkit config completion zsh)"     # in ~/.zshrc',
        "ftkit config completion fish > ~/.config/fish/completions/ftkit.fish",
    ),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the script that completes commands, recipes, clusters, images and runs after TAB."""
    completion = get_completion_class(shell)
    if completion is None:
        raise PrerequisiteError(f"click has no completion for {shell}", fix="install another release of click")
    Terminal().data(completion(cli, {}, PROGRAM, COMPLETE_VARIABLE).source() + "\n")
