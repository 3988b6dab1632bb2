"""`ftkit data`: inspect, check, prepare and upload the data of a recipe."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import dropwhile, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from ftkit.cli import arguments
from ftkit.cli.commands import command, current_context
from ftkit.cli.inference import require_packages
from ftkit.cli.terminal.console import Facts, Styled, Terminal
from ftkit.cli.terminal.format import count, duration, short_path
from ftkit.cli.terminal.plan_view import span
from ftkit.config.data import describe_in_both, describe_too_long
from ftkit.data.labels import REPEATED_MARKER
from ftkit.data.staging import prepare_here
from ftkit.data.upload import upload_data
from ftkit.errors import DataError, plural
from ftkit.launch.resolve import RunArgs, read_settings, resolve, resolve_recipe
from ftkit.planning.plan import read_plan_to_use
from ftkit.planning.step_time import longest_step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ftkit.cli.arguments import RunOptions
    from ftkit.data.inspection import DataInspector, DataStats, Sample

_BAR = 30
_SHOWN_PLACES = 3
_VALUES = re.compile(r"""'[^']*'|"[^"]*"|\d[\d,.]*""")
"""Parts that differ between error messages of the same problem: quoted values and numbers."""


def _open_data(terminal: Terminal, args: RunArgs) -> DataInspector:
    """Resolve the recipe, read its first training rows and load its tokenizer. No cluster is needed."""
    require_packages("transformers", "tokenizers", "numpy")
    from ftkit.data.inspection import DataInspector
    from ftkit.data.prepare import open_encoder

    recipe = resolve_recipe(args, current_context())
    return DataInspector(recipe, open_encoder(recipe, terminal.say), terminal.say)


@command(
    "show",
    "ftkit data show demo",
    "ftkit data show demo -n 10 data.train_on=last",
    "ftkit data show demo --json",
    "ftkit data show --packs 3,17 last",
    "ftkit data show demo --html samples.html",
)
@arguments.run_options
@arguments.number_option("-n", "--rows", "num_rows", default=3, about="Number of rows (default 3).")
@click.option("--packs", metavar="IDS", help="Print these packs (3,17) of a run; give RUN instead of RECIPE.")
@arguments.file_option("--html", exists=False, about="Write a page of the samples, with the ids of the tokens.")
@arguments.json_option
def show_command(
    words: tuple[str, ...],
    *,
    num_rows: int,
    packs: str | None,
    html: Path | None,
    as_json: bool,
    **options: Unpack[RunOptions],
) -> None:
    """Print samples as the trainer sees them: the text that the chat template renders, turn by turn.

    Tokens in the loss are green, between ⟦ and ⟧. Special tokens are printed unchanged; ↵ is a line break.
    """
    terminal = Terminal()
    if html and as_json:
        raise arguments.usage_error("--html and --json can't be combined")
    if packs is not None:
        samples, tokenizer = _samples_of_run(words, packs)
        notes = []
    else:
        inspector = _open_data(terminal, arguments.run_args(words, **options))
        samples, tokenizer = list(inspector.samples(num_rows)), inspector.encoder.encoders[0].tokenizer
        notes = _notes(inspector, samples)
    if html:
        from ftkit.cli.page.write import samples_page, save_page
        from ftkit.data.inspection import pieces_by_turn

        shown = [(sample, list(pieces_by_turn(sample, tokenizer))) for sample in samples]
        save_page(samples_page(" ".join(words), notes, shown), html, "--html")
        terminal.data(f"{short_path(html.absolute())}\n")
        return
    for note in () if as_json else notes:
        terminal.say(note)
    _show_all(samples, terminal, as_json=as_json)


def _notes(inspector: DataInspector, samples: Iterable[Sample]) -> list[str]:
    is_text = all(encoder.format.kind == "text" for encoder in inspector.encoder.encoders.values())
    train_on = "all" if is_text else inspector.recipe.data.train_on
    parts = {"assistant": "assistant turns", "last": "the last assistant turn", "completion": "the completion",
             "all": "all tokens"}  # fmt: skip
    trained = parts[train_on] if isinstance(train_on, str) else f"turns of {', '.join(train_on)}"
    notes = [f"trained: {trained}"]
    if any(sample.num_renderings > 1 and not sample.side for sample in samples):
        notes.append(
            "The chat template rewrites earlier turns, so a row becomes several documents: each trained turn "
            "follows the same text as in inference."
        )
    return notes


def _samples_of_run(words: tuple[str, ...], packs: str) -> tuple[Iterable[Sample], PreTrainedTokenizerBase]:
    from ftkit.data.inspection import samples_of_packs
    from ftkit.data.prepared_data import PreparedData
    from ftkit.data.tokenizers import load_saved_tokenizer

    ids = [word.strip() for word in packs.split(",")]
    if len(words) != 1 or not all(word.isdigit() for word in ids):
        raise arguments.usage_error("--packs takes numbers and one run: ftkit data show --packs 3,17 RUN")
    data = PreparedData(read_plan_to_use(arguments.get_run(words[0]).layout).data.root)
    tokenizer = load_saved_tokenizer(data.tokenizer)
    return samples_of_packs(data, [int(word) for word in ids], tokenizer), tokenizer


def _show_all(samples: Iterable[Sample], terminal: Terminal, *, as_json: bool) -> None:
    if as_json:
        hidden = {"ids", "trained", "expansion", "thumbnail"}
        terminal.json(
            [
                asdict(sample, dict_factory=lambda pairs: {k: v for k, v in pairs if k not in hidden})
                for sample in samples
            ]
        )
        return
    for sample in samples:
        part = f", document {sample.number} of {sample.num_renderings}" if sample.num_renderings > 1 else ""
        part = f", {sample.side}" if sample.side else part
        title = f"{sample.where}{part}: {plural(sample.num_tokens, 'token')}, {sample.num_trained:,} trained"
        terminal.text(Styled(title, "bold"))
        if sample.fate:
            terminal.text(Styled(sample.fate, "yellow"))
        for number, picture in enumerate(sample.pictures, start=1):
            terminal.text(
                f"picture {number}: {picture.width:,} x {picture.height:,} pixels, {picture.num_tokens:,} tokens"
            )
        rows = []
        shown = sample.segments
        if sample.side == "rejected":  # the prompt is above
            shown = tuple(dropwhile(lambda segment: not segment.is_trained, shown))
        for _, turn in groupby(shown, key=lambda segment: segment.turn):
            segments, parts = list(turn), []
            for segment in segments:
                text = REPEATED_MARKER.sub(lambda run: f"{run[1]} × {len(run[0]) // len(run[1])}", segment.text)
                text = text.replace("\n", "↵\n")
                text = text.removesuffix("\n") if segment is segments[-1] else text
                parts.append(Styled(f"⟦{text}⟧", "green") if segment.is_trained else Styled(text, ""))
            rows.append((segments[0].role, parts))
        terminal.facts(rows, is_data=True)
        terminal.text()


@command("stats", "ftkit data stats demo", "ftkit data stats demo --cluster slurm --json")
@arguments.run_options
@arguments.json_option
def stats_command(words: tuple[str, ...], *, as_json: bool, **options: Unpack[RunOptions]) -> None:
    """Count tokens, lengths, duplicates and packs of the training rows.

    If a cluster is set, predict the duration of an epoch on it.
    """
    terminal, ctx, args = Terminal(), current_context(), arguments.run_args(words, **options)
    plan = resolve(args, ctx) if read_settings(args, ctx).has_cluster else None
    inspector = _open_data(terminal, args)
    stats, training = inspector.stats(), inspector.recipe.training
    batch, steps = training.global_batch_size, -(-stats.num_packs // training.global_batch_size)
    epoch: dict[str, float | None] = dict.fromkeys(("seconds", "gpu_hours", "cost"))
    about, longest = plural(steps, "step"), 1.0
    if stats.num_packs < batch:
        about = f"less than a step, which takes {plural(batch, 'pack')}"
    if plan and plan.speed:
        seconds, longest = steps * plan.speed.step_seconds, longest_step(plan.recipe, plan.speed)
        hours, cost = seconds * plan.placement.world_size / 3600, plan.cost_of(seconds)
        epoch = {"seconds": seconds, "gpu_hours": hours, "cost": cost}
        spent = span("{:,.1f}".format, hours, longest)
        about += f", {span(duration, seconds, longest)}, {spent} GPU hours on {plan.cluster.name}"
        about += "" if cost is None else f", {span('{:,.2f}'.format, cost, longest)} at its price_per_gpu_hour"
    if as_json:
        ends = {f"longest_{name}": value and value * longest for name, value in epoch.items()}
        terminal.json(asdict(stats) | {"epoch": {"steps": steps} | epoch | ends})
        return
    facts = _facts(stats, training.sequence_length)
    terminal.facts([*facts, ("epoch", f"{about}; {count(stats.num_tokens)} tokens")], is_data=True)
    most = max((each.count for each in stats.histogram), default=0)
    bars = [(each, "█" * -(-each.count * _BAR // most)) for each in stats.histogram]
    terminal.text()
    terminal.facts(
        [(f"{each.start:,}-{each.end:,} tokens", f"{bar} {each.count:,}") for each, bar in bars], is_data=True
    )


def _facts(stats: DataStats, length: int) -> Facts:
    num_rows = sum(source.num_rows for source in stats.sources)
    validation = f" for training, {stats.num_validation:,} for validation" if stats.num_validation else ""
    kind = "pair" if stats.sides else "document"
    in_both = f"; {plural(stats.num_in_both, f'validation {kind}')} also trained on" if stats.num_in_both else ""
    is_other = stats.num_renderings != stats.num_documents + stats.num_validation
    rewritten = f", from {stats.num_renderings:,} renderings" if is_other else ""
    bad = f"; {stats.num_bad:,} skipped as bad" if stats.num_bad else ""
    dropped = f"; {plural(stats.num_dropped, 'equal or contradicting pair')} dropped" if stats.num_dropped else ""
    longest = f", the longest of {plural(stats.longest_rendering, 'token')}" if stats.num_too_long else ""
    facts: Facts = [
        ("format", ", ".join(dict.fromkeys(stats.formats))),
        ("rows", f"{num_rows:,}{bad}{dropped}"),
        ("documents", f"{stats.num_documents:,}{validation}{rewritten}"),
        ("lengths", f"median {stats.median:,.0f}, mean {stats.mean:,.0f}, longest {plural(stats.longest, 'token')}"),
        ("too long", f"{stats.num_too_long:,} for packs of {length:,} (data.too_long: {stats.too_long}){longest}"),
        ("duplicates", f"{stats.num_duplicates:,}{in_both}"),
        ("tokens", f"{stats.num_tokens:,}, {stats.num_trained:,} of them trained"),
        ("packs", f"{stats.num_packs:,} of {length:,} tokens, {stats.fill_ratio:.1%} full"),
    ]
    if stats.sides:
        facts.append(("completions", "mean of {:,.0f} tokens chosen, {:,.0f} rejected".format(*stats.sides)))
    for source in stats.sources if len(stats.sources) > 1 else ():
        share = f"{source.num_tokens / max(1, stats.num_tokens):.1%}"
        rows = plural(source.num_train_rows, "training row")
        facts.append((source.name, f"{rows}, {plural(source.num_tokens, 'token')} ({share})"))
    return facts


@dataclass
class _ProblemKind:
    """Rows that can't be used for the same reason, ignoring values in the message."""

    count: int = 0
    places: list[tuple[str, str]] = field(default_factory=list)  # of the first rows, and their reasons
    reasons: set[str] = field(default_factory=set)  # two, if they differ

    def add(self, where: str, reason: str) -> None:
        self.count += 1
        if len(self.places) < _SHOWN_PLACES:
            self.places.append((where, reason))
        if len(self.reasons) <= 1:
            self.reasons.add(reason)


def _show_kinds(kinds: dict[tuple[str, str], _ProblemKind], terminal: Terminal) -> None:
    for (kind, fix), found in kinds.items():
        differ = len(found.reasons) > 1
        terminal.text(Styled(f"{plural(found.count, 'row')}: {kind if differ else found.places[0][1]}", "bold"))
        terminal.text(f"  {fix}")
        for where, reason in found.places:
            terminal.text(f"  {where}: {reason}" if differ else f"  {where}")
        if (num_hidden := found.count - len(found.places)) > 0:
            terminal.text(f"  and {num_hidden:,} more: --all lists them")


@command("check", "ftkit data check demo", "ftkit data check demo --skip-bad 10", "ftkit data check demo --json")
@arguments.run_options
@arguments.number_option("--skip-bad", low=0, about="Number of bad rows to tolerate (data.skip_bad).")
@click.option("--all", "shows_all", is_flag=True, help="Print every bad row, not three of each kind.")
@arguments.json_option
def check_command(
    words: tuple[str, ...], *, skip_bad: int | None, shows_all: bool, as_json: bool, **options: Unpack[RunOptions]
) -> None:
    """Read, render and tokenize every training row with the recipe's settings.

    Prints each kind of problem with its number of rows, and the file and line of the first three; --json lists all.
    Fails with exit code 8 if there are more than data.skip_bad.
    """
    terminal = Terminal()
    inspector = _open_data(terminal, arguments.run_args(words, **options))
    allowed = inspector.recipe.data.skip_bad if skip_bad is None else skip_bad
    num_rows = num_bad = num_refused = num_fit = num_rejected = num_train = num_dropped = 0
    too_long: Counter[str] = Counter()
    listed: list[dict[str, str]] = []
    kinds: dict[tuple[str, str], _ProblemKind] = {}
    for encoded in inspector.check():
        num_rows += encoded.num_rows.total() + len(encoded.bad)
        encoded.refused += encoded.contradictions
        num_bad, num_refused = num_bad + len(encoded.bad), num_refused + len(encoded.refused)
        num_fit += len(encoded.train.lengths) + len(encoded.validation.lengths)
        num_rejected, num_train = num_rejected + encoded.train.num_rejected, num_train + len(encoded.train.lengths)
        num_dropped += encoded.num_dropped
        too_long += encoded.too_long
        for error in (*encoded.bad, *encoded.refused):
            where, _, reason = error.what.partition(": ")
            if as_json:
                listed.append({"where": where, "reason": reason, "fix": error.fix})
            elif shows_all:  # at once: there may be millions
                for line in (Styled(where, "bold"), f"  {reason}", f"  {error.fix}"):
                    terminal.text(line)
            kinds.setdefault((_VALUES.sub("…", reason), error.fix), _ProblemKind()).add(where, reason)
    if as_json:
        terminal.json({"rows": num_rows, "bad": listed})
    elif not shows_all:
        _show_kinds(kinds, terminal)
    dropped = f"{plural(num_dropped, 'equal or contradicting pair')} dropped" if num_dropped else ""
    num_useless = num_bad + num_refused  # data.skip_bad does not allow documents longer than a pack
    if num_bad > allowed or num_refused:
        limit = f", {allowed:,} are allowed" if allowed else ""
        raise DataError(
            f"{num_useless:,} of {plural(num_rows, 'row')} can't be used{limit}",
            meaning=dropped,
            fix=_fix(num_rows, num_bad, num_refused, {fix for _, fix in kinds}),
        )
    sample = inspector.recipe.training.sample_name
    long = f"{plural(too_long.total(), sample)} longer than a pack: {describe_too_long(too_long)}"
    if too_long.total() and not num_fit:
        raise DataError(f"no {sample} can be trained on: {long}", fix="raise training.sequence_length")
    whole = "" if num_dropped or too_long["drop"] else ": all can be used"
    used = f"{num_bad:,} of {num_rows:,} are skipped" if num_bad else f"{plural(num_rows, 'row')}{whole}"
    warning = inspector.recipe.training.warn_of_balance(num_train - num_rejected, num_rejected)
    held_out = f"{num_fit - num_train:,} are for validation" if warning and num_fit > num_train else ""
    in_both = describe_in_both(inspector.digests.num_in_both, inspector.recipe.data, sample)
    terminal.say("; ".join(filter(None, [used, dropped, long if too_long.total() else "", held_out, warning, in_both])))


def _fix(num_rows: int, num_bad: int, num_refused: int, fixes: set[str]) -> str:
    if num_bad < num_rows and not num_refused:
        return f"correct them, or leave them out: data.skip_bad={num_bad}"
    if len(fixes) == 1:
        return next(iter(fixes))
    if num_bad + num_refused < num_rows:
        return "correct them; the reasons are above"
    return "set data.format to match these rows; 'ftkit data show' prints how they are read"


@command("prepare", "ftkit data prepare demo", "ftkit data prepare mine.yaml --workers 8")
@arguments.run_options
@arguments.number_option("--workers", about="Number of tokenizing processes; default: one per CPU.")
@arguments.hf_token_option
def prepare_command(
    words: tuple[str, ...], *, workers: int | None, hf_token_file: Path | None, **options: Unpack[RunOptions]
) -> None:
    """Tokenize and pack the data of a run, and download its weights, before 'ftkit run'.

    Prints the folder of the prepared data. Needs no GPU. Does nothing if the data is already prepared.
    """
    terminal = Terminal()
    plan = resolve(arguments.run_args(words, **options), current_context())
    prepare_here(plan, arguments.job_environment(hf_token_file), terminal.say, workers)
    terminal.data(f"{plan.data.root}\n")


@command(
    "upload",
    "ftkit data upload mine.yaml --to gs://bucket/data",
    "ftkit data upload gemma3-1b-dolly-lora --to s3://bucket/dolly",
)
@arguments.run_options
@click.option("--to", "destination", metavar="ADDRESS", required=True,
              help="gs://bucket/prefix, s3://bucket/prefix, or a folder that all machines see.")  # fmt: skip
def upload_command(words: tuple[str, ...], *, destination: str, **options: Unpack[RunOptions]) -> None:
    """Copy the data of a recipe to an object store once, for all machines that train on it.

    Prints the override that reads the copy, to type after the recipe: the same rows are trained on, in the same order.
    Datasets of the hub become Parquet files. Existing copies are not copied again; other files are not replaced.
    """
    terminal = Terminal()
    data = resolve_recipe(arguments.run_args(words, **options), current_context()).data
    if any(source.kind == "hub" for source in data.sources):
        require_packages("datasets")
    for key, value in upload_data(data, destination, terminal.say).items():
        text = value if isinstance(value, str) else json.dumps(value)
        terminal.data(f"{shlex.quote(f'{key}={text}')}\n")
