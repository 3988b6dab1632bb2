"""Both sides of a pair attend to one copy of their prompt: losses and gradients are those of packs with two copies."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from preference_samples import batch_of, change_adapters, draw_pairs, engine_of, store_of
from torch.nn.attention.flex_attention import create_mask
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ftkit.config.objectives import DpoSpec
from ftkit.config.training import TrainingPlan
from ftkit.data.packing import REJECTED, document_begins, share_prompts, visible_until
from ftkit.data.prepared_data import PackStore, PreparedData
from ftkit.errors import TrainingError
from ftkit.runs.records import EvaluationRecord
from ftkit.train.causal_lm import CausalLM, SourceLosses
from ftkit.train.distributed.probe import run_probe
from ftkit.train.distributed.verification import verify_causality, verify_isolation
from ftkit.train.model import attention
from ftkit.train.model.attention import choose_kernel
from ftkit.train.objectives import Preferences

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.train.world import World


@pytest.fixture
def stores(tmp_path: Path) -> tuple[PackStore, PackStore]:
    """Packs with two copies of each prompt, and with one."""
    return store_of(tmp_path / "whole", 128, is_shared=False), store_of(tmp_path / "shared", 96, is_shared=True)


def test_a_rejected_side_is_stored_from_the_last_token_of_the_prompt_on(stores: tuple[PackStore, PackStore]) -> None:
    whole, shared = stores
    assert (whole.shares_prompts, shared.shares_prompts) == (False, True)
    assert shared.num_targets.tolist() == whole.num_targets.tolist()
    assert shared.document_starts([0, 1]).tolist() == [0, 8, 0, 11, 0, 0, 0, 19]
    saved = whole.document_lengths([0, 1]) - shared.document_lengths([0, 1])
    assert saved.tolist() == shared.document_starts([0, 1]).tolist()
    tokens, labels, positions, sources = shared.read([0])[0]
    before = whole.read([0])[0]
    assert tokens[13:21].tolist() == before[0, 21:29].tolist()
    assert labels[13:21].tolist() == before[1, 21:29].tolist()
    assert positions[13:21].tolist() == [*range(8, 16)]
    assert np.flatnonzero(document_begins(positions)).tolist() == [0, 13, 21, 34, 38]
    assert (sources[13:21] == REJECTED).all()


def test_a_token_is_visible_to_the_end_of_the_documents_that_begin_with_it() -> None:
    positions = np.array([[0, 1, 2, 3, 2, 3, 0, 1, 0, 1]], np.int32)  # a pair with a prompt of 3, another, padding
    assert visible_until(positions).tolist() == [[6, 6, 4, 4, 6, 6, 8, 8, 10, 10]]


def test_no_prompt_is_shared_beyond_a_trained_or_another_token() -> None:
    chosen, rejected = draw_pairs()[0]
    chosen.tokens[3], rejected.tokens[3] = 1, 2
    assert share_prompts([chosen, rejected])[1].start == 3
    chosen.labels[1] = 5
    assert share_prompts([chosen, rejected])[1].start == 1


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_loss_gradient_and_metrics_are_those_of_packs_with_two_copies(
    method: str, checkpointing: str, stores: tuple[PackStore, PackStore], world: World
) -> None:
    reference = np.random.default_rng(0).uniform(-40, -20, (8,)).astype(np.float32) if method == "full" else None
    found = []
    for store in stores:
        engine, _ = engine_of("dpo", {"beta": 0.3}, method, world, activation_checkpointing=checkpointing)
        change_adapters(engine)
        sums = SourceLosses(0, world.device, 9)
        loss = engine.forward(batch_of(store, world, reference), sums)
        engine.backward(loss, 4, is_last=True)
        gradients = {name: each.grad for name, each in engine.model.hf_model.named_parameters() if each.requires_grad}
        found.append((loss.detach(), sums.metrics, gradients, engine.step(1e-3, 1e9)))
    (loss, metrics, gradients, norm), (own_loss, own_metrics, own_gradients, own_norm) = found
    torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(own_metrics, metrics, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own_gradients, gradients, rtol=1e-4, atol=1e-6 * float(norm))
    torch.testing.assert_close(own_norm, norm, rtol=1e-5, atol=0)


def test_in_float64_they_are_equal_to_rounding(stores: tuple[PackStore, PackStore], world: World) -> None:
    _, base = engine_of("dpo", {}, "full", world)
    for name, module in list(base.named_modules()):
        if isinstance(module, LlamaRMSNorm):  # computes in fp32
            base.set_submodule(name, torch.nn.RMSNorm(32, dtype=torch.float64))
    found = []
    for store in stores:
        model = CausalLM(deepcopy(base), objective=Preferences(DpoSpec(), has_reference=False))
        states = model(compute=CausalLM.label_states, batch=batch_of(store, world))
        (states * torch.randn(states.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
        trained = [each.grad for each in model.parameters() if each.grad is not None]
        found.append([states.detach(), *trained])
    for own, whole in zip(*found, strict=True):
        assert own.dtype == torch.float64
        torch.testing.assert_close(own, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["packs", "pairs"])
def test_the_isolation_check_covers_shared_prompts(layout: Any, world: World) -> None:
    engine, _ = engine_of("dpo", {}, "lora", world)
    probe = run_probe(engine, world, 61, micro_batch_size=2, sequence_length=64, layout=layout)
    verify_causality(probe)
    verify_isolation(probe)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda until: torch.full_like(until, until.shape[1]), "attend to each other"),  # causal alone
        (lambda until: torch.minimum(until, torch.cummin(until.flip(1), 1).values.flip(1)), "attend to each other"),
    ],
    ids=["neighbors are visible", "a prompt is visible to the chosen side alone"],
)
def test_a_wrong_mask_fails_the_isolation_check(
    change: Callable[[torch.Tensor], torch.Tensor], message: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention._shared_mask
    monkeypatch.setattr(attention, "_shared_mask", lambda until, kernel: right(change(until), kernel))
    engine, _ = engine_of("dpo", {}, "lora", world)
    probe = run_probe(engine, world, 61, micro_batch_size=2, sequence_length=64, layout="pairs")
    with pytest.raises(TrainingError, match=message):
        verify_isolation(probe)


def test_the_block_mask_of_flex_attention_is_that_of_sdpa() -> None:
    until = torch.tensor(visible_until(np.array([[*range(150), *range(90, 130), *range(66)]], np.int32)))
    dense = attention._shared_mask(until, "sdpa")
    blocks = attention._shared_mask(until, "flex_attention")
    assert torch.equal(create_mask(blocks.mask_mod, 1, None, 256, 256, "cpu"), dense)
    is_empty = ~dense[0, 0].unflatten(1, (2, 128)).unflatten(0, (2, 128)).any((1, 3))
    assert torch.equal(blocks.to_dense()[0, 0] == 0, is_empty)


@pytest.mark.parametrize(
    ("kernel", "changes", "message"),
    [
        ("eager", {}, "attention 'eager' does not take their mask"),
        ("auto", {"sliding_window": 32}, "has layers of type sliding_attention"),
        ("auto", {"layer_types": ["full_attention", "linear_attention"]}, "has layers of type linear_attention"),
    ],
)
def test_what_can_not_share_prompts_is_refused_by_name(
    kernel: str, changes: dict[str, Any], message: str, world: World
) -> None:
    training = TrainingPlan.model_validate({"attention": kernel, "max_steps": 1})
    config = LlamaConfig(num_hidden_layers=2)
    assert choose_kernel(training, config, world)[0] in {"sdpa", "eager"}
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(TrainingError, match=message):
        choose_kernel(training, config, world, shares_prompts=True)


# --- Runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for numbers in rng.integers(0, 100, (64, 6)).tolist():
            prompt = f"What is the sum of {', '.join(map(str, numbers))}?"
            row = {"prompt": prompt, "chosen": f"It is {sum(numbers)}.", "rejected": ["No.", f"{sum(numbers) + 1}"]}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.mark.parametrize(("objective", "method"), [("dpo", "lora"), ("ipo", "full")])
def test_runs_with_and_without_shared_prompts_and_on_two_processes_train_the_same(
    objective: str, method: str, make_run: Callable[..., Any], long_prompts: Path
) -> None:
    """A pack holds other pairs if prompts are shared, so a step has all of them."""
    runs = []
    for share, size in ((False, 1), (None, 1), (None, 2)):
        run = make_run(
            f"share-{objective}-{share}-{size}", "data.format=preferences",
            f"data.source={long_prompts}", "data.validation={count: 8}", "evaluation.generation=null",
            "training.precision=fp32", "training.max_steps=2", f"training.objective={objective}",
            f"training.method={method}", "training.learning_rate=1e-3", "training.sequence_length=256",
            *([] if share is None else [f"data.share_prompts={str(share).lower()}"]), processes=size,
        )  # fmt: skip
        run.train()
        runs.append(run)
    whole, *shared = runs
    (before, _), manifest = whole.records(EvaluationRecord), PreparedData(whole.plan.data.root).read_manifest()
    for run in shared:
        own = PreparedData(run.plan.data.root).read_manifest()
        assert own.num_train_targets == manifest.num_train_targets
        assert own.num_train_tokens + own.num_shared_tokens == manifest.num_train_tokens
        assert own.num_shared_tokens > 0.2 * manifest.num_train_tokens
        (own_before, _) = run.records(EvaluationRecord)
        assert own_before.loss == pytest.approx(before.loss, rel=1e-5)
        assert own_before.scores == pytest.approx(before.scores, rel=1e-4, abs=1e-4)
    one, two = (run.losses() for run in shared)
    for step, values in one.items():
        assert two[step] == pytest.approx(values, rel=2e-5 * step)
