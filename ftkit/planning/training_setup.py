"""The setup of a run and the specifications of its GPU, from which memory and step time are predicted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ftkit.config.execution import USABLE_MEMORY, is_gathered_in_fp8
from ftkit.config.training import EngineName, Precision, TrainingPlan, TrainingSpec
from ftkit.models.architecture import ArchitectureSpec
from ftkit.models.families import family_of
from ftkit.models.parameters import count_model

if TYPE_CHECKING:
    from ftkit.config.cluster import GpuModel


@dataclass(frozen=True)
class Gpu:
    """Specifications of a GPU from its vendor's data sheet; the memory is nvidia-smi's value where measured."""

    device_name: str  # torch's name. Variants with another speed (PCIe, NVL) have other names, and are unknown.
    memory_gib: float
    bf16_flops: float  # dense FLOP/s, on tensor cores
    fp32_flops: float  # FLOP/s on CUDA cores: the trainer keeps TF32 off (`ftkit.train.world`)
    memory_bandwidth: float  # bytes/s
    link_bandwidth: float  # bytes/s to the other GPUs of its node, one way
    has_fast_attention: bool  # whether flash-attn-4 and cuDNN's attention in packs run on it (Hopper and newer)
    has_fp8: bool = True  # whether it has FP8 matmuls (Ada, Hopper and newer)
    is_blackwell: bool = False
    matmul_efficiency: float = 0.803  # fraction of `bf16_flops` that the best single matmul reaches
    flex_efficiency: float = 0.34  # fraction of `bf16_flops` that flex attention reaches, forward and backward
    is_measured: bool = True  # whether the efficiencies are based on measurements of this GPU

    def peak_flops(self, precision: Precision) -> float:
        """Return the FLOP/s of matmuls in the compute dtype."""
        return self.bf16_flops if precision == "bf16" else self.fp32_flops

    def attention_efficiency(self, training: TrainingSpec) -> float | None:
        """Return the fraction of the peak that flash-attn-4 or cuDNN reaches, if installed; None if neither can run."""
        is_fast = training.compute_precision == "bf16" and self.has_fast_attention
        return VARLEN_EFFICIENCY.get(training.attention) if is_fast else None

    @property
    def usable_gib(self) -> float:
        """Memory available to tensors."""
        return USABLE_MEMORY * self.memory_gib


VARLEN_EFFICIENCY = {"auto": 0.56, "flash4": 0.56, "cudnn": 0.45}
"""Fraction of `bf16_flops`, forward and backward: flash-attn-4 on H200; cuDNN 9.19 on H100 (0.43 to 0.54 by length)."""

# bf16 and fp32 FLOP/s are from NVIDIA's data sheets: A100 (2021), H100 SXM, H200 SXM, L4; for B200, 1/8 of HGX B200.
# The best matmuls are from "Maximum Achievable Matmul FLOPS" of stas00/ml-engineering (2026): 271.2 TFLOP/s on A100,
# 794.5 on H100 and H200, 1,745 on B200. Flex attention was measured on H200. On A100, it reaches 85 to 90% of
# FlashAttention-2's speed (PyTorch's article on FlexAttention, 2024), which is 60% of the peak (Dao 2023, figure 4). No
# such measurements were found for L4, so it has Hopper's efficiencies.
GPUS: dict[GpuModel, Gpu] = {
    "a100-40gb": Gpu(
        "NVIDIA A100-SXM4-40GB", 40.0, 312e12, 19.5e12, 1.555e12, 300e9, has_fast_attention=False, has_fp8=False,
        matmul_efficiency=0.869, flex_efficiency=0.52,
    ),
    "a100-80gb": Gpu(
        "NVIDIA A100-SXM4-80GB", 80.0, 312e12, 19.5e12, 2.039e12, 300e9, has_fast_attention=False, has_fp8=False,
        matmul_efficiency=0.869, flex_efficiency=0.52,
    ),
    "b200": Gpu(
        "NVIDIA B200", 178.0, 2250e12, 75e12, 8.0e12, 900e9, has_fast_attention=True, is_blackwell=True,
        matmul_efficiency=0.776,
    ),
    "h100-80gb": Gpu("NVIDIA H100 80GB HBM3", 79.6, 989e12, 67e12, 3.35e12, 450e9, has_fast_attention=True),
    "h200": Gpu("NVIDIA H200", 140.4, 989e12, 67e12, 4.8e12, 450e9, has_fast_attention=True),
    "l4": Gpu("NVIDIA L4", 22.5, 121e12, 30.3e12, 0.3e12, 16e9, has_fast_attention=False, is_measured=False),
}  # fmt: skip


def gpu_of_device(device_name: str) -> Gpu | None:
    """Return the GPU with this name in torch; None if it is unknown."""
    return next((gpu for gpu in GPUS.values() if gpu.device_name == device_name), None)


def teacher_settings(training: TrainingPlan) -> TrainingPlan:
    """Return the settings of a teacher: all weights are frozen, in the compute precision."""
    kept = ("objective", "distill", "attention", "compile", "deterministic", "collectives", "sequence_length",
            "micro_batch_size", "global_batch_size", "max_steps", "num_epochs", "seed")  # fmt: skip
    offload = "all" if training.offload == "all" else "none"
    values = training.model_dump(include={*kept}) | {"offload": offload, "precision": training.compute_precision}
    resolved = {"shard_degree": training.shard_degree}  # 1 is no value of a recipe
    return TrainingPlan.model_validate(values).model_copy(update=resolved)


@dataclass(frozen=True)
class Setup:
    """Model, training settings with every `auto` resolved, and devices of a run: the inputs of `Fit` and step time."""

    shape: ArchitectureSpec
    training: TrainingPlan
    num_shards: int = 1  # processes that share a copy of the model
    engine: EngineName = "fsdp2"
    device: Literal["cpu", "cuda"] = "cuda"
    gpu: Gpu | None = None  # None for a CPU, or if the profile sets no GPU
    num_nodes: int = 1
    node_bandwidth: float | None = None  # bytes/s of a node's network; unlimited if None
    node_memory_gib: float | None = None
    keeps_weights: bool = False  # whether layers stay unsharded between forward and backward pass
    num_replicas: int = 1  # copies of the model, each on `num_shards` neighboring processes
    defers_sync: bool = False  # whether gradients are reduced only in the last micro-batch of a step
    has_linear_kernel: bool = True
    """Whether a kernel computes the model's linear attention, if any; otherwise, PyTorch does."""
    has_packs: bool = True  # whether micro-batches are packs of text: without pictures and padded rows
    teacher: ArchitectureSpec | None = None  # of a model that computes before step 1 on the same processes

    @property
    def num_processes(self) -> int:
        """Number of processes on all nodes, one per GPU."""
        return self.num_shards * self.num_replicas

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches that a process accumulates in a step."""
        return max(1, self.training.global_batch_size // (self.training.micro_batch_size * self.num_data_ranks))

    @property
    def num_data_ranks(self) -> int:
        """Number of groups of processes with different packs. The processes of a group divide each pack."""
        return self.num_processes // self.training.gpus_per_pack

    @property
    def tokens(self) -> int:
        """Number of tokens of a micro-batch on one process."""
        return self.training.micro_batch_size * self.training.sequence_length // self.training.gpus_per_pack

    @property
    def num_layer_shards(self) -> int:
        """Number of processes that shard a layer's matrices, after tensor parallelism has divided them."""
        return self.num_shards // self.training.tensor_parallel

    @property
    def gathers_in_fp8(self) -> bool:
        """Whether trained matrices are all-gathered in FP8."""
        return self.training.sends_fp8 and self.num_layer_shards > 1

    @property
    def num_gathered_in_fp8(self) -> int:
        """Number of weights that are all-gathered in FP8; each takes one byte less than in bf16."""
        linears = count_model(self.shape).linears if self.gathers_in_fp8 else ()
        return sum(
            each.count * each.size for each in linears if is_gathered_in_fp8(each.name, each.inputs, each.outputs)
        )

    @property
    def can_replay_graphs(self) -> bool:
        """Whether the host can launch a micro-batch's decoder as two CUDA graphs: its forward and its backward pass.

        A graph's memory is its own: a second forward pass beside it, as of a reference, would need all activations
        twice. Linear attention can't be captured. The first steps after a resume are launched, and can round otherwise.
        """
        training = self.training
        is_alone = self.num_processes == 1 and self.device == "cuda" and self.engine == "fsdp2"
        is_eager = training.compile == "none" or training.offload == "all" or training.activation_offload
        calls_again = training.objective == "kto" or (training.has_reference and not training.stores_reference)
        has_state = family_of(self.shape.family).other_layers == "linear_attention"
        is_wanted = training.cuda_graphs and not training.deterministic
        return is_wanted and self.has_packs and is_alone and not (is_eager or has_state or calls_again)

    def with_training(self, **changes: Any) -> Setup:
        return replace(self, training=self.training.model_copy(update=changes))


def teacher_setup(setup: Setup) -> Setup | None:
    """Return the setup of a run's teacher; None if it has none."""
    if setup.teacher is None:
        return None
    training = teacher_settings(setup.training)
    alone = replace(setup, shape=setup.teacher, training=training, teacher=None)
    return replace(alone, engine="fsdp2", keeps_weights=False, defers_sync=False)
