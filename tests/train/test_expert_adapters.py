"""Adapters of routed experts: exact, trained by every engine, resumed, exported, and loaded again by ftkit and peft."""

from __future__ import annotations

import shutil
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from validation_loss import validation_loss

from ftkit.config.execution import method_counts
from ftkit.config.training import TrainingPlan
from ftkit.errors import PrerequisiteError, TrainingError
from ftkit.evaluate import verify_export
from ftkit.evaluate.export_formats import check_format
from ftkit.launch.trained_model import check_adapter
from ftkit.models.adapters import LoraSpec
from ftkit.runs.records import EvaluationRecord, StartRecord, VerificationRecord
from ftkit.train.memory.activation_checkpointing import apply_activation_checkpointing
from ftkit.train.model.adapted_linear import TokenKeys, token_keys
from ftkit.train.model.expert_adapters import GroupedExperts
from ftkit.train.model.float8 import Fp8Layout
from ftkit.train.model.hf_model import find_decoder_layers
from ftkit.train.model.linears import Nf4Layout, QuantizedLinear
from ftkit.train.model.lora import (
    dequantized_base,
    init_adapters,
    is_adapter,
    load_adapters,
    merge_adapters,
    prepare_method,
)
from ftkit.train.private_apis.transformers import CONVERTS_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.train.world import World

pytestmark = pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="in transformers 4, experts are linear layers")

TARGETS = ("q_proj", "gate_proj", "up_proj", "down_proj")
NAMES = {"qwen3_moe": TARGETS, "mixtral": ("w1", "w2", "w3"), "gpt_oss": ("q_proj", "gate_up_proj", "down_proj")}


SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "rope_scaling": None,
}  # fmt: skip


def build(family: str) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES))


def training(lora: LoraSpec, **more: Any) -> TrainingPlan:
    return TrainingPlan(
        sequence_length=32, global_batch_size=1, max_steps=1, learning_rate=1e-3, lora=lora,
        **({"method": "lora", "precision": "fp32"} | more),
    )  # fmt: skip


def adapted(family: str, world: World, lora: LoraSpec, **more: Any) -> Any:
    model = build(family)
    prepare_method(model, training(lora, **more), world.device)
    init_adapters(model, 0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def gradients(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    TokenKeys.of(model).keys = torch.from_numpy(token_keys(tokens.numpy()))
    logits = model(input_ids=tokens, use_cache=False).logits
    logits.square().mean().backward()
    return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", NAMES)
def test_logits_and_gradients_are_those_of_merged_weights(family: str, world: World) -> None:
    """The gradients of A and B follow from that of the merged weight W + s B A."""
    lora = LoraSpec(rank=3, alpha=7, targets=NAMES[family], use_rslora=True)
    model, plain = adapted(family, world, lora), build(family)
    adapters = {name: each.detach() for name, each in model.named_parameters() if is_adapter(name)}
    base = {name: each.detach() for name, each in plain.named_parameters()}
    turned = {name for name in base if family == "gpt_oss" and base[name].ndim == 3}
    merged = merge_adapters(base, adapters, lora, transposed=turned)
    plain.load_state_dict({**plain.state_dict(), **{name: merged[name] for name in base}})
    tokens = torch.arange(3, 43)[None]
    found, expected = gradients(model, tokens), gradients(plain, tokens)
    torch.testing.assert_close(found["logits"], expected["logits"])
    checked = 0
    for name, down in adapters.items():
        experts, _, matrix = name.rpartition(".lora_A_")
        if not experts:
            continue
        up, gradient = adapters[name.replace("lora_A", "lora_B")], expected[f"{experts}.{matrix}"]
        gradient = (gradient.mT if turned else gradient) * lora.scaling_of(down.shape[1] // lora.rank)
        torch.testing.assert_close(found[name], up.mT @ gradient)
        torch.testing.assert_close(found[name.replace("lora_A", "lora_B")], gradient @ down.mT)
        checked += 1
    assert checked == 4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.class 'torch.autograd.function.Function'. should not:DeprecationWarning")
@pytest.mark.parametrize(("mode", "method"), [("selective", "lora"), ("full", "lora"), ("selective", "qlora")])
def test_compiled_and_recomputed_layers_have_the_same_gradients(mode: Any, method: str, world: World) -> None:
    lora, tokens = LoraSpec(rank=4, targets=TARGETS), torch.arange(3, 43)[None]
    model, eager = (adapted("qwen3_moe", world, lora, method=method) for _ in range(2))
    expected = gradients(eager, tokens)
    apply_activation_checkpointing(find_decoder_layers(model), [mode, mode], compiled=mode == "selective")
    found = gradients(model, tokens)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.class 'torch.autograd.function.Function'. should not:DeprecationWarning")
def test_experts_of_odd_sizes_are_computed_one_by_one_between_compiled_parts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts 36 wide, only gate and up are in 4 bits: both of their sizes are multiples of 8."""
    monkeypatch.setitem(SIZES, "intermediate_size", 36)
    monkeypatch.setitem(SIZES, "num_hidden_layers", 1)
    lora, tokens = LoraSpec(rank=4, targets=("q_proj",)), torch.arange(3, 43)[None]
    model, eager = (adapted("mixtral", world, lora, method="qlora") for _ in range(2))
    for each in (model, eager):
        each.set_experts_implementation("eager")
    assert [[*each.layouts] for each in model.modules() if isinstance(each, GroupedExperts)] == [["gate_up_proj"]]
    expected = gradients(eager, tokens)
    apply_activation_checkpointing(find_decoder_layers(model), ["none"], compiled=True)
    found = gradients(model, tokens)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def difference(found: Any, expected: Any) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def test_frozen_experts_in_fp8_are_those_of_dequantized_weights_but_for_the_rounding_of_tokens(world: World) -> None:
    """Of experts 24 wide, only gate and up are in FP8: down needs multiples of 16."""
    lora, tokens = LoraSpec(rank=4, targets=TARGETS), torch.arange(3, 43)[None]
    plain = adapted("qwen3_moe", world, lora, precision="bf16")
    model = adapted("qwen3_moe", world, lora, precision="bf16", base_precision="fp8")
    weights = dict(plain.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            weights[f"{name}.weight"].data.copy_(module.weight)
        if isinstance(module, GroupedExperts):
            assert module.layouts.keys() == {"gate_up_proj"}
            layout = module.layouts["gate_up_proj"]
            assert module.gate_up_proj.shape == (4, layout.num_stored)
            weights[f"{name}.gate_up_proj"].data.copy_(layout.dequantize(module.gate_up_proj))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = gradients(model, tokens), gradients(plain, tokens)
    assert found.keys() == expected.keys()
    assert difference(found["logits"], expected["logits"]) < 0.2  # some tokens go to other experts


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_frozen_experts_in_4_bits_are_those_of_the_dequantized_base_that_exports_merge_into(
    family: str, world: World
) -> None:
    lora, tokens = LoraSpec(rank=4, targets=NAMES[family]), torch.arange(3, 43)[None]
    plain = adapted(family, world, lora)
    model = adapted(family, world, lora, method="qlora")
    experts = next(module for module in model.modules() if isinstance(module, GroupedExperts))
    assert experts.layouts.keys() == {"gate_up_proj", "down_proj"}
    original = dict(build(family).named_parameters())
    with torch.device("meta"):
        empty = build(family)
    dequantized, own = dequantized_base(original, empty, torch.float32), dict(plain.named_parameters())
    for name, each in own.items():
        if not is_adapter(name):
            stored = name.replace(".base_layer.", ".")
            each.data.copy_(dequantized[stored])
            assert each.ndim < 3 or not each.equal(original[stored])
    found, expected = gradients(model, tokens), gradients(plain, tokens)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_compiled_experts_in_4_bits_are_dequantized_as_one_by_one() -> None:
    layout = Nf4Layout(40, 24, torch.bfloat16)
    weights = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(1))
    stored = layout.quantize(weights)
    assert layout.quantize(weights[:0]).shape == (0, layout.num_stored)
    assert layout.dequantize(stored).equal(torch.stack([layout.dequantize(layout.quantize(each)) for each in weights]))
    assert layout.dequantize(stored.to("meta")).shape == weights.shape
    compiled = torch.compile(layout.dequantize, dynamic=False, fullgraph=True, backend="aot_eager")
    assert compiled(stored).equal(layout.dequantize(stored))


def test_products_of_experts_in_fp8_are_those_of_dequantized_weights() -> None:
    """The second expert has no rows. Tokens, and gradients with the scales of the weights, are rounded to 3 bits."""
    torch.manual_seed(0)
    layout, ends = Fp8Layout(48, 32, torch.bfloat16), torch.tensor([3, 3, 20, 40], dtype=torch.int32)
    expert_of_row = torch.tensor([0] * 3 + [2] * 17 + [3] * 20)
    stored = layout.quantize(torch.randn(4, 48, 32) * torch.rand(4, 48, 1))
    rows = torch.randn(40, 32, dtype=torch.bfloat16, requires_grad=True)
    again = rows.detach().clone().requires_grad_()
    product, upstream = (
        layout.multiply_grouped(rows, stored, expert_of_row, ends),
        torch.randn(40, 48, dtype=torch.bfloat16),
    )
    expected = torch.einsum("si,soi->so", again, layout.dequantize(stored)[expert_of_row])
    product.backward(upstream)
    expected.backward(upstream)
    assert difference(product, expected) < 0.04
    assert difference(rows.grad, again.grad) < 0.04


def test_dropout_of_a_tokens_experts_does_not_depend_on_where_other_tokens_go(world: World) -> None:
    model = adapted("qwen3_moe", world, LoraSpec(rank=4, targets=TARGETS[1:], dropout=0.5)).train()
    outputs = []
    for others in (range(50, 70), range(90, 110)):
        tokens = torch.tensor([[*range(3, 23), *others]])  # causal: the first 20 don't see the others
        TokenKeys.of(model).keys = torch.from_numpy(token_keys(np.arange(40)))
        outputs.append(model(input_ids=tokens, use_cache=False).logits[:, :20])
    torch.testing.assert_close(*outputs)


def test_dropout_of_experts_is_drawn_in_training_alone(world: World) -> None:
    lora, tokens = LoraSpec(rank=4, targets=TARGETS[1:], dropout=0.5), torch.arange(3, 43)[None]
    with_dropout, without = (
        adapted("qwen3_moe", world, each) for each in (lora, lora.model_copy(update={"dropout": 0.0}))
    )
    expected = gradients(without, tokens)["logits"]
    assert not torch.allclose(gradients(with_dropout.train(), tokens)["logits"], expected)
    torch.testing.assert_close(gradients(with_dropout.eval(), tokens)["logits"], expected)


def test_what_experts_do_not_support_is_rejected(world: World) -> None:
    with pytest.raises(TrainingError, match=r"lora\.targets: without up_proj"):
        adapted("qwen3_moe", world, LoraSpec(targets=("q_proj", "gate_proj", "down_proj")))
    with pytest.raises(TrainingError, match=r"lora\.use_dora: gate_up_proj"):
        adapted("qwen3_moe", world, LoraSpec(targets=TARGETS, use_dora=True))


MIXTURE = (
    "model.architecture.family=qwen3_moe",
    "model.architecture.intermediate_size=32",
    "evaluation.generation=null",
)
ON_EXPERTS = (
    "training.method=lora", "training.lora={rank: 2, alpha: 8, targets: [q_proj, gate_proj, up_proj, down_proj]}",
    "training.learning_rate=0.02", "training.max_steps=2", "training.checkpoint_every_steps=1",
    "evaluation.generation=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(make_run: Callable[..., Any], world: World) -> tuple[Any, Any]:
    """A mixture of experts, and adapters on its experts, trained by two processes. Tests copy the second."""
    base = make_run("mixture", *MIXTURE, "training.max_steps=1", processes=1)
    base.train_here(world)
    run = make_run("adapted-experts", f"model.weights={base.layout.export}", *MIXTURE, *ON_EXPERTS)
    run.train()
    return base, run


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
def test_peft_loads_exported_experts_and_ftkit_continues_from_them(
    runs: tuple[Any, Any], make_run: Callable[..., Any], world: World
) -> None:
    base, run = runs
    before, after = (record.loss for record in run.records(EvaluationRecord))
    assert after < before
    plain = AutoModelForCausalLM.from_pretrained(base.layout.export)
    model = PeftModel.from_pretrained(plain, str(run.layout.export)).eval()
    assert validation_loss(model, run) == pytest.approx(after, rel=1e-5)
    assert validation_loss(model.merge_and_unload(), run) == pytest.approx(after, rel=1e-5)
    run.copy_to("experts-20260102T030405Z-ab12")
    continued = make_run("more-experts", "model=run:experts", *ON_EXPERTS, "training.max_steps=1", processes=1)
    check_adapter(continued.plan.recipe)
    continued.train_here(world)
    assert continued.records(EvaluationRecord)[0].loss == pytest.approx(after, rel=1e-5)
    counted = continued.records(VerificationRecord)[0].checks["trainable parameters"]
    assert counted == method_counts(continued.plan.recipe.model.architecture, continued.plan.recipe.training).trained


def test_verification_and_vllm_reject_adapters_of_experts_with_a_reason(
    runs: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = runs
    with pytest.raises(TrainingError, match="vLLM does not find the experts' adapters"):
        check_format("vllm-lora", run.plan, merges=False)
    monkeypatch.setattr(verify_export, "available_bytes", lambda: 2**20)
    with pytest.raises(PrerequisiteError, match="GiB of memory"):
        verify_export.verify_export(run.layout.export, lambda _: None)


def test_adapters_made_by_peft_are_continued(runs: tuple[Any, Any], tmp_path: Path, world: World) -> None:
    """peft targets the experts by the names that they have in files."""
    base, _ = runs
    plain = AutoModelForCausalLM.from_pretrained(base.layout.export)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=[*TARGETS], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = get_peft_model(plain, config).eval()
    made.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(base.layout.export)
    prepare_method(model, training(LoraSpec(rank=4, alpha=8, targets=TARGETS)), world.device)
    load_adapters(model.eval(), tmp_path, None)
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        found, expected = (each(input_ids=tokens, use_cache=False).logits for each in (model, made))
    torch.testing.assert_close(found, expected)


def test_adapters_of_experts_resume_on_another_number_of_processes(
    runs: tuple[Any, Any], make_run: Callable[..., Any], world: World
) -> None:
    base, run = runs
    settings = (f"model.weights={base.layout.export}", *MIXTURE, *ON_EXPERTS)
    resumed = make_run("adapted-experts-alone", *settings, processes=1)
    shutil.copytree(run.layout.checkpoint(1), resumed.layout.checkpoint(1))
    resumed.train_here(world)
    assert [record.resumed_from for record in resumed.records(StartRecord)] == [1]
    assert resumed.losses()[2] == pytest.approx(run.losses()[2], rel=1e-5)
