from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from ftkit.config.context import Context
from ftkit.config.load import load_recipe
from ftkit.config.recipe import RecipePlan
from ftkit.config.training import TrainingPlan
from ftkit.data.packing import IGNORED, Document, DocumentBatch
from ftkit.data.prepared_data import PackStore, PackWriter
from ftkit.planning.flops import mean_visible_keys, token_flops
from ftkit.planning.plan import BatchPlan
from ftkit.planning.planner import plan_model
from ftkit.runs.checkpoints import TrainState
from ftkit.train.components.batches import BatchSchedule
from ftkit.train.loop import Progress, StepResult, StepTiming
from ftkit.train.observers import step_metrics
from ftkit.train.observers.step_metrics import StepMetrics, Stopwatch, count_flops, find_peak_flops
from ftkit.train.world import ContextGroup

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.runs.records import StepRecord
    from ftkit.train.components.recorder import Recorder
    from ftkit.train.memory.usage import MemoryTrace
    from ftkit.train.world import World

LENGTHS = (16, 9, 30, 5, 12)
TARGETS = sum((length - 1) // 2 for length in LENGTHS)
PACKS = (2, 1, 2)
"""Documents in each pack, of 32 tokens."""


@pytest.fixture
def recipe(tmp_path: Path) -> RecipePlan:
    found = load_recipe("olmo3-7b-full", Context(tmp_path, tmp_path, {}), ["model.architecture.sliding_window=8"])
    training = TrainingPlan.extend(found.training, micro_batch_size=1, activation_checkpointing="none")
    return RecipePlan.extend(found, model=plan_model(found.model, None), training=training)


@pytest.fixture
def store(tmp_path: Path) -> PackStore:
    """Three packs of several documents, padding, and every second token in the loss."""
    documents = [
        Document(np.zeros(length, np.int32), np.where(np.arange(length) % 2, 0, IGNORED).astype(np.int32))
        for length in LENGTHS
    ]
    with PackWriter(tmp_path / "train") as writer:
        writer.write(DocumentBatch.of(documents), PACKS)
    return PackStore(tmp_path / "train", 32)


def test_the_documents_of_packs_are_counted_without_padding(store: PackStore) -> None:
    for packs in ([0], [1], [2, 0], [2, 1, 0], [1, 1]):
        expected = [LENGTHS[each] for pack in packs for each in range(sum(PACKS[:pack]), sum(PACKS[: pack + 1]))]
        assert store.document_lengths(packs).tolist() == expected


def test_flops_are_those_of_each_document_and_the_projection_of_targets_only(recipe: RecipePlan) -> None:
    lengths = np.array(LENGTHS)
    shape, training = recipe.model.architecture, recipe.training
    expected = sum(
        length * token_flops(shape, training, mean_visible_keys(length, None), mean_visible_keys(length, 8), 0.5).total
        for length in LENGTHS
    )
    assert count_flops(shape, training, lengths, sum(LENGTHS) // 2) == pytest.approx(expected)
    no_window = shape.model_copy(update={"sliding_window": None})
    assert count_flops(no_window, training, lengths, 0) > count_flops(shape, training, lengths, 0)


def test_flops_of_a_prompt_and_of_what_follows_it_are_those_of_the_whole_document(recipe: RecipePlan) -> None:
    shape, training = recipe.model.architecture, recipe.training
    for prompt, rest in ((20, 5), (3, 4), (8, 8)):
        whole, first, last = (np.array([length]) for length in (prompt + rest, prompt, rest))
        parts = count_flops(shape, training, first, 0) + count_flops(shape, training, last, rest, first)
        assert parts == pytest.approx(count_flops(shape, training, whole, rest))


def test_all_ranks_count_the_tokens_of_the_whole_step_once(store: PackStore) -> None:
    """Also if ranks divide packs, and in the last step of an epoch, which has fewer packs than the batch."""
    groups = [(rank, size, ContextGroup()) for size in (1, 2) for rank in range(size)]
    for rank, size, context in [*groups, (0, 1, ContextGroup(1, 2)), (0, 2, ContextGroup(0, 2))]:
        sizes = BatchPlan(micro_batch_size=1, accumulation_steps=2 // size, global_batch_size=2)
        schedule = BatchSchedule(
            store=store, plan=sizes, seed=1, num_packs_in_run=3, rank=rank, size=size, context=context
        )
        steps = [schedule.step(0), schedule.step(1)]
        assert sum(each.num_tokens for each in steps) == sum(LENGTHS)
        assert sum(each.num_targets for each in steps) == TARGETS
        assert steps[1].num_tokens == store.document_lengths(schedule.packs_of_step(1)).sum()


class Records:
    def __init__(self) -> None:
        self.written: list[StepRecord] = []

    def write(self, record: StepRecord) -> None:
        self.written.append(record)


def test_throughput_and_mfu_are_those_of_real_tokens_since_the_last_record(
    recipe: RecipePlan, store: PackStore, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = BatchPlan(micro_batch_size=1, accumulation_steps=2, global_batch_size=2)
    schedule = BatchSchedule(store=store, plan=plan, seed=1, num_packs_in_run=3, rank=0, size=1)
    records, trace = Records(), cast("MemoryTrace", SimpleNamespace(peak_gib=lambda: None))
    state = TrainState(7, "data", num_tokens=1000, num_targets=400)
    plan_of_run: Any = SimpleNamespace(recipe=recipe)
    progress = Progress(plan_of_run, schedule, state, num_steps=9)
    monkeypatch.setattr(step_metrics, "find_peak_flops", lambda *_: 1e15)
    metrics = StepMetrics(progress, world, Stopwatch(), cast("Recorder", records), trace, ())
    for number in (0, 1):
        timing, batch = StepTiming(2.0, 2.0, 0.0), schedule.step(number)
        result = StepResult(8 + number, batch, 1.0, {}, 1.0, 1e-3, stop_requested=False, timing=timing)
        metrics.report(result)
    (record,) = records.written
    tokens = sum(LENGTHS)
    assert (record.tokens, record.targets, record.tokens_per_second) == (1000 + tokens, 400 + TARGETS, tokens / 4)
    flops = count_flops(recipe.model.architecture, recipe.training, np.array(LENGTHS), TARGETS)
    assert record.mfu == pytest.approx(flops / 4 / 1e15)


def test_mfu_on_a_cpu_is_unknown(recipe: RecipePlan, world: World) -> None:
    assert find_peak_flops(recipe, world) is None
