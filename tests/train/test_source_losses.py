"""Losses per source of a run on a mixture, on two processes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from ftkit.data.packing import IGNORED
from ftkit.data.prepared_data import PackStore, PreparedData
from ftkit.runs.records import EvaluationRecord, SourceLoss, StepRecord
from ftkit.train.causal_lm import SourceLosses
from ftkit.train.components.batches import BatchSchedule
from ftkit.train.components.recorder import scalars_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.train.world import World

NAMES = ("rows.jsonl.0", "rows.jsonl.1")


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    """Two files with the same name: one with rows that are easy to learn, one with numbers."""
    rng = np.random.default_rng(0)
    sources = []
    for kind, num_rows in (("easy", 120), ("hard", 40)):
        file = tmp_path / kind / "rows.jsonl"
        file.parent.mkdir()
        answers = ["yes " * 30 if kind == "easy" else " ".join(map(str, rng.random(3))) for _ in range(num_rows)]
        rows = ([{"role": "user", "content": kind}, {"role": "assistant", "content": answer}] for answer in answers)
        file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        sources.append(str(file))
    return json.dumps(sources)


@pytest.mark.parametrize(("engine", "packing", "max_packs"), [("fsdp2", "auto", 2), ("zero3", "off", 64)])
def test_the_losses_per_source_add_up_to_the_loss(
    make_run: Callable[..., Any], mixture: str, engine: str, packing: str, max_packs: int
) -> None:
    run = make_run(
        f"mixture-{engine}", f"data.source={mixture}", "data.format=messages", "data.validation={count: 24}",
        "evaluation.generation=null", "training.max_steps=4", "training.checkpoint_every_steps=4",
        f"training.engine={engine}", f"data.packing={packing}", f"evaluation.max_packs={max_packs}",
    )  # fmt: skip
    run.train()
    data = PreparedData(run.plan.data.root)
    store = data.read_train()
    seed = run.plan.recipe.training.seed
    schedule = BatchSchedule(store=store, plan=run.plan.batch, seed=seed, num_packs_in_run=None, rank=0, size=1)
    steps = run.records(StepRecord)
    assert len(steps) == 4
    for record in steps:
        assert weighted_mean(record.sources) == pytest.approx(record.loss, rel=1e-5)
        expected = count_labels(store, schedule.packs_of_step(record.step - 1))
        assert [record.sources[name].num_targets for name in NAMES] == expected
        assert scalars_of(record)["train/loss/rows.jsonl.1"] == record.sources["rows.jsonl.1"].loss
    after = run.records(EvaluationRecord)[-1]
    assert weighted_mean(after.sources) == pytest.approx(after.loss, rel=1e-5)
    num_packs = len(validation := data.read_validation())
    measured = (
        [0, num_packs // 2] if max_packs < num_packs else list(range(num_packs))
    )  # not only the longest documents
    exact = validation_losses(run.layout.export, validation, measured)
    assert {name: source.loss for name, source in after.sources.items()} == pytest.approx(exact, rel=1e-4)
    assert exact[NAMES[0]] < exact[NAMES[1]]


def test_loss_sums_per_source_stay_in_fp32_when_fsdp2_casts_inputs(world: World) -> None:
    class Adder(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor, *, source_losses: SourceLosses) -> torch.Tensor:
            assert hidden.dtype == torch.bfloat16
            source_losses.add(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 0]))
            return super().forward(hidden)

    adder = Adder(4, 4)
    fully_shard(adder, mesh=world.mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    sources = SourceLosses(2, world.device)
    adder(torch.ones(1, 4), source_losses=sources)
    assert sources.sums.tolist() == [[4.0, 2.0], [2.0, 1.0]]


def test_source_names_are_valid_in_every_tracker() -> None:
    sources = {name: SourceLoss(1.0, 1) for name in ("*.parquet", "..", "data-set/a b", "chats.jsonl.0")}
    scalars = scalars_of(EvaluationRecord(0.0, 0, "before", 1.0, 2.7, (), sources))
    names = ("_.parquet", "_", "data-set_a_b", "chats.jsonl.0")
    assert [name for name in scalars if name.startswith("eval/loss/")] == [f"eval/loss/{name}" for name in names]


def weighted_mean(sources: dict[str, SourceLoss]) -> float:
    total = sum(source.loss * source.num_targets for source in sources.values())
    return total / sum(source.num_targets for source in sources.values())


def count_labels(store: PackStore, packs: list[int]) -> list[int]:
    read = store.read(packs)
    return [int(((read[:, 1] != IGNORED) & (read[:, 3] == source)).sum()) for source in range(len(NAMES))]


def validation_losses(export: Path, store: PackStore, packs: list[int]) -> dict[str, float]:
    """Return the mean losses of an exported model by transformers' own forward pass."""
    model = AutoModelForCausalLM.from_pretrained(export)
    sums = np.zeros(len(NAMES))
    for pack in store.read(packs).astype(np.int64):
        tokens, labels, positions, sources = torch.from_numpy(pack)
        with torch.no_grad():
            logits = model(tokens[None], position_ids=positions[None], use_cache=False).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        sums += np.bincount(sources, losses, len(NAMES))
    counts = count_labels(store, packs)
    return dict(zip(NAMES, (sums / counts).tolist(), strict=True))
