"""A stored reference: log-probabilities of completions by the model before training, computed once for a set of data.

They are next to the prepared data, in a folder named by what they depend on besides it: weights and precision. A killed
computation continues; runs with other settings of the objective find them complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ftkit.errors import TrainingError
from ftkit.files import publish
from ftkit.train.causal_lm import CausalLM
from ftkit.train.components.batches import to_micro_batch, with_pairs

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ftkit.data.prepared_data import PackStore, PreparedData
    from ftkit.planning.plan import RunPlan
    from ftkit.train.engine import Engine
    from ftkit.train.world import World

log = logging.getLogger(__name__)

_PACKS_PER_WRITE = 256
"""Packs after which a part is written: what a killed computation loses at most."""
_PACKS_COMPARED = 8
"""Packs of which a start computes the log-probabilities again, and compares them with the stored ones."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest relative difference of a completion's log-probability from the stored one: what rounding explains."""


class References(NamedTuple):
    """Log-probabilities of the documents of both splits, fp32 [documents]."""

    train: NDArray[np.float32]
    validation: NDArray[np.float32]


def compute_references(
    engine: Engine, plan: RunPlan, data: PreparedData, world: World, weights: Path | None
) -> References:
    """Return the stored reference; compute what is missing with the model, which is not trained yet.

    Collective. `weights` is the folder of the pretrained weights; None for random ones.

    Raises TrainingError: the stored numbers are those of another model.
    """
    folder = data.root / "references" / _key(plan, data, weights)
    existing = next(each for each in (folder, folder.parent, data.root) if each.exists())
    found = []
    for name, store in (("train", data.read_train()), ("validation", data.read_validation())):
        path = folder / f"{name}.f32"
        if not os.access(existing, os.W_OK) and not path.exists():  # another user's
            path = plan.layout.root / "references" / path.name
        found.append(_split(engine, plan, store, world, path))
        _compare(engine, plan, store, world, path, found[-1])
    return References(*found)


def _key(plan: RunPlan, data: PreparedData, weights: Path | None) -> str:
    model, training = plan.recipe.model, plan.recipe.training
    files = sorted((path.name, path.stat().st_size) for path in weights.glob("*.safetensors")) if weights else []
    facts = {
        "data": data.read_manifest().identity,
        "weights": [model.weights, model.revision, model.adapter, files],
        "seed": training.seed if weights is None else None,
        "architecture": model.architecture.model_dump(mode="json"),
        "precision": [training.precision, training.base_precision, training.method == "qlora"],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _split(engine: Engine, plan: RunPlan, store: PackStore, world: World, path: Path) -> NDArray[np.float32]:
    part = path.with_name(f"{path.stem}.{plan.id}.part")  # the runs of a sweep may compute them at the same time
    stored = np.empty(0, np.float32)
    if not len(store):
        return stored
    if world.is_first:
        path.parent.mkdir(parents=True, exist_ok=True)
        source = path if path.exists() else part
        stored = np.fromfile(source, "<f4") if source.exists() else stored
    stored = world.gather_objects(stored)[0]  # one rank reads: a file system may show the others an older state
    if len(stored) == store.num_documents:
        log.info("reference of %s: read from %s", path.stem, path)
        return stored
    begin, num_kept = store.whole_packs(len(stored))
    done = [stored[:num_kept]]
    for first in range(begin, len(store), _PACKS_PER_WRITE):
        last = min(first + _PACKS_PER_WRITE, len(store))
        done.append(_log_probs(engine, plan, store, world, range(first, last)))
        if world.is_first:
            with part.open("wb" if first == begin else "ab") as file:
                file.write((np.concatenate(done) if first == begin else done[-1]).astype("<f4").tobytes())
                file.flush()
                os.fsync(file.fileno())
        log.info("reference of %s: %d of %d packs", path.stem, last, len(store))
    if world.is_first:
        publish(part, path)
    return np.concatenate(done)


def _log_probs(engine: Engine, plan: RunPlan, store: PackStore, world: World, packs: range) -> NDArray[np.float32]:
    """Return the log-probabilities of the documents of packs, fp32; each rank computes micro-batches of its own."""
    micro = plan.recipe.training.micro_batch_size
    own: list[tuple[int, NDArray[np.float32]]] = []
    with engine.inference() as model:
        for first in range(packs.start, packs.stop, micro * world.data_size):
            # Ranks beyond the end compute the last pack again: each forward is a collective.
            begin = first + world.data_rank * micro
            chosen = range(begin, min(begin + micro, packs.stop)) or packs[-1:]
            read = store.read(chosen)
            batch = with_pairs(to_micro_batch(read, world.device), read)
            sums = model(compute=CausalLM.completion_log_probs, batch=batch)
            if begin < packs.stop:
                own.append((begin, sums.float().cpu().numpy()))  # host sync: before step 1
    everything = sorted((each for rank in world.gather_objects(own) for each in rank), key=lambda each: each[0])
    return np.concatenate([values for _, values in everything])


def _compare(
    engine: Engine, plan: RunPlan, store: PackStore, world: World, path: Path, stored: NDArray[np.float32]
) -> None:
    packs = range(min(len(store), _PACKS_COMPARED))
    if not packs:
        return
    again = _log_probs(engine, plan, store, world, packs)
    expected = stored[: len(again)]
    difference = float(np.max(np.abs(again - expected) / np.abs(expected)))
    if not difference <= TOLERANCE[engine.model.hf_model.dtype]:
        raise TrainingError(
            f"the stored reference is not this model: log-probabilities of completions in {path} differ by "
            f"{difference:.1%} from those that it computes now",
            meaning="the weights changed without a change of name and size, or the model is not deterministic",
            fix=f"delete {path.parent}, and run again",
        )
