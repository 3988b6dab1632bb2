"""Quantize a GGUF file with llama.cpp, and measure what that changes on the validation split, by llama.cpp's server."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from transformers import AutoConfig, GenerationConfig, TextStreamer

from ftkit.data.cases import EvaluationSet, ModelInput
from ftkit.data.packing import IGNORED, Document
from ftkit.errors import TrainingError
from ftkit.evaluate.engines import LlamaCpp, Setup, serve
from ftkit.evaluate.export_formats import QUANTIZE, find_program, run_converter
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
_TIMED_TOKENS = 64
_SMALLEST = 1e-12
"""Smallest probability of all tokens together that are not among the most probable ones."""


def write_quantized(
    folder: Path, file: Path, types: Sequence[str], plan: RunPlan, report: Callable[[str], None]
) -> list[GgufFile]:
    """Quantize the GGUF file of an export, and measure both; add what the recipe accepts to the export.

    Returns the measurements of all files. Those whose loss is above the recipe's bound are not kept.
    """
    record = read_json(folder / EXPORT_RECORD, ExportRecord)
    if record is None:
        raise AssertionError("an export has a record")
    with tempfile.TemporaryDirectory(prefix=".quantized-", dir=folder) as made:
        model = _Served.of(folder, record, file)
        names = _metrics(plan)
        data, metrics = evaluation_set(model.input, plan, MeasureSettings(names, limit=_MAX_ROWS), report)
        data = replace(data, documents=_first_targets(data.documents))
        unquantized, found = _measure(model, data, metrics, report), list[GgufFile]()
        found.append(_compare(file, data, metrics, unquantized, unquantized))
        for name in types:
            path = Path(made, f"{file.stem.rpartition('-')[0]}-{name}.gguf")
            report(f"quantizing to {name}")
            run_converter(QUANTIZE, [find_program(QUANTIZE) or QUANTIZE, str(file)], path, path, name)
            measured = _measure(replace(model, engine=_engine(folder, record, path), targets=[]), data, metrics, report)
            found.append(_compare(path, data, metrics, measured, unquantized))
        kept = [each for each in found if not _is_worse(each, plan)]
        for each in kept[1:]:
            publish(Path(made, each.name), folder / each.name)
    write_json(folder / EXPORT_RECORD, replace(record, gguf=tuple(kept)))
    append_table(folder, "## Quantized files\n\nMeasured with llama.cpp on the validation split", *table(kept))
    return found


def require_accepted(found: Sequence[GgufFile], plan: RunPlan) -> None:
    if worse := [each for each in found if _is_worse(each, plan)]:
        text = ", ".join(f"{each.name} by {each.loss_increase:.4f}" for each in worse)
        raise TrainingError(
            f"quantizing raises the loss by more than export.max_loss_increase={plan.recipe.export.max_loss_increase}, "
            f"and these files were not kept: {text}",
            meaning="so few bits change this model more than the recipe accepts",
            fix="quantize to more bits: --quantize q6_k or q8_0",
        )


def _is_worse(file: GgufFile, plan: RunPlan) -> bool:
    bound = plan.recipe.export.max_loss_increase
    return bound is not None and not file.loss_increase <= bound


def table(files: Sequence[GgufFile]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the rows of a table of measured files; those of numbers begin with `#`."""
    scores = list(files[0].scores)
    titles = ["file", "#GiB", "#loss", "#increase", "#95% interval", "#KL", *(f"#{name}" for name in scores)]
    titles.append("#tokens/s")
    rows = []
    for each in files:
        low, high = each.interval
        rows.append([
            each.name, f"{each.file.size / 2**30:.3g}", f"{each.loss:.4f}", f"{each.loss_increase:+.4f}",
            f"{low:+.4f} to {high:+.4f}", f"{each.kl:.4f}", *(f"{each.scores[name]:.4g}" for name in scores),
            f"{each.tokens_per_second:.1f}",
        ])  # fmt: skip
    return titles, rows


# --- Measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Served(GeneratingModel):
    """A GGUF file that llama.cpp's server serves; `targets` are the distributions at each label, once measured."""

    schedules: ClassVar[bool] = True
    folder: Path
    engine: LlamaCpp
    targets: list[Mapping[int, float]] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path, record: ExportRecord, file: Path) -> _Served:
        _, tokenizer, generation = find_generation(ModelFolder(folder, str(folder)))
        return cls(file.name, tokenizer, generation, folder, _engine(folder, record, file))

    @property
    def input(self) -> ModelInput:
        return ModelInput.of(self.tokenizer, self.label, AutoConfig.from_pretrained(self.folder))

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
                self.targets.append(found)
            sums.append([math.fsum(losses), float(len(losses)), float(num_best)])
        return sums


@dataclass(frozen=True)
class _Measured:
    rows: Measured
    targets: Sequence[Mapping[int, float]]
    tokens_per_second: float


def _engine(folder: Path, record: ExportRecord, file: Path) -> LlamaCpp:
    return LlamaCpp(Setup(folder, folder, record.precision, (), "", None, folder, file))


def _metrics(plan: RunPlan) -> tuple[str, ...]:
    """Return the metrics of completions that the recipe has."""
    if generation := plan.recipe.evaluation.generation:
        return generation.metrics
    return tuple(plan.recipe.data.task.metrics if plan.recipe.data.task else ()) or ("loss",)


def _first_targets(documents: Sequence[tuple[int, Document]]) -> list[tuple[int, Document]]:
    totals = np.cumsum([np.count_nonzero(each.labels != IGNORED) for _, each in documents])
    return list(documents[: 1 + int(np.searchsorted(totals, _MAX_TARGETS))])


def _measure(
    model: _Served, data: EvaluationSet, metrics: Sequence[Metric], report: Callable[[str], None]
) -> _Measured:
    settings = MeasureSettings()
    prompts = [each.prompt for each in data.cases] or [each.tokens[:1].tolist() for _, each in data.documents]
    longest = max(*(len(each.tokens) for _, each in data.documents), *(map(len, prompts)))
    with serve(model.engine, longest + settings.max_new_tokens, report):
        rows = measure(model, data, metrics, settings, Ranks())
        timings = model.engine.complete(prompts[0], _TIMED_TOKENS, ignore_eos=True)["timings"]
    return _Measured(rows, model.targets, float(timings["predicted_per_second"]))


def _compare(
    file: Path, data: EvaluationSet, metrics: Sequence[Metric], own: _Measured, unquantized: _Measured
) -> GgufFile:
    found = {each.metric: each for each in compare(data, metrics, own.rows, unquantized.rows, 0) if not each.source}
    loss = found.pop("loss")
    scores = {name: each.after for name, each in found.items() if name not in ("perplexity", "token_accuracy")}
    pairs = zip(unquantized.targets, own.targets, strict=True)
    kl = math.fsum(divergence(*pair) for pair in pairs) / len(own.targets)
    return GgufFile(
        file.name, SavedFile.of(file), loss.after, loss.change or 0.0, loss.interval, kl, scores,
        own.tokens_per_second, len(own.targets),
    )  # fmt: skip


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
