"""Linear attention, state spaces and short convolutions: what computes them, and how compiled layers call it."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compiler_warnings import COMPILER_WARNINGS
from family_matrix import tiny_config
from torch._dynamo import lookup_backend
from transformers import AutoModelForCausalLM

from ftkit.train.causal_lm import MicroBatch, model_inputs
from ftkit.train.memory.activation_checkpointing import apply_activation_checkpointing
from ftkit.train.model import token_mixers
from ftkit.train.model.hf_model import find_decoder, find_decoder_layers
from ftkit.train.model.token_mixers import choose_token_mixers, chunk_gated_delta_rule
from ftkit.train.private_apis.transformers import CONVERTS_WEIGHTS, kernel_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ftkit.config.training import ActivationCheckpointing
    from ftkit.train.world import World

pytestmark = [
    pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="transformers 4 has no functions with kernels"),
    *COMPILER_WARNINGS,
]
DOCUMENTS = (5, 60, 64, 1, 70)
LENGTH = sum(DOCUMENTS)

FAKE = '''
import torch
from ftkit.train.model.packed_mixers import chunk_gated_delta_rule as computed

CALLS = []


@torch.compiler.disable
def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, **kwargs,
):
    """Has fla 0.6.0's parameters; like it, takes the documents of one row, and stays out of compiled graphs."""
    assert not kwargs
    assert cu_seqlens is None or q.shape[0] == 1
    assert not torch.compiler.is_compiling()
    CALLS.append(cu_seqlens)
    return computed(q, k, v, g, beta, use_qk_l2norm_in_kernel, cu_seqlens)
'''


@pytest.fixture
def graph_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of the graphs that are compiled, without generating code for them."""
    sizes: list[int] = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        parts = [module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
        sizes.append(sum(len(part.nodes) for part in parts))
        compiled: Callable[..., Any] = lookup_backend("aot_eager")(graph, inputs)
        return compiled

    monkeypatch.setattr("ftkit.train.memory.compile.inductor", lambda _, **__: compile_graph)
    torch._dynamo.reset()
    yield sizes
    torch._dynamo.reset()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a package `fla` with this code; transformers looks for it again, as when it imports the model's file."""
    hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")

    def installed(code: str, init: str = "") -> None:
        for folder, text in (("fla", init), ("fla/ops", ""), ("fla/ops/gated_delta_rule", code)):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "__init__.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        (before,) = [one for one in kernel_functions(build("qwen3_next")) if one.name == "chunk_gated_delta_rule"]
        found = hub_kernels.use_kernel_func_from_hub_with_fallback(before.name, before.package)(before.fallback)
        monkeypatch.setattr(sys.modules[before.module], before.attribute, found)

    yield installed
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        del sys.modules[name]


def packed(documents: tuple[int, ...] = DOCUMENTS) -> MicroBatch:
    positions = torch.cat([torch.arange(length) for length in documents])[None]
    ends = torch.tensor([0, *torch.tensor(documents).cumsum(0)], dtype=torch.int32)
    tokens = torch.randint(3, 300, positions.shape, generator=torch.Generator().manual_seed(0))
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(tokens, positions, none, none, ends, max(documents))


def states_and_gradients(model: Any, batch: MicroBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    decoder = find_decoder(model)
    states = decoder(**model_inputs(decoder, batch)).last_hidden_state
    weight = torch.linspace(-1, 1, states.numel()).view(states.shape)
    parameters = [one for one in decoder.parameters() if one.requires_grad]
    gradients = torch.autograd.grad((states * weight).sum(), parameters, allow_unused=True)
    return states.detach(), [one for one in gradients if one is not None]


def build(family: str) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(tiny_config(family)).train()


@pytest.mark.parametrize("decay", [0.01, 2.0])
@pytest.mark.parametrize("documents", [(1,), (64,), DOCUMENTS, (700,), (63, 1, 64, 65, 63)])
def test_the_gated_delta_rule_of_packs_equals_that_of_single_documents(
    documents: tuple[int, ...], decay: float
) -> None:
    torch.manual_seed(0)
    length = sum(documents)
    shapes = ((1, length, 2, 16), (1, length, 2, 16), (1, length, 4, 24))
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    tensors += [(-decay * torch.rand(1, length, 4)).requires_grad_(), torch.rand(1, length, 4, requires_grad=True)]
    ends = torch.tensor([0, *torch.tensor(documents).cumsum(0)], dtype=torch.int32)
    found, _ = chunk_gated_delta_rule(*tensors, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)  # type: ignore[misc]

    (function,) = [one for one in kernel_functions(build("qwen3_next")) if one.name == "chunk_gated_delta_rule"]
    parts = zip(*(torch.split(one, list(documents), dim=1) for one in tensors), strict=True)
    expected = torch.cat([function.fallback(*part, use_qk_l2norm_in_kernel=True)[0] for part in parts], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    direction = torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad(each, tensors, direction) for each in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid", "lfm2"])
def test_packs_need_no_package(family: str, world: World) -> None:
    model = build(family)
    choices = choose_token_mixers(model, world)
    assert choices
    assert not any("transformers" in choice for choice in choices)
    batch = packed()
    together, _ = states_and_gradients(model, batch)
    offset = 0
    for length in DOCUMENTS:
        tokens = batch.input_ids[:, offset : offset + length]
        alone = find_decoder(model)(input_ids=tokens, use_cache=False).last_hidden_state
        torch.testing.assert_close(together[:, offset : offset + length], alone.detach(), rtol=1e-3, atol=1e-4)
        offset += length


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("qwen3_next", "selective"),
        ("qwen3_next", "full"),
        ("kimi_linear", "selective"),
        ("falcon_mamba", "selective"),
        ("mamba2", "selective"),
    ],
)
def test_compiled_layers_have_no_unrolled_loops_and_compute_the_same(
    family: str, mode: ActivationCheckpointing, world: World, graph_sizes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = build(family)
    choose_token_mixers(model, world)
    is_packed = family == "qwen3_next"
    batches = [packed(DOCUMENTS if is_packed else (length,)) for length in (LENGTH, 3 * LENGTH)]
    batches = batches if not is_packed else [packed(), packed(3 * DOCUMENTS)]
    expected = [states_and_gradients(model, batch if is_packed else unpacked(batch)) for batch in batches]

    layers = find_decoder_layers(model)
    apply_activation_checkpointing(layers, [mode] * len(layers), compiled=True)
    with caplog.at_level(logging.WARNING, logger="ftkit"):
        for batch, (states, gradients) in zip(batches, expected, strict=True):
            found, found_gradients = states_and_gradients(model, batch if is_packed else unpacked(batch))
            torch.testing.assert_close(found, states, rtol=1e-4, atol=1e-5)
            for one, other in zip(found_gradients, gradients, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-4)
    assert 0 < max(graph_sizes) < 400
    assert not [one for one in caplog.records if one.name.startswith("ftkit.train.memory")]


def unpacked(batch: MicroBatch) -> MicroBatch:
    """Return the tokens as one padded row without padding."""
    return MicroBatch(**(vars(batch) | {"attention_mask": torch.ones_like(batch.input_ids)}))


def test_an_installed_kernel_gets_the_documents_in_compiled_layers_too(
    install: Callable[..., None], world: World, graph_sizes: list[int]
) -> None:
    install(FAKE)
    model = build("qwen3_next")
    (_, choice) = choose_token_mixers(model, world)
    assert choice == "chunk_gated_delta_rule: flash-linear-attention of unknown version"
    calls = sys.modules["fla.ops.gated_delta_rule"].CALLS
    batch = packed()
    calls.clear()
    states, gradients = states_and_gradients(model, batch)
    num_calls = len(calls)
    assert num_calls == sum(kind == "linear_attention" for kind in model.config.layer_types)

    layers = find_decoder_layers(model)
    apply_activation_checkpointing(layers, ["selective"] * len(layers), compiled=True)
    found, found_gradients = states_and_gradients(model, batch)
    assert [one.tolist() for one in calls] == [batch.cu_seqlens.tolist()] * 3 * num_calls
    torch.testing.assert_close(found, states, rtol=1e-4, atol=1e-5)
    for one, other in zip(found_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-4)
    assert max(graph_sizes) < 400


@pytest.mark.parametrize(
    ("code", "init", "reason"),
    [
        (FAKE.replace("return computed", "raise RuntimeError('needs Triton 3.7.1') or computed"), "",
         "flash-linear-attention of unknown version fails on a CPU: RuntimeError: needs Triton 3.7.1"),
        (FAKE.replace("kernel, cu_seqlens)", "kernel)"), "",
         "flash-linear-attention of unknown version computes it wrongly on a CPU"),
        (FAKE, "import no_such_package",
         "flash-linear-attention can't be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        ("", "", "flash-linear-attention of unknown version does not have it"),
    ],
)  # fmt: skip
def test_a_kernel_that_does_not_run_here_is_reported_and_not_used(
    code: str, init: str, reason: str, install: Callable[..., None], world: World
) -> None:
    install(code, init)
    model = build("qwen3_next")
    (_, choice) = choose_token_mixers(model, world)
    assert choice.startswith("chunk_gated_delta_rule: ftkit's in PyTorch, which takes longer, since")
    assert reason in choice
    states, _ = states_and_gradients(model, packed())
    assert states.isfinite().all()


def test_causal_conv1d_gets_no_packs_with_more_elements_than_its_offsets_reach() -> None:
    lengths = []

    def kernel(hidden_states: torch.Tensor, *_: object, **options: torch.Tensor) -> torch.Tensor:
        lengths.append(hidden_states.shape[-1])
        assert options.keys() == {"seq_idx", "activation"}
        return hidden_states

    convolve = token_mixers._convolution(kernel, token_mixers._CONVOLUTION_REACHES)
    with torch.device("meta"):
        for length in (2**19, 2**19 + 1):
            inputs, documents = torch.empty(1, 8192, length), torch.empty(1, length, dtype=torch.int32)
            assert convolve(inputs, torch.empty(8192, 4), activation="silu", seq_idx=documents).shape == inputs.shape
    assert lengths == [2**19]


def test_functions_without_a_kernel_that_loop_over_tokens_are_reported_as_slow(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    choices = choose_token_mixers(build("kimi_linear"), world)
    assert [choice.partition(":")[0] for choice in choices if "transformers' in PyTorch" in choice] == ["chunk_kda"]
    assert [record.levelname for record in caplog.records if "install" in record.message][-1] == "WARNING"
    assert not choose_token_mixers(build("llama"), world)


def test_a_kernel_that_is_wrong_on_hopper_is_not_tuned_first(
    install: Callable[..., None], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FAKE)
    (function,) = [one for one in kernel_functions(build("qwen3_next")) if one.name == "chunk_gated_delta_rule"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    for version, fails in {"3.3.1": False, "3.6.0": True, "3.7.1": False, "3.8.0+git1a2b": False}.items():
        monkeypatch.setattr(token_mixers, "_version_of", lambda _, version=version: version)
        found = token_mixers._known_failure(function, torch.device("cuda"))
        assert (found is not None) == fails
    monkeypatch.setattr(token_mixers, "_version_of", lambda _: "3.6.0")
    assert token_mixers._known_failure(function, torch.device("cuda")) == (
        "needs Triton 3.7.1 or newer, or tilelang, on NVIDIA H200; here is Triton 3.6.0"
    )
    assert token_mixers._known_failure(function, world.device) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "may not repeat" in str(token_mixers._known_failure(function, world.device))


def test_layers_that_loop_over_tokens_are_not_compiled_and_the_log_says_so(
    graph_sizes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = build("recurrent_gemma")
    batch = unpacked(packed((LENGTH,)))
    states, gradients = states_and_gradients(model, batch)
    layers = find_decoder_layers(model)
    with caplog.at_level(logging.WARNING, logger="ftkit"):
        apply_activation_checkpointing(layers, ["full"] * len(layers), compiled=True)
        found, found_gradients = states_and_gradients(model, batch)
    torch.testing.assert_close(found, states, rtol=1e-4, atol=1e-5)
    for one, other in zip(found_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-4)
    assert max(graph_sizes, default=0) < 400
    (said,) = [one.getMessage() for one in caplog.records if "loops over tokens" in one.getMessage()]
    assert said.startswith("RecurrentGemmaDecoderLayer is not compiled, because RecurrentGemmaRglru loops over tokens")
