"""Kernel choice on a GPU for models with special attention or logits."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any

import pytest
import torch
from gpu_models import IDS, LENGTH, VOCABULARY, architecture, training
from preference_samples import batch_of, change_adapters, store_of
from transformers import AutoModelForCausalLM

from ftkit.errors import PrerequisiteError
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.distributed.probe import run_probe
from ftkit.train.distributed.verification import verify_isolation, verify_logits
from ftkit.train.model.attention import choose_kernel, register_kernel
from ftkit.train.model.hf_model import build_empty, make_config
from ftkit.train.model.lora import init_adapters, prepare_method
from ftkit.train.model.pretrained import init_weights

if TYPE_CHECKING:
    from pathlib import Path

    from ftkit.train.world import World

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
        ("granite", {"logits_scaling": 8.0}),
        ("cohere2", {"logit_scale": 0.0625}),
    ],
)
def test_models_with_capped_or_scaled_logits_train_with_isolated_documents(
    family: str, fields: dict[str, float], world: World
) -> None:
    shape = architecture(family, sliding_window=100, full_attention_every=2)
    config = make_config(shape, IDS)
    vars(config).update(fields)
    kernel, reason = choose_kernel(training(), config, world)
    assert kernel == "flex" or family != "gemma2", reason
    model = build_empty(config, register_kernel(kernel))
    engine = Fsdp2Engine(model, training(), world, lambda sharded: init_weights(sharded, shape, 0))
    probe = run_probe(engine, world, VOCABULARY, micro_batch_size=2, sequence_length=LENGTH)
    verify_isolation(probe)
    verify_logits(probe)


def test_short_packs_use_a_kernel_that_isolates_documents(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftkit.train.model.attention._varlen_failure", lambda *_: "tried without it")
    short = training(sequence_length=96)
    config = make_config(architecture("llama"), IDS)
    kernel, reason = choose_kernel(short, config, world)
    assert kernel == "sdpa"
    assert "flex attention needs packs of 128" in reason
    config._attn_implementation = register_kernel(kernel)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(world.device)
    engine = Fsdp2Engine(model, short, world)
    verify_isolation(run_probe(engine, world, VOCABULARY, micro_batch_size=2, sequence_length=96))


def test_an_incomplete_flash4_is_not_selected_and_fails_if_requested(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_flash(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("flash_attn"):
            raise ImportError("libcute is missing")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_flash)
    config = make_config(architecture("llama"), IDS)
    kernel, _ = choose_kernel(training(), config, world)
    assert kernel != "flash4"
    with pytest.raises(PrerequisiteError, match="libcute is missing"):
        choose_kernel(training(attention="flash4"), config, world)


@pytest.mark.parametrize("width", [16, 48, 64])
def test_the_selected_kernel_is_correct_for_each_head_size(width: int, world: World) -> None:
    torch.compiler.reset()  # a run has one head size; several in one process would be compiled as a symbolic shape
    shape = architecture("qwen3", head_dim=width)
    kernel, reason = choose_kernel(training(), make_config(shape, IDS), world)
    model = build_empty(make_config(shape, IDS), register_kernel(kernel))
    engine = Fsdp2Engine(model, training(), world, lambda sharded: init_weights(sharded, shape, 0))
    probe = run_probe(engine, world, VOCABULARY, micro_batch_size=2, sequence_length=LENGTH)
    assert verify_isolation(probe), (kernel, reason)


def test_pairs_that_share_a_prompt_are_computed_as_those_with_two_copies(world: World, tmp_path: Path) -> None:
    shape, found = architecture("llama"), []
    for is_shared in (False, True):
        store = store_of(tmp_path / str(is_shared), 256, is_shared=is_shared)
        settings = training(objective="dpo", method="lora", sequence_length=256)
        config = make_config(shape, IDS)
        kernel, reason = choose_kernel(settings, config, world, shares_prompts=is_shared)
        assert kernel == "flex" or not is_shared, reason
        model = build_empty(config, register_kernel(kernel))
        prepare_method(model, settings, world.device)

        def initialize(sharded: torch.nn.Module) -> None:
            init_weights(sharded, shape, 0)
            init_adapters(sharded, 0)

        engine = Fsdp2Engine(model, settings, world, initialize)
        change_adapters(engine)
        loss = engine.forward(batch_of(store, world))
        engine.backward(loss, 4, is_last=True)
        found.append((float(loss.detach()), float(engine.step(1e-3, 1e9))))
    (loss, norm), shared = found
    assert shared == (pytest.approx(loss, rel=5e-3), pytest.approx(norm, rel=3e-2))
