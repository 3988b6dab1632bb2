"""Quantize a GGUF file with llama.cpp, and measure what that changes on the validation split, by llama.cpp's server."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from transformers import AutoConfig, GenerationConfig, TextStreamer

from ftkit.data.cases import EvaluationSet, ModelInput
from ftkit.data.packing import IGNORED, Document
from ftkit.errors import DataError, TrainingError
from ftkit.evaluate.engines import LlamaCpp, Setup, serve
from ftkit.evaluate.export_formats import QUANTIZE, find_program, gguf_type, run_converter
from ftkit.evaluate.loaded_model import GeneratingModel, find_generation
from ftkit.evaluate.results import compare
from ftkit.evaluate.scoring import Measured, Ranks, evaluation_set, measure
from ftkit.evaluate.source import MeasureSettings, ModelFolder
from ftkit.files import publish, read_json, write_json
from ftkit.models.folder import EXPORT_RECORD
from ftkit.runs.checkpoints import SavedFile
from ftkit.runs.model_card import append_table
from ftkit.train.components.export_record import ExportRecord, GgufFile

if TYPE_CHECKING:
    from ftkit.data.completion_metrics import Metric
    from ftkit.planning.plan import RunPlan

_MAX_ROWS = 100
_MAX_TARGETS = 4000
"""Tokens whose loss is measured, in whole documents: the server computes one for each request."""
_NUM_COMPARED = 200
"""Most probable tokens that are kept for the divergence, in kilobytes for each target."""
_TIMED_TOKENS = 64
_INCREASE = "increase"
_FALLBACK = re.compile(r"(\d+ of \d+) tensor\(s\) required fallback")
_Measured = tuple[Measured, Sequence[Mapping[int, float]]]
"""Losses and scores of rows, and the distributions at each label."""
_SMALLEST = 1e-12
"""Smallest probability of all tokens together that are not among the most probable ones."""


def write_quantized(
    folder: Path, file: Path, types: Sequence[str], plan: RunPlan, report: Callable[[str], None],
    show: Callable[[list[str], list[list[str]]], None],
) -> None:  # fmt: skip
    """Quantize the GGUF file of an export, measure all files, and show the table; add it and the files to the export.

    Files whose loss is above the recipe's bound are not kept: TrainingError, after the others are written.
    """
    record = read_json(folder / EXPORT_RECORD, ExportRecord)
    if record is None:
        raise AssertionError("an export has a record")
    _, tokenizer, generation = find_generation(ModelFolder(folder, str(folder)))
    with tempfile.TemporaryDirectory(prefix=".quantized-", dir=folder) as made:

        def served(path: Path) -> _Served:
            setup = Setup(folder, folder, record.precision, (), "", None, Path(made), path)
            return _Served(path.name, tokenizer, generation, LlamaCpp(setup))

        settings = MeasureSettings(_metrics(plan), limit=_MAX_ROWS)
        try:
            data, metrics = evaluation_set(served(file).input, plan, settings, report)
        except DataError as error:
            fix = f"quantize it without measuring: {QUANTIZE} {file} FILE TYPE"
            raise DataError(f"--quantize: {error.what}", meaning=error.meaning, fix=fix) from error
        data = replace(data, documents=_first_targets(data.documents))
        found, plain, paths, notes = list[GgufFile](), None, [file], dict[str, str]()
        for name in types:
            if name != gguf_type(record.precision):  # the file has that type
                report(f"quantizing to {name}")
                paths.append(Path(made, f"{plan.id}-{name}.gguf"))
                words = [find_program(QUANTIZE) or QUANTIZE, str(file)]
                log = run_converter(QUANTIZE, words, paths[-1], folder / paths[-1].name, name)
                if larger := _FALLBACK.search(log):
                    note = f"{larger[1]} tensors have a larger type: their rows do not fit the blocks of {name}"
                    notes[paths[-1].name] = f"{paths[-1].name}: {note}"
                    report(note)
        for path in paths:
            model = served(path)
            rows, speed = _measure(model, data, metrics, settings, report)
            plain = plain or (rows, model.targets)
            change = _compare(data, metrics, (rows, model.targets), plain)
            found.append(GgufFile(path.name, SavedFile.of(path), change | {"tokens/s": speed}))
        bound = plan.recipe.export.max_loss_increase
        worse = [each for each in found if bound is not None and not each.metrics[_INCREASE] <= bound]
        kept = [each for each in found if each not in worse]
        for each in kept[1:]:
            publish(Path(made, each.name), folder / each.name)
    show(*format_table(found))
    write_json(folder / EXPORT_RECORD, replace(record, gguf=tuple(kept)))
    title = ["## Quantized files", *(notes[each.name] for each in kept if each.name in notes)]
    append_table(folder, "\n\n".join([*title, "Measured with llama.cpp on the validation split"]), *format_table(kept))
    if worse:
        text = ", ".join(f"{each.name} by {each.metrics[_INCREASE]:.4f}" for each in worse)
        raise TrainingError(
            f"quantizing raises the loss by more than export.max_loss_increase={bound}, and these files were not kept: "
            + text,
            meaning="so few bits change this model more than the recipe accepts",
            fix="quantize to more bits: --quantize q6_k or q8_0",
        )


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= value < 1e9 else f"{value:.4g}"  # noqa: PLR2004 - exponents are hard to compare


def format_table(files: Sequence[GgufFile]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows; titles of numbers begin with `#`."""
    rows = [[each.name, f"{each.file.size / 2**30:.3g}", *map(_number, each.metrics.values())] for each in files]
    return ["file", "#GiB", *(f"#{name}" for name in files[0].metrics)], rows


# --- Measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Served(GeneratingModel):
    """A GGUF file that llama.cpp's server serves; `targets` are the distributions at each label, once measured."""

    schedules: ClassVar[bool] = True
    engine: LlamaCpp
    targets: list[Mapping[int, float]] = field(default_factory=list)

    @property
    def input(self) -> ModelInput:
        return ModelInput.of(self.tokenizer, self.label, AutoConfig.from_pretrained(self.engine.setup.folder))

    def complete(
        self, prompts: Sequence[Sequence[int]], config: GenerationConfig, streamer: TextStreamer | None = None
    ) -> list[list[int]]:
        del streamer
        return [self.engine.complete(prompt, int(config.max_new_tokens or 1))["tokens"] for prompt in prompts]

    def losses(self, documents: Sequence[Document]) -> list[list[float]]:
        sums = []
        for document in documents:
            tokens, losses, num_best = document.tokens.tolist(), list[float](), 0
            for place in np.flatnonzero(document.labels != IGNORED).tolist():
                label = int(document.labels[place])
                found = self.engine.probabilities(tokens[: place + 1], label)
                losses.append(-found[label])
                num_best += found[label] == max(found.values())
                self.targets.append(dict(islice(found.items(), _NUM_COMPARED)))  # the most probable ones come first
            sums.append([math.fsum(losses), float(len(losses)), float(num_best)])
        return sums


def _metrics(plan: RunPlan) -> tuple[str, ...]:
    """Return the metrics of completions that the recipe has."""
    if generation := plan.recipe.evaluation.generation:
        return generation.metrics
    return tuple(plan.recipe.data.task.metrics if plan.recipe.data.task else ()) or ("loss",)


def _first_targets(documents: Sequence[tuple[int, Document]]) -> list[tuple[int, Document]]:
    totals = np.cumsum([np.count_nonzero(each.labels != IGNORED) for _, each in documents])
    return list(documents[: 1 + int(np.searchsorted(totals, _MAX_TARGETS))])


def _measure(
    model: _Served, data: EvaluationSet, metrics: Sequence[Metric], settings: MeasureSettings,
    report: Callable[[str], None],
) -> tuple[Measured, float]:  # fmt: skip
    """Return a file's measurements, and the tokens per second that the server generates."""
    prompts = [each.prompt for each in data.cases] or [each.tokens[:1].tolist() for _, each in data.documents]
    longest = max(*(len(each.tokens) for _, each in data.documents), *(map(len, prompts)))
    with serve(model.engine, longest + settings.max_new_tokens, report):
        rows = measure(model, data, metrics, settings, Ranks())
        timings = model.engine.complete(prompts[0], _TIMED_TOKENS, ignore_eos=True)["timings"]
    return rows, float(timings["predicted_per_second"])


def _compare(data: EvaluationSet, metrics: Sequence[Metric], own: _Measured, plain: _Measured) -> dict[str, float]:
    """Return the metrics of a file's table: losses in nats per token, and half of the 95% interval of their change."""
    found = {each.metric: each for each in compare(data, metrics, own[0], plain[0], 0) if not each.source}
    loss, (low, high) = found["loss"], found["loss"].interval
    kl = math.fsum(map(divergence, plain[1], own[1])) / len(own[1])
    scores = {name: each.after for name, each in found.items() if name not in ("loss", "perplexity", "token_accuracy")}
    return {"loss": loss.after, _INCREASE: loss.change or 0.0, "±95%": (high - low) / 2, "KL": kl, **scores}


def divergence(true: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the KL divergence of two distributions, by log-probabilities of their most probable tokens, in nats.

    All tokens that are not listed in both count as one: by the log-sum inequality, the result is at most that of the
    whole distributions.
    """
    listed = [(each, other[token]) for token, each in true.items() if token in other]
    both = np.array(listed, np.float64).reshape(-1, 2)
    rest = np.log(np.maximum(1 - np.exp(both).sum(0), _SMALLEST))
    both = np.vstack([both, rest])
    return float((np.exp(both[:, 0]) * (both[:, 0] - both[:, 1])).sum())
