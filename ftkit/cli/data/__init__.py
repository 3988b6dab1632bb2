"""`ftkit data`: inspect and check data before training."""

from __future__ import annotations

import click

from ftkit.cli.commands import LazyCommand, LazyGroup

_SECTIONS = {
    "Commands": (
        LazyCommand("show", "ftkit.cli.data.show", "Print samples as the trainer sees them."),
        LazyCommand("stats", "ftkit.cli.data.stats", "Count tokens, lengths, duplicates and packs."),
        LazyCommand("check", "ftkit.cli.data.check", "Check every row."),
        LazyCommand("prepare", "ftkit.cli.data.prepare", "Tokenize and pack data, and download weights."),
    ),
}


@click.group(
    "data",
    cls=LazyGroup,
    sections=_SECTIONS,
    short_help="Inspect and check training data.",
    examples=("ftkit data show demo", "ftkit data stats demo", "ftkit data check demo --json"),
)
def command() -> None:
    """Inspect and check training data. Needs no GPU.

    Each command takes the arguments of 'ftkit run': a recipe, and overrides of its keys.
    """
