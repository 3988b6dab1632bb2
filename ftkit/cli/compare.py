"""`ftkit compare`: show runs side by side."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import RUN_HELP, get_run, json_option
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.shell_completion import complete_run
from ftkit.cli.terminal.console import Column, Styled, Terminal
from ftkit.cli.terminal.format import count, duration, finite, gib, plural
from ftkit.runs.compare import align_losses, compare_curves, find_differences, read_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ftkit.runs.compare import ComparedRun


@click.command(
    "compare",
    cls=ExamplesCommand,
    short_help="Show how runs differ and what came of them.",
    examples=("ftkit compare demo other", "ftkit compare demo other --json | jq .results"),
    help=f"""Show runs side by side: what differs in recipe, data, image, versions and cluster; what came of them; and
    their losses after the same numbers of tokens. The last line says whether the losses are equal, bit for bit.

    {RUN_HELP}
    """,
)
@click.argument("references", metavar="RUN RUN...", nargs=-1, required=True, shell_complete=complete_run)
@json_option
def command(references: tuple[str, ...], *, as_json: bool) -> None:
    """Compare runs."""
    terminal = Terminal()
    layouts = {folder.id: folder.layout for folder in map(get_run, references)}
    if len(layouts) < 2:  # noqa: PLR2004 - what comparing takes
        raise click.UsageError("compare needs two runs or more, and each once", click.get_current_context())
    runs = [read_run(layout) for layout in layouts.values()]
    if as_json:
        terminal.json(finite(_as_json(runs)))
    else:
        _show(runs, terminal)


def _show(runs: Sequence[ComparedRun], terminal: Terminal) -> None:
    names = [chr(ord("A") + index) if index < 26 else str(index) for index in range(len(runs))]  # noqa: PLR2004
    terminal.facts([(name, Styled(run.id, "bold")) for name, run in zip(names, runs, strict=True)], is_data=True)
    terminal.text(is_data=True)
    differences = find_differences(runs)
    if differences:
        columns = (Column("WHAT DIFFERS", can_shrink=True), *(Column(name, can_shrink=True) for name in names))
        rows = [
            (f"{each.section}: {each.key}".removeprefix("recipe: "), *map(_short, each.values)) for each in differences
        ]
        terminal.table(columns, rows)
    else:
        terminal.text("nothing differs in recipe, data, image, versions, and cluster", is_data=True)
    terminal.text(is_data=True)
    columns = (Column("RESULT"), *(Column(name, is_number=True) for name in names))
    results = [_results(run) for run in runs]
    terminal.table(columns, [(title, *(each[title] for each in results)) for title in results[0]])
    points = align_losses(runs)
    if points:
        terminal.text(is_data=True)
        columns = (Column("TOKENS", is_number=True), *(Column(f"LOSS {name}", is_number=True) for name in names))
        terminal.table(columns, [(count(tokens), *(f"{loss:.4f}" for loss in losses)) for tokens, losses in points])
    terminal.text(is_data=True)
    for name, run in zip(names[1:], runs[1:], strict=True):
        terminal.text(f"{names[0]} and {name}: {_verdict(runs[0], run)}", is_data=True)


def _verdict(first: ComparedRun, other: ComparedRun) -> str:
    found = compare_curves(first, other)
    if found.num_common == 0:
        return "no records after the same number of tokens"
    common = f"{plural(found.num_common, 'record')} after as many tokens"
    if found.first_difference is None:
        return f"equal losses, bit for bit ({common})"
    at_most = "" if found.largest_difference is None else f", by {found.largest_difference:.2g} at most"
    return f"losses differ from {count(found.first_difference)} tokens on{at_most} ({common})"


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def _results(run: ComparedRun) -> dict[str, str]:
    """Return the lines of the table of results."""
    found = run.results

    def show(value: float | None, form: Callable[[float], str]) -> str:
        return "-" if value is None else form(value)

    return {
        "step": show(found.step, str),
        "tokens": show(found.tokens, count),
        "loss": show(found.loss, "{:.4f}".format),
        "validation loss": show(found.validation_loss, "{:.4f}".format),
        "execution accuracy": show(found.execution_accuracy, "{:.1%}".format),
        "tokens/s per process": show(found.tokens_per_second_per_process, count),
        "MFU": show(found.mfu, "{:.1%}".format),
        "GPU memory, predicted": show(found.predicted_gib, gib),
        "memory, measured": show(found.measured_gib, gib),
        "training time": show(found.training_seconds, duration),
        "restarts": str(found.num_restarts),
    }


def _as_json(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    return {
        "runs": [run.id for run in runs],
        "differences": [asdict(each) for each in find_differences(runs)],
        "results": {run.id: asdict(run.results) for run in runs},
        "losses": [{"tokens": tokens, "losses": losses} for tokens, losses in align_losses(runs)],
        "against_first": {run.id: asdict(compare_curves(runs[0], run)) for run in runs[1:]},
    }
