from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from ftkit.config.context import Context
from ftkit.config.load import load_recipe
from ftkit.config.recipe import RecipePlan, RecipeSpec
from ftkit.config.training_plan import TrainingPlan
from ftkit.data.encoding import IGNORED, Document
from ftkit.data.store import DocumentBatch, PackStore, PackWriter
from ftkit.planning.estimates.flops import mean_visible_keys, token_flops
from ftkit.planning.planner import plan_model
from ftkit.train.components.mfu import MfuMeter, make_mfu_meter

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.train.world import World


def plan_of(recipe: RecipeSpec) -> RecipePlan:
    return RecipePlan.of(recipe, plan_model(recipe.model, None), TrainingPlan.of(recipe.training, 1, "none"))


def test_mfu_counts_attention_within_documents_and_projection_of_targets_only(tmp_path: Path, world: World) -> None:
    ctx = Context(tmp_path, tmp_path, {})
    recipe = plan_of(load_recipe("olmo3-7b-full", ctx, ["model.architecture.sliding_window=8"]))
    labels = np.where(np.arange(16) % 2, 0, IGNORED).astype(np.int32)
    document = Document(np.zeros(16, dtype=np.int32), labels)
    with PackWriter(tmp_path / "train") as writer:
        writer.write(DocumentBatch.of([document] * 400), [2] * 200)
    measured = make_mfu_meter(recipe, PackStore(tmp_path / "train", 32), world)
    keys, in_window = mean_visible_keys(16, None), mean_visible_keys(16, 8)
    expected = token_flops(recipe.model.architecture, recipe.training, keys, in_window, target_ratio=7 / 16)
    assert measured.flops_per_pack == pytest.approx(32 * expected.total)
    assert measured.mfu(1000.0) is None  # the peak of a CPU is not known


def test_padding_does_not_count_as_work(tmp_path: Path, world: World) -> None:
    recipe = plan_of(load_recipe("olmo3-7b-full", Context(tmp_path, tmp_path, {})))
    documents = [Document(np.arange(1, 9, dtype=np.int32), np.arange(2, 10, dtype=np.int32)) for _ in range(2)]
    flops = {}
    for length in (16, 64):
        with PackWriter(tmp_path / str(length)) as writer:
            writer.write(DocumentBatch.of(documents * 2), [2, 2])
        flops[length] = make_mfu_meter(recipe, PackStore(tmp_path / str(length), length), world).flops_per_pack
    assert flops[64] == pytest.approx(flops[16])


def test_mfu_is_a_fraction_of_the_peak_of_all_gpus() -> None:
    assert MfuMeter(flops_per_pack=6e9 * 4096, peak_flops=8 * 989e12).mfu(80_000 / 4096) == pytest.approx(
        0.0607, rel=1e-2
    )
