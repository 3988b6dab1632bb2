"""`ftkit data check`: check that every row can be trained on."""

from __future__ import annotations

from typing import Any

import click

from ftkit.cli.arguments import json_option, run_options
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.cli.terminal.format import plural


@click.command(
    "check",
    cls=ExamplesCommand,
    short_help="Check every row.",
    examples=("ftkit data check demo", "ftkit data check demo --skip-bad 10", "ftkit data check demo --json"),
)
@run_options
@click.option(
    "--skip-bad", metavar="N", type=click.IntRange(min=0), help="Number of bad rows to tolerate (data.skip_bad)."
)
@json_option
def command(words: tuple[str, ...], *, skip_bad: int | None, as_json: bool, **options: Any) -> None:
    """Read, render and tokenize every training row with the recipe's settings.

    Prints each bad row with its file, line and reason. Fails with exit code 8 if there are more than data.skip_bad.
    """
    from ftkit.cli.data.open import open_data
    from ftkit.errors import DataError

    terminal = Terminal()
    plan, inspector = open_data(terminal, words, **options)
    allowed = plan.recipe.data.skip_bad if skip_bad is None else skip_bad
    num_rows = num_bad = 0
    listed: list[dict[str, str]] = []
    fixes: set[str] = set()
    for num, bad in inspector.check():
        num_rows, num_bad = num_rows + num, num_bad + len(bad)
        for error in bad:
            where, reason = error.what.split(": ", 1)
            fixes.add(error.fix)
            if as_json:
                listed.append({"where": where, "reason": reason, "fix": error.fix})
                continue
            terminal.text(Styled(where, "bold"), is_data=True)
            terminal.text(f"  {reason}", is_data=True)
            terminal.text(f"  {error.fix}", is_data=True)
    if as_json:
        terminal.json({"rows": num_rows, "bad": listed})
    if num_bad > allowed:
        raise DataError(
            f"{num_bad:,} of {plural(num_rows, 'row')} can't be used"
            + (f", {allowed:,} are allowed" if allowed else ""),
            fix=f"correct them, or leave them out: data.skip_bad={num_bad}"
            if num_bad < num_rows
            else next(iter(fixes))
            if len(fixes) == 1
            else "set data.format to match these rows; 'ftkit data show' prints how they are read",
        )
    terminal.say(
        f"{plural(num_rows, 'row')}: all can be used" if not num_bad else f"{num_bad:,} of {num_rows:,} are skipped"
    )
