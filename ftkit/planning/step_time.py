"""Predict the duration of a step from the architecture and the GPU's data sheet.

Four resources can limit a step: the GPU with its arithmetic and memory, the network, host memory, and the host that
launches kernels. The efficiencies were fitted to runs on H200; for other GPUs, they are scaled by published
measurements of single matmuls and of attention (`ftkit.planning.training_setup`). docs/reference/benchmarks.md has the
runs, and compares the predictions with published results for H100, B200 and A100, to which nothing was fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log
from typing import TYPE_CHECKING, Final, Literal

from ftkit.config.execution import FP32, count_repeated_parameters, is_quantized, method_counts, saved_by_quantization
from ftkit.models.adapters import count_active_adapter_parameters
from ftkit.models.families import MEASURED, family_of
from ftkit.models.parameters import count_model
from ftkit.planning.activations import Activations, layer_bytes
from ftkit.planning.flops import delta_rule_seconds, document_flops, token_flops, vision_flops

if TYPE_CHECKING:
    from ftkit.config.recipe import RecipePlan
    from ftkit.config.training import TrainingPlan
    from ftkit.models.architecture import ArchitectureSpec, ModelCounts
    from ftkit.planning.training_setup import Gpu, Setup


MATRIX_EFFICIENCY = 0.785
"""Fraction of the best single matmul's rate (`Gpu.matmul_efficiency`) that the matmuls of a step reach, small kernels
around them included."""
FP8_SPEEDUP = {True: 1.54, False: 1.78}
"""Speed-up of linear layers in FP8 over bf16, conversion included, by whether weights are trained: True for trained
weights (converted each time), False for frozen ones (stored in FP8). Fitted to runs of Llama 3 8B on two H200 and of 8
layers of OLMo-3 7B on one, and of Llama 3.3 70B LoRA with 80 and with 32 checkpointed layers."""
FP8_GATHER_BYTES = 12
"""Memory traffic, in bytes per weight and micro-batch, that the FP8 all-gather saves: amax and cast happen once, before
it."""
SDPA_EFFICIENCY = 0.30
"""Fraction of the peak that attention by SDPA reaches. With a mask for packs, it computes all pairs of tokens."""
ELEMENTWISE_PASSES = {True: 10, False: 20}
"""Number of times that operations other than matmuls and attention read or write a layer's saved activations, with
compiled layers (True) and in eager mode (False)."""
RECOMPUTED_PASSES = 0.4
"""Fraction of these passes that checkpointing repeats: those of the forward pass. Fitted to OLMo-3 7B with 8 layers."""
OPTIMIZER_BYTES = 28
"""Bytes read and written per trained parameter in AdamW's step: weight, gradient and two states, and the gradient
norm."""
CAST_BYTES = 26  # bytes read and written per trained parameter and micro-batch to cast, all-gather and reduce
ACCUMULATE_BYTES = 6
"""Bytes read and written per trained parameter in a micro-batch that accumulates gradients without reducing them."""
COPY_OUT_PASSES = 2.5
"""Time to copy all-gathered frozen weights out of FSDP2's buffer, relative to reading them once: each byte is read and
written, at 80% of the memory's bandwidth (63 ms a step in a profile of Qwen3-30B-A3B on two H200)."""
EXPERT_EFFICIENCY = 0.89
"""Rate of grouped matmuls of experts with many rows, relative to a dense matmul of their size."""
EXPERT_ROWS = 110
"""Rows that take as long as each expert's weights and partly empty tiles. With 512 randomly routed rows per expert,
grouped matmuls reach 505 to 565 TFLOP/s on an H200, where dense ones reach 676 to 779. Fitted to 4 layers of
gpt-oss-120b, whose experts had 64 rows, and 16 of Qwen3-30B-A3B with 128."""
EXPERT_GAP_SECONDS = 0.0014
"""Time that the GPU waits for the host per sharded layer with experts, forward and backward: the kernels around the
grouped matmuls are small. From the profile of `COPY_OUT_PASSES`. One GPU has no such gap, without FSDP2's hooks."""
ADAPTER_GAP_SECONDS = 0.00045
"""Time between the kernels of a layer with adapters, forward and backward: 132 kernels in a profile of Gemma 3 12B LoRA
on an H200, whose steps take 22 ms longer than their kernels. CUDA graphs leave about 0.1 ms."""
EXPERT_ADAPTER_PASSES = 10
"""Number of times that adapters of experts with many rows read or write the experts' inputs and outputs, forward and
backward. Fitted to one run of Qwen3-30B-A3B on two H200."""
TENSOR_PARALLEL_SECONDS = 0.021
"""Time that tensor parallelism adds to a micro-batch in addition to its collectives. It was the same with 8 layers of
OLMo-3 7B and with Llama 3 8B on two H200 (43 and 42 ms in steps of two micro-batches). The cause is not known."""
VISION_EFFICIENCY = 0.64
"""Speed of a vision tower relative to matmuls and SDPA attention in the decoder: its layers are not compiled. Fitted to
Gemma 3 4B LoRA with six pictures of 896 x 896 in a pack on an H200."""
DEQUANTIZE_BYTES = 3.7
"""Bytes read and written to dequantize a 4-bit weight: in the forward and the backward pass, and to recompute it."""
DORA_BYTES = 10
"""Bytes read and written per weight with a DoRA adapter and micro-batch, mostly for the norms of merged rows. Fitted to
Llama 3 8B on an H200: a step takes 14 ms longer than with LoRA."""
TRANSPOSE_BYTES = 2
"""Bytes read and written per frozen weight in FP8 and micro-batch, to transpose it for the backward pass."""
NETWORK_EFFICIENCY = 0.75  # fraction of a link's bandwidth that collectives reach
NCCL_SLOWDOWN = 0.28
"""Fraction of the time of FSDP2's NCCL collectives over NVLink that is lost, because overlapping matmuls take up to 39%
longer. Copy engines do not slow them down. The loss is assumed to be proportional to the bytes moved within a node: a
slower network between nodes does not add to it."""
ZERO3_EXPOSED = 0.5  # fraction of the time of ZeRO-3's collectives that does not overlap with computation
HOST_BANDWIDTH = 29e9
"""Bytes per second in one direction between a GPU and host memory while all GPUs of a node copy (PCIe 5 x16: 64e9).
Fitted to a run of Llama 3.3 70B LoRA on two H200 with 32 of 80 layers offloaded."""
FORWARD_SHARE = {True: 0.42, False: 0.33}
"""Fraction of a micro-batch's time in the forward pass, by whether only adapters are trained; derived from FLOPs."""
PADDING: Final = 2 * log(2)
"""Assumed number of tokens in padded rows per token of documents. Each row width is twice the one before, and document
lengths are assumed to be log-uniform."""
HOST_SECONDS_PER_LAYER = {"fsdp2": 0.004, "zero3": 0.008}
"""Time that the host takes to launch the kernels of a layer, forward and backward."""
GRAPHS_UP_TO = 4
"""Largest time of a micro-batch on the GPU, relative to the host's, for CUDA graphs: beyond, they take memory and save
little. LoRA on Llama 3 8B with 2 packs of 4,096 tokens has 4.1, and its GPU waits 1% of a step for the host."""
CAPTURED_FAMILIES = {*MEASURED, "qwen3_moe"}  # not all others can be captured; their memory is planned for graphs
GRAPH_SECONDS_PER_LAYER = 0.0006
"""Assumed minimum time of a layer's kernels in CUDA graphs, forward and backward: about 150 kernels (Gemma 3 12B LoRA)
of 4 µs. No run of so few tokens was measured."""
SLOW_HOST = 1.8
"""Launch time on the slowest measured host, relative to `HOST_SECONDS_PER_LAYER`: Gemma 3 1B with four packs of 2,048
tokens took 189 ms a step beside an H100."""
UNMEASURED = 1.35
"""Longest step to expect of a family or setting that nothing was fitted to, relative to the plan's: Qwen 3.5 9B took
1.17 times as long as planned on an H100, and layers that don't compile as one graph 1.16 times (torchtitan's Llama 3
8B)."""
FP8_HOST_SECONDS_PER_LAYER = 0.00096
"""Time in which the host also launches the cast and transpose kernels of FP8. Fitted to Gemma 3 12B LoRA with frozen
weights in FP8 at 2,048 tokens on an H200, where the host limits the step."""

Bound = Literal["gpu", "host", "main memory", "network"]


@dataclass(frozen=True)
class StepTimePlan:
    bound: Bound  # the resource that limits the step time
    step_seconds: float  # duration of an optimizer step
    slow_host_seconds: float  # `step_seconds` with a slow host (`SLOW_HOST`)
    tokens_per_second: float  # tokens of documents, without padding, over all processes
    mfu: float  # model FLOPs utilization: `document_flops` as a fraction of the GPUs' peak


def predict_step_time(setup: Setup, gpu: Gpu, padding: float = 1.0, fill: float = 1.0) -> StepTimePlan:
    """Predict the speed of a run, assuming that each pack is one document with all of its tokens in the loss.

    `padding` is the ratio of computed tokens to a pack's tokens if documents are padded rows; it adds micro-batches.
    `fill` is the fraction of a pack that is not padding. Padding does not count in throughput and MFU.
    """
    training = setup.training
    early, last = (_micro_batch_seconds(setup, gpu, is_last=is_last) for is_last in (False, True))
    bound: Bound = max(last, key=lambda name: last[name])
    num_micro_batches = ceil(padding * setup.num_micro_batches)
    step, on_slow_host = (
        (num_micro_batches - 1) * max(*early.values(), factor * early["host"])
        + max(last[bound], factor * last["host"])
        + _optimizer_seconds(setup, gpu)
        for factor in (1.0, SLOW_HOST)
    )
    total = fill * training.global_batch_size * training.sequence_length / step
    flops = document_flops(setup.shape, training, training.sequence_length).total
    peak = setup.num_processes * gpu.peak_flops(training.compute_precision)
    return StepTimePlan(bound, step, on_slow_host, total, total * flops / peak)


def predict_forward_hours(setup: Setup, gpu: Gpu, num_tokens: float) -> float:
    """Predict the GPU hours of the forward passes of a teacher or a reference with this setup, before step 1."""
    share = FORWARD_SHARE[setup.training.adapters is not None]
    plain = replace(setup, training=setup.training.model_copy(update={"objective": "next_token", "cuda_graphs": False}))
    return setup.num_processes * share * num_tokens / predict_step_time(plain, gpu).tokens_per_second / 3600


def _micro_batch_seconds(setup: Setup, gpu: Gpu, *, is_last: bool) -> dict[Bound, float]:
    """Return the seconds that a micro-batch keeps each resource busy; the longest is the bottleneck."""
    links, network = _collective_seconds(setup, gpu, is_last=is_last)
    gpu_seconds = _gpu_seconds(setup, gpu, setup.tokens) + _exchange_seconds(setup, gpu)
    gpu_seconds += setup.tokens * vision_seconds(setup, gpu)
    gpu_seconds += _weights_bytes(setup, is_last=is_last) / gpu.memory_bandwidth
    if count_model(setup.shape).experts_per_token and setup.num_layer_shards > 1:
        gpu_seconds += EXPERT_GAP_SECONDS * setup.shape.num_hidden_layers
    has_graphs = setup.shape.family in CAPTURED_FAMILIES and replays_graphs(setup)
    if setup.training.adapters is not None and not has_graphs:
        gpu_seconds += ADAPTER_GAP_SECONDS * setup.shape.num_hidden_layers
    if setup.training.tensor_parallel > 1:
        gpu_seconds += TENSOR_PARALLEL_SECONDS
    if setup.engine == "zero3":
        gpu_seconds += ZERO3_EXPOSED * max(links, network)
    elif setup.num_nodes > 1 or setup.training.collectives == "nccl" or setup.training.tensor_parallel > 1:
        gpu_seconds += NCCL_SLOWDOWN * links
    if has_graphs:
        gpu_seconds = max(gpu_seconds, GRAPH_SECONDS_PER_LAYER * setup.shape.num_hidden_layers)
    busy: dict[Bound, float] = {
        "gpu": gpu_seconds,
        "network": max(links, network),
        "host": 0.0 if has_graphs else _host_seconds(setup),
        "main memory": _offload_seconds(setup, gpu_seconds),
    }
    training = setup.training
    is_computed = training.has_reference and not training.stores_reference
    forwards = 1 + 2 * is_computed if training.objective == "kto" else int(is_computed)  # extra ones
    passes = 1 + FORWARD_SHARE[True] * forwards
    return {resource: passes * seconds for resource, seconds in busy.items()}


def longest_step(recipe: RecipePlan, speed: StepTimePlan) -> float:
    """Return the longest step to expect of a recipe, relative to the plan's; 1 if such runs were measured."""
    is_measured = recipe.model.architecture.is_measured and not recipe.training.deterministic
    return 1.0 if is_measured else max(UNMEASURED, speed.slow_host_seconds / speed.step_seconds)


def replays_graphs(setup: Setup) -> bool:
    """Return whether the host launches the decoder as CUDA graphs, because its speed may limit steps otherwise."""
    if not setup.can_replay_graphs or setup.gpu is None:
        return setup.can_replay_graphs
    return _gpu_seconds(setup, setup.gpu, setup.tokens) < GRAPHS_UP_TO * _host_seconds(setup)


def _host_seconds(setup: Setup) -> float:
    """Return the seconds that a micro-batch takes the host, if its kernels are launched one by one."""
    fp8_seconds = FP8_HOST_SECONDS_PER_LAYER if setup.training.multiplies_in_fp8 else 0.0
    return setup.shape.num_hidden_layers * (HOST_SECONDS_PER_LAYER[setup.engine] + fp8_seconds)


def _gpu_seconds(setup: Setup, gpu: Gpu, tokens: int) -> float:
    shape, training = setup.shape, setup.training
    modes = training.checkpointing_of_layers(shape.num_hidden_layers, setup.engine)
    fully, partly = (modes.count(mode) / len(modes) for mode in ("full", "except_attention"))
    flops = document_flops(shape, training, training.sequence_length)
    matrices = flops.matrices + 6 * count_repeated_parameters(shape, training)
    matrices += 2 * (fully + partly) * _recomputed_weights(setup)
    matrices *= _matmul_time(shape, training, tokens)
    compiled = setup.engine == "fsdp2" and training.compile != "none"
    saved = layer_bytes(shape, training.compute_bytes, compiled=compiled)
    passes = ELEMENTWISE_PASSES[compiled] * (1 + RECOMPUTED_PASSES * _checkpointed_share(setup))
    moved: float = shape.num_hidden_layers * saved * passes
    if training.adapters is not None:  # inputs and outputs of a token's adapted experts
        counts, targets = count_model(shape), training.adapters.targets
        adapted = [each for each in counts.expert_matrices if each.num_ranks(targets)]
        numbers = counts.experts_per_token * sum(each.count * (each.inputs + each.outputs) for each in adapted)
        moved += EXPERT_ADAPTER_PASSES * training.compute_bytes * numbers * _rows_time(counts, tokens)
    seconds = matrices / (MATRIX_EFFICIENCY * gpu.matmul_efficiency)
    attention, recurrent = _attention_flops(setup, gpu)
    seconds += attention + (fully * attention + partly * recurrent) / 3
    seconds /= gpu.peak_flops(training.compute_precision)
    seconds += moved / gpu.memory_bandwidth + delta_rule_seconds(setup, gpu)
    return tokens * seconds


def vision_seconds(setup: Setup, gpu: Gpu) -> float:
    """Return the seconds that the vision part takes per token of a picture."""
    flops = vision_flops(setup.shape, setup.training)
    work = flops.matrices / (MATRIX_EFFICIENCY * gpu.matmul_efficiency) + flops.attention / SDPA_EFFICIENCY
    return work / VISION_EFFICIENCY / gpu.peak_flops(setup.training.compute_precision)


def _checkpointed_share(setup: Setup) -> float:
    modes = setup.training.checkpointing_of_layers(setup.shape.num_hidden_layers, setup.engine)
    return 1 - modes.count("none") / len(modes)


def _recomputed_weights(setup: Setup) -> int:
    """Count the weights whose matmuls full checkpointing recomputes: a last one only if a norm reads it."""
    shape, training, counts = setup.shape, setup.training, count_model(setup.shape)
    last = sum(each.count * each.size for each in counts.linears if each.name == "down_proj")
    adapters = 0 if training.adapters is None else count_active_adapter_parameters(shape, training.adapters)
    is_last_read = family_of(shape.family).savings.norms_follow
    return counts.active + adapters - (0 if is_last_read else last)


def _weights_bytes(setup: Setup, *, is_last: bool) -> float:
    """Count the bytes of weights and gradients that a micro-batch's collectives and quantization read and write."""
    counts = method_counts(setup.shape, setup.training)
    around, layers = _parts_of_weights(setup)
    is_added = setup.defers_sync and not is_last
    moved = (ACCUMULATE_BYTES if is_added else CAST_BYTES) * (around + layers) * counts.trained
    moved -= FP8_GATHER_BYTES * setup.num_gathered_in_fp8
    if setup.training.quantization == "nf4":
        moved += DEQUANTIZE_BYTES * (2 + _checkpointed_share(setup)) * counts.quantized
    else:
        moved += TRANSPOSE_BYTES * counts.quantized
    adapters = setup.training.adapters
    if adapters is not None and adapters.use_dora:
        linears = count_model(setup.shape).linears
        moved += DORA_BYTES * sum(each.count * each.size for each in linears if each.name in adapters.targets)
    if adapters is not None and setup.num_layer_shards > 1:
        moved += COPY_OUT_PASSES * _gathered_bytes(setup, is_last=is_last)
    return moved


def _attention_flops(setup: Setup, gpu: Gpu) -> tuple[float, float]:
    """Return the attention FLOPs of a token, divided by the fraction of the peak that the kernel reaches.

    The second number is the part of layers with a recurrent state, which have no attention output to save.
    """
    shape, training, length = setup.shape, setup.training, setup.training.sequence_length
    recurrent = token_flops(shape, training, keys=0, keys_in_window=0).attention
    if training.attention in {"sdpa", "eager"}:
        attention = token_flops(shape, training, length, length).attention
        return attention / SDPA_EFFICIENCY, recurrent / SDPA_EFFICIENCY
    has_sinks = family_of(shape.family).has_sinks  # which only flex attention computes
    efficiency = (None if has_sinks else gpu.attention_efficiency(training)) or gpu.flex_efficiency
    return document_flops(shape, training, length).attention / efficiency, recurrent / efficiency


def _rows_time(counts: ModelCounts, tokens: int) -> float:
    """Return the time of the experts' matmuls relative to experts with many rows."""
    num_experts = max((each.experts for each in counts.expert_matrices), default=0)
    return 1 + EXPERT_ROWS * num_experts / (tokens * max(1, counts.experts_per_token))


def _matmul_time(shape: ArchitectureSpec, training: TrainingPlan, tokens: int) -> float:
    """Return the time of the matmuls relative to dense bf16: FP8 is faster, grouped matmuls of experts are slower."""
    counts = count_model(shape)
    all_weights = counts.active + shape.vocab_size * shape.hidden_size
    in_fp8 = routed = 0.0
    if training.multiplies_in_fp8:
        matrices = (each for each in counts.linears if is_quantized("fp8", each.inputs, each.outputs))
        in_fp8 = sum(each.count * each.size for each in matrices) / all_weights
    if counts.experts_per_token:
        routed = max(0, counts.active - sum(each.count * each.size for each in counts.linears)) / all_weights
    fp8_time = 1 - in_fp8 + in_fp8 / FP8_SPEEDUP[training.trains_in_fp8]
    return fp8_time + routed * (_rows_time(counts, tokens) / EXPERT_EFFICIENCY - 1)


def _collective_seconds(setup: Setup, gpu: Gpu, *, is_last: bool) -> tuple[float, float]:
    """Return the seconds that a micro-batch's collectives use the links within a node, and the network between nodes.

    Weights are all-gathered for the forward pass, and again for the backward pass if they were resharded; gradients are
    reduce-scattered. A process receives the other shards of its replica; a node receives each shard once. Replicas
    all-reduce their gradients in the last micro-batch: each shard passes every link twice, for the sum and its result.
    """
    nodes = max(1, setup.num_nodes // setup.num_replicas)  # of a replica
    gradients = setup.training.reduce_bytes * method_counts(setup.shape, setup.training).trained
    carried = _gathered_bytes(setup, is_last=is_last) + (gradients if is_last or not setup.defers_sync else 0)
    around, layers = _parts_of_weights(setup)
    received = (1 - 1 / setup.num_shards) * around + (1 - 1 / setup.num_layer_shards) * layers
    links, network = received * carried, (1 - 1 / nodes) * carried
    if is_last and setup.num_nodes > nodes:
        network += 2 * (1 - nodes / setup.num_nodes) * gradients / nodes
    elif is_last:
        links += 2 * (1 - 1 / setup.num_replicas) * gradients / setup.num_shards
    between = 0.0 if setup.node_bandwidth is None else network / (NETWORK_EFFICIENCY * setup.node_bandwidth)
    return links / (NETWORK_EFFICIENCY * gpu.link_bandwidth), between


def _parts_of_weights(setup: Setup) -> tuple[float, float]:
    """Return the fractions of all weights that a process computes with: outside the layers, and within them."""
    counts = count_model(setup.shape)
    around = counts.around / counts.total
    return around, (1 - around) / setup.training.tensor_parallel


def _gathered_bytes(setup: Setup, *, is_last: bool) -> int:
    times = int(is_last or not setup.defers_sync) if setup.keeps_weights else 2
    whole = setup.training.compute_bytes * count_model(setup.shape).total
    return times * (whole - saved_by_quantization(setup.shape, setup.training) - setup.num_gathered_in_fp8)


def _exchange_seconds(setup: Setup, gpu: Gpu) -> float:
    """Return the seconds of the collectives within layers, which do not overlap with computation.

    Context parallelism exchanges tokens for heads (all-to-all). Tensor parallelism all-gathers and reduce-scatters the
    tokens twice.
    """
    shape, training, size = setup.shape, setup.training, setup.training.context_parallel
    heads = 2 * shape.num_attention_heads + 2 * max(shape.num_key_value_heads, training.gpus_per_pack)
    numbers = heads * shape.head_dim * (size - 1) / size + 4 * (training.tensor_parallel - 1) * shape.hidden_size
    passes = 2 + _checkpointed_share(setup)
    moved = shape.num_hidden_layers * passes * setup.tokens * numbers * training.compute_bytes
    # Adapter matrices that are not divided all-reduce their gradients in fp32.
    moved += 2 * FP32 * count_repeated_parameters(shape, training) / training.tensor_parallel
    return moved / (NETWORK_EFFICIENCY * gpu.link_bandwidth)


def _offload_seconds(setup: Setup, gpu_seconds: float) -> float:
    """Return the seconds of a micro-batch if copies between GPU and host memory limit it.

    The forward pass copies activations to the host, the backward pass copies them back.
    """
    shape, training, state = setup.shape, setup.training, 0
    if training.offload == "all":
        state = 2 * training.compute_bytes * count_model(shape).total
        state += training.reduce_bytes * method_counts(shape, training).trained
    out = Activations(setup).offloaded / HOST_BANDWIDTH if training.activation_offload else 0.0
    forward = gpu_seconds * FORWARD_SHARE[training.adapters is not None]
    back = out if out <= forward else max(out, gpu_seconds - forward)
    return state / HOST_BANDWIDTH + out + back


def _optimizer_seconds(setup: Setup, gpu: Gpu) -> float:
    shape, training = setup.shape, setup.training
    stored = method_counts(shape, training).trained + count_repeated_parameters(shape, training)
    trained = stored / setup.num_shards
    if setup.training.offload == "none":
        return OPTIMIZER_BYTES * trained / gpu.memory_bandwidth
    return 2 * 8 * trained / HOST_BANDWIDTH  # states are fetched and written back
