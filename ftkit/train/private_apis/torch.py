"""Private and experimental names of torch."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import ModuleType


class Ctx(Protocol):
    """The `ctx` of an autograd function or operator, which torch does not type; functions add attributes."""

    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Save inputs and outputs for the backward pass."""

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...


TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

FSDP2_ON_CPUS = hasattr(torch.cpu.Stream, "record_event")
"""Whether FSDP2 trains on several processes without GPUs.

Not in torch 2.6, nor in NGC's 2.7.0a0 of the same line: autograd refuses weights that are all-gathered again, and gloo
sums gradients where NCCL averages them. Stream methods are missing too, which is what this checks.
"""

CUSTOM_COLLECTIVES = hasattr(FSDPModule, "set_custom_all_gather") and TORCH >= (2, 11)
"""Whether FSDP2 supports custom collectives (from torch 2.10 on), and symmetric memory was tested with them."""

TRACES_FULL_CHECKPOINTS = TORCH >= (2, 13)
"""Whether the compiler traces full activation checkpointing: it is new, so versions with measured runs go without."""

FSDP2_EXTENDS_ALL_GATHERS = TORCH >= (2, 8)
"""Whether FSDP2 has tensor subclasses transform what it all-gathers, as `ftkit.train.model.local_shard` does.

The interface is in torch 2.6 too, whose line can't be tested on several processes without GPUs (`FSDP2_ON_CPUS`).
"""

FSDP2_SETS_DIVISORS = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
"""Whether FSDP2 sums gradients and divides them by any number, with gloo too (from torch 2.9 on)."""


def complete_cpu_streams() -> None:
    """Add two no-op methods that FSDP2 calls to torch 2.6's CPU streams.

    Only torch 2.6 lacks them; without them FSDP2's first forward on a CPU fails. When torch 2.6 is no longer supported:
    delete this.
    """
    for method in ("record_event", "wait_event"):
        if not hasattr(torch.cpu.Stream, method):
            setattr(torch.cpu.Stream, method, lambda *_: None)


def compile_failures() -> tuple[type[Exception], type[Exception]]:
    """Return the exceptions of a compiled function that can't be one graph, and of one with too many recompilations.

    The first is the base class of those that tracing and compilation raise. `torch._dynamo.exc`, torch 2.6 to 2.15. If
    one disappears: compile without `fullgraph`, and lose the warning.
    """
    from torch._dynamo import exc  # noqa: PLC0415 - loads the compiler

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def inductor() -> Callable[..., Any]:
    """Return Inductor's compiler of a graph, for a backend of `torch.compile` that changes the graph first.

    `torch._dynamo.lookup_backend`, torch 2.1 to 2.15; torch's guide to custom backends uses it. If it goes: compile
    without the change.
    """
    from torch._dynamo import lookup_backend  # noqa: PLC0415 - loads the compiler

    compiler: Callable[..., Any] = lookup_backend("inductor")
    return compiler


def recompute_matmul_inputs() -> AbstractContextManager[None]:
    """Let compilers recompute, in the backward pass, inputs of matmuls that element-wise operations made.

    By default they are saved: recomputing them takes a kernel, where other recomputed values stay in registers. So are
    values of chains of more than 100 fusible operations, which a layer in 4 bits has between its matmuls: those that
    dequantize its matrices. `torch._functorch.config.ban_recompute_materialized_backward` and
    `ban_recompute_long_fusible_chains`, torch 2.3 to 2.15. If one goes: compile without it, and add the saved values to
    the plan.
    """
    from torch._functorch import config  # noqa: PLC0415 - loads the compiler

    context: AbstractContextManager[None] = config.patch(
        ban_recompute_materialized_backward=False, ban_recompute_long_fusible_chains=False
    )
    return context


def cache_autograd_functions() -> AbstractContextManager[None]:
    """Let AOTAutograd's cache serve graphs with autograd functions, which quantized and FP8 layers have.

    Dynamo traces forward and backward of such a function into the graph, so they are part of the cache's key.
    `torch._functorch.config.autograd_cache_allow_custom_autograd_functions`, torch 2.11 to 2.15. If it goes: compile
    without it; each start then differentiates the layers again, in seconds.
    """
    from torch._functorch import config  # noqa: PLC0415 - loads the compiler

    name = "autograd_cache_allow_custom_autograd_functions"
    context: AbstractContextManager[None] = config.patch({name: True}) if hasattr(config, name) else nullcontext()
    return context


def tag_compile_caches(tag: str) -> None:
    """Have the compiler's caches serve only what was compiled with the same tag.

    `torch.compiler.config.cache_key_tag`, torch 2.7 to 2.15. If it goes: a folder of caches for each tag.
    """
    with suppress(ImportError):
        from torch.compiler import config  # noqa: PLC0415 - loads the compiler

        if hasattr(config, "cache_key_tag"):
            config.cache_key_tag = tag


def cacheable_policy(context_fn: Callable[[], Any]) -> Callable[[], Any]:
    """Let AOTAutograd's cache serve graphs with a policy of activation checkpointing: decorates its `context_fn`.

    That is a function of a module, since the cache's key is pickled; the key's tag has its code (`tag_compile_caches`).
    The attribute `cache_hash`, torch 2.13 to 2.15; others ignore it. If it goes: each start differentiates the layers
    again, in seconds.
    """
    context_fn.cache_hash = context_fn.__qualname__  # type: ignore[attr-defined]
    return context_fn


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Have compiled functions accept any size of a dimension; by default, they are compiled again for the second size.

    `torch._dynamo.maybe_mark_dynamic`, torch 2.1 to 2.15. If it goes: `torch._dynamo.mark_dynamic`, which fails where
    a layer needs a known size.
    """
    from torch._dynamo import maybe_mark_dynamic  # noqa: PLC0415 - loads the compiler

    maybe_mark_dynamic(tensor, dim)


def raise_recompile_limit(num_layers: int) -> None:
    """Let torch compile a layer's code once per layer, and a few times more.

    `torch._dynamo.config.cache_size_limit`, torch 2.6 to 2.15 (an alias of `recompile_limit` from 2.7 on). torch 2.6
    compiles once per layer with selective checkpointing, and would leave the ninth and all others uncompiled. If it
    goes: `recompile_limit`, or nothing, where layers share a graph.
    """
    from torch._dynamo import config  # noqa: PLC0415 - loads the compiler

    config.cache_size_limit = max(config.cache_size_limit, num_layers + 8)


def process_group(name: str) -> ProcessGroup:
    """Return a process group by its name, the only form in which an operator can take it.

    `torch.distributed.distributed_c10d._resolve_process_group`, torch 2.2 to 2.15. If it goes: functional collectives
    with a public way to give them a group.
    """
    group: ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type] # noqa: SLF001
    return group


def symmetric_memory() -> ModuleType:
    """Return the module with `empty` and `rendezvous`: GPU memory that peers have mapped.

    `torch.distributed._symmetric_memory`, torch 2.5 to 2.15. If it goes: its public successor, or NCCL's collectives,
    which `training.collectives` falls back to.
    """
    from torch.distributed import _symmetric_memory  # noqa: PLC0415 - only GPUs of one host need it

    return _symmetric_memory


def set_collectives(module: FSDPModule, all_gather: Any, reduce_scatter: Any) -> None:
    """Have FSDP2 call other collectives than NCCL's for a module.

    Experimental, torch 2.10 to 2.15; the classes of the arguments are private. If they go: NCCL's collectives.
    """
    module.set_custom_all_gather(all_gather)
    module.set_custom_reduce_scatter(reduce_scatter)


def skip_step(optimizer: torch.optim.Optimizer, is_skipped: torch.Tensor) -> None:
    """Have a fused optimizer skip its next `step` if a scalar on the device is 1, without a host sync.

    `Optimizer.found_inf`, which `torch.amp.GradScaler` sets, torch 2.0 to 2.15. If it goes: read the scalar.
    """
    optimizer.found_inf = is_skipped  # type: ignore[attr-defined]


def divide_gradients(optimizer: torch.optim.Optimizer, divisor: torch.Tensor) -> None:
    """Have a fused optimizer divide gradients by a scalar on the device in its next `step`.

    `Optimizer.grad_scale`, which `torch.amp.GradScaler` sets, torch 2.0 to 2.15. If it goes: divide them before.
    """
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]


def add_to_all(tensors: list[torch.Tensor], value: torch.Tensor) -> None:
    """Add a scalar to tensors in one kernel: `torch._foreach_add_`, torch 1.10 to 2.15. If it goes: a loop."""
    torch._foreach_add_(tensors, value)


def record_collectives() -> None:
    """Enable torch's flight recorder: the last collectives of each process group created from now on.

    Each takes a few hundred bytes. torch 2.6 has the second name, torch 2.13 both. If they disappear: hangs are
    reported without collectives.
    """
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        os.environ.setdefault(name, "2000")


def dump_collectives() -> bytes | None:
    """Return torch's record of the last collectives in the format of `torchfrtrace`; None if unavailable.

    `torch._C._distributed_c10d._dump_nccl_trace` in builds with CUDA; `_dump_fr_trace` in those without, torch 2.13.
    """
    from torch._C import _distributed_c10d as c10d  # noqa: PLC0415 - not in every build

    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    trace: bytes | None = dump() if dump else None
    return trace


def checkpoint_index_names() -> tuple[Any, ...]:
    """Return the private classes in a checkpoint's index: the unpickler allows no others.

    torch 2.6 to 2.15. If one moves: earlier checkpoints still have its old module, so keep both.
    """
    return metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.serialization._get_layout  # noqa: SLF001


def record_memory_history(max_entries: int) -> None:
    """Start to record CUDA allocations with Python stacks; 0 entries stop it.

    `torch.cuda.memory._record_memory_history`, torch 2.1 to 2.15; torch's own tutorials use it. If it goes: leave the
    snapshot out of profiles.
    """
    if max_entries:
        torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")  # noqa: SLF001
    else:
        torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001


def dump_memory_snapshot(path: Path) -> None:
    """Write the recorded CUDA allocations; `torch.cuda.memory._dump_snapshot`, see `record_memory_history`."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]  # noqa: SLF001


SCALED_MM = torch.ops.aten._scaled_mm.default  # noqa: SLF001
"""Operator of `scaled_mm`, which activation checkpointing selects by."""


GROUPED_MM = getattr(torch.ops.aten, "_grouped_mm", None)
"""Operator of the experts' matmuls in transformers, which activation checkpointing selects by; torch 2.8 to 2.15.

If it goes: the operator behind `torch.nn.functional.grouped_mm`, which torch 2.10 and newer have.
"""


def scaled_mm(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the product of two FP8 matrices.

    `torch._scaled_mm`, torch 2.5 to 2.15. If it goes: `torch.nn.functional.scaled_mm`, which torch 2.10 and newer have.
    """
    return torch._scaled_mm(left, right, **options)  # noqa: SLF001


def make_wrapper(kind: Any, inner: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return an instance of a tensor subclass without memory: it looks like another tensor, in a dtype.

    `torch.Tensor._make_wrapper_subclass`, torch 1.11 to 2.15; torch's guide to tensor subclasses uses it. If it goes:
    weights are all-gathered in bf16.
    """
    return torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
        kind, inner.shape, strides=inner.stride(), dtype=dtype, device=inner.device
    )


def find_norms(tensors: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the norm of each tensor in few kernels: `torch._foreach_norm`, torch 1.12 to 2.15.

    Order 2 is the root of the sum of squares, infinity the largest absolute value. If it goes: a loop.
    """
    return list(torch._foreach_norm(tensors, order))  # noqa: SLF001


def map_instances(kind: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    """Replace the instances of a type in nested lists, tuples and dictionaries.

    `torch.utils._pytree.tree_map_only`, torch 1.13 to 2.15. If it goes: a recursion.
    """
    return _pytree.tree_map_only(kind, function, tree)


def find_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries.

    `torch.utils._pytree.tree_leaves`, torch 2.0 to 2.15. If it goes: a recursion.
    """
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def scaled_grouped_mm(
    rows: torch.Tensor,
    matrices: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor,
    ends: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply FP8 rows, [S, K], by the FP8 matrices of their groups, [E, K, N]; group e has the rows before ends[e].

    `torch._scaled_grouped_mm`, torch 2.8 to 2.15, on GPUs from Hopper on. If it goes:
    `torch.nn.functional.scaled_grouped_mm`, which torch 2.10 and newer have.
    """
    return torch._scaled_grouped_mm(  # noqa: SLF001
        rows, matrices, row_scales, column_scales, offs=ends, out_dtype=dtype, use_fast_accum=True
    )
