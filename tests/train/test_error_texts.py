"""The texts of representative errors before and during training, in a golden file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from ftkit.config.execution import ParameterCounts
from ftkit.config.recipe import BestSpec, ProfileSpec
from ftkit.config.training import TrainingPlan
from ftkit.errors import FtkitError
from ftkit.planning.layout import RunLayout
from ftkit.runs.checkpoints import TrainState
from ftkit.runs.records import EvaluationRecord
from ftkit.train.checkpoint.loading import load_newest
from ftkit.train.components.batches import StepBatch
from ftkit.train.components.exporter import write_weights
from ftkit.train.distributed.collectives import choose_collectives
from ftkit.train.distributed.pack_parallel import check_context_parallel, check_tensor_parallel
from ftkit.train.distributed.verification import verify_sharding, verify_targets
from ftkit.train.engine import ShardingStats
from ftkit.train.loop import Progress, StepResult, StepTiming, check_is_measured
from ftkit.train.observers import check_profile
from ftkit.train.observers.step_metrics import AnomalyWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.train.world import World

GOLDEN = Path(__file__).parents[1] / "golden" / "errors" / "train.txt"
TRAINING = TrainingPlan(sequence_length=32, global_batch_size=4, max_steps=1, learning_rate=1e-3)
STATS = ShardingStats(
    num_layers=4, num_units=1, num_sharded_layers=4, checkpointed_layers={"none": 4}, total_elements=1000,
    local_elements=1000, max_local_elements=500, trainable_elements=1000,
)  # fmt: skip


def damaged(folder: Path, world: World) -> None:
    layout, engine = RunLayout(folder), SimpleNamespace()
    layout.checkpoint(3).mkdir(parents=True)
    load_newest(engine, layout, world, "data")  # type: ignore[arg-type]


def shortened() -> None:
    recipe = SimpleNamespace(evaluation=SimpleNamespace(selection=None), training=SimpleNamespace(max_steps=5))
    plan: Any = SimpleNamespace(recipe=recipe, id="demo-1")
    batches: Any = None
    Progress.resume(plan, batches, TrainState(7, "data"))


def not_finite() -> None:
    recorder: Any = SimpleNamespace(write=lambda _: None)
    result = StepResult(
        3, StepBatch([], 0, *[np.empty(0, np.int64)] * 2), float("nan"), {}, 1.0, 1e-3,
        stop_requested=False, timing=StepTiming(1.0, 1.0, 0.0),
    )  # fmt: skip
    AnomalyWatch("demo-1", "stop", recorder, lambda _: [4, 5]).report(result)


def test_error_texts(world: World, tmp_path: Path) -> None:
    llama: Any = AutoConfig.for_model("llama")
    evaluated = EvaluationRecord(0.0, 1, "during", 1.0, 2.7, ())
    copying = TRAINING.model_copy(update={"collectives": "copy_engine"})
    causes: list[Callable[[], object]] = [
        lambda: verify_sharding(STATS, TRAINING, ParameterCounts(1000, 1000)),
        lambda: verify_targets(np.array([3, 0, 7, 0])),
        lambda: check_context_parallel(llama, "flex", 2),
        lambda: check_context_parallel(llama, "sdpa", 3),
        lambda: check_tensor_parallel(llama, "sdpa", 3),
        lambda: choose_collectives(copying, replace(world, size=2)),
        lambda: check_profile(ProfileSpec(enabled=True), 2),
        lambda: check_is_measured(evaluated, BestSpec(metric="calls")),
        lambda: damaged(tmp_path, world),
        shortened,
        not_finite,
        lambda: write_weights({"a": torch.ones(2, device="meta")}, [("a", torch.ones(3))], tmp_path),
    ]
    texts = []
    for cause in causes:
        with pytest.raises(FtkitError) as caught:
            cause()
        texts.append(f"{caught.value}\n".replace(str(tmp_path), "RUN").replace(tmp_path.name, "RUN"))
    text = "\n".join(texts)
    if os.environ.get("FTKIT_UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")
