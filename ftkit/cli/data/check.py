"""`ftkit data check`: check that every row can be trained on."""

from __future__ import annotations

from typing import Any

import click

from ftkit.cli.arguments import json_option, run_args, run_options
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Styled, Terminal


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
    from ftkit.errors import DataError, plural

    terminal = Terminal()
    inspector = open_data(terminal, run_args(words, **options))
    allowed = inspector.recipe.data.skip_bad if skip_bad is None else skip_bad
    num_rows = num_bad = num_refused = num_fit = num_too_long = 0
    listed: list[dict[str, str]] = []
    fixes: set[str] = set()
    for encoded in inspector.check():
        num_rows += encoded.num_rows.total() + len(encoded.bad)
        num_bad, num_refused = num_bad + len(encoded.bad), num_refused + len(encoded.refused)
        num_fit += len(encoded.train.lengths) + len(encoded.validation.lengths)
        num_too_long += encoded.num_too_long.total()
        for error in (*encoded.bad, *encoded.refused):
            where, _, reason = error.what.partition(": ")
            fixes.add(error.fix)
            if as_json:
                listed.append({"where": where, "reason": reason, "fix": error.fix})
                continue
            terminal.text(Styled(where, "bold"), is_data=True)
            terminal.text(f"  {reason}", is_data=True)
            terminal.text(f"  {error.fix}", is_data=True)
    if as_json:
        terminal.json({"rows": num_rows, "bad": listed})
    num_useless = num_bad + num_refused  # data.skip_bad does not allow documents longer than a pack
    if num_bad > allowed or num_refused:
        raise DataError(
            f"{num_useless:,} of {plural(num_rows, 'row')} can't be used"
            + (f", {allowed:,} are allowed" if allowed else ""),
            fix=f"correct them, or leave them out: data.skip_bad={num_bad}"
            if num_bad < num_rows and not num_refused
            else next(iter(fixes))
            if len(fixes) == 1
            else "correct them; each row above has its reason"
            if num_useless < num_rows
            else "set data.format to match these rows; 'ftkit data show' prints how they are read",
        )
    outcome = f"{plural(num_too_long, 'document')} longer than a pack (data.too_long: {inspector.recipe.data.too_long})"
    if num_too_long and not num_fit:
        raise DataError(f"no document can be trained on: {outcome}", fix="raise training.sequence_length")
    terminal.say(
        (f"{plural(num_rows, 'row')}: all can be used" if not num_bad else f"{num_bad:,} of {num_rows:,} are skipped")
        + (f"; {outcome}" if num_too_long else "")
    )
