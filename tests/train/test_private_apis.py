"""Each private name exists where `ftkit.train.private_apis` expects it; an upgrade that moves one fails here."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.fsdp import FSDPModule
from transformers import (
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    MixtralModel,
    masking_utils,
)
from transformers.utils import chat_template_utils
from waiting import PATIENCE_SECONDS

from ftkit.data.private_apis import compile_chat_template
from ftkit.train.components.optimizer import FusedAdamW
from ftkit.train.private_apis.libraries import flash_attention, import_bitsandbytes
from ftkit.train.private_apis.torch import (
    GROUPED_MM,
    add_to_all,
    cache_autograd_functions,
    checkpoint_index_names,
    compile_failures,
    complete_cpu_streams,
    dump_collectives,
    mark_dynamic,
    process_group,
    raise_recompile_limit,
    scaled_mm,
    set_collectives,
    start_compile_workers,
    symmetric_memory,
    tag_compile_caches,
    waiting_collective,
)
from ftkit.train.private_apis.transformers import (
    CONVERTS_WEIGHTS,
    WeightConversions,
    attention_backends,
    attention_implementation,
    computes_experts_one_by_one,
    grouped_mm,
    ignored_tensors,
    mask_documents_always,
    revert_weight_conversion,
    router_classes,
)
from tests.waiting import wait_until

if TYPE_CHECKING:
    from ftkit.train.world import World

needs_custom_collectives = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_all_gather"), reason="this torch has no custom collectives; ftkit takes NCCL's"
)


@pytest.mark.oldest
def test_cpu_streams_have_what_fsdp2_calls() -> None:
    complete_cpu_streams()
    torch.cpu.Stream().record_event()
    torch.cpu.Stream().wait_event(None)  # type: ignore[arg-type]


@pytest.mark.oldest
def test_a_graph_break_raises_the_first_listed_exception() -> None:
    unsupported, recompile_limit = compile_failures()
    assert issubclass(recompile_limit, Exception)

    def broken(values: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return values

    with pytest.raises(unsupported):
        torch.compile(broken, fullgraph=True, backend="eager")(torch.zeros(1))


@pytest.mark.oldest
def test_a_process_group_is_found_by_its_name(world: World) -> None:
    group = world.mesh.get_group()
    assert process_group(group.group_name) is group


@pytest.mark.oldest
def test_the_recompile_limit_rises_with_the_layers_and_never_falls() -> None:
    from torch._dynamo import config

    with config.patch(cache_size_limit=8):
        raise_recompile_limit(30)
        assert config.cache_size_limit == 38
        raise_recompile_limit(2)
        assert config.cache_size_limit == 38


def test_the_compilers_caches_have_a_tag_and_serve_autograd_functions() -> None:
    from torch._functorch import config
    from torch.compiler import config as caches

    with caches.patch(cache_key_tag=""):  # monkeypatch would leave the setting deleted
        tag_compile_caches("a version")
        assert caches.cache_key_tag == "a version"
    with cache_autograd_functions():
        assert config.autograd_cache_allow_custom_autograd_functions


@pytest.mark.oldest
def test_older_compilers_do_without_a_tag_and_autograd_functions() -> None:
    tag_compile_caches("")
    with cache_autograd_functions():
        pass


@pytest.mark.oldest
def test_a_dynamic_dimension_is_compiled_once() -> None:
    compiles = CompileCounter()
    forward = torch.compile(lambda values: values * 2, backend=compiles, fullgraph=True)
    for size in (6, 2, 9):
        values = torch.zeros(size)
        mark_dynamic(values)
        forward(values)
    assert compiles.frame_count == 1


@pytest.mark.oldest
def test_symmetric_memory_can_be_allocated_and_shared() -> None:
    assert callable(symmetric_memory.empty)
    assert callable(symmetric_memory.rendezvous)


@needs_custom_collectives
def test_fsdp2_accepts_custom_collectives(world: World) -> None:
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(nn.Linear(2, 2), mesh=world.mesh)
    set_collectives(module, "gather", "reduce")
    group = module._get_fsdp_state()._fsdp_param_group
    assert (group._all_gather_comm, group._reduce_scatter_comm) == ("gather", "reduce")


@pytest.mark.oldest
def test_an_index_refers_only_to_allowed_names() -> None:
    names = checkpoint_index_names()
    assert [each.__name__ for each in names] == ["_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout"]
    properties = TensorProperties.create_from_tensor(torch.zeros(2))
    assert type(properties.__getstate__()[3]) is names[0]


@pytest.mark.oldest
def test_memory_history_accepts_ftkits_arguments() -> None:
    names = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert "enabled" in names
    inspect.signature(torch.cuda.memory._dump_snapshot).bind("a file")


def test_fp8_matrices_are_multiplied_if_the_operator_exists() -> None:
    assert torch.ops.aten._scaled_mm.default is not None
    assert callable(scaled_mm)


def test_the_matmuls_of_experts_are_an_operator() -> None:
    assert GROUPED_MM is not None
    assert GROUPED_MM.default.name() == "aten::_grouped_mm"


@pytest.mark.oldest
@pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="transformers 4 has no stacked experts")
def test_rows_are_multiplied_by_the_matrix_of_their_expert() -> None:
    rows, matrices = torch.randn(5, 16), torch.randn(3, 16, 8)
    product = grouped_mm(rows, matrices, torch.tensor([2, 2, 5], dtype=torch.int32))
    torch.testing.assert_close(product, torch.cat([rows[:2] @ matrices[0], rows[2:] @ matrices[2]]))
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=1))
    assert not computes_experts_one_by_one(model.config)
    model.set_experts_implementation("eager")
    assert computes_experts_one_by_one(model.config)


def test_the_attention_implementation_of_a_configuration_is_known() -> None:
    assert attention_implementation(LlamaConfig(attn_implementation="eager")) == "eager"


def test_the_attention_backends_of_a_model_class_are_known() -> None:
    assert attention_backends(LlamaForCausalLM) == {"custom", "flex", "sdpa"}
    assert attention_backends(BloomForCausalLM) == set()


@pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="routers of transformers 4 return something else")
def test_transformers_reports_the_routers_of_a_decoder() -> None:
    [router] = router_classes(MixtralModel)
    config = MixtralConfig(hidden_size=8, num_local_experts=4, num_experts_per_tok=2)
    logits, weights, experts = router(config)(torch.ones(3, 8))
    assert [logits.shape, weights.shape, experts.shape] == [(3, 4), (3, 2), (3, 2)]
    assert router_classes(LlamaModel) == ()


@pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="this transformers stores weights as files do")
def test_transformers_reports_its_weight_conversions() -> None:
    config = MixtralConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=16, num_local_experts=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    conversions = WeightConversions.of(model)
    held = model.state_dict()
    stored = revert_weight_conversion(model, held)
    assert "model.layers.0.block_sparse_moe.experts.1.w1.weight" in stored.keys() - held.keys()
    assert {conversions.rename(name)[0] for name in stored} == held.keys()


def test_flash_attention_is_forward_then_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    interface: Any = types.ModuleType("interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = "forward", "backward"
    package: Any = types.ModuleType("flash_attn.cute")
    package.interface = interface
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    assert flash_attention() == ("forward", "backward")


@pytest.mark.oldest
@pytest.mark.parametrize(
    "name", ["quantize_4bit", "get_4bit_type", "create_dynamic_map", "optimizer_update_8bit_blockwise"]
)
def test_bitsandbytes_has_the_functions_of_nf4_and_8_bit_states(name: str) -> None:
    assert callable(getattr(import_bitsandbytes("a test"), name))
    assert torch.ops.bitsandbytes.dequantize_4bit.default is not None
    assert torch.ops.bitsandbytes.dequantize_blockwise.default is not None


@pytest.mark.oldest
def test_a_fused_optimizer_skips_a_step_if_found_inf_is_set() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([weight], lr=0.1, betas=(0.9, 0.999))
    weight.grad = torch.full((3,), torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(weight, torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert torch.allclose(weight, torch.full((3,), 0.899))
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.oldest
def test_a_fused_optimizer_divides_gradients_by_grad_scale() -> None:
    found, expected = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    found.grad, expected.grad = torch.tensor([1.0, 2.0, -4.0]), torch.tensor([0.25, 0.5, -1.0])
    ours, theirs = (
        FusedAdamW([found], lr=0.1, betas=(0.9, 0.95)),
        torch.optim.AdamW([expected], lr=0.1, betas=(0.9, 0.95), fused=True),
    )
    ours.grad_scale = torch.tensor(4.0)
    ours.step()
    theirs.step()
    assert torch.equal(found, expected)
    assert torch.equal(ours.state[found]["exp_avg"], theirs.state[expected]["exp_avg"])


@pytest.mark.oldest
def test_a_scalar_is_added_to_all_tensors() -> None:
    tensors = [torch.zeros(()), torch.ones(2)]
    add_to_all(tensors, torch.tensor(0.5))
    assert [tensor.tolist() for tensor in tensors] == [0.5, [1.5, 1.5]]


@pytest.mark.usefixtures("world")
def test_no_collective_is_waited_for_when_all_have_ended(world: World) -> None:
    world.barrier()
    # gloo's thread retires the record of a collective after it has woken who waits for it.
    wait_until(lambda: waiting_collective("") == ("", 0), lambda: str(waiting_collective("")))


def test_the_last_collectives_can_be_read() -> None:
    trace = dump_collectives()
    assert trace is not None
    assert b"pg_config" in trace


DEEPSPEED = """
import os
import torch
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
from ftkit.train.private_apis.libraries import forget_pending_gradients, import_deepspeed
from ftkit.train.private_apis.libraries import Zero3Optimizer, zero3_partition

deepspeed = import_deepspeed(torch.device("cpu"))
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 2**31}
model = torch.nn.Linear(3, 2)
assert zero3_partition(model.weight) is None
deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=torch.float32)
partition = zero3_partition(model.weight)
assert partition.shape == (2, 3) and partition.values.numel() == 6 and not partition.is_persistent
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.0), config=config)
optimizer = Zero3Optimizer(engine)
assert sum(master.numel() for master in optimizer.masters) == 8
optimizer.init_states(("exp_avg", "exp_avg_sq"))
assert all(set(states) == {"exp_avg", "exp_avg_sq", "step"} for states in optimizer.states.values())
assert zero3_partition(model.weight).is_persistent
model(torch.ones(1, 3))
forget_pending_gradients(model)
before = partition.values.clone()
engine.backward(engine(torch.ones(1, 3)).sum())
optimizer.set_step(0.1, 1e9)
engine.step()
assert abs(float(optimizer.grad_norm) - 8 ** 0.5) < 1e-5
assert not torch.equal(zero3_partition(model.weight).values, before)
assert sum(gradient.numel() for gradient in optimizer.gradients) >= 8
optimizer.gather_persistent()
print("all there", flush=True)
os._exit(0)
"""


def test_deepspeed_has_the_attributes_of_partitions_and_of_the_optimizer() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEEPSPEED], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert "all there" in done.stdout, done.stdout + done.stderr


@pytest.mark.oldest
def test_a_class_lists_the_tensors_that_it_ignores() -> None:
    config = LlamaConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(config)
    assert hasattr(type(model), "_keys_to_ignore_on_load_unexpected")
    assert ignored_tensors(model) == ()


@pytest.mark.oldest
def test_a_chat_template_is_compiled_as_apply_chat_template_does() -> None:
    template = (
        "{% for turn in messages %}{{ turn | tojson }}{% generation %}{{ turn.content }}{% endgeneration %}{% endfor %}"
    )
    turns = [{"role": "user", "content": "é <b>"}]
    (expected,), _ = chat_template_utils.render_jinja_template([turns], chat_template=template)
    assert compile_chat_template(template).render(messages=turns) == expected


def test_masks_of_packs_tell_documents_apart_also_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    several = torch.tensor([[0, 1, 2, 0, 1, 0]])
    expected = masking_utils.find_packed_sequence_indices(several)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", masking_utils.find_packed_sequence_indices)
    mask_documents_always()
    assert torch.equal(masking_utils.find_packed_sequence_indices(several), expected)
    assert masking_utils.find_packed_sequence_indices(torch.arange(6)[None]).tolist() == [[0] * 6]


def test_processes_that_compile_are_started_before_the_first_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    started: list[str] = []
    for name in ("warm_pool", "wakeup"):
        monkeypatch.setattr(AsyncCompile, name, lambda name=name: started.append(name))
    start_compile_workers()
    assert started == ["warm_pool", "wakeup"]
