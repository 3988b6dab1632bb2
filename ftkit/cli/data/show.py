"""`ftkit data show`: print samples as the trainer sees them."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import get_run, json_option, run_args, run_options
from ftkit.cli.commands import ExamplesCommand
from ftkit.cli.terminal.console import Styled, Terminal
from ftkit.errors import plural

if TYPE_CHECKING:
    from ftkit.data.inspection import Sample, Segment


@click.command(
    "show",
    cls=ExamplesCommand,
    short_help="Print samples as the trainer sees them.",
    examples=(
        "ftkit data show demo",
        "ftkit data show demo -n 10 data.train_on=last",
        "ftkit data show demo --json",
        "ftkit data show --packs 3,17 last",
    ),
)
@run_options
@click.option(
    "-n", "--rows", "num_rows", metavar="N", type=click.IntRange(min=1), default=3, help="Number of rows (default 3)."
)
@click.option("--packs", metavar="IDS", help="Print these packs (3,17) of a run; give RUN instead of RECIPE.")
@json_option
def command(words: tuple[str, ...], *, num_rows: int, packs: str | None, as_json: bool, **options: Any) -> None:
    """Print samples as the trainer sees them: the text that the chat template renders, turn by turn.

    Tokens in the loss are green, between ⟦ and ⟧. Special tokens are printed unchanged; ↵ is a line break.
    """
    from ftkit.cli.data.open import open_data

    terminal = Terminal()
    if packs is not None:
        _show_packs(words, packs, terminal, as_json=as_json)
        return
    inspector = open_data(terminal, run_args(words, **options))
    samples = list(inspector.samples(num_rows))
    if as_json:
        terminal.json([asdict(sample) for sample in samples])
        return
    is_text = all(encoder.format.kind == "text" for encoder in inspector.encoder.encoders.values())
    terminal.say(f"trained: {_describe('all' if is_text else inspector.recipe.data.train_on)}")
    if any(sample.num_renderings > 1 for sample in samples):
        terminal.say(
            "The chat template rewrites earlier turns, so a row becomes several documents: each trained turn follows "
            "the same text as in inference."
        )
    for sample in samples:
        _show(sample, terminal)


def _show_packs(words: tuple[str, ...], packs: str, terminal: Terminal, *, as_json: bool) -> None:
    """Print documents of a run's prepared data."""
    from ftkit.data.inspection import samples_of_packs
    from ftkit.data.store import PreparedData
    from ftkit.planning.plan import read_plan_to_use

    ids = [word.strip() for word in packs.split(",")]
    if len(words) != 1 or not all(word.isdigit() for word in ids):
        raise click.UsageError("--packs takes numbers and one run: ftkit data show --packs 3,17 RUN")
    data = PreparedData(read_plan_to_use(get_run(words[0]).layout).data_directory)
    samples = samples_of_packs(data, [int(word) for word in ids])
    if as_json:
        terminal.json([asdict(sample) for sample in samples])
        return
    for sample in samples:
        _show(sample, terminal)


def _describe(train_on: str | list[Any]) -> str:
    if isinstance(train_on, list):
        return f"turns of {', '.join(train_on)}"
    return {
        "assistant": "assistant turns", "last": "the last assistant turn", "completion": "the completion",
        "all": "all tokens",
    }[train_on]  # fmt: skip


def _show(sample: Sample, terminal: Terminal) -> None:
    part = f", document {sample.number} of {sample.num_renderings}" if sample.num_renderings > 1 else ""
    title = f"{sample.where}{part}: {plural(sample.num_tokens, 'token')}, {sample.num_trained:,} trained"
    terminal.text(Styled(title, "bold"), is_data=True)
    if sample.fate:
        terminal.text(Styled(sample.fate, "yellow"), is_data=True)
    rows = []
    for _, turn in groupby(sample.segments, key=lambda segment: segment.turn):
        segments = list(turn)
        rows.append((segments[0].role, [_shown(segment, is_last=segment is segments[-1]) for segment in segments]))
    terminal.passages(rows)
    terminal.text(is_data=True)


def _shown(segment: Segment, *, is_last: bool) -> Styled:
    text = segment.text.replace("\n", "↵\n")
    text = text.removesuffix("\n") if is_last else text
    return Styled(f"⟦{text}⟧", "green") if segment.is_trained else Styled(text, "")
