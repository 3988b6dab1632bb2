"""Private and experimental names of torch: in torch 2.6 to 2.15, unless an entry says otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._functorch import config as functorch_config
from torch.distributed import ProcessGroup, _symmetric_memory, distributed_c10d
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module
from torch.utils import _pytree

if TYPE_CHECKING:
    import torch._dynamo.config  # noqa: TC004 - at run time, torch loads its compiler at the first access
    from torch import fx


class Ctx(Protocol):
    """The `ctx` of an autograd function or operator, which torch does not type; functions add attributes."""

    saved_tensors: tuple[torch.Tensor, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...


TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

FSDP2_ON_CPUS = hasattr(torch.cpu.Stream, "record_event")
"""Whether FSDP2 can train on several processes without GPUs: not in torch 2.6, nor in NGC's 2.7.0a0 of the same line.

There, autograd rejects weights that are all-gathered again, and gloo sums gradients where NCCL averages them. Stream
methods are missing too, which this checks."""
CUSTOM_COLLECTIVES = hasattr(FSDPModule, "set_custom_all_gather") and TORCH >= (2, 11)
"""Whether FSDP2 supports custom collectives (from torch 2.10 on), and symmetric memory was tested with them."""
TRACES_FULL_CHECKPOINTS = TORCH >= (2, 11)
"""Whether the compiler traces full activation checkpointing: tried with torch 2.11 and 2.13."""
FSDP2_EXTENDS_ALL_GATHERS = TORCH >= (2, 8)
"""Whether tensor subclasses may transform the data of FSDP2's all-gathers: 2.6 can't be tested on several processes."""
FSDP2_SETS_DIVISORS = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
"""Whether FSDP2 sums gradients and divides them by any number, with gloo too (from torch 2.9 on)."""

process_group: Callable[[str], ProcessGroup] = distributed_c10d._resolve_process_group  # type: ignore[attr-defined,assignment] # noqa: SLF001
"""Returns a process group by its name: operators can take only the name."""
dump_memory_snapshot: Callable[[Path], None] = torch.cuda.memory._dump_snapshot  # noqa: SLF001
"""Writes the recorded CUDA allocations to a path."""
copy_all = torch._foreach_copy_  # copies tensors into others, of any dtype, in few kernels
find_norms = torch._foreach_norm  # noqa: SLF001
"""Returns the norm of each tensor, of a given order and in a dtype, in few kernels; of order infinity, the amax."""
hooks_with_kwargs = module._global_forward_hooks_with_kwargs  # noqa: SLF001
"""Ids of global hooks with keyword arguments; torch does not delete them when the hooks are removed."""
symmetric_memory = _symmetric_memory  # the module with `empty` and `rendezvous`: GPU memory that peers have mapped
map_instances = _pytree.tree_map_only
"""Replaces a type's instances in nested lists, tuples and dictionaries; arguments: type, function, tree."""

scaled_mm = torch._scaled_mm  # noqa: SLF001
"""Multiplies two FP8 matrices with their scales; `torch.nn.functional.scaled_mm` needs torch 2.10."""
SCALED_MM = torch.ops.aten._scaled_mm.default  # noqa: SLF001
GROUPED_MM = getattr(torch.ops.aten, "_grouped_mm", None)
"""Operators of FP8 matmuls and of experts (torch 2.8 and newer), which activation checkpointing recognizes."""

VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)  # noqa: SLF001
"""Operators of compiled graphs that show a tensor in another shape."""


def add_to_all(tensors: Sequence[torch.Tensor], added: torch.Tensor) -> None:
    """Add a tensor, [], to tensors in few kernels.

    `_foreach_add_` would take a single tensor as a number, which is a host sync.
    """
    torch._foreach_add_(tensors, [added] * len(tensors))  # type: ignore[call-overload]


def cast_all(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return copies of tensors in a dtype, without gradients, in few kernels."""
    copies = [torch.empty_like(each, dtype=dtype, requires_grad=False) for each in tensors]
    copy_all(copies, [each.detach() for each in tensors])
    return copies


class ReplacedParameters:
    """Temporarily replace a module's parameters with other tensors, as `torch.func.functional_call` does.

    That searches all modules at each call: 12 ms for the 340 parameters of Gemma 3 1B. Here, the places are known.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Find the places of the parameters. Nothing else may replace the parameters afterwards."""
        self._places: dict[torch.Tensor, list[tuple[dict[str, Any], str]]] = {}
        for owner in (each._parameters for each in module.modules()):  # noqa: SLF001
            for name, parameter in owner.items():
                if parameter is not None:
                    self._places.setdefault(parameter, []).append((owner, name))

    @contextmanager
    def by(self, change: Callable[[torch.Tensor], torch.Tensor], parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Replace these parameters with `change(parameter)` in the block; tied parameters get one tensor.

        A backward pass that recomputes activations calls modules again, so it must be in the block.
        """
        before = {each: self._get(each) for each in parameters}
        for parameter in before:
            self._put(parameter, change(parameter))
        try:
            yield
        finally:
            for parameter, value in before.items():
                self._put(parameter, value)

    def restore(self, parameter: torch.Tensor) -> None:
        """Restore a parameter before the end of `by`. Nothing else holds the replacement, so its memory is freed."""
        self._put(parameter, parameter)

    def _get(self, parameter: torch.Tensor) -> torch.Tensor:
        owner, name = self._places[parameter][0]
        value: torch.Tensor = owner[name]
        return value

    def _put(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        for owner, name in self._places[parameter]:
            owner[name] = value


def complete_cpu_streams() -> None:
    """Add two no-op methods to torch 2.6's CPU streams: without them, FSDP2's first forward on a CPU fails."""
    for method in ("record_event", "wait_event"):
        if not hasattr(torch.cpu.Stream, method):
            setattr(torch.cpu.Stream, method, lambda *_: None)


def compile_failures() -> tuple[type[Exception], type[Exception]]:
    """Return the base exception of functions that can't be one graph, and the one of too many recompilations."""
    return torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit  # noqa: SLF001


_ONE_MATRIX_AT_A_TIME = {
    # What independent operations must share to be fused: more than the tables of 4-bit weights, which Inductor counts
    # once per number of a word (4,353 bytes). Otherwise, one kernel dequantizes several matrices.
    "score_fusion_memory_threshold": 8192,
    # Otherwise, a freed buffer stays allocated for the next one of its size: a matrix, while others are computed.
    "allow_buffer_reuse": False,
}


def inductor(change: Callable[[fx.Graph], None], *, makes_matrices: bool) -> Callable[..., Callable[..., Any]]:
    """Return Inductor's compiler of a graph; `change` changes the differentiated graphs before they are lowered.

    `makes_matrices` says whether the graph computes matrices of weights, of which few should exist at a time.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass  # noqa: PLC0415 - imports the compiler

    class Change(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            change(graph)

        def uuid(self) -> str:  # in the caches' keys, whose tag covers the code (`tag_compile_caches`)
            return change.__qualname__

    compile_graph: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")  # noqa: SLF001
    patches = {"post_grad_custom_post_pass": Change()} | (_ONE_MATRIX_AT_A_TIME if makes_matrices else {})
    return partial(compile_graph, config_patches=patches)


def recompute_matmul_inputs() -> AbstractContextManager[None]:
    """Let the compiler recompute, in the backward pass, matmul inputs that come from element-wise operations.

    By default, they are saved, because recomputing them takes a kernel; other recomputed values stay in registers.
    Results of more than 100 chained fusible operations, such as a 4-bit layer's dequantization, are also saved.
    """
    settings = ("ban_recompute_materialized_backward", "ban_recompute_long_fusible_chains")
    patch: AbstractContextManager[None] = functorch_config.patch(dict.fromkeys(settings, False))
    return patch


def cache_autograd_functions() -> AbstractContextManager[None]:
    """Let AOTAutograd's cache serve graphs with autograd functions of quantized and FP8 layers (torch 2.11).

    Dynamo traces forward and backward of such a function into the graph, so they are part of the cache key.
    """
    name = "autograd_cache_allow_custom_autograd_functions"
    return functorch_config.patch({name: True}) if hasattr(functorch_config, name) else nullcontext()


def start_compile_workers() -> None:
    """Start the processes that compile kernels before the first graph needs them; this takes seconds."""
    from torch._inductor.async_compile import AsyncCompile  # noqa: PLC0415 - imports Triton

    AsyncCompile.warm_pool()
    if hasattr(AsyncCompile, "wakeup"):  # not in all versions
        AsyncCompile.wakeup()


def tag_compile_caches(tag: str) -> None:
    """Restrict the compiler's caches to entries with the same tag (torch 2.7)."""
    if TORCH >= (2, 7):
        torch.compiler.config.cache_key_tag = tag


def cacheable_policy(context_fn: Callable[[], Any]) -> Callable[[], Any]:
    """Decorate a checkpointing policy's `context_fn`, so that AOTAutograd's cache serves graphs with it.

    It must be a module-level function, because the cache key is pickled; the key's tag covers its code
    (`tag_compile_caches`). torch before 2.13 ignores `cache_hash`.
    """
    context_fn.cache_hash = context_fn.__qualname__  # type: ignore[attr-defined]
    return context_fn


def mark_dynamic(tensor: torch.Tensor) -> None:
    """Let compiled functions accept any size of the first dimension; by default, a second size recompiles them."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)  # noqa: SLF001


def raise_recompile_limit(num_layers: int) -> None:
    """Let torch compile a layer's code once per layer, and a few more times.

    torch 2.6 compiles once per layer with selective checkpointing, and would not compile layers from the ninth on.
    """
    config = torch._dynamo.config  # noqa: SLF001
    config.cache_size_limit = max(config.cache_size_limit, num_layers + 8)


def set_collectives(module: FSDPModule, all_gather: object, reduce_scatter: object) -> None:
    """Make FSDP2 call custom collectives for a module (torch 2.10); torch's classes of them are private."""
    module.set_custom_all_gather(all_gather)  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]


def record_collectives() -> None:
    """Enable torch's flight recorder of the last collectives; torch 2.6 has the second name, torch 2.13 both."""
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        os.environ.setdefault(name, "2000")


def dump_collectives() -> bytes | None:
    """Return torch's record of the last collectives in the format of `torchfrtrace`; None if unavailable."""
    c10d = torch._C._distributed_c10d  # noqa: SLF001
    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)  # without CUDA, torch 2.13
    trace: bytes | None = dump() if dump else None
    return trace


def waiting_collective(background: str) -> tuple[str, int]:
    """Return the oldest unfinished collective with its group, and its number in the group; "" and 0 if there is none.

    Collectives of the group with description `background` come last. From torch's flight recorder, which only NCCL has
    in torch 2.6.
    """
    c10d = torch._C._distributed_c10d  # noqa: SLF001
    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json", None)
    entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", ()) if dump else ()
    waiting = [each for each in entries if each["state"] != "completed" and not each.get("retired")]
    for each in sorted(waiting, key=lambda each: each["process_group"][1] == background)[:1]:
        name, group = each["profiling_name"].partition(":")[2], each["process_group"]
        return f"{name} [{group[0] if group[1] in ('', 'undefined') else group[1]}]", each["collective_seq_id"]
    return "", 0


def checkpoint_index_names() -> tuple[Any, ...]:
    """Return the private classes in a checkpoint's index; the unpickler allows no other private ones.

    If one moves, keep both modules: earlier checkpoints refer to the old one.
    """
    return metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, torch.serialization._get_layout  # noqa: SLF001


def record_memory_history(max_entries: int) -> None:
    """Record CUDA allocations with Python stacks; 0 entries stop the recording.

    Frees are recorded without stacks: reading the stack clears the exception by which a checkpoint ends its
    recomputation early, and the backward pass fails ("returned NULL without setting an exception", torch 2.11).
    """
    if max_entries:
        torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python", context="alloc")  # noqa: SLF001
    else:
        torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001


def scaled_grouped_mm(
    rows: torch.Tensor,
    matrices: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor,
    ends: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply FP8 rows, [S, K], by the FP8 matrices of their groups, [E, K, N]; group e has the rows before ends[e].

    torch 2.8 and newer, on GPUs from Hopper on. `torch.nn.functional.scaled_grouped_mm` needs torch 2.10.
    """
    return torch._scaled_grouped_mm(  # noqa: SLF001
        rows, matrices, row_scales, column_scales, offs=ends, out_dtype=dtype, use_fast_accum=True
    )


def make_wrapper(kind: type[torch.Tensor], inner: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return a tensor of a subclass without storage, in a dtype, with the shape, strides and device of `inner`."""
    return torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
        kind, inner.shape, strides=inner.stride(), dtype=dtype, device=inner.device
    )


def find_tensors(tree: object) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
