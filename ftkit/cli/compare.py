"""`ftkit compare`: show runs side by side."""

from __future__ import annotations

from pathlib import Path

import click

from ftkit.cli.arguments import RUN_HELP, complete_run, get_runs, json_option
from ftkit.cli.forwarded import ForwardedCommand
from ftkit.cli.terminal.console import Terminal
from ftkit.cli.terminal.format import finite, short_path


@click.command(
    "compare",
    cls=ForwardedCommand,
    examples=(
        "ftkit compare demo other",
        "ftkit compare demo other --json | jq .results",
        "ftkit compare demo other --html comparison.html",
    ),
    help=f"""Show runs side by side: differences in recipe, data, image, versions and cluster; their results; and
    their losses where all have a record: after the same number of tokens, or else at the same step. The
    last line says whether the losses are equal, bit for bit.

    {RUN_HELP} The id or the name of a sweep selects all of its runs.
    """,
)
@click.argument("references", metavar="RUN RUN...", nargs=-1, required=True, shell_complete=complete_run)
@click.option(
    "--html", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML page instead."
)
@json_option
def command(references: tuple[str, ...], *, html: Path | None, as_json: bool) -> None:
    """Compare runs."""
    from ftkit.cli.terminal.comparison_view import comparison_as_json, comparison_report, show_comparison
    from ftkit.runs.compare import read_run

    terminal = Terminal()
    layouts = [folder.layout for folder in get_runs(references)]
    if len(layouts) < 2:  # noqa: PLR2004 - a comparison needs two
        raise click.UsageError("compare needs at least two different runs", click.get_current_context())
    if html:
        from ftkit.cli.page.charts import require_matplotlib
        from ftkit.cli.page.write import comparison_page, save_page

        require_matplotlib()
        save_page(comparison_page(comparison_report(layouts)), html)
        terminal.data(f"{short_path(html.absolute())}\n")
        return
    runs = [read_run(layout) for layout in layouts]
    if as_json:
        terminal.json(finite(comparison_as_json(runs)))
    else:
        show_comparison(runs, terminal)
