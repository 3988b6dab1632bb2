"""Whole runs of the trainer."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ftkit.cli.main import main
from ftkit.cli.terminal.record_lines import record_line
from ftkit.data.packing import IGNORED, pack_at
from ftkit.data.prepared_data import PreparedData
from ftkit.errors import TrainingError
from ftkit.files import parse_json
from ftkit.planning.plan import PREPARATION_VERSION, BatchPlan
from ftkit.runs.checkpoints import MARKER, Marker, TrainState
from ftkit.runs.metrics_file import read_records
from ftkit.runs.records import (
    AnomalyRecord,
    CheckpointRecord,
    EndRecord,
    EvaluationRecord,
    StartRecord,
    StepRecord,
    VerificationRecord,
)
from ftkit.train import trainer
from ftkit.train.components.batches import BatchSchedule

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ftkit.data.prepared_data import PackStore
    from ftkit.train.world import World


KILLED = Path(__file__).with_name("killed_in_a_step.py")


@pytest.mark.oldest
def test_a_run_learns_and_records_each_stage(finished_run: Any) -> None:
    losses = finished_run.losses()
    assert sorted(losses) == list(range(1, 21))
    assert losses[20][0] < 0.75 * losses[1][0]
    assert [record.outcome for record in finished_run.records(EndRecord)] == ["completed"]
    assert [record.when for record in finished_run.records(EvaluationRecord)] == ["before", "after"]
    (verification,) = finished_run.records(VerificationRecord)
    assert verification.checks["units"] == 3


def test_checkpoints_record_the_version_that_prepared_their_data(finished_run: Any) -> None:
    plan = finished_run.plan
    (folder,) = [folder for step, folder in plan.layout.list_checkpoints() if step == 20]
    progress = parse_json((folder / MARKER).read_bytes(), Marker).progress
    assert progress.fingerprint == f"{plan.fingerprint}@{PREPARATION_VERSION}"


@pytest.mark.oldest
def test_validation_rows_get_completions_and_scores(finished_run: Any) -> None:
    before, after = finished_run.records(EvaluationRecord)
    assert before.scores["sql"] == 0.0
    assert len(after.samples) == 5
    assert len({sample.question for sample in after.samples}) == 5
    assert after.perplexity == pytest.approx(math.exp(after.loss))


@pytest.mark.oldest
def test_the_export_equals_the_trained_model(finished_run: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished_run.layout.export)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    store = PreparedData(finished_run.plan.data.root).read_validation()
    total = 0.0
    for tokens, labels, positions, _ in store.read(range(len(store))).astype(np.int64):
        with torch.no_grad():
            logits = model(
                torch.from_numpy(tokens)[None], position_ids=torch.from_numpy(positions)[None], use_cache=False
            ).logits[0]
        total += float(
            torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), ignore_index=IGNORED, reduction="sum")
        )
    after = finished_run.records(EvaluationRecord)[-1]
    assert total / store.num_targets.sum() == pytest.approx(after.loss, rel=1e-5)


def test_the_exported_tokenizer_renders_a_conversation(finished_run: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(finished_run.layout.export)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<bos><start_of_turn>user\nhi<end_of_turn>\n"


@pytest.mark.oldest
def test_ten_steps_resume_and_ten_more_equal_twenty_bit_for_bit(finished_run: Any) -> None:
    resumed = finished_run.copy_to("resumed")
    resumed.forget_after(10)
    resumed.train()
    assert [record.resumed_from for record in resumed.records(StartRecord)] == [10]
    straight = finished_run.losses()
    assert resumed.losses() == {step: straight[step] for step in range(11, 21)}
    name = "model.safetensors"
    assert (resumed.layout.export / name).read_bytes() == (finished_run.layout.export / name).read_bytes()


def test_a_run_that_passes_over_a_damaged_checkpoint_says_so(finished_run: Any) -> None:
    run = finished_run.copy_to("damaged")
    for part in run.layout.checkpoint(20).glob("*.distcp"):
        part.write_bytes(part.read_bytes()[:-1])
    run.train()
    (start,) = run.records(StartRecord)[-1:]
    assert (start.resumed_from, start.damaged) == (10, (20,))
    assert "damaged: checkpoint of step 20" in record_line(start)


def test_one_process_computes_the_same_as_two(finished_run: Any, make_run: Callable[..., Any]) -> None:
    alone = make_run("alone", processes=1)
    alone.train()
    for step, (loss, norm) in alone.losses().items():
        assert (loss, norm) == pytest.approx(finished_run.losses()[step], abs=1e-5, rel=1e-4)


def test_a_checkpoint_of_two_processes_resumes_on_one_with_another_micro_batch(
    finished_run: Any, make_run: Callable[..., Any]
) -> None:
    interrupted = finished_run.copy_to("interrupted")
    interrupted.forget_after(10)
    alone = make_run("interrupted", "training.micro_batch_size=auto", processes=1)
    assert (finished_run.plan.batch.micro_batch_size, alone.plan.batch.micro_batch_size) == (2, 8)
    alone.train()
    for step, (loss, _) in alone.losses().items():
        assert loss == pytest.approx(finished_run.losses()[step][0], abs=1e-5)
    assert sorted(alone.losses()) == list(range(11, 21))


@pytest.mark.oldest
def test_pretrained_weights_stream_into_the_shards(finished_run: Any, make_run: Callable[..., Any]) -> None:
    overrides = [f"model.weights={finished_run.layout.export}", "training.max_steps=1", "evaluation.generation=null"]
    continued = make_run("continued", *overrides)
    continued.train()
    before = continued.records(EvaluationRecord)[0]
    assert before.loss == pytest.approx(finished_run.records(EvaluationRecord)[-1].loss, abs=1e-6)


def test_weights_of_another_shape_are_rejected_before_training(finished_run: Any, make_run: Callable[..., Any]) -> None:
    wrong = make_run(
        "wrong-shape", f"model.weights={finished_run.layout.export}", "model.architecture.num_hidden_layers=3"
    )
    wrong.train(expect=9)
    error = wrong.first_error()
    assert "num_hidden_layers: 3 " in error.message
    assert error.exit_code == 9
    assert not wrong.losses()


def test_a_stop_request_writes_a_checkpoint_from_which_the_run_resumes(
    finished_run: Any, make_run: Callable[..., Any]
) -> None:
    stopped = make_run("stopped")
    stopped.layout.root.mkdir(parents=True)
    stopped.layout.stop_request.touch()
    stopped.train()
    (end,) = stopped.records(EndRecord)
    assert (end.outcome, end.step) == ("stopped", 1)
    assert not stopped.layout.export.exists()
    stopped.layout.stop_request.unlink()
    stopped.train()
    assert stopped.losses() == finished_run.losses()


@pytest.mark.parametrize("device", ["at once", "behind"])
def test_a_run_killed_in_a_step_has_recorded_the_previous_step(device: str, make_run: Callable[..., Any]) -> None:
    run = make_run(f"killed {device}", "evaluation.generation=null", processes=1)
    run.train(str(KILLED), "11", device, expect=-signal.SIGKILL)
    assert sorted(run.losses()) == list(range(1, 11))
    events = [type(record) for record in read_records(run.layout.metrics)]
    assert events[-2:] == [StepRecord, CheckpointRecord]


def test_a_run_that_fails_in_a_step_has_recorded_the_previous_step(make_run: Callable[..., Any]) -> None:
    run = make_run("failed behind", "evaluation.generation=null", processes=1)
    run.train(str(KILLED), "6", "behind", "by an error", expect=1)
    assert sorted(run.losses()) == list(range(1, 6))


def test_an_operation_in_a_step_that_cannot_repeat_ends_the_run_with_its_name(
    make_run: Callable[..., Any], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("varying", "training.deterministic=true", "training.max_steps=2", processes=1)
    original = trainer.train

    def train(*args: Any, **kwargs: Any) -> Any:
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
        return original(*args, **kwargs)

    monkeypatch.setattr(trainer, "train", train)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # restored afterwards
    try:
        with pytest.raises(TrainingError, match="put_ has no implementation"):
            run.train_here(world)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_non_finite_step_on_one_rank_is_skipped_by_all_and_recorded(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("training.on_nonfinite=skip", "training.max_steps=8", "evaluation.generation=null")
    run = make_run("not-finite-20260102T030405Z-ab12", *options)
    run.train(str(KILLED), "6", "behind", "nan")
    assert [step for step, (_, norm) in run.losses().items() if not math.isfinite(norm)] == [6]
    assert sorted(run.losses()) == list(range(1, 9))
    (anomaly,) = run.records(AnomalyRecord)
    store = PreparedData(run.plan.data.root).read_train()
    assert (anomaly.step, anomaly.kind) == (6, "nonfinite")
    monkeypatch.setenv("FTKIT_WORKSPACE", str(run.layout.root.parents[1]))
    assert main(["data", "show", "--packs", f"{anomaly.packs[0]},{anomaly.packs[1]}", run.plan.id]) == 0
    shown = capsys.readouterr().out
    documents = (store.read(anomaly.packs[:1])[0, 2] == 0).sum()
    assert shown.count(f"pack {anomaly.packs[0]}, document ") in {documents, documents - 1}  # one may be padding
    assert "⟦SELECT" in shown
    assert main(["data", "show", "--packs", str(len(store)), run.plan.id]) == 8
    assert anomaly.packs == tuple(pack_at(index, len(store), run.plan.recipe.training.seed) for index in range(40, 48))


def test_accumulation_and_activation_checkpointing_change_only_memory(
    finished_run: Any, make_run: Callable[..., Any]
) -> None:
    frugal = make_run(
        "frugal",
        "training.micro_batch_size=1",
        "training.activation_checkpointing=full",
        "evaluation.generation=null",
    )
    frugal.train()
    assert [value for key, value in frugal.records(VerificationRecord)[0].checks.items() if "'full'" in key] == [2]
    for step, (loss, _) in frugal.losses().items():
        assert loss == pytest.approx(finished_run.losses()[step][0], abs=2e-5)


def test_epochs_end_with_the_last_pack(make_run: Callable[..., Any]) -> None:
    run = make_run("epochs", "training.max_steps=null", "training.num_epochs=2", "evaluation.generation=null")
    run.train()
    num_packs = len(PreparedData(run.plan.data.root).read_train())
    assert len(run.losses()) == -(-2 * num_packs // 8)


def test_a_run_with_more_epochs_continues_after_the_shorter_last_batch_of_the_former_last_epoch(
    make_run: Callable[..., Any], world: World
) -> None:
    words = ("training.max_steps=null", "training.schedule=constant", "evaluation.generation=null")
    run = make_run("longer", *words, "training.num_epochs=1", "training.global_batch_size=16", processes=1)
    manifest = PreparedData(run.plan.data.root).read_manifest()
    num_packs = manifest.num_train_packs
    assert num_packs % 16, "the last batch of the first epoch is shorter"
    assert manifest.fill_ratio < 1, "packs have padding"
    run.train_here(world)
    last = run.records(StepRecord)[-1]
    assert (last.tokens, last.targets) == (manifest.num_train_tokens, manifest.num_train_targets)
    training = run.plan.recipe.training.model_copy(update={"num_epochs": 2})
    longer = replace(run, plan=replace(run.plan, recipe=run.plan.recipe.model_copy(update={"training": training})))
    longer.train_here(world)
    last, num_steps = longer.records(StepRecord)[-1], 2 * -(-num_packs // 16)
    assert (last.step, last.num_steps, last.epoch) == (num_steps, num_steps, 2.0)
    assert (last.tokens, last.targets) == (2 * manifest.num_train_tokens, 2 * manifest.num_train_targets)


@pytest.mark.parametrize("num_packs", [10, 12], ids=["shorter last batch", "full batches"])
def test_steps_after_a_checkpoint_take_the_packs_after_its_own(num_packs: int) -> None:
    plan = BatchPlan(micro_batch_size=4, accumulation_steps=1, global_batch_size=4)
    state, store, end = TrainState(3, "data", num_packs=num_packs), cast("PackStore", range(10)), 30
    schedule = BatchSchedule(store=store, plan=plan, seed=1, num_packs_in_run=end, rank=0, size=1, state=state)
    num_steps = schedule.count_steps()
    assert num_steps == 8
    packs = [pack for step in range(3, num_steps) for pack in schedule.packs_of_step(step)]
    assert packs == [pack_at(index, 10, 1) for index in range(num_packs, end)]
    assert (schedule.epoch_of_step(num_steps), schedule.packs_of_step(num_steps)) == (3.0, [])


def test_a_run_that_is_shortened_below_its_checkpoint_is_refused(finished_run: Any) -> None:
    shortened = finished_run.copy_to("shortened")
    training = shortened.plan.recipe.training.model_copy(update={"max_steps": 15})
    shortened.plan = replace(shortened.plan, recipe=shortened.plan.recipe.model_copy(update={"training": training}))
    shortened.train(expect=9)
    error = shortened.first_error()
    assert "step 20" in error.message
    assert "step 15" in error.message
