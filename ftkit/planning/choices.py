"""Resolve a recipe's `auto` values: engine, sharding, micro-batch, checkpointing."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, get_args

from ftkit.config.execution import only_with_fsdp2
from ftkit.config.training import RECOMPUTES_LAYERS, ActivationCheckpointing, EngineName, TrainingPlan, TrainingSpec
from ftkit.errors import plural
from ftkit.models.parameters import count_model
from ftkit.planning.fit import Fit
from ftkit.planning.step_time import predict_step_time, replays_graphs
from ftkit.planning.training_setup import GPUS, Gpu, Setup

if TYPE_CHECKING:
    from ftkit.config.cluster import GpuModel
    from ftkit.models.architecture import ArchitectureSpec

_SHARDED = {
    "full": "weights, gradients and optimizer states",
    "lora": "frozen weights and adapters",
    "qlora": "4-bit weights and adapters",
}
SPARE = 0.8
"""Largest fraction of a GPU's usable memory for an `auto` sharding, unless all take more. Predictions were off by up to
6%, and by up to 12% before the worst of them were corrected."""


@dataclass(frozen=True)
class EnginePlan:
    """The engine that shards the model, why it was chosen, and how it shards: the fields of a `Setup`."""

    name: EngineName
    reason: str
    keeps_weights: bool = False
    num_replicas: int = 1
    defers_sync: bool = False
    has_linear_kernel: bool = True
    replays_graphs: bool = False

    def resolved(self, setup: Setup) -> EnginePlan:
        """Return the plan with the setup's sharding, which is also appended to the reason."""
        decided = {
            f"{setup.num_replicas} replicas of {setup.num_shards} shards": setup.num_replicas > 1,
            f"layers are divided among {setup.training.tensor_parallel} GPUs": setup.training.tensor_parallel > 1,
            "weights are all-gathered in FP8": setup.gathers_in_fp8,
            "layers stay unsharded": setup.keeps_weights,
            "gradients are reduced once per step": setup.defers_sync,
            "the decoder is launched as CUDA graphs, if it can be captured": replays_graphs(setup),
        }
        return replace(
            self,
            reason="; ".join([self.reason, *(text for text, applies in decided.items() if applies)]),
            keeps_weights=setup.keeps_weights,
            num_replicas=setup.num_replicas,
            defers_sync=setup.defers_sync,
            has_linear_kernel=setup.has_linear_kernel,
            replays_graphs=replays_graphs(setup),
        )


def choose_engine(
    shape: ArchitectureSpec, wanted: TrainingSpec, world_size: int, gpu: GpuModel | None, *, has_pictures: bool = False
) -> EnginePlan:
    """Return the recipe's engine; with `auto`, FSDP2 unless only ZeRO-3 fits the GPU."""
    if wanted.engine != "auto":
        return EnginePlan(wanted.engine, "the recipe asks for it")
    if world_size == 1:
        return EnginePlan("fsdp2", "one process: a single shard")
    if has_pictures:
        return EnginePlan("fsdp2", "the only engine that trains on pictures")
    if only := only_with_fsdp2(wanted):
        return EnginePlan("fsdp2", f"the only engine that supports the recipe's {' and '.join(only)}")
    setup = Setup(shape, least_memory(wanted), world_size)
    fsdp2_gib = Fit(setup).memory.total
    zero3_gib = Fit(replace(setup, engine="zero3")).memory.total
    processes = plural(world_size, "process")
    if gpu is not None and zero3_gib <= GPUS[gpu].usable_gib < fsdp2_gib:
        reason = f"{zero3_gib:.0f} GiB per {gpu} with zero3, which fits ({GPUS[gpu].memory_gib:g} GiB)"
        return EnginePlan("zero3", f"{processes}: {reason}; {fsdp2_gib:.0f} GiB with fsdp2")
    return EnginePlan("fsdp2", f"{processes}: {_SHARDED[wanted.method]} in shards")


def least_memory(training: TrainingSpec) -> TrainingPlan:
    """Resolve `auto` values to the settings that use the least memory."""
    micro, checkpointing = training.micro_batch_size, training.activation_checkpointing
    return TrainingPlan.extend(
        training,
        micro_batch_size=1 if micro == "auto" else micro,
        activation_checkpointing="full" if checkpointing == "auto" else checkpointing,
    )


@lru_cache(maxsize=64)  # the choice of settings and the suggestions try the same setups
def with_sharding(setup: Setup) -> Setup:
    """Choose the number of shards, and when layers are resharded and gradients reduced.

    Keep the recipe's values. For `auto`, choose the sharding with the shortest predicted step that leaves memory to
    spare. A later option replaces an earlier one only if it is faster by `LEAST_DIFFERENCE`.
    """
    possible = list(_shardings(setup))
    if setup.gpu is None or len(possible) == 1:
        return possible[0]
    fits = [Fit(each) for each in possible]
    fitting = [each.setup for each in fits if each.steps.total <= SPARE * setup.gpu.usable_gib]
    if not fitting:
        return min(fits, key=lambda each: each.steps.total).setup
    best, *others = fitting
    for each in others:
        fastest, seconds = (predict_step_time(one, setup.gpu).step_seconds for one in (best, each))
        if seconds * LEAST_DIFFERENCE < fastest:
            best = each
    return best


def _shardings(setup: Setup) -> Iterator[Setup]:
    """Yield the shardings that the recipe allows and whose memory can be predicted.

    Replicas have whole nodes. On one host, deferring reductions saves nothing: copy engines move gradients for free.
    """
    training, num_processes = setup.training, setup.num_processes
    whole = replace(setup, num_shards=num_processes, num_replicas=1, keeps_weights=False, defers_sync=False)
    if num_processes == 1 or setup.engine == "zero3":
        yield whole
        return
    is_known = setup.gpu is not None and training.offload == "none" and count_model(setup.shape).is_exact
    has_network = is_known and setup.node_bandwidth is not None and setup.num_nodes > 1
    replicas = [1]
    if training.shard_degree != "auto":
        replicas = [num_processes // training.shard_degree]
    elif has_network and training.tensor_parallel == 1:
        replicas = [num for num in range(1, setup.num_nodes + 1) if setup.num_nodes % num == 0 and num < num_processes]
    keeps = {"always": (False,), "never": (True,), "auto": (True, False) if is_known else (False,)}
    defers = {"every_micro_batch": (False,), "last_micro_batch": (True,), "auto": (False, True)[: 1 + has_network]}
    if whole.num_micro_batches == 1:
        defers = dict.fromkeys(defers, (False,))
    deferrals, kept_weights = defers[training.sync_gradients], keeps[training.reshard_after_forward]
    for num, deferred, kept in product(replicas, deferrals, kept_weights):
        shards = num_processes // num
        yield replace(whole, num_shards=shards, num_replicas=num, keeps_weights=kept, defers_sync=deferred)


WORTHWHILE = 1.1  # minimum speed-up of a suggestion, about the error of predictions
LEAST_DIFFERENCE = 1.02  # minimum speed-up for a larger micro-batch, and for a sharding that takes more memory
ROOM = 0.85  # fraction of a GPU's usable memory that `auto` may use: predictions were off by up to a tenth
ROOM_IF_ESTIMATED = 0.5  # `ROOM` for a model whose parameters are estimated
MOST_TOKENS = 2**17  # maximum tokens of a micro-batch for `auto`: larger ones were not measured
CPU_TOKENS = 2**11  # `MOST_TOKENS` on CPUs, where memory and speed are not predicted
MODES: tuple[ActivationCheckpointing, ...] = get_args(ActivationCheckpointing)
"""All modes of activation checkpointing; each uses less memory than the one before."""
TRIED: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full", "except_attention")
"""Order in which `auto` tries the modes: a later mode is chosen only if it is faster by `LEAST_DIFFERENCE`."""

HOST_ROOM = 0.5
"""Fraction of a node's memory that a run may use if `auto` offloads activations. If the node's memory is unknown, it is
assumed to be that of its GPUs: few nodes have less."""
OFFLOAD_STEPS = 16  # numbers of offloaded layers that `auto` tries

OPEN = ("micro_batch_size", "activation_checkpointing")
"""Settings of `training` that change only speed and memory, not the result."""


@dataclass(frozen=True)
class ExecutionPlan:
    """The choice of micro-batch and activation checkpointing: the `auto` keys, and the reason for their values."""

    chosen: tuple[str, ...] = ()
    reason: str = "the recipe sets both"


class Option(NamedTuple):
    """Settings with their predictions. All options of a run have the same optimization."""

    training: TrainingPlan
    step_seconds: float
    total_gib: float


def choose_execution(training: TrainingSpec, lightest: Setup) -> tuple[TrainingPlan, ExecutionPlan]:
    """Resolve a recipe's `auto` values to the fastest settings that are predicted to fit with memory to spare.

    Keep the recipe's values. Without predictions, choose the settings with the least memory; on CPUs, at most
    `CPU_TOKENS` per micro-batch. `lightest` is the setup with `auto` values resolved by `least_memory`.
    """
    chosen, gpu = tuple(field for field in OPEN if getattr(training, field) == "auto"), lightest.gpu
    resolved = lightest.training
    if not chosen:
        return resolved, ExecutionPlan()
    is_size_open, is_mode_open = (field in chosen for field in OPEN)
    if lightest.device == "cpu":
        size = micro_batch_sizes(lightest, CPU_TOKENS)[-1] if is_size_open else resolved.micro_batch_size
        mode = "none" if is_mode_open else resolved.activation_checkpointing
        reasons = [f"at most {CPU_TOKENS:,} tokens per micro-batch"] * is_size_open
        reasons += ["nothing recomputed"] * is_mode_open
        plan = TrainingPlan.extend(training, micro_batch_size=size, activation_checkpointing=mode)
        return plan, ExecutionPlan(chosen, f"{' and '.join(reasons)}, because there is no GPU")
    if gpu is None:
        return resolved, ExecutionPlan(chosen, "the least memory: the cluster's profile sets no GPU model ('gpu')")
    sizes = micro_batch_sizes(lightest, MOST_TOKENS) if is_size_open else [resolved.micro_batch_size]
    modes = TRIED if is_mode_open else (resolved.activation_checkpointing,)
    room = ROOM if count_model(lightest.shape).is_exact else ROOM_IF_ESTIMATED
    room_gib = room * gpu.usable_gib
    best = fastest_option(possible_options(lightest, gpu, sizes, modes, room_gib if is_mode_open else None), room_gib)
    if best is None:
        return resolved, ExecutionPlan(chosen, f"the least memory: no choice leaves {1 - room:.0%} of the GPU free")
    gained = speedup(lightest, replace(lightest, training=best.training), gpu)
    gain = f", {gained:.1f} times as fast as with the least memory" if gained >= WORTHWHILE else ""
    return best.training, ExecutionPlan(
        chosen, f"predicted to be the fastest that leaves {1 - room:.0%} of the GPU's memory free{gain}"
    )


def speedup(setup: Setup, other: Setup, gpu: Gpu) -> float:
    """Return how many times as fast the other settings are, predicted as by a plan: with CUDA graphs if possible."""
    now, then = (predict_step_time(with_sharding(each), gpu).step_seconds for each in (setup, other))
    return now / then


@lru_cache(maxsize=64)
def predict_option(setup: Setup, gpu: Gpu) -> Option:
    """Return a setup's settings with their predictions, after choosing its sharding.

    Settings are compared without CUDA graphs: evaluation has none, and not every decoder can be captured. The memory
    is that of the steps, and includes a teacher, which computes before them, only if that does not fit.
    """
    setup = with_sharding(setup)
    launched = predict_step_time(setup.with_training(cuda_graphs=False), gpu)
    fit = Fit(setup)
    needed = fit.steps if fit.on_gpu(gpu.usable_gib) else fit.memory
    return Option(setup.training, launched.step_seconds, needed.total)


def possible_options(
    setup: Setup, gpu: Gpu, sizes: Sequence[int], modes: Sequence[ActivationCheckpointing], room_gib: float | None
) -> Iterator[Option]:
    """Yield the possible settings with their predictions, by micro-batch size, then by checkpointing mode.

    If a mode fits in `room_gib` and the next lighter one does not, also yield the mode in the fewest layers that fit.
    If `room_gib` is None, keep the setup's number of layers.
    """
    for size in sizes:
        fits_on_gpu = dict.fromkeys(MODES, False)
        for mode in modes:
            if not _is_possible(setup, mode):
                continue
            sized = setup.with_training(micro_batch_size=size, activation_checkpointing=mode)
            if room_gib is None:
                yield predict_option(sized, gpu)
                continue
            whole, numbers = sized.with_training(checkpointed_layers=None), _numbers_of_offloaded_layers(sized, gpu)
            most = whole.with_training(offloaded_layers=numbers[-1]) if mode == "selective" else whole
            option = predict_option(most, gpu)
            yield option
            on_gpu = whole.with_training(offloaded_layers=numbers[0])
            fits_on_gpu[mode] = Fit(with_sharding(on_gpu)).steps.total <= room_gib
            lighter = sized.training.lighter_checkpointing(setup.engine)
            if option.total_gib <= room_gib and mode != "none" and not fits_on_gpu[lighter]:
                previous = math.inf
                for num in numbers:
                    fewest = _with_fewest_layers(whole.with_training(offloaded_layers=num), room_gib)
                    option = predict_option(fewest, gpu)
                    yield option
                    if option.step_seconds > previous:  # copies take longer than the computation
                        break
                    previous = option.step_seconds


def _numbers_of_offloaded_layers(setup: Setup, gpu: Gpu) -> Sequence[int | None]:
    """Return numbers of `selective` layers to offload: from 0 in steps, while they fit host memory; or the recipe's."""
    training, num_layers = setup.training, setup.shape.num_hidden_layers
    if training.offloaded_layers is not None or not training.activation_offload or setup.engine != "fsdp2":
        return [training.offloaded_layers]
    selective = setup.with_training(activation_checkpointing="selective", checkpointed_layers=None)
    step = max(1, num_layers // OFFLOAD_STEPS)
    numbers = range(step, num_layers + 1, step)
    return [0, *(num for num in numbers if fits_host(selective.with_training(offloaded_layers=num), gpu))]


def fits_host(setup: Setup, gpu: Gpu) -> bool:
    """Return whether nodes have memory to spare for the offloaded tensors."""
    node_gib = setup.node_memory_gib or gpu.memory_gib * setup.num_processes / setup.num_nodes
    return Fit(setup).on_host(HOST_ROOM * node_gib)


def _is_possible(setup: Setup, mode: ActivationCheckpointing) -> bool:
    training = setup.training
    if mode in {"selective", "except_attention"} and setup.engine != "fsdp2":
        return False
    if mode == "except_attention" and training.attention == "eager":
        return False
    is_offloaded = mode in RECOMPUTES_LAYERS or (mode == "selective" and training.compile != "none")
    return is_offloaded or not training.activation_offload


def _with_fewest_layers(setup: Setup, room_gib: float) -> Setup:
    """Return the setup with its checkpointing mode in the fewest layers that fit; in all layers if fewer don't."""
    resharded = replace(setup, gpu=None if setup.num_processes > 1 else setup.gpu)  # without spare memory

    def fits(num: int) -> bool:
        return Fit(with_sharding(resharded.with_training(checkpointed_layers=num))).steps.total <= room_gib

    num_layers = setup.shape.num_hidden_layers
    fewest = 1 + bisect_left(range(1, num_layers), True, key=fits)  # noqa: FBT003 - what is searched for
    return setup.with_training(checkpointed_layers=fewest if fewest < num_layers else None)


def fastest_option(options: Iterator[Option], room_gib: float) -> Option | None:
    """Return the fastest option that fits; a later one must be faster by `LEAST_DIFFERENCE`. None if none fits."""
    best: Option | None = None
    for each in options:
        if each.total_gib <= room_gib and (best is None or each.step_seconds * LEAST_DIFFERENCE < best.step_seconds):
            best = each
    return best


def micro_batch_sizes(setup: Setup, most_tokens: int) -> list[int]:
    """Return the micro-batch sizes that divide the global batch evenly, smallest first."""
    training = setup.training
    per_process = training.global_batch_size // setup.num_data_ranks
    most = max(1, min(per_process, most_tokens * training.gpus_per_pack // training.sequence_length))
    return [size for size in range(1, most + 1) if per_process % size == 0]
