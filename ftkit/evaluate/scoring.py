"""Measure losses and completion scores of a model, in one process or in several with a copy of the model each."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from transformers import PreTrainedTokenizerBase

from ftkit.data.cases import EvaluationSet, make_evaluation_set, read_evaluation_rows
from ftkit.data.completion_metrics import Completion, Metric, choose_metrics
from ftkit.errors import PrerequisiteError, plural
from ftkit.process import num_usable_cpus

if TYPE_CHECKING:
    from ftkit.data.cases import ModelInput
    from ftkit.data.packing import Document
    from ftkit.evaluate.loaded_model import GeneratingModel
    from ftkit.evaluate.source import MeasureSettings, ModelSource, Target
    from ftkit.planning.plan import RunPlan

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Ranks:
    """This process among `size` processes that share the work; by default there is only one."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that prints and writes."""
        return self.rank == 0

    def exchange(self, value: ItemT) -> list[ItemT]:
        """Return the values of all ranks, rank 0's first. Collective."""
        if self.size == 1:
            return [value]
        values: list[ItemT | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return cast("list[ItemT]", values)

    def map(self, function: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> list[ResultT]:
        """Apply a function to items that the ranks share; return the results in the order of the items. Collective."""
        parts = self.exchange([function(item) for item in items[self.rank :: self.size]])
        return [parts[number % self.size][number // self.size] for number in range(len(items))]


def is_a_rank() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the processes that torchrun started; without torchrun, this is the only one."""
    if not is_a_rank():
        yield Ranks()
        return
    dist.init_process_group("gloo")  # only Python objects are exchanged
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def run_ranks(size: int, words: Sequence[str]) -> int:
    """Run a command line of ftkit in several processes; return the exit code. Only the first process prints.

    With GPUs, each process has one.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus and size > num_gpus:
        raise PrerequisiteError(f"--gpus {size}: torch sees {num_gpus} here", fix=f"give at most --gpus {num_gpus}")
    from torch.distributed.run import main as torchrun  # noqa: PLC0415 - a second

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the command reports why it failed
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_usable_cpus() // size)))
    try:
        torchrun(["--standalone", f"--nproc-per-node={size}", "--local-ranks-filter=0", "-m", "ftkit", *words])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    return 0


# --- Measuring -----------------------------------------------------------------------------------


_TOKENS_PER_FORWARD = 8192  # maximum tokens of a forward pass, whose logits are all in memory


@dataclass(frozen=True)
class Measured:
    """A model's measurements; `loss` is [rows, 3]: summed loss, labels, and labels that are the most probable token."""

    loss: NDArray[np.float64]
    completions: list[Completion]  # of each case
    scores: dict[str, list[float | None]]  # of each case, by metric; None if a metric does not apply


@dataclass(frozen=True)
class Measurements:
    """The tokenizer of a model, its data, and the measurements; `before` are those of the model before training."""

    tokenizer: PreTrainedTokenizerBase
    data: EvaluationSet
    metrics: list[Metric]
    after: Measured
    before: Measured | None


def evaluation_set(
    model: ModelInput, plan: RunPlan | None, settings: MeasureSettings, report: Callable[[str], None]
) -> tuple[EvaluationSet, list[Metric]]:
    """Read and encode the rows of an evaluation as a model takes them, and select the metrics of completions.

    `plan` is that of the model's run, if it has one; `report` gets messages about skipped rows.
    """
    rows = read_evaluation_rows(plan, Path(settings.file) if settings.file else None, settings.limit)
    data = make_evaluation_set(model, rows, plan.recipe.data if plan else None, report)
    return data, choose_metrics(settings.metrics, data.cases, plan.recipe.data.task if plan else None)


def measure_target(
    target: Target,
    settings: MeasureSettings,
    load: Callable[[ModelSource], AbstractContextManager[GeneratingModel]],
    report: Callable[[str], None],
    ranks: Ranks | None = None,
) -> Measurements:
    """Measure a model, and the model before training on the same rows if there is one. Collective."""
    ranks, before = ranks or Ranks(), None
    with load(target.source) as model:
        tokenizer = model.tokenizer
        data, metrics = evaluation_set(model.input, target.plan, settings, report)
        completions = f", {plural(len(data.cases), 'completion')}" if metrics else ""
        report(f"measuring {plural(len(data.rows), 'row')}{completions}{_whole(target.plan, settings, data)}")
        after = measure(model, data, metrics, settings, ranks)
    for metric in metrics if settings.metrics else ():
        if all(score is None for score in after.scores[metric.name]):
            report(f"{metric.name} applies to none of these rows")
    if target.before and target.before != target.source:
        del model  # only one model at a time is in memory
        with load(target.before) as model:
            before = measure(model, data, metrics, settings, ranks)
    return Measurements(tokenizer, data, metrics, after, before)


def _whole(plan: RunPlan | None, settings: MeasureSettings, data: EvaluationSet) -> str:
    """Say which documents of the validation split the run itself measured otherwise; empty if none."""
    if plan is None or settings.file:
        return ""
    length = plan.recipe.training.sequence_length
    num = sum(len(document.tokens) > length for _, document in data.documents)
    long = f"{plural(num, 'document')} longer than sequence_length {length:,}"
    return f"; {long} in whole, which the run's own validation cut or dropped" if num else ""


def measure(
    model: GeneratingModel, data: EvaluationSet, metrics: Sequence[Metric], settings: MeasureSettings, ranks: Ranks
) -> Measured:
    """Compute losses, and generate and score completions if there are metrics for them. Collective.

    Batches and results are the same for any number of ranks.
    """
    loss = np.zeros((len(data.rows), 3))
    batches = [data.documents] if model.schedules else list(_batches(data.documents))
    found = ranks.map(lambda batch: model.losses([document for _, document in batch]), batches)
    for batch, sums in zip(batches, found, strict=True):
        for (number, _), of_document in zip(batch, sums, strict=True):
            loss[number] += of_document
    if not metrics:
        return Measured(loss, [], {})
    config = model.generation.greedy(model.tokenizer, settings.max_new_tokens)
    order = sorted(range(len(data.cases)), key=lambda number: len(data.cases[number].prompt))
    size = max(1, len(order)) if model.schedules else settings.batch_size
    groups = [order[first : first + size] for first in range(0, len(order), size)]
    completed = ranks.map(lambda group: model.complete([data.cases[each].prompt for each in group], config), groups)
    tokens = dict(zip(order, chain.from_iterable(completed), strict=True))
    completions = [
        model.generation.to_completion(model.tokenizer, tokens[number], case.reference)
        for number, case in enumerate(data.cases)
    ]
    pairs = list(zip(data.cases, completions, strict=True))
    return Measured(loss, completions, {metric.name: [metric.score(*pair) for pair in pairs] for metric in metrics})


def _batches(documents: Sequence[tuple[int, Document]]) -> Iterator[list[tuple[int, Document]]]:
    """Yield documents of similar lengths, as many as fit in a forward pass."""
    batch: list[tuple[int, Document]] = []
    for each in sorted(documents, key=lambda found: len(found[1].tokens)):
        if batch and len(each[1].tokens) * (len(batch) + 1) > _TOKENS_PER_FORWARD:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch
