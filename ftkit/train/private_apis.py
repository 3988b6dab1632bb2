"""Every private or undocumented name of torch, transformers, DeepSpeed, bitsandbytes, peft and flash-attn.

The rest of the trainer uses them through this module. Each entry lists the versions that have the name, and what to do
when it disappears; `tests/train/test_private_apis.py` has a test for each, so that an upgrade fails there first.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.fsdp import FSDPModule

from ftkit.errors import PrerequisiteError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import ModuleType

    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

FSDP2_ON_CPUS = hasattr(torch.cpu.Stream, "record_event")
"""Whether FSDP2 trains on several processes without GPUs.

Not in torch 2.6, nor in NGC's 2.7.0a0 of the same line: autograd refuses weights that are all-gathered again, and gloo
sums gradients where NCCL averages them. Stream methods are missing too, which is what this checks.
"""

CUSTOM_COLLECTIVES = hasattr(FSDPModule, "set_custom_all_gather") and TORCH >= (2, 11)
"""Whether FSDP2 supports custom collectives (from torch 2.10 on), and symmetric memory was tested with them."""

FSDP2_SETS_DIVISORS = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
"""Whether FSDP2 sums gradients and divides them by any number, with gloo too (from torch 2.9 on)."""

CONVERTS_WEIGHTS = int(transformers.__version__.split(".")[0]) >= 5  # noqa: PLR2004
"""Whether transformers stores some tensors in another form than files on the hub."""


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

    `torch._dynamo.exc`, torch 2.6 to 2.15. If one disappears: compile without `fullgraph`, and lose the warning.
    """
    from torch._dynamo import exc  # noqa: PLC0415 - loads the compiler

    return exc.Unsupported, exc.FailOnRecompileLimitHit


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


def leave_out_step(optimizer: torch.optim.Optimizer, is_left_out: torch.Tensor) -> None:
    """Have the next `step` of a fused optimizer change nothing if a scalar on the device is 1; the host need not know.

    `Optimizer.found_inf`, which `torch.amp.GradScaler` sets, torch 2.0 to 2.15. If it goes: read the scalar.
    """
    optimizer.found_inf = is_left_out  # type: ignore[attr-defined]


def record_collectives() -> None:
    """Enable torch's flight recorder: the last collectives of each process group created from now on.

    A few hundred bytes each. torch 2.6 has the second name, torch 2.13 both. If they disappear: a hang is reported
    without collectives.
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


@dataclass(frozen=True)
class WeightConversions:
    """transformers' conversions of the tensors in files when it loads a model class.

    `transformers.conversion_mapping` and `transformers.core_model_loading`, transformers 5.0 to 5.23, undocumented; 4
    has neither, and converts nothing. If they go: the mapping of each family is in the code of its model in
    transformers; write it here.

    Attributes:
        renamings: tensors that only have another name in files.
        converters: tensors that are assembled from several of the files'.
    """

    renamings: list[Any]
    converters: list[Any]

    @classmethod
    def of(cls, model: PreTrainedModel) -> WeightConversions:
        """Return the conversions of a model's class."""
        if not CONVERTS_WEIGHTS:
            return cls([], [])
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415 - transformers 5
        from transformers.core_model_loading import WeightConverter, WeightRenaming  # noqa: PLC0415

        known = get_model_conversion_mapping(model, add_legacy=False)
        return cls(*([one for one in known if isinstance(one, kind)] for kind in (WeightRenaming, WeightConverter)))

    def rename(self, stored: str) -> tuple[str, str | None]:
        """Return the name of the tensor that a stored one is converted to, and the pattern of its part in it."""
        if not self.renamings and not self.converters:
            return stored, None
        from transformers.core_model_loading import rename_source_key  # noqa: PLC0415 - transformers 5

        renamed: tuple[str, str | None] = rename_source_key(stored, self.renamings, self.converters)
        return renamed


def revert_weight_conversion(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's weights in the layout of files.

    `transformers.core_model_loading.revert_weight_conversion`, transformers 5.0 to 5.23. If it goes: see
    `WeightConversions`.
    """
    from transformers import core_model_loading  # noqa: PLC0415 - transformers 5

    reverted: dict[str, torch.Tensor] = core_model_loading.revert_weight_conversion(model, dict(weights))
    return reverted


def attention_implementation(config: PretrainedConfig) -> str:
    """Return the attention implementation that a model uses.

    `config._attn_implementation`, transformers 4.57 to 5.23; to set it there is a public method. If it goes: keep the
    name that `build_empty` was given.
    """
    name: str = config._attn_implementation  # noqa: SLF001
    return name


def attention_backends(model_class: type[nn.Module]) -> set[str]:
    """Return the attention backends that a model class of transformers supports: `custom`, `flex`, `sdpa`.

    `_supports_attention_backend`, `_supports_flex_attn` and `_supports_sdpa`, transformers 4.57 to 5.23. If they go:
    try `set_attn_implementation`, which raises for the others.
    """
    flags = {"custom": "_supports_attention_backend", "flex": "_supports_flex_attn", "sdpa": "_supports_sdpa"}
    return {backend for backend, flag in flags.items() if getattr(model_class, flag)}


def ignored_tensors(model: nn.Module) -> tuple[str, ...]:
    """Return patterns of tensors in files for which a model class of transformers deliberately has no place.

    `_keys_to_ignore_on_load_unexpected`, transformers 4.57 to 5.23. If it goes: such tensors are named in a warning.
    """
    return tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def flash_attention() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return flash-attn-4's forward and backward; its public function is opaque to compilers and to checkpointing.

    `flash_attn.cute.interface._flash_attn_fwd` and `_flash_attn_bwd`, flash-attn-4 4.0.0b. If they go:
    `choose_kernel` finds that the kernel doesn't run, and takes flex attention.

    Raises:
        ImportError: the package is missing, or has no such functions.
    """
    from flash_attn.cute import interface  # type: ignore[import-not-found] # noqa: PLC0415 - on GPUs

    return interface._flash_attn_fwd, interface._flash_attn_bwd  # noqa: SLF001


@cache
def import_bitsandbytes(needed_by: str) -> Any:
    """Return bitsandbytes' functions: quantization to NF4, its tables, and the update of 8-bit optimizer states.

    `bitsandbytes.functional`, whose functions are undocumented, 0.46 to 0.50; importing it also defines the operators
    `torch.ops.bitsandbytes`. If one goes: `tests/train/test_nf4.py` and `test_adamw8bit.py` have the formulas.

    Raises:
        PrerequisiteError: it is not installed.
    """
    try:
        from bitsandbytes import functional  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise PrerequisiteError(
            f"{needed_by} needs bitsandbytes, which is not installed", fix="pip install 'ftkit[qlora]'"
        ) from error
    return functional


def compute_in_input_dtype(model: nn.Module) -> None:
    """Make peft's layers compute in the dtype of their inputs, under autocast, instead of that of the adapters.

    `BaseTunerLayer.cast_input_dtype_enabled`, peft 0.14 to 0.21. If it goes: `peft.helpers.disable_input_dtype_casting`
    around each forward.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415 - takes seconds, and only adapters need it

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False


@dataclass(frozen=True)
class Zero3Partition:
    """This rank's partition of a parameter of DeepSpeed.

    Attributes:
        shape: of the whole parameter.
        values: flat view of the partition, padded on the last rank; writing to it changes the parameter.
        is_persistent: every rank also has the whole parameter, since it is small.
    """

    shape: torch.Size
    values: torch.Tensor
    is_persistent: bool


def zero3_partition(parameter: torch.Tensor) -> Zero3Partition | None:
    """Return this rank's partition of a parameter; None if DeepSpeed did not partition it.

    `ds_tensor`, `ds_shape` and `ds_persist`, DeepSpeed 0.19. If one goes: `deepspeed.utils.safe_get_local_fp32_param`
    has the values, and the shapes can be kept from before `zero.Init`.
    """
    ds: Any = parameter
    if not hasattr(ds, "ds_tensor"):
        return None
    return Zero3Partition(ds.ds_shape, ds.ds_tensor, bool(getattr(ds, "ds_persist", False)))


class Zero3Optimizer:
    """The attributes of DeepSpeed's ZeRO-3 optimizer that have no public name, DeepSpeed 0.19.

    If one goes: `deepspeed.utils.safe_get_local_*` reads masters and states parameter by parameter, and
    `engine.get_global_grad_norm()` the norm.
    """

    def __init__(self, engine: Any) -> None:
        """Take DeepSpeed's engine."""
        self._optimizer = engine.optimizer

    @property
    def masters(self) -> list[torch.Tensor]:
        """This rank's fp32 weights, one flat tensor per parameter group."""
        return list(self._optimizer.fp32_partitioned_groups_flat)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The buffer of this rank's gradients, once there is one."""
        buffer = self._optimizer.grad_partitions_flat_buffer
        return [] if buffer is None else [buffer]

    @property
    def states(self) -> Mapping[torch.Tensor, dict[str, torch.Tensor]]:
        """The states of the wrapped torch optimizer, by master."""
        states: Mapping[torch.Tensor, dict[str, torch.Tensor]] = self._optimizer.optimizer.state
        return states

    @property
    def grad_norm(self) -> Any:
        """The global gradient norm of the last step; None if DeepSpeed skipped the step."""
        return None if self._optimizer.overflow else self._optimizer._global_grad_norm  # noqa: SLF001

    def set_step(self, learning_rate: float, max_norm: float) -> None:
        """Set learning rate and gradient clipping of the next step."""
        self._optimizer.clip_grad = max_norm
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def init_states(self, names: tuple[str, ...]) -> None:
        """Create the states that torch would create in the first step, so that a checkpoint can be loaded into them."""
        for master in self.masters:
            states = {name: torch.zeros_like(master) for name in names}
            self._optimizer.optimizer.state[master] = states | {"step": torch.zeros((), device=master.device)}

    def gather_persistent(self) -> None:
        """All-gather the persistent parameters again, after their partitions were written."""
        persistent = self._optimizer.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)


def forget_pending_gradients(model: nn.Module) -> None:
    """Make DeepSpeed expect no gradients for a forward pass without a backward pass.

    It counts the outputs of each module whose gradients are to come (`ds_grads_remaining`, DeepSpeed 0.19), and frees
    weights after the last. If it goes: probe without gradients.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "ds_grads_remaining"):
            module.ds_grads_remaining = 0


def import_deepspeed(device: torch.device) -> Any:
    """Return DeepSpeed, set up for a device, without compiling operators at the start.

    `deepspeed.ops.__compatible_ops__`, DeepSpeed 0.19. If it goes: install a C++ compiler where ZeRO-3 trains on CPUs;
    shared memory for gloo is compiled there, for a minute.

    Raises:
        PrerequisiteError: it is not installed.
    """
    os.environ["DS_ACCELERATOR"] = device.type
    try:
        import deepspeed  # noqa: PLC0415 - it looks for the accelerator when it is imported
        import deepspeed.ops  # noqa: PLC0415
    except ImportError as error:
        raise PrerequisiteError(
            "engine 'zero3' needs DeepSpeed, which is not installed", fix="pip install 'ftkit[deepspeed]'"
        ) from error
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)
    logger.addFilter(lambda record: "leaf module configuration" not in record.getMessage())  # deliberately none
    # torch 2.13 warns at each of DeepSpeed's collectives, several times a step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed


def accelerate_environment(config: Path) -> dict[str, str]:
    """Return the variables that `accelerate launch` would set for a configuration file.

    accelerate's own launcher can't be used: it starts processes by its own rules, and a single one on CPUs. These
    functions are undocumented; 1.0 to 1.15 have them. When they go: set the variables of its documentation here.
    """
    from accelerate.commands import launch  # noqa: PLC0415 - few runs need it
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env  # noqa: PLC0415

    parsed = launch.launch_command_parser().parse_args(["--config_file", str(config), "script.py"])
    args, defaults, _ = launch._validate_launch_command(parsed)  # noqa: SLF001
    args.deepspeed_fields_from_accelerate_config = ",".join([*defaults.deepspeed_config, "mixed_precision"])
    # As if on a second machine: on the first, it looks for a free port.
    args.num_machines, args.machine_rank, args.deepspeed_multinode_launcher = 2, 1, "standard"
    found = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    return {name: value for name, value in found.items() if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}
