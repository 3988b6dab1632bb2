"""Objectives on preferences: equal to the papers' formulas on one row a completion, packed or not, on any ranks."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from preference_samples import (
    change_adapters,
    change_weights,
    check_gradients,
    engine_of,
    log_probs_of,
    pack_completions,
)

from ftkit.config.data import DataSpec
from ftkit.data.cases import ModelInput, make_evaluation_set
from ftkit.data.packing import IGNORED
from ftkit.data.prepared_data import PreparedData
from ftkit.data.rows import Row
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.errors import TrainingError
from ftkit.runs.records import EvaluationRecord, StepRecord, VerificationRecord
from ftkit.train.causal_lm import SourceLosses
from ftkit.train.components import references
from ftkit.train.components.batches import to_micro_batch, with_completions
from ftkit.train.distributed.verification import verify_pairs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.data.rows import Columns
    from ftkit.train.causal_lm import MicroBatch
    from ftkit.train.world import World

OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3},
    "ipo": {"beta": 0.2},
    "orpo": {"beta": 0.5},
    "simpo": {"beta": 1.5, "gamma": 0.7},
}
SMOOTHED = {"beta": 0.2, "label_smoothing": 0.1, "loss_weight_sft": 0.4}
BETTER = DataSpec.model_validate(
    {"source": "./pairs.jsonl", "format": {"kind": "preferences", "chosen": "better", "rejected": "worse"}}
)
Pair = tuple[list[int], list[int], list[int]]
"""The tokens of a prompt, of the chosen and of the rejected completion."""


def draw_pairs() -> list[list[Pair]]:
    """Return the pairs of two packs: of uneven lengths, in a vocabulary of 61 tokens."""
    rng = np.random.default_rng(3)
    sizes = [[(5, 4, 7), (9, 1, 3)], [(2, 11, 2), (6, 3, 3), (4, 8, 5)]]
    return [[tuple(rng.integers(0, 61, size).tolist() for size in pair) for pair in pack] for pack in sizes]  # type: ignore[misc]


def pack_pairs(packs: list[list[Pair]]) -> np.ndarray[Any, Any]:
    """Return packs as `PackStore.read` does."""
    return pack_completions(
        [
            [(prompt, side, number == 1) for prompt, *sides in pack for number, side in enumerate(sides)]
            for pack in packs
        ]
    )


def batch_of(packs: list[list[Pair]], world: World, reference: torch.Tensor | None = None) -> MicroBatch:
    read = pack_pairs(packs)
    stored = None if reference is None else reference.flatten().float().numpy()
    return with_completions(to_micro_batch(read, world.device), read, 2, stored)


# --- The papers, on one padded row for each completion, in float64 -----------------------------------


def plain_log_probs(model: Any, pairs: list[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed log-probabilities of completions, [pairs, 2], and their numbers of tokens."""
    sums, lengths = log_probs_of(model, [(prompt, side) for prompt, *sides in pairs for side in sides])
    return sums.view(-1, 2), lengths.view(-1, 2)


def plain_loss(
    objective: str, options: dict[str, Any], policy: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Return the mean loss of pairs, as the papers define it."""
    beta = options["beta"]
    chosen, rejected = policy.unbind(1)
    mean_chosen, mean_rejected = (policy / lengths).unbind(1)
    if objective == "dpo":
        h = (chosen - reference[:, 0]) - (rejected - reference[:, 1])
        smoothing = options.get("label_smoothing", 0.0)
        likely = torch.sigmoid(beta * h)
        losses = -(1 - smoothing) * likely.log() - smoothing * (1 - likely).log()
        return (losses - options.get("loss_weight_sft", 0.0) * mean_chosen).mean()
    if objective == "ipo":
        h = ((policy - reference) / lengths) @ torch.tensor([1.0, -1.0], dtype=policy.dtype)
        return ((h - 1 / (2 * beta)) ** 2).mean()
    if objective == "orpo":
        odds_chosen, odds_rejected = (mean.exp() / (1 - mean.exp()) for mean in (mean_chosen, mean_rejected))
        return (-mean_chosen - beta * torch.sigmoid((odds_chosen / odds_rejected).log()).log()).mean()
    assert objective == "simpo"
    return -torch.sigmoid(beta * mean_chosen - beta * mean_rejected - options["gamma"]).log().mean()


@pytest.mark.parametrize("method", ["full", "lora", "dora"])
@pytest.mark.parametrize(("objective", "options"), [*OBJECTIVES.items(), ("dpo", SMOOTHED)])
def test_loss_and_gradient_are_those_of_the_paper_on_unpacked_rows(
    objective: str, options: dict[str, Any], method: str, world: World
) -> None:
    has_reference = objective in {"dpo", "ipo"}
    packs = draw_pairs()
    pairs = [pair for pack in packs for pair in pack]
    if method == "dora":
        engine, base = engine_of(objective, options, "lora", world, lora={"use_dora": True})
    else:
        engine, base = engine_of(objective, options, method, world)
    change_adapters(engine)
    if method == "full":
        change_weights(engine)
    exact = deepcopy(engine.model.hf_model).double()
    policy, lengths = plain_log_probs(exact, pairs)
    with torch.no_grad():
        reference, _ = plain_log_probs(base, pairs)
    of_packs = torch.split(reference, [len(pack) for pack in packs])
    batches = [
        batch_of([pack], world, stored if has_reference and method == "full" else None)
        for pack, stored in zip(packs, of_packs, strict=True)
    ]
    expected = plain_loss(objective, options, policy, reference, lengths)
    expected.backward()
    gradients = {name: each.grad for name, each in exact.named_parameters() if each.grad is not None}

    num = 9 if has_reference else 8
    sums = SourceLosses(0, world.device, num)
    losses = []
    for number, batch in enumerate(batches, start=1):  # two micro-batches
        loss = engine.forward(batch, sums)
        engine.backward(loss, len(pairs), is_last=number == len(batches))
        losses.append(float(loss.detach()))
    assert sum(losses) / len(pairs) == pytest.approx(float(expected.detach()), rel=1e-5)
    check_gradients(engine, gradients)

    ratios = policy.detach() - reference * has_reference
    rewards = options["beta"] * (ratios if objective == "dpo" else ratios / lengths)
    accuracy, margin, reward_chosen, reward_rejected, *others = (sums.metrics / len(pairs)).tolist()
    assert accuracy == pytest.approx(float((rewards[:, 0] > rewards[:, 1]).double().mean()))
    assert margin == pytest.approx(float((rewards[:, 0] - rewards[:, 1]).mean()), abs=1e-4)
    assert [reward_chosen, reward_rejected] == pytest.approx(rewards.mean(0).tolist(), abs=1e-4)
    expected_others = [*policy.detach().mean(0).tolist(), *lengths.mean(0).tolist()]
    expected_others += [float((policy.detach() - reference)[:, 0].mean())] * has_reference
    assert others == pytest.approx(expected_others, abs=1e-3)
    with engine.inference() as model:
        raised = SourceLosses(0, world.device, num)
        after = sum(float(model(batch=batch, source_losses=raised)) for batch in batches)
    assert after < sum(losses)
    assert float(raised.metrics[1]) > float(sums.metrics[1])


def test_a_rank_without_pairs_takes_part_with_zero_gradients(world: World) -> None:
    engine, _ = engine_of("dpo", OBJECTIVES["dpo"], "lora", world)
    empty = pack_pairs(draw_pairs())
    empty[:, 1], empty[:, 2] = IGNORED, np.arange(64)
    batch = with_completions(to_micro_batch(empty, world.device), empty, 2)
    loss = engine.forward(batch)
    engine.backward(loss, 1, is_last=True)
    assert float(loss.detach()) == 0
    assert float(engine.step(0.1, 1.0)) == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pairs_are_checked_before_the_first_step(precision: str, world: World) -> None:
    """The model equals its reference until adapters change it; a step along the gradient raises the margin."""
    for objective, constant in (("dpo", np.log(2)), ("ipo", 1 / 0.16)):
        engine, _ = engine_of(objective, OBJECTIVES[objective], "lora", world, precision)
        batch = batch_of(draw_pairs(), world)
        checks = verify_pairs(engine, batch, precision)
        assert float(checks["first loss of pairs"]) == pytest.approx(
            constant, rel=1e-5 if precision == "fp32" else 2e-2
        )
        assert float(checks["margin of pairs"]) > 0
        change_adapters(engine, 2.0)
        with pytest.raises(TrainingError, match="not its own reference"):
            verify_pairs(engine, batch, precision)
    engine, _ = engine_of("simpo", OBJECTIVES["simpo"], "full", world, precision)
    assert set(verify_pairs(engine, batch_of(draw_pairs(), world), precision)) == {"margin of pairs"}


# --- Runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rng = np.random.default_rng(0)
    rows = []
    for one, other in rng.integers(0, 100, (120, 2)).tolist():
        wrong = [f"I do not know {one} and {other}.", "No."]
        rows.append({"prompt": f"What is {one} plus {other}?", "chosen": f"It is {one + other}.", "rejected": wrong})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def train_on_pairs(
    finished_run: Any, make_run: Callable[..., Any], pairs_file: Path
) -> Callable[..., dict[int, tuple[float, float]]]:
    def train(name: str, *overrides: str, processes: int, trains: bool = True) -> Any:
        run = make_run(
            name, f"model.weights={finished_run.layout.export}", f"data.source={pairs_file}", "data.format=preferences",
            "data.validation={count: 12}", "evaluation.generation=null", "training.precision=fp32",
            "training.max_steps=6", *overrides, processes=processes,
        )  # fmt: skip
        if trains:
            run.train()
        return run

    return train


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("objective", "method", "engine"),
    [
        ("dpo", "lora", "fsdp2"), ("dpo", "full", "fsdp2"), ("orpo", "full", "fsdp2"),
        ("dpo", "lora", "zero3"), ("dpo", "full", "zero3"),
    ],
)  # fmt: skip
def test_one_and_two_processes_train_the_same_on_pairs(
    train_on_pairs: Callable[..., Any], objective: str, method: str, engine: str
) -> None:
    settings = (f"training.objective={objective}", f"training.method={method}", "training.learning_rate=1e-3")
    one, two = (
        train_on_pairs(
            f"{objective}-{method}-{engine}-{size}", *settings, f"training.micro_batch_size={3 - size}",
            f"training.engine={chosen}", processes=size,
        )
        for size, chosen in ((1, "fsdp2"), (2, engine))
    )  # fmt: skip
    losses, others = one.losses(), two.losses()
    assert len(losses) == 6
    for step, (loss, norm) in losses.items():
        assert others[step] == pytest.approx((loss, norm), rel=2e-5 * step)
    (proof,), (before, after) = one.records(VerificationRecord), one.records(EvaluationRecord)
    last = one.records(StepRecord)[-1].scores
    assert last == pytest.approx(two.records(StepRecord)[-1].scores, rel=1e-3)
    assert after.scores["margin"] > before.scores["margin"]
    assert after.loss < before.loss
    if objective == "dpo":
        assert losses[1][0] == pytest.approx(np.log(2), rel=1e-5)
        assert float(proof.checks["first loss of pairs"]) == pytest.approx(np.log(2), rel=1e-5)
        assert before.scores["reward_chosen"] == pytest.approx(0, abs=1e-5)


def test_a_stored_reference_is_computed_once_continued_and_compared(train_on_pairs: Callable[..., Any]) -> None:
    settings = ("training.objective=ipo", "training.method=full", "training.micro_batch_size=2")
    first = train_on_pairs("stored", *settings, processes=1)
    (folder,) = (first.plan.data.root / "references").iterdir()
    path = folder / "train.f32"
    stored, began = np.fromfile(path, "<f4"), path.stat().st_mtime_ns
    train_on_pairs("reused", *settings, "training.ipo={beta: 0.5}", processes=2)
    assert path.stat().st_mtime_ns == began
    path.unlink()
    (stored[:31] + 1).tofile(folder / "train.continued.part")  # what a killed computation wrote is kept
    with pytest.raises(AssertionError, match="is not this model"):
        train_on_pairs("continued", *settings, processes=1)
    continued = np.fromfile(path, "<f4")
    num_kept = int((continued > stored + 0.5).sum())
    assert 0 < num_kept <= 31
    assert continued[num_kept:] == pytest.approx(stored[num_kept:], rel=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_reference_that_is_no_number_is_named_by_its_document(
    value: float, train_on_pairs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    settings = ("training.objective=dpo", "training.method=full", "training.precision=bf16")  # a reference of its own
    compute = references._log_probs

    def compute_damaged(*arguments: Any) -> Any:
        found = compute(*arguments)
        found[first_of_pack_1 + 2] = value
        return found

    run = train_on_pairs(f"damaged-reference-{value}", *settings, processes=1, trains=False)
    first_of_pack_1 = len(PreparedData(run.plan.data.root).read_train().document_lengths([0]))
    folder = run.plan.data.root / "references"
    known = {*folder.glob("*/*")}
    monkeypatch.setattr(references, "_log_probs", compute_damaged)
    with pytest.raises(TrainingError, match=r"the reference computes .* document 3 of pack 1 of the split 'train'"):
        run.train_here(world)
    assert {*folder.glob("*/*")} == known


def test_a_batch_without_its_stored_reference_is_refused(world: World) -> None:
    engine, _ = engine_of("dpo", OBJECTIVES["dpo"], "full", world)
    with pytest.raises(TypeError, match="no log-probabilities of the reference"):
        engine.forward(batch_of(draw_pairs(), world))


@pytest.mark.parametrize(
    ("columns", "data"),
    [
        ({"prompt": "which?", "chosen": "this", "rejected": "not that"}, None),
        ({"prompt": "which?", "better": "this", "worse": "not that"}, BETTER),
    ],
)
def test_an_evaluation_of_pairs_measures_the_chosen_completions(columns: Columns, data: DataSpec | None) -> None:
    tokenizer = learn_tokenizer(["which is better? this one, not that one"], 300, "chatml")
    model = ModelInput(tokenizer, "a model", len(tokenizer), None)
    row = Row(columns, "pairs.jsonl:1")
    found = make_evaluation_set(model, [("", row)], data, lambda _: None)
    ((_, document),) = found.documents
    trained = document.labels[document.labels != IGNORED].tolist()
    assert tokenizer.decode(trained, skip_special_tokens=True).strip() == "this"
    (case,) = found.cases
    assert tokenizer.decode(case.reference or [], skip_special_tokens=True).strip() == "this"


def test_an_evaluation_skips_turns_without_a_completion_among_rows_that_have_one() -> None:
    tokenizer, skipped = learn_tokenizer(["which is better? this one"], 300, "chatml"), list[str]()
    turns = [{"role": "user", "content": "which?"}, {"role": "assistant", "content": "this"}]
    rows = [("", Row({"messages": turns[:number]}, f"chats.jsonl:{number}")) for number in (1, 2)]
    model = ModelInput(tokenizer, "a model", len(tokenizer), None)
    (case,) = make_evaluation_set(model, rows, None, skipped.append).cases
    assert case.reference is not None
    assert "chats.jsonl:1: nothing to train on" in " ".join(skipped)
    (prompt,) = make_evaluation_set(model, rows[:1], None, skipped.append).cases
    assert (prompt.prompt, prompt.reference) == (case.prompt, None)


def test_an_evaluation_answers_the_prompt_of_a_pair_of_equal_sides_that_training_drops() -> None:
    tokenizer = learn_tokenizer(["which is better? this one, not that one"], 300, "chatml")
    data, skipped = BETTER.model_copy(update={"contradictions": "drop"}), list[str]()
    pairs = [{"prompt": "which?", "better": "this", "worse": each} for each in ("this", "not that")]
    rows = [("", Row(pair, f"pairs.jsonl:{number}")) for number, pair in enumerate(pairs, start=1)]
    found = make_evaluation_set(ModelInput(tokenizer, "a model", len(tokenizer), None), rows, data, skipped.append)
    assert [case.number for case in found.cases] == [0, 1]
    assert [number for number, _ in found.documents] == [1]
    assert skipped == []
