"""Objective kto: equal to the paper's formula on one row a completion, packed or not, on any ranks, resumed or not."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
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

from ftkit.data.packing import mismatch_completions
from ftkit.runs.records import EvaluationRecord, StepRecord, VerificationRecord
from ftkit.train.causal_lm import SourceLosses
from ftkit.train.components.batches import to_micro_batch, with_completions
from ftkit.train.components.evaluate import mean_metrics
from ftkit.train.components.references import reference_point
from ftkit.train.distributed.verification import verify_pairs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from preference_samples import Completion

    from ftkit.train.causal_lm import MicroBatch
    from ftkit.train.world import World

OPTIONS = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8}
NAMES = (
    "accuracy", "margin", "reward_chosen", "reward_rejected", "log_prob_chosen", "log_prob_rejected", "length_chosen",
    "length_rejected", "kl_per_token", "kl", "desirable",
)  # fmt: skip


def draw_packs(seed: int) -> list[list[Completion]]:
    """Return the completions of two packs, of uneven lengths."""
    rng = np.random.default_rng(seed)
    sizes = [[(5, 4), (9, 1), (3, 7)], [(2, 11), (6, 3), (4, 8), (1, 1)]]
    return [
        [(rng.integers(0, 61, one).tolist(), rng.integers(0, 61, two).tolist(), bool(place % 2))
         for place, (one, two) in enumerate(pack)]
        for pack in sizes
    ]  # fmt: skip


def batch_of(read: np.ndarray[Any, Any], world: World, reference: torch.Tensor | None) -> MicroBatch:
    stored = None if reference is None else reference.float().numpy()
    return with_completions(to_micro_batch(read, world.device), read, 1, stored)


# --- The paper, on one padded row for each completion, in float64 ------------------------------------


def plain_reference_point(policy: Any, base: Any, packs: list[list[Completion]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the reference point, and the base's log-probabilities of mismatched completions.

    A prompt is followed by the completion of the next one in its micro-batch, which is a pack here.
    """
    rows = [(pack[place][0], pack[(place + 1) % len(pack)][1]) for pack in packs for place in range(len(pack))]
    with torch.no_grad():
        of_policy, of_base = log_probs_of(policy, rows)[0], log_probs_of(base, rows)[0]
    return (of_policy - of_base).mean().clamp(min=0), of_base


def plain_loss(log_ratios: torch.Tensor, point: torch.Tensor, is_desirable: torch.Tensor) -> torch.Tensor:
    """Return the mean of `λ_y - v(x, y)` (equations 7 and 8)."""
    beta = OPTIONS["beta"]
    gain = OPTIONS["desirable_weight"] * torch.sigmoid(beta * (log_ratios - point))
    loss = OPTIONS["undesirable_weight"] * torch.sigmoid(beta * (point - log_ratios))
    weights = torch.where(is_desirable, OPTIONS["desirable_weight"], OPTIONS["undesirable_weight"])
    return (weights - torch.where(is_desirable, gain, loss)).mean()


@pytest.mark.parametrize(("method", "seed"), [("full", 10), ("lora", 10), ("lora", 3)])
def test_loss_and_gradient_are_those_of_the_paper_on_unpacked_rows(method: str, seed: int, world: World) -> None:
    packs = draw_packs(seed)
    rows = [row for pack in packs for row in pack]
    is_desirable = torch.tensor([not is_rejected for *_, is_rejected in rows])
    engine, base = engine_of("kto", OPTIONS, method, world)
    change_adapters(engine)
    if method == "full":
        change_weights(engine)
    exact = deepcopy(engine.model.hf_model).double()
    policy, lengths = log_probs_of(exact, [(prompt, completion) for prompt, completion, _ in rows])
    with torch.no_grad():
        reference, _ = log_probs_of(base, [(prompt, completion) for prompt, completion, _ in rows])
    point, mismatched = plain_reference_point(exact, base, packs)
    assert (float(point) > 0.05) == (seed == 10)  # with the other, it is 0: a negative estimate
    expected = plain_loss(policy - reference, point, is_desirable)
    expected.backward()
    gradients = {name: each.grad for name, each in exact.named_parameters() if each.grad is not None}

    sizes, is_stored = [len(pack) for pack in packs], method == "full"
    batches, others = (
        [
            batch_of(change(pack_completions([pack])), world, each if is_stored else None)
            for pack, each in zip(packs, stored.split(sizes), strict=True)
        ]
        for change, stored in ((lambda read: read, reference), (mismatch_completions, mismatched))
    )
    with pytest.raises(TypeError, match="no reference point"):
        engine.forward(batches[0])
    with engine.inference() as model:
        bits = reference_point(model, others)
    assert float(bits.view(torch.float32)) == pytest.approx(float(point), rel=1e-5)
    sums, losses = SourceLosses(0, world.device, len(NAMES)), []
    for number, batch in enumerate(batches, start=1):  # two micro-batches
        loss = engine.forward(replace(batch, kl_bits=bits), sums)
        engine.backward(loss, len(rows), is_last=number == len(batches))
        losses.append(float(loss.detach()))
    assert sum(losses) / len(rows) == pytest.approx(float(expected.detach()), rel=1e-5)
    check_gradients(engine, gradients)

    ratios = policy.detach() - reference
    means = {"kl": float(point), "desirable": float(is_desirable.double().mean())}
    means["kl_per_token"] = float(ratios[is_desirable].sum() / lengths[is_desirable].sum())
    means["accuracy"] = float(((ratios > point) == is_desirable).double().mean())
    for side, mask in (("chosen", is_desirable), ("rejected", ~is_desirable)):
        means[f"reward_{side}"] = OPTIONS["beta"] * float(ratios[mask].mean())
        means[f"log_prob_{side}"] = float(policy.detach()[mask].mean())
        means[f"length_{side}"] = float(lengths[mask].mean())
    means["margin"] = means["reward_chosen"] - means["reward_rejected"]
    assert mean_metrics(NAMES, sums.metrics.tolist(), len(rows)) == pytest.approx(means, abs=1e-4)


def test_a_step_of_one_kind_has_no_metrics_of_the_other(world: World) -> None:
    """The completions of a rank, or of a step, may all be desirable."""
    read = pack_completions([[(prompt, completion, False) for prompt, completion, _ in pack] for pack in draw_packs(3)])
    engine, _ = engine_of("kto", OPTIONS, "lora", world)
    change_adapters(engine)
    batch = replace(batch_of(read, world, None), kl_bits=torch.zeros((), dtype=torch.int32))
    sums = SourceLosses(0, world.device, len(NAMES))
    assert torch.isfinite(engine.forward(batch, sums))
    means = mean_metrics(NAMES, sums.metrics.tolist(), 7)
    assert means.keys() == {name for name in NAMES if not name.endswith("rejected")} - {"margin"}
    assert all(np.isfinite(list(means.values())))
    nothing = SourceLosses(0, world.device, len(NAMES))
    read[:, 1], read[:, 2] = -100, np.arange(64)
    batch = replace(batch_of(read, world, None), kl_bits=torch.zeros((), dtype=torch.int32))
    loss = engine.forward(batch, nothing)
    engine.backward(loss, 1, is_last=True)
    assert (float(loss.detach()), float(engine.step(0.1, 1.0)), float(nothing.metrics.abs().sum())) == (0, 0, 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_completions_are_checked_before_the_first_step(precision: str, world: World) -> None:
    """While the model is its reference, the loss is half the mean weight; a step along the gradient lowers it."""
    engine, _ = engine_of("kto", OPTIONS, "lora", world, precision)
    batch = batch_of(pack_completions(draw_packs(3)), world, None)
    checks = verify_pairs(engine, batch, precision)
    assert float(checks["first loss of pairs"]) == pytest.approx((4 * 1.2 + 3 * 0.8) / 14, rel=2e-2)
    assert float(checks["margin of pairs"]) > 0


# --- Runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def labels_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("labels") / "labels.jsonl"
    rng = np.random.default_rng(0)
    rows = []
    for one, other in rng.integers(0, 100, (150, 2)).tolist():
        is_right = bool(one % 4)
        answer = f"It is {one + other}." if is_right else "I do not know."
        rows.append({"prompt": f"What is {one} plus {other}?", "completion": answer, "label": is_right})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def train_on_labels(finished_run: Any, make_run: Callable[..., Any], labels_file: Path) -> Callable[..., Any]:
    def train(name: str, *overrides: str, processes: int) -> Any:
        run = make_run(
            name, f"model.weights={finished_run.layout.export}", f"data.source={labels_file}", "data.format=auto",
            "data.validation={count: 20}", "evaluation.generation=null", "training.precision=fp32",
            "training.objective=kto", "training.learning_rate=1e-3", "training.max_steps=6", *overrides,
            processes=processes,
        )  # fmt: skip
        run.train()
        return run

    return train


@pytest.mark.oldest
@pytest.mark.parametrize("method", ["lora", "full"])
def test_processes_and_packing_change_nothing_and_resumed_steps_are_equal_bit_for_bit(
    train_on_labels: Callable[..., Any], method: str
) -> None:
    settings = (f"training.method={method}", "training.checkpoint_every_steps=3")
    one, two = (
        train_on_labels(f"kto-{method}-{size}", *settings, f"training.micro_batch_size={3 - size}", processes=size)
        for size in (1, 2)
    )
    others = [two]
    if method == "lora":  # a stored reference is that of packs
        others.append(train_on_labels("kto-rows", *settings, "data.packing=off", processes=1))
    losses, last = one.losses(), one.records(StepRecord)[-1].scores
    for other in others:
        found = other.losses()
        assert len(found) == len(losses) == 6
        for step, (loss, norm) in losses.items():
            assert found[step] == pytest.approx((loss, norm), rel=2e-5 * step)
        assert last == pytest.approx(other.records(StepRecord)[-1].scores, rel=1e-3, abs=1e-5)
    assert tuple(sorted(last)) == tuple(sorted(NAMES))
    assert last["kl"] > 0
    assert losses[1][0] == pytest.approx(0.5, rel=1e-5)
    (proof,), (before, after) = one.records(VerificationRecord), one.records(EvaluationRecord)
    assert float(proof.checks["first loss of pairs"]) == pytest.approx(0.5, rel=1e-5)
    assert before.scores["kl"] == pytest.approx(0, abs=1e-5)
    assert after.loss < before.loss
    assert after.scores["margin"] > before.scores["margin"]
    resumed = two.copy_to(f"kto-{method}-resumed")
    resumed.forget_after(3)
    resumed.train()
    assert resumed.losses() == {step: two.losses()[step] for step in (4, 5, 6)}


def test_both_sides_of_pairs_are_completions_with_a_label(train_on_labels: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"What is {one}?", "chosen": f"It is {one}.", "rejected": "No."} for one in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = train_on_labels("kto-pairs", f"data.source={path}", "training.method=lora", processes=1)
    last = run.records(StepRecord)[-1].scores
    assert last["length_chosen"] > last["length_rejected"]
    assert 0.3 < last["desirable"] < 0.7
