"""Quantize an export with llama.cpp or llm-compressor, and measure the change on the validation split.

llama.cpp's server measures GGUF files. vLLM's server measures compressed models; without vLLM, transformers does.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers import AutoConfig

from ftkit.data.cases import EvaluationSet, ModelInput, Prompt
from ftkit.data.packing import IGNORED, Document
from ftkit.data.prepared_data import PreparedData
from ftkit.errors import DataError, TrainingError
from ftkit.evaluate.engines import LlamaCpp, Setup, Vllm, serve
from ftkit.evaluate.export_formats import QUANTIZE, find_program, run_converter
from ftkit.evaluate.loaded_model import GeneratingModel, LoadedModel, available_devices, find_generation, load_model
from ftkit.evaluate.results import compare
from ftkit.evaluate.scoring import Measured, Ranks, evaluation_set, measure
from ftkit.evaluate.served_model import Distributions, ServedModel
from ftkit.evaluate.source import MeasureSettings, ModelFolder
from ftkit.files import publish, read_json, write_json
from ftkit.models.folder import EXPORT_RECORD
from ftkit.models.weight_files import CONFIG_FILE, WEIGHTS_INDEX
from ftkit.runs.certificate import UNCERTIFIED
from ftkit.runs.checkpoints import SavedFile
from ftkit.runs.model_card import append_table
from ftkit.train.components.export_record import ExportRecord, QuantizedFiles

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from ftkit.data.completion_metrics import Metric
    from ftkit.planning.plan import RunPlan

_MAX_ROWS = 100
_MAX_TARGETS = 4000
"""Tokens whose loss is measured, in whole documents: llama.cpp's server computes one token per request."""
_NUM_COMPARED = 200  # most probable tokens kept for the divergence; they take kilobytes per target
_TIMED_TOKENS = 64
_CALIBRATION_DOCUMENTS = 512
_CALIBRATION_TOKENS = 2**20
_INCREASE = "increase"
_FALLBACK = re.compile(r"(\d+ of \d+) tensor\(s\) required fallback")
_Measured = tuple[Measured, Distributions]  # losses and scores of rows, and the distributions at each label
_SMALLEST = 1e-12  # lower bound of the total probability of all tokens outside the most probable ones


class Quantizer(ABC):
    """Write quantized files of an export, and run them."""

    measured_with: str

    def __init__(self, export: Path, plain: Path, plan: RunPlan, report: Callable[[str], None]) -> None:
        """`plain` is the unquantized file, or the export itself."""
        record = read_json(export / EXPORT_RECORD, ExportRecord)
        if record is None:
            raise AssertionError("an export has a record")
        self.export, self.plain, self.plan, self.report, self.record = export, plain, plan, report, record
        _, self.tokenizer, self.generation = find_generation(ModelFolder(export, str(export)))

    @abstractmethod
    def quantize(self, name: str, into: Path) -> tuple[Path, str]:
        """Write a file, or the folder of a model, into a folder; return it, and a note for the model card."""

    @abstractmethod
    def open(self, path: Path, length: int, targets: Distributions) -> AbstractContextManager[GeneratingModel]:
        """Run the model in `path` for texts of up to `length` tokens; losses append the distribution at each label."""

    @contextmanager
    def served(self, engine: Vllm | LlamaCpp, length: int, targets: Distributions) -> Iterator[GeneratingModel]:
        with serve(engine, length, self.report):
            yield ServedModel(engine.dtype, self.tokenizer, self.generation, engine, _NUM_COMPARED, targets)

    def name_of(self, path: Path) -> str:
        return self.record.precision if path == self.export else path.name

    def files_of(self, path: Path) -> dict[str, SavedFile]:
        if path == self.export:
            return self.record.files
        paths = sorted(path.iterdir()) if path.is_dir() else [path]
        return {str(each.relative_to(path.parent)): SavedFile.of(each) for each in paths}


class Gguf(Quantizer):
    measured_with = LlamaCpp.name

    def quantize(self, name: str, into: Path) -> tuple[Path, str]:
        path = into / f"{self.plan.id}-{name}.gguf"
        words = [find_program(QUANTIZE) or QUANTIZE, str(self.plain)]
        larger = _FALLBACK.search(run_converter(QUANTIZE, words, path, self.export / path.name, name))
        note = f"{larger[1]} tensors have a larger type: their rows do not fit the blocks of {name}" if larger else ""
        return path, note

    def open(self, path: Path, length: int, targets: Distributions) -> AbstractContextManager[GeneratingModel]:
        setup = Setup(self.export, self.export, self.record.precision, (), "", None, path.parent, path)
        return self.served(LlamaCpp(setup), length, targets)


class Compressed(Quantizer):
    """Quantizes a model with llm-compressor, into a folder that vLLM and transformers load."""

    def __init__(
        self, export: Path, plan: RunPlan, report: Callable[[str], None], compressor: str, server: str | None
    ) -> None:
        """`compressor` is the Python of llm-compressor's environment, `server` of vLLM's; None for transformers."""
        super().__init__(export, export, plan, report)
        self._compressor, self._server = compressor, server
        self.measured_with = Vllm.name if server else "transformers"

    def quantize(self, name: str, into: Path) -> tuple[Path, str]:
        path, calibration = into / name, into / "calibration.json"
        documents = [] if name == "fp8" else _calibration(self.plan)
        calibration.write_text(json.dumps(documents), encoding="utf-8")
        digest = SavedFile.of(calibration).sha256
        note = f"calibrated on {len(documents)} training documents; SHA-256 of their tokens: {digest}"
        script = str(Path(__file__).with_name("compress.py"))
        words = [self._compressor, script, str(self.export), name, str(calibration)]
        fix = f"give w4a16 layers whose inputs are multiples of 128; or update it: {self._compressor} -m pip install …"
        run_converter("llm-compressor", words, path, self.export / name, fix=fix)
        # Another version of transformers may write everything except the weights differently.
        found, config = (read_json(each / CONFIG_FILE, dict[str, object]) or {} for each in (path, self.export))
        left = {*self.record.files, *UNCERTIFIED, WEIGHTS_INDEX}
        for each in self.export.iterdir():
            if each.is_file() and each.name not in left and each.suffix != ".gguf":
                shutil.copy2(each, path)
        write_json(path / CONFIG_FILE, config | {"quantization_config": found["quantization_config"]})
        return path, note if documents else ""

    @contextmanager
    def open(self, path: Path, length: int, targets: Distributions) -> Iterator[GeneratingModel]:
        if self._server:
            options = ("--max-logprobs", str(_NUM_COMPARED))
            setup = Setup(path, path, self.name_of(path), options, self._server, None, path)
            with self.served(Vllm(setup), length, targets) as model:
                yield model
        else:
            self.report(f"loading {self.name_of(path)}")
            model = load_model(ModelFolder(path, self.name_of(path)), *available_devices())
            yield _Loaded(**vars(model), targets=targets)


def write_quantized(
    quantizer: Quantizer, types: Sequence[str], show: Callable[[list[str], list[list[str]]], None]
) -> None:
    """Quantize an export, measure all files, show the table, and add it and the files to the export.

    Files that raise the loss by more than the recipe's bound are not kept: TrainingError, after the others are written.
    """
    folder, plan, report = quantizer.export, quantizer.plan, quantizer.report
    settings = MeasureSettings(_metrics(plan), limit=_MAX_ROWS)
    limits = ModelInput.of(quantizer.tokenizer, plan.id, AutoConfig.from_pretrained(folder))
    try:
        data, metrics = evaluation_set(limits, plan, settings, report)
    except DataError as error:
        fix = "quantize it with that program itself, which measures nothing"
        raise DataError(f"quantizing is not measured: {error.what}", meaning=error.meaning, fix=fix) from error
    totals = np.cumsum([np.count_nonzero(each.labels != IGNORED) for _, each in data.documents])
    data = replace(data, documents=data.documents[: 1 + int(np.searchsorted(totals, _MAX_TARGETS))])
    found, plain = list[QuantizedFiles](), None
    with tempfile.TemporaryDirectory(prefix=".quantized-", dir=folder) as made:
        paths = [(quantizer.plain, "")]
        for name in types:
            report(f"quantizing to {name}")
            paths.append(quantizer.quantize(name, Path(made)))
            if note := paths[-1][1]:
                report(note)
        for path, note in paths:
            own, speed = _measure(quantizer, path, data, metrics, settings, limits.max_length)
            plain = plain or own
            change = _compare(data, metrics, own, plain) | {"tokens/s": speed}
            found.append(QuantizedFiles(quantizer.name_of(path), quantizer.files_of(path), change, note))
        bound = plan.recipe.export.max_loss_increase
        worse = [each for each in found if bound is not None and not each.metrics[_INCREASE] <= bound]
        kept = [each for each in found if each not in worse]
        for each in kept[1:]:
            publish(Path(made, each.name), folder / each.name)
    show(*format_table(found))
    record = quantizer.record
    write_json(folder / EXPORT_RECORD, replace(record, quantized=(*record.quantized, *kept)))
    parts = [
        "## Quantized files",
        *(f"{each.name}: {each.note}" for each in kept if each.note),
        f"Measured with {quantizer.measured_with} on the validation split",
    ]
    append_table(folder, "\n\n".join(parts), *format_table(kept))
    if worse:
        text = ", ".join(f"{each.name} by {each.metrics[_INCREASE]:.4f}" for each in worse)
        raise TrainingError(
            f"quantizing raises the loss by more than export.max_loss_increase={bound}, and these files were not kept: "
            + text,
            meaning="so few bits change this model more than the recipe accepts",
            fix="quantize to more bits: --quantize q6_k or q8_0, or --format fp8",
        )


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= value < 1e9 else f"{value:.4g}"  # noqa: PLR2004 - exponents are hard to compare


def format_table(files: Sequence[QuantizedFiles]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows; titles of numbers begin with `#`."""
    rows = [[each.name, f"{each.num_bytes / 2**30:.3g}", *map(_number, each.metrics.values())] for each in files]
    return ["file", "#GiB", *(f"#{name}" for name in files[0].metrics)], rows


# --- Measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loaded(LoadedModel):
    """A model of transformers; `targets` are as in `ServedModel`."""

    targets: Distributions = field(default_factory=list)

    def label_logits(self, documents: Sequence[Document]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for logits, labels in super().label_logits(documents):
            best = logits.log_softmax(-1).topk(min(_NUM_COMPARED, logits.shape[-1]))
            rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            self.targets.extend(dict(zip(*row, strict=True)) for row in rows)
            yield logits, labels


def _metrics(plan: RunPlan) -> tuple[str, ...]:
    if generation := plan.recipe.evaluation.generation:
        return generation.metrics
    return tuple(plan.recipe.data.task.metrics if plan.recipe.data.task else ()) or ("loss",)


def _calibration(plan: RunPlan) -> list[list[int]]:
    """Return the tokens of whole training documents, from packs spread evenly over the training split."""
    store = PreparedData(plan.data.root).read_train()
    wanted = math.ceil(_CALIBRATION_DOCUMENTS * len(store) / store.num_documents)
    num_packs = max(1, min(len(store), wanted, _CALIBRATION_TOKENS // store.sequence_length))
    documents = list[list[int]]()
    for pack in np.linspace(0, len(store) - 1, num_packs, dtype=np.int64).tolist():
        ends, starts = np.cumsum(store.document_lengths([pack])), store.document_starts([pack])
        parts = np.split(store.read([pack])[0, 0], ends)[:-1]  # the last part is padding
        documents += [part.tolist() for part, start in zip(parts, starts, strict=True) if start == 0]
    return documents[:_CALIBRATION_DOCUMENTS]


def _measure(
    quantizer: Quantizer, path: Path, data: EvaluationSet, metrics: Sequence[Metric], settings: MeasureSettings,
    max_length: int | None,
) -> tuple[_Measured, float]:  # fmt: skip
    """Return the measurements of a file or folder, and the tokens per second of one generated completion."""
    prompts = [each.prompt for each in data.cases] or [Prompt(each.tokens[:1].tolist()) for _, each in data.documents]
    length = max(*(len(each.tokens) for _, each in data.documents), *(map(len, prompts))) + settings.max_new_tokens
    targets: Distributions = []
    with quantizer.open(path, min(length, max_length or length), targets) as model:
        rows = measure(model, data, metrics, settings, Ranks())
        timed = model.generation.greedy(model.tokenizer, _TIMED_TOKENS)
        timed.min_new_tokens = _TIMED_TOKENS
        begin = time.perf_counter()
        (tokens,) = model.complete(prompts[:1], timed)
        seconds = time.perf_counter() - begin
    return (rows, targets), len(tokens) / seconds


def _compare(data: EvaluationSet, metrics: Sequence[Metric], own: _Measured, plain: _Measured) -> dict[str, float]:
    """Return the metrics of a file's table: losses in nats per token, and half of the 95% interval of their change."""
    found = {each.metric: each for each in compare(data, metrics, own[0], plain[0], 0) if not each.source}
    loss, (low, high) = found["loss"], found["loss"].interval
    kl = math.fsum(map(divergence, plain[1], own[1])) / len(own[1])
    scores = {name: each.after for name, each in found.items() if name not in ("loss", "perplexity", "token_accuracy")}
    return {"loss": loss.after, _INCREASE: loss.change or 0.0, "±95%": (high - low) / 2, "KL": kl, **scores}


def divergence(true: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the KL divergence of two distributions in nats, from log-probabilities of their most probable tokens.

    Tokens that are not listed in both count as one. By the log-sum inequality, the result is at most the divergence of
    the whole distributions.
    """
    listed = [(each, other[token]) for token, each in true.items() if token in other]
    both = np.array(listed, np.float64).reshape(-1, 2)
    both = np.vstack([both, np.log(np.maximum(1 - np.exp(both).sum(0), _SMALLEST))])
    return float((np.exp(both[:, 0]) * (both[:, 0] - both[:, 1])).sum())
