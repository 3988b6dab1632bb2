"""Activation checkpointing: the same gradients with fewer saved tensors."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any, get_args
from uuid import uuid4

import pytest
import torch
import torch._dynamo
import torch.fx
from compiler_warnings import COMPILER_WARNINGS
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ftkit.config.execution import ParameterCounts
from ftkit.config.training import RECOMPUTES_LAYERS, ActivationCheckpointing, Method, TrainingPlan
from ftkit.models.architecture import ArchitectureSpec
from ftkit.models.families import MEASURED, MeasuredFamily, family_of
from ftkit.train.causal_lm import MicroBatch
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.distributed.verification import verify_sharding
from ftkit.train.memory import activation_checkpointing as checkpointing
from ftkit.train.memory import compile as compiling
from ftkit.train.memory.activation_checkpointing import (
    ActivationOffload,
    _addresses,
    activation_checkpointing_of,
    apply_activation_checkpointing,
)
from ftkit.train.model.attention import register_kernel
from ftkit.train.model.hf_model import find_decoder_layers, make_config
from ftkit.train.model.lora import init_adapters, prepare_method
from ftkit.train.model.varlen_attention import varlen_attention
from ftkit.train.private_apis.torch import TRACES_FULL_CHECKPOINTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.train.world import World

LENGTH, LAYERS = 24, 3
SAVING = ("selective", "except_attention", "full")

pytestmark = [*COMPILER_WARNINGS]


class Ids:
    bos_token_id, eos_token_id, pad_token_id = 1, 2, 0


def training(**changes: object) -> TrainingPlan:
    fields = {
        "sequence_length": LENGTH, "global_batch_size": 2, "max_steps": 1, "learning_rate": 1e-3, "precision": "fp32",
    }  # fmt: skip
    return TrainingPlan.model_validate(fields | changes)


def build(family: MeasuredFamily, spec: TrainingPlan) -> Any:
    fields = {
        "family": family, "vocab_size": 320, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "tie_word_embeddings": family == "gemma3_text",
    }  # fmt: skip
    if family in {"gemma3_text", "olmo3"}:
        fields |= {"sliding_window": 6, "full_attention_every": 2}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(make_config(ArchitectureSpec.model_validate(fields), Ids()))  # type: ignore[arg-type]
    model.config.use_cache = False
    prepare_method(model, spec, torch.device("cpu"))
    return model


def micro_batch() -> MicroBatch:
    tokens = torch.randint(0, 320, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).remainder(15).repeat(2, 1)
    borders = torch.cat([torch.nonzero(positions.flatten() == 0)[:, 0], torch.tensor([tokens.numel()])]).int()
    labels, keys = tokens.flatten()[1:], tokens * 2**40 + torch.arange(LENGTH)
    return MicroBatch(tokens, positions, torch.arange(2 * LENGTH - 1), labels, borders, 15, token_keys=keys)


def apply_to_all(layers: torch.nn.ModuleList, mode: ActivationCheckpointing, *, compiled: bool = False) -> None:
    apply_activation_checkpointing(layers, [mode] * len(layers), compiled=compiled)


class Calls(TorchDispatchMode):
    """Counts the calls of an operator."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.name in func.name()
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def every_product_is_wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny models have no inner dimension of 256; adapters of rank 4 stay narrow."""
    for module in (checkpointing, compiling):
        monkeypatch.setattr(module, "WIDE", 8)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Compile without code generation, fail on graph breaks, and count graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr("ftkit.train.memory.compile.inductor", lambda _, **__: counter)
    return counter


@pytest.fixture
def parked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of offloaded tensors, in their order."""
    shapes: list[torch.Size] = []
    park = ActivationOffload._offload
    monkeypatch.setattr(
        ActivationOffload, "_offload", lambda self, one, layer: shapes.append(one.shape) or park(self, one, layer)
    )
    return shapes


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(family: MeasuredFamily, spec: TrainingPlan, world: World) -> dict[str, torch.Tensor]:
    engine = Fsdp2Engine(build(family, spec), spec, world, lambda sharded: init_adapters(sharded, 5))
    torch.manual_seed(11)
    engine.backward(engine.forward(micro_batch()), 2 * LENGTH - 1, is_last=True)
    named = engine.model.hf_model.named_parameters()
    return {name: whole(value.grad) for name, value in named if value.grad is not None}


@pytest.mark.parametrize("mode", SAVING)
@pytest.mark.parametrize("method", get_args(Method))
@pytest.mark.parametrize("family", MEASURED)
def test_gradients_equal_those_without_checkpointing(
    family: MeasuredFamily, method: Method, mode: str, world: World
) -> None:
    spec = training(method=method, lora=None if method == "full" else {"rank": 4, "dropout": 0.2})
    expected = gradients(family, spec, world)
    found = gradients(family, spec.model_copy(update={"activation_checkpointing": mode}), world)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], msg=name)


def test_selective_checkpointing_does_not_repeat_the_matmuls_of_experts() -> None:
    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, vocab_size=64,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    apply_to_all(find_decoder_layers(model), "selective")
    loss = model(torch.arange(16)[None], use_cache=False).logits.float().square().mean()
    with Calls("_grouped_mm") as calls:
        loss.backward()
    assert calls.count == 2 * 2  # for each of two matmuls, the gradients of its factors


@pytest.mark.parametrize("method", ["full", "qlora"])
@pytest.mark.parametrize("family", MEASURED)
def test_gradients_equal_those_without_offload_and_only_layer_inputs_are_offloaded(
    family: MeasuredFamily, method: Method, world: World, parked: list[torch.Size]
) -> None:
    spec = training(method=method, activation_checkpointing="full")
    expected = gradients(family, spec, world)
    found = gradients(family, spec.model_copy(update={"activation_offload": True}), world)
    assert parked == LAYERS * [torch.Size([2, LENGTH, 32])]
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], msg=name)


@pytest.mark.parametrize("compiled", ["none", "layers"])
@pytest.mark.usefixtures("compiles")
def test_gradients_are_the_same_with_some_checkpointed_layers(
    compiled: str, world: World, parked: list[torch.Size]
) -> None:
    expected = gradients("llama", training(), world)
    spec = training(
        activation_checkpointing="full", checkpointed_layers=1, activation_offload=True, offloaded_layers=0,
        compile=compiled,
    )  # fmt: skip
    for name, value in gradients("llama", spec, world).items():
        torch.testing.assert_close(value, expected[name], msg=name)
    assert len(parked) == 1
    stats = Fsdp2Engine(build("llama", spec), spec, world).sharding_stats()
    assert stats.checkpointed_layers == {"full": 1, "selective": LAYERS - 1}
    checks = verify_sharding(stats, spec, ParameterCounts(stats.total_elements, stats.trainable_elements))
    assert checks["layers with checkpointing 'full'"] == checks["offloaded layers"] == 1
    assert checks["layers with checkpointing 'selective'"] == LAYERS - 1


@pytest.mark.parametrize(
    ("changes", "num_offloaded"),
    [
        ({"activation_checkpointing": "selective"}, LAYERS),
        ({"activation_checkpointing": "selective", "offloaded_layers": 1}, 1),
        ({"activation_checkpointing": "full", "checkpointed_layers": 1, "offloaded_layers": 0}, 0),
    ],
)
def test_outputs_of_matmuls_of_some_compiled_layers_are_offloaded(
    changes: dict[str, Any],
    num_offloaded: int,
    world: World,
    compiles: CompileCounterWithBackend,
    parked: list[torch.Size],
) -> None:
    expected = gradients("llama", training(), world)
    for name, value in gradients(
        "llama", training(activation_offload=True, compile="layers", **changes), world
    ).items():
        torch.testing.assert_close(value, expected[name], msg=name)
    wide = torch.Size([2 * LENGTH, 96])  # gate and up
    assert parked.count(wide) == 2 * num_offloaded
    assert parked.count(torch.Size([2, LENGTH, 32])) >= num_offloaded  # among others, the layer's input
    assert compiles.frame_count == (1 if changes["activation_checkpointing"] == "selective" else 2)


def test_offloaded_activations_are_prefetched_one_layer_ahead() -> None:
    offload = ActivationOffload(torch.device("cpu"))
    layers = [offload._begin_layer() for _ in range(3)]
    parked = [
        [offload._offload(torch.full((2,), float(number)), layer) for _ in range(2)]
        for number, layer in enumerate(layers)
    ]
    assert torch.equal(offload._load(*parked[2][0]), torch.full((2,), 2.0))
    arriving = layers[1].device[1]
    assert not layers[0].device
    assert offload._load(*parked[1][1]) is arriving
    assert [offload._load(*each).tolist() for each in (parked[2][1], parked[0][0])] == [[2.0, 2.0], [0.0, 0.0]]
    assert offload._newest is None


def test_offloaded_activations_are_fetched_in_any_order() -> None:
    offload = ActivationOffload(torch.device("cpu"))
    parked = [offload._offload(torch.full((2,), float(number)), offload._begin_layer()) for number in range(4)]
    order = (3, 0, 2, 1)
    assert [offload._load(*parked[number]).tolist() for number in order] == [[float(number)] * 2 for number in order]


def test_what_a_layer_computes_is_offloaded_and_what_it_got_stays() -> None:
    offload = ActivationOffload(torch.device("cpu"))
    hidden, weight = torch.randn(1, 8, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    with offload.offloading(hidden, [weight]):
        product = (hidden * weight).exp()
    layer = offload._newest and offload._newest()
    assert layer is not None
    assert [tuple(host.shape) for host in layer.host] == [(1, 8, 4), (1, 8, 4)]
    product.sum().backward()
    torch.testing.assert_close(weight.grad, (product * hidden).sum(0).detach())


def test_a_graph_that_is_dropped_without_a_backward_pass_leaves_nothing_on_the_device() -> None:
    offload = ActivationOffload(torch.device("cpu"))
    hidden = torch.randn(1, 8, 4, requires_grad=True)
    for _ in range(2):
        with offload.offloading(hidden, []):
            product = hidden.exp()  # the first one's graph ends here in the second round
    product.sum().backward()
    assert not offload._being_copied
    assert offload._newest is None or offload._newest() is None
    assert [len(buffers) for buffers in offload._free.values()] == [2]


def test_the_memory_of_a_sharded_parameter_is_that_of_its_shard(world: World) -> None:
    spec = training(offload="all")  # else one process shards nothing
    parameters = [*Fsdp2Engine(build("llama", spec), spec, world).model.parameters()]
    assert all(isinstance(each, DTensor) for each in parameters)
    for each in parameters:
        assert [*_addresses(each)] == [each.to_local().untyped_storage().data_ptr()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("mode", "products", "attentions", "norms"),
    [("none", 0, 0, 0), ("selective", 0, 0, 1), ("except_attention", 1, 0, 1), ("full", 1, 1, 1)],
)
def test_each_mode_recomputes_only_its_operators(
    mode: ActivationCheckpointing, products: int, attentions: int, norms: int
) -> None:
    model = build("llama", training())
    apply_to_all(find_decoder_layers(model), mode)
    batch = micro_batch()
    hidden = model.base_model(input_ids=batch.input_ids, position_ids=batch.position_ids).last_hidden_state
    with (
        Calls("aten::mm") as products_seen,
        Calls("attention_for_cpu") as attentions_seen,
        Calls("rsqrt") as norms_seen,
    ):
        hidden.sum().backward()
    # The last matmul of a layer is not recomputed: the backward pass does not read it.
    assert products_seen.count == LAYERS * (2 * 7 + 6 * products)
    assert attentions_seen.count == LAYERS * (1 + attentions)
    assert norms_seen.count == LAYERS * 2 * norms


def test_lora_b_products_are_recomputed_without_those_of_4_bit_weights() -> None:
    model = build("llama", training(method="qlora", lora={"rank": 4}))
    init_adapters(model, 5)
    apply_to_all(find_decoder_layers(model), "selective")
    batch = micro_batch()
    hidden = model.base_model(input_ids=batch.input_ids, position_ids=batch.position_ids).last_hidden_state
    with Calls("aten::mm") as products:
        hidden.sum().backward()
    narrow, gradients_of_adapters, gradients_of_inputs = 6, 4 * 7, 7  # the last product is not read
    assert products.count == LAYERS * (narrow + gradients_of_adapters + gradients_of_inputs)


traced = pytest.mark.skipif(not TRACES_FULL_CHECKPOINTS, reason="this torch calls the compiled layer twice")
IN_8_BITS = {"method": "lora", "base_precision": "fp8", "precision": "bf16"}


@traced
@pytest.mark.parametrize(
    ("family", "changes", "products"),
    [
        ("llama", {}, 2 * 7 + 6),
        ("olmo3", {}, 2 * 7 + 7),  # a norm reads the last product
        # Frozen matrices, 7 + 4 adapters backward, 4 + 6 forward.
        ("llama", IN_8_BITS, 7 + 6 + (7 + 7 + 4 + 4) + 4 + 6),
    ],
)
def test_compiled_full_checkpointing_saves_inputs_and_recomputes_what_the_backward_pass_reads(
    family: MeasuredFamily, changes: dict[str, Any], products: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: dict[str, torch.fx.Graph] = {}

    def keep(name: str) -> Any:
        return lambda module, _: graphs.update({name: module.graph}) or make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    monkeypatch.setattr("ftkit.train.memory.compile.inductor", lambda _, **__: backend)
    gradients(family, training(activation_checkpointing="full", compile="layers", **changes), world)
    found = [node for node in graphs["backward"].nodes if node.target is torch.ops.aten.mm.default]
    assert len(found) == products
    (_, *saved), *_ = graphs["forward"].output_node().args
    views = (torch.ops.aten.detach.default,)  # of frozen weights, by torch 2.11
    computed = [node.meta["val"] for node in saved if node.op != "placeholder" and node.target not in views]
    assert not any(value.is_floating_point() for value in computed)  # there may be the state of a random generator


@traced
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_are_added_in_place_only_where_the_backward_pass_recomputes_or_differentiates_them(
    method: Method, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: dict[bool, int] = {}
    add_in_place = compiling._add_in_place

    def count(graph: torch.fx.Graph) -> None:
        add_in_place(graph)
        is_backward = any("tangents" in node.name for node in graph.find_nodes(op="placeholder"))
        added[is_backward] = len(graph.find_nodes(op="call_function", target=torch.ops.ftkit.add_product_.default))

    count.__qualname__ = str(uuid4())  # in the keys of the compiler's caches, which outlive a session
    monkeypatch.setattr(compiling, "_add_in_place", count)
    spec = training(method=method, lora={"rank": 4}, activation_checkpointing="full", compile="layers")
    found = gradients("llama", spec, world)
    assert added == {False: 0, True: 6 + 2}  # all recomputed outputs; gradients of the inputs of `down` and `o`
    expected = gradients("llama", training(method=method, lora={"rank": 4}), world)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class NoisyResidual(torch.nn.Module):
    """Adds its input with dropout, multiplied by the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16, bias=False)
        torch.nn.init.eye_(self.linear.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.linear(torch.nn.functional.dropout(hidden, 0.5))


def test_the_compiler_recomputes_the_same_dropout() -> None:
    layers = torch.nn.ModuleList([NoisyResidual(), NoisyResidual()])
    weights = [layer.linear.weight for layer in layers]
    apply_to_all(layers, "full", compiled=True)
    first = torch.randn(32, 16, requires_grad=True)
    second = layers[0](first)
    third = layers[1](second)
    gradient = torch.randn(32, 16)
    third.backward(gradient)
    dropped = (third - second).detach()
    assert 0 < (dropped == 0).sum() < dropped.numel()
    torch.testing.assert_close(weights[1].grad, gradient.T @ dropped)


class RememberingResidual(NoisyResidual):
    """Has a side effect, as DoRA's layers do, which the compiler doesn't trace in a checkpoint."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_tokens = len(hidden)
        return hidden + self.linear(hidden)


@traced
def test_full_checkpointing_that_the_compiler_cannot_trace_calls_the_compiled_layer_twice(
    compiles: CompileCounterWithBackend, caplog: pytest.LogCaptureFixture
) -> None:
    layers = torch.nn.ModuleList([RememberingResidual(), RememberingResidual()])
    apply_to_all(layers, "full", compiled=True)
    hidden = torch.randn(32, 16, requires_grad=True)
    layers[1](layers[0](hidden)).sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, torch.full_like(hidden, 4.0))
    assert compiles.frame_count == 1
    assert caplog.text.count("can't be compiled with its recomputation") == 1


@pytest.mark.parametrize(
    ("method", "mode", "lora"),
    [
        ("full", "full", None),
        ("full", "except_attention", None),
        ("full", "selective", None),
        ("qlora", "selective", {"rank": 4, "dropout": 0.2, "use_dora": True, "targets": ("q_proj", "down_proj")}),
    ],
)
def test_layers_compile_once_without_graph_breaks(
    method: Method,
    mode: ActivationCheckpointing,
    lora: dict[str, Any] | None,
    world: World,
    compiles: CompileCounterWithBackend,
) -> None:
    spec = training(method=method, lora=lora)
    expected = gradients("llama", spec, world)
    changes = {"activation_checkpointing": mode, "compile": "layers", "activation_offload": mode in RECOMPUTES_LAYERS}
    found = gradients("llama", spec.model_copy(update=changes), world)
    assert compiles.frame_count == 1
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], msg=name)


@pytest.mark.parametrize(
    ("mode", "options", "joined"),
    [("selective", {}, [2, 3]), ("none", {"targets": ("q_proj", "v_proj", "up_proj")}, [2])],
)
def test_compiled_layers_multiply_by_all_adapters_of_an_input_at_once_with_gradients_of_peft(
    mode: ActivationCheckpointing,
    options: dict[str, Any],
    joined: list[int],
    world: World,
    compiles: CompileCounterWithBackend,
) -> None:
    spec = training(method="lora", lora={"rank": 4, "use_rslora": True, **options})
    expected = gradients("gemma3_text", spec, world)
    changes = {"activation_checkpointing": mode, "compile": "layers"}
    found = gradients("gemma3_text", spec.model_copy(update=changes), world)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert compiles.frame_count == 1  # all layers have one graph, the first one too
    bodies = [each for each in compiles.graphs[-1].modules() if isinstance(each, GraphModule)]
    joints = [node for body in bodies for node in body.graph.find_nodes(op="call_function", target=torch.cat)]
    adapters = [[weight for weight in node.all_input_nodes if "lora_a" in weight.name.lower()] for node in joints]
    assert sorted(len(weights) for weights in adapters if weights) == joined


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_compiled_layers_with_adapters_do_not_save_what_element_wise_operations_made(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CompileCounterWithBackend("aot_eager_decomp_partition")  # Inductor's partition, without its code
    monkeypatch.setattr("ftkit.train.memory.compile.inductor", lambda _, **__: backend)
    model = build("llama", training(method=method, lora={"rank": 2}, precision="bf16"))
    init_adapters(model, 5)
    layers = find_decoder_layers(model)
    apply_activation_checkpointing(layers, LAYERS * ["none"], compiled=True)
    hidden = torch.randn(1, LENGTH, 32, requires_grad=True, dtype=torch.bfloat16)
    tables = model.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
    of_tokens: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if LENGTH in tensor.shape and all(tensor is not table for table in tables):
            of_tokens[tensor.untyped_storage().data_ptr()] = tensor.numel() // LENGTH
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        layers[0](hidden, position_embeddings=tables, attention_mask=None).sum().backward()
    savings, around = family_of("llama").savings, 7 * 2 + 2 + 4 + 2  # products by lora_A, norms, log-sum-exp, rows
    saved, recomputed = (
        sum(number * width for number, width in zip(part, (32, 32, 16, 96), strict=True))
        for part in (savings.compiled, savings.recomputed_inputs)
    )
    assert saved - recomputed <= sum(of_tokens.values()) <= saved - recomputed + around


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("mode", get_args(ActivationCheckpointing))
def test_layers_report_what_they_recompute_and_keep_their_parameter_names(
    mode: ActivationCheckpointing, compiled: bool
) -> None:
    model = build("llama", training())
    layers = find_decoder_layers(model)
    names, modules = list(model.state_dict()), [name for name, _ in model.named_modules()]
    apply_to_all(layers, mode, compiled=compiled)
    assert {activation_checkpointing_of(layer) for layer in layers} == {mode}
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == modules
    assert find_decoder_layers(model) is layers
    assert all("forward" not in vars(module) for module in model.modules())


def attention_weights(query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return the attention weights within documents, [H, T, T], for flash-attn-4's options."""
    places = torch.arange(len(query))
    document = torch.bucketize(places, options["cu_seqlens_q"][1:], right=True)
    behind = places[:, None] - places[None]
    seen = (document[:, None] == document[None]) & (behind >= 0)
    if options["window_size_left"] is not None:
        seen &= behind <= options["window_size_left"]
    scores = torch.einsum("qhd,khd->hqk", query, key) * options["softmax_scale"]
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def for_each_head(query: torch.Tensor, *shared: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in shared]


@pytest.fixture
def flash4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace flash-attn-4, which needs a GPU, with a reference implementation."""

    def forward(query: Any, key: Any, value: Any, *, return_lse: bool, **options: Any) -> tuple[Any, ...]:
        assert return_lse
        key, value = for_each_head(query, key, value)
        output = torch.einsum("hqk,khd->qhd", attention_weights(query, key, options), value)
        return output.contiguous(), query.new_zeros(query.shape[1::-1]), None

    def backward(query: Any, key: Any, value: Any, _: Any, gradient: Any, __: Any, **options: Any) -> tuple[Any, ...]:
        keys, values = for_each_head(query, key, value)
        weights = attention_weights(query, keys, options)
        of_weights = torch.einsum("qhd,khd->hqk", gradient, values)
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * options["softmax_scale"]
        of_query = torch.einsum("hqk,khd->qhd", of_scores, keys)
        of_keys, of_values = (
            torch.einsum("hqk,qhd->khd", of_scores, query),
            torch.einsum("hqk,qhd->khd", weights, gradient),
        )
        return of_query, *(full.unflatten(1, (key.shape[1], -1)).sum(2) for full in (of_keys, of_values))

    interface = types.ModuleType("interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)


@pytest.mark.usefixtures("flash4")
@pytest.mark.parametrize("mode", get_args(ActivationCheckpointing))
def test_flash_attention_gradients_match_sdpa_when_compiled_and_checkpointed(
    mode: ActivationCheckpointing, world: World, compiles: CompileCounterWithBackend
) -> None:
    expected = gradients("olmo3", training(), world)
    spec = training(activation_checkpointing=mode, compile="layers")
    model = build("olmo3", spec)
    model.set_attn_implementation(register_kernel("flash4"))
    engine = Fsdp2Engine(model, spec, world)
    engine.backward(engine.forward(micro_batch()), 2 * LENGTH - 1, is_last=True)
    for name, parameter in engine.model.hf_model.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), expected[name], msg=name)
    assert compiles.frame_count == 2  # with a window and without


@pytest.mark.usefixtures("flash4")
@pytest.mark.parametrize(
    "changes",
    [{}, {"method": "lora", "lora": {"rank": 4, "dropout": 0.2}}, {"method": "qlora", "precision": "bf16"}, IN_8_BITS],
)
def test_compiled_layers_keep_and_offload_the_output_of_attention_and_recompute_all_else(
    changes: dict[str, Any], world: World, parked: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    backward: list[torch.fx.Graph] = []
    backend = aot_autograd(
        fw_compiler=lambda module, _: make_boxed_func(module.forward),
        bw_compiler=lambda module, _: backward.append(module.graph) or make_boxed_func(module.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    monkeypatch.setattr("ftkit.train.memory.compile.inductor", lambda _, **__: backend)
    spec = training(activation_checkpointing="except_attention", activation_offload=True, compile="layers", **changes)
    model = build("llama", spec)
    model.set_attn_implementation(register_kernel("flash4"))
    engine = Fsdp2Engine(model, spec, world, lambda sharded: init_adapters(sharded, 5))
    engine.backward(engine.forward(micro_batch()), 2 * LENGTH - 1, is_last=True)
    hidden, output, lse = (2, LENGTH, 32), (2 * LENGTH, 4, 8), (4, 2 * LENGTH)
    assert sorted(parked) == sorted(LAYERS * [hidden, output, lse])
    names = [str(node.target) for graph in backward for node in graph.nodes]
    assert sum("varlen_attention.default" in name for name in names) == 0
    assert sum("varlen_attention_backward.default" in name for name in names) == 1


@pytest.mark.usefixtures("flash4")
@pytest.mark.parametrize("window", [None, 4])
def test_flash_attention_passes_torch_opcheck(window: int | None) -> None:
    query, key, value = (torch.randn(12, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    borders = torch.tensor([0, 5, 12], dtype=torch.int32)
    torch.library.opcheck(varlen_attention, (query, key, value, borders, 7, 0.3, window, "flash4"))
