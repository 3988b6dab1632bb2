"""Compiled layers: checks and training share graphs, and the next start finds them in the compiler's caches."""

from __future__ import annotations

import shutil
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch._dynamo
from compiler_warnings import COMPILER_WARNINGS
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor.codecache import BypassFxGraphCache, FxGraphCache
from transformers import AutoModelForCausalLM
from waiting import PATIENCE_SECONDS

from ftkit.config.training import TrainingPlan
from ftkit.data.packing import Document, build_pack
from ftkit.models.architecture import ArchitectureSpec
from ftkit.train.components.batches import to_micro_batch
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.distributed.probe import run_probe
from ftkit.train.model.attention import Kernel, register_kernel
from ftkit.train.model.hf_model import make_config
from ftkit.train.model.lora import init_adapters, prepare_method

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ftkit.train.causal_lm import MicroBatch
    from ftkit.train.world import World

LENGTH, VOCABULARY = 128, 320
PACKS = ((LENGTH,), (70, 58), (5,) * 20, (90,))
"""Lengths of the documents of some packs; the checks' pack has five."""

pytestmark = [*COMPILER_WARNINGS]


class Ids:
    bos_token_id, eos_token_id, pad_token_id = 1, 2, 0


@pytest.fixture(autouse=True)
def without_earlier_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def flash4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace flash-attn-4, which needs a GPU, with functions that return something of the right shape."""

    def forward(query: Any, _: Any, value: Any, **__: Any) -> tuple[Any, ...]:
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, dim=1).contiguous(), query.new_zeros(query.shape[1::-1]), None

    def backward(query: Any, key: Any, value: Any, _: Any, gradient: Any, *__: Any, **___: Any) -> tuple[Any, ...]:
        return torch.zeros_like(query), torch.zeros_like(key), gradient.unflatten(1, (value.shape[1], -1)).sum(2)

    interface = types.ModuleType("interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)


def make_engine(world: World, kernel: Kernel, **changes: Any) -> Fsdp2Engine:
    """Return an engine with a small Gemma 3, whose layers have a sliding window or none."""
    fields = {
        "sequence_length": LENGTH, "global_batch_size": 1, "max_steps": 1, "learning_rate": 1e-3, "precision": "bf16",
        "compile": "layers", "activation_checkpointing": "none",
    }  # fmt: skip
    if changes.get("method", "full") != "full":
        fields |= {"lora": {"rank": 4, "dropout": 0.1}}
    training = TrainingPlan.model_validate(fields | changes)
    shape = ArchitectureSpec(
        family="gemma3_text", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=LENGTH,
        tie_word_embeddings=True, sliding_window=16, full_attention_every=2,
    )  # fmt: skip
    dtype = torch.float32 if training.method == "full" else torch.bfloat16
    model = AutoModelForCausalLM.from_config(make_config(shape, Ids()), dtype=dtype)  # type: ignore[arg-type]
    model.config.use_cache = False
    model.set_attn_implementation(register_kernel(kernel))
    prepare_method(model, training, torch.device("cpu"))
    return Fsdp2Engine(model, training, world, lambda sharded: init_adapters(sharded, 5))


def pack(lengths: Sequence[int]) -> MicroBatch:
    documents = [Document(np.full(length, 7, np.int32), np.full(length, 7, np.int32)) for length in lengths]
    return to_micro_batch(build_pack(documents, LENGTH)[None], torch.device("cpu"))


def check_and_train(engine: Fsdp2Engine, world: World) -> None:
    run_probe(engine, world, VOCABULARY, micro_batch_size=1, sequence_length=LENGTH)
    for lengths in PACKS:
        engine.backward(engine.forward(pack(lengths)), LENGTH, is_last=True)
        engine.step(1e-3, 1.0)


@pytest.mark.usefixtures("flash4")
@pytest.mark.parametrize(
    ("method", "kernel"), [("full", "flash4"), ("full", "sdpa"), ("lora", "flash4"), ("qlora", "flash4")]
)
def test_checks_and_steps_with_any_number_of_documents_share_a_graph_for_each_kind_of_layer(
    method: str, kernel: Kernel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiles = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr("ftkit.train.memory.compile.inductor", lambda _, **__: compiles)
    check_and_train(make_engine(world, kernel, method=method), world)
    # flash-attn-4: with a window and without. SDPA: with a mask, and without for packs of a single document.
    assert compiles.frame_count == 2


@pytest.mark.usefixtures("flash4")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="full"),
        pytest.param({"activation_checkpointing": "selective"}, id="selective"),
        pytest.param({"activation_checkpointing": "full"}, id="checkpointed"),
        pytest.param({"activation_checkpointing": "except_attention"}, id="except attention"),
        pytest.param({"precision": "fp8"}, id="fp8"),
        pytest.param({"method": "lora", "activation_checkpointing": "selective"}, id="lora"),
        pytest.param({"method": "lora", "base_precision": "fp8"}, id="lora on fp8"),
        pytest.param({"method": "qlora", "lora": {"rank": 4, "dropout": 0.1, "use_dora": True}}, id="qlora with DoRA"),
    ],
)
def test_graphs_of_layers_can_be_in_the_compilers_caches(
    changes: dict[str, Any], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bypasses: list[str] = []

    def compile_graph(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        try:
            autograd_cache.check_cacheable(graph)
            autograd_cache._collect_context_fn_hashes(graph)
            FxGraphCache._check_for_hop(graph)
        except (autograd_cache.BypassAOTAutogradCache, BypassFxGraphCache) as error:  # raised here, it is a warning
            bypasses.append(str(error))
        return graph.forward

    monkeypatch.setattr("ftkit.train.memory.compile.inductor", lambda _, **__: compile_graph)
    engine = make_engine(world, "flash4", **changes)
    engine.forward(pack(PACKS[0]))
    assert bypasses == []


TWICE_COMPILED = """
import torch
from torch._dynamo.utils import counters
from torch._inductor import cpu_vec_isa
from ftkit.train.memory.activation_checkpointing import apply_activation_checkpointing
from ftkit.train.model.float8 import convert_linears

class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16, bias=False)

    def forward(self, hidden):
        return hidden + self.linear(hidden)

cpu_vec_isa.valid_vec_isa_list = lambda: []  # otherwise a program is compiled for each set of instructions
layers = torch.nn.ModuleList([Residual()])
convert_linears(layers)
apply_activation_checkpointing(layers, ["selective"], compiled=True)
layers[0](torch.ones(4, 16)).sum().backward()
found = counters["aot_autograd"]
print(found["autograd_cache_miss"], found["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_a_second_start_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", TWICE_COMPILED]
    counts = [
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS).stdout.split()
        for _ in range(2)
    ]
    assert counts == [["1", "0", "2"], ["0", "1", "0"]]
