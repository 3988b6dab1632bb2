"""A stored reference: log-probabilities of completions by the model before training, computed once per data set.

They are next to the prepared data, in a folder named by the other inputs that they depend on: weights and precision. A
killed computation continues. Runs with other settings of the objective reuse them.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ftkit.errors import TrainingError
from ftkit.files import publish
from ftkit.train.causal_lm import CausalLM
from ftkit.train.components.batches import BatchSchedule

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from ftkit.data.prepared_data import PreparedData
    from ftkit.planning.plan import RunPlan
    from ftkit.train.causal_lm import MicroBatch
    from ftkit.train.engine import Engine
    from ftkit.train.world import World

log = logging.getLogger(__name__)

_PACKS_PER_WRITE = 256  # packs per write: a killed computation loses at most this many
_PACKS_COMPARED = 8
"""Number of packs whose log-probabilities each start recomputes, and compares with the stored ones."""
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest relative difference of a completion's log-probability from the stored one that rounding explains, by compute
precision. In bf16, other kernels changed it by at most 4e-4 (a model of 1B parameters on an H100)."""


class References(NamedTuple):
    """Log-probabilities of the documents of both splits, fp32 [1, documents].

    For objective kto, they are [2, documents], and the second row is for mismatched completions.
    """

    train: NDArray[np.float32]
    validation: NDArray[np.float32]


def compute_references(engine: Engine, plan: RunPlan, data: PreparedData, world: World) -> References:
    """Return the stored reference; compute missing parts with the model, which is not trained yet. Collective.

    Raises TrainingError if the stored values are another model's.
    """
    training, stores = plan.recipe.training, {"train": data.read_train(), "validation": data.read_validation()}
    schedules = {name: [BatchSchedule.outside(training, store, world)] for name, store in stores.items()}
    if training.completions_per_sample == 1:
        schedules = {name: [each, replace(each, is_mismatched=True)] for name, (each,) in schedules.items()}
    needed = [_file_name(name, each) for name, both in schedules.items() for each in both if len(each.store)]
    model = plan.recipe.model
    facts = [  # what the log-probabilities depend on besides data and weights
        model.revision, model.adapter, training.seed if model.weights == "random" else None,
        model.architecture.model_dump(mode="json"),
        training.precision, training.base_precision, training.method == "qlora",
    ]  # fmt: skip
    folder = data.folder_of("references", model.weights, facts, needed, plan.layout.root)
    found = []
    for name, both in schedules.items():
        rows = []
        for each in both:
            path = folder / _file_name(name, each)
            rows.append(_split(engine, plan, each, world, path))
            _compare(engine, each, world, path, rows[-1], training.compute_precision)
        found.append(np.stack(rows))
    return References(*found)


def _file_name(split: str, schedule: BatchSchedule) -> str:
    return f"{split}-mismatched.f32" if schedule.is_mismatched else f"{split}.f32"


def _split(engine: Engine, plan: RunPlan, schedule: BatchSchedule, world: World, path: Path) -> NDArray[np.float32]:
    store = schedule.store
    part = path.with_name(f"{path.stem}.{plan.id}.part")  # the runs of a sweep may compute them at the same time
    stored = np.empty(0, np.float32)
    if not len(store):
        return stored
    if world.is_first:
        path.parent.mkdir(parents=True, exist_ok=True)
        source = path if path.exists() else part
        stored = np.fromfile(source, "<f4") if source.exists() else stored
    stored = world.gather_objects(stored)[0]  # only rank 0 reads: a file system may show others an older state
    if len(stored) == store.num_documents:
        log.info("reference of %s: read from %s", path.stem, path)
        return stored
    begin, num_kept = store.whole_packs(len(stored))
    done = [stored[:num_kept]]
    for first in range(begin, len(store), _PACKS_PER_WRITE):
        last = min(first + _PACKS_PER_WRITE, len(store))
        computed = _log_probs(engine, schedule, world, range(first, last))
        if len(wrong := np.flatnonzero(~np.isfinite(computed))):
            document = sum(map(len, done)) + int(wrong[0])
            pack, first_document = store.whole_packs(document)
            raise not_finite("the reference", document - first_document + 1, pack, path.stem, plan.id)
        done.append(computed)
        if world.is_first:
            with part.open("wb" if first == begin else "ab") as file:
                file.write((np.concatenate(done) if first == begin else done[-1]).astype("<f4").tobytes())
                file.flush()
                os.fsync(file.fileno())
        log.info("reference of %s: %d of %d packs", path.stem, last, len(store))
    if world.is_first:
        publish(part, path)
    return np.concatenate(done)


def not_finite(model: str, document: int, pack: int, split: str, run: str) -> TrainingError:
    """Return the error for NaN or infinity in log-probabilities computed before step 1; documents count from 1."""
    return TrainingError(
        f"{model} computes NaN or infinity in document {document} of pack {pack} of the split '{split}'",
        meaning="its weights are damaged, or too large for the precision",
        fix=f"see it: ftkit data show --packs {pack} {run}; or set training.precision=fp32",
    )


def _log_probs(engine: Engine, schedule: BatchSchedule, world: World, packs: range) -> NDArray[np.float32]:
    """Return the log-probabilities of the documents of packs, fp32; each rank computes its own micro-batches."""
    with engine.inference() as model:
        own = [
            model(compute=CausalLM.completion_log_probs, batch=batch.on(world.device)).float().cpu().numpy()
            for batch in schedule.in_turn(packs)  # host sync: before step 1
        ]
    return np.concatenate([sums for ranks in zip(*world.gather_objects(own), strict=True) for sums in ranks])


def _compare(
    engine: Engine, schedule: BatchSchedule, world: World, path: Path, stored: NDArray[np.float32], precision: str
) -> None:
    packs = range(min(len(schedule.store), _PACKS_COMPARED))
    if not packs:
        return
    again = _log_probs(engine, schedule, world, packs)
    expected = stored[: len(again)]
    difference = float(np.max(np.abs(again - expected) / np.abs(expected)))
    log.info(
        "reference of %s: %d completions computed again, largest difference %.2g", path.stem, len(again), difference
    )
    if not difference <= TOLERANCE[precision]:
        raise TrainingError(
            f"the stored reference is not this model: log-probabilities of completions in {path} differ by "
            f"{difference:.2g} of them from those that it computes now",
            meaning="the weights changed without a change of name and size, or the model is not deterministic",
            fix=f"delete {path.parent}, and run again",
        )


def reference_point(model: CausalLM, batches: Iterable[MicroBatch]) -> torch.Tensor:
    """Return the bits of the reference point of objective kto (`kto`), from the mismatched completions of all ranks.

    Collective; within `Engine.inference`.
    """
    sums = torch.stack([model(compute=CausalLM.mismatched_sums, batch=batch) for batch in batches]).sum(0)
    dist.all_reduce(sums)
    return (sums[0] / sums[1].clamp(min=1)).clamp(min=0).view(torch.int32)
