"""`ftkit data stats`: count tokens, and predict the duration of an epoch."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ftkit.cli.arguments import json_option, run_args, run_options
from ftkit.cli.commands import ExamplesCommand, current_context
from ftkit.cli.terminal.console import Cell, Terminal
from ftkit.cli.terminal.format import count, duration
from ftkit.errors import plural

if TYPE_CHECKING:
    from ftkit.data.inspection import DataStats
    from ftkit.planning.plan import RunPlan

_BAR = 30


@click.command(
    "stats",
    cls=ExamplesCommand,
    short_help="Count tokens, lengths, duplicates and packs.",
    examples=("ftkit data stats demo", "ftkit data stats demo --cluster slurm --json"),
)
@run_options
@json_option
def command(words: tuple[str, ...], *, as_json: bool, **options: Any) -> None:
    """Count tokens, lengths, duplicates and packs of the training rows.

    If a cluster is set, predict the duration of an epoch on it.
    """
    from ftkit.cli.data.open import open_data
    from ftkit.launch.resolve import read_settings, resolve

    terminal, ctx, args = Terminal(), current_context(), run_args(words, **options)
    plan = resolve(args, ctx) if read_settings(args, ctx).has_cluster else None
    inspector = open_data(terminal, args)
    stats, training = inspector.stats(), inspector.recipe.training
    batch = training.global_batch_size
    epoch = _epoch(stats, batch, plan)
    if as_json:
        terminal.json(asdict(stats) | {"epoch": epoch})
        return
    facts = [*_facts(stats, training.sequence_length), ("epoch", _describe(epoch, stats, batch, plan))]
    terminal.facts(facts, is_data=True)
    most = max((each.count for each in stats.histogram), default=0)
    bars: list[tuple[str, Cell]] = [
        (f"{each.start:,}-{each.end:,} tokens", f"{'█' * -(-each.count * _BAR // most)} {each.count:,}")
        for each in stats.histogram
    ]
    terminal.text(is_data=True)
    terminal.facts(bars, is_data=True)


def _facts(stats: DataStats, length: int) -> list[tuple[str, Cell]]:
    num_rows = sum(source.num_rows for source in stats.sources)
    validation = f" for training, {stats.num_validation:,} for validation" if stats.num_validation else ""
    is_other = stats.num_renderings != stats.num_documents + stats.num_validation
    rewritten = f", from {stats.num_renderings:,} renderings" if is_other else ""
    facts: list[tuple[str, Cell]] = [
        ("format", ", ".join(dict.fromkeys(stats.formats))),
        ("rows", f"{num_rows:,}" + (f"; {stats.num_bad:,} skipped as bad" if stats.num_bad else "")),
        ("documents", f"{stats.num_documents:,}{validation}{rewritten}"),
        ("lengths", f"median {stats.median:,.0f}, mean {stats.mean:,.0f}, longest {plural(stats.longest, 'token')}"),
        ("too long", f"{stats.num_too_long:,} for packs of {length:,} (data.too_long: {stats.too_long})"),
        ("duplicates", f"{stats.num_duplicates:,}"),
        ("tokens", f"{stats.num_tokens:,}, {stats.num_trained:,} of them trained"),
        ("packs", f"{stats.num_packs:,} of {length:,} tokens, {stats.fill_ratio:.1%} full"),
    ]
    if len(stats.sources) > 1:
        shares = [f"{source.num_tokens / max(1, stats.num_tokens):.1%}" for source in stats.sources]
        facts += [
            (source.name, f"{plural(source.num_rows, 'row')}, {plural(source.num_tokens, 'token')} ({share})")
            for source, share in zip(stats.sources, shares, strict=True)
        ]
    return facts


def _epoch(stats: DataStats, batch: int, plan: RunPlan | None) -> dict[str, Any]:
    """Return the steps of an epoch, with duration, GPU hours and cost if the plan predicts the step time."""
    steps = -(-stats.num_packs // batch)
    if plan is None or plan.speed is None:
        return {"steps": steps, "seconds": None, "gpu_hours": None, "cost": None}
    seconds = steps * plan.speed.step_seconds
    gpu_hours = seconds * plan.placement.world_size / 3600
    return {"steps": steps, "seconds": seconds, "gpu_hours": gpu_hours, "cost": plan.cost_of(seconds)}


def _describe(epoch: dict[str, Any], stats: DataStats, batch: int, plan: RunPlan | None) -> str:
    is_short = stats.num_packs < batch
    text = f"less than a step, which takes {plural(batch, 'pack')}" if is_short else plural(epoch["steps"], "step")
    if plan and epoch["seconds"] is not None:
        text += f", {duration(epoch['seconds'])}, {epoch['gpu_hours']:,.1f} GPU hours on {plan.cluster.name}"
        text += "" if epoch["cost"] is None else f", {epoch['cost']:,.2f} at its price_per_gpu_hour"
    return f"{text}; {count(stats.num_tokens)} tokens"
