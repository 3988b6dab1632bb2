"""Throughput published by others for configurations that a plan can express. No constant was fitted to it.

docs/reference/benchmarks.md shows these rows with today's prediction, and lists the sources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ftkit import assets
from ftkit.config.load import read_shipped
from ftkit.config.training import TrainingPlan
from ftkit.models.config_json import read_shape
from ftkit.planning.choices import with_sharding
from ftkit.planning.step_time import predict_step_time
from ftkit.planning.training_setup import GPUS, Gpu, Setup

# FlashAttention-2, which most of them used, reaches 0.30 of the peak on Hopper (measured on H200) and 0.60 on A100 (Dao
# 2023). It replaces flex, which ftkit would use there.
A100 = replace(GPUS["a100-80gb"], flex_efficiency=0.60)
H100 = replace(GPUS["h100-80gb"], flex_efficiency=0.30)
# 96 GB of HBM2e, 500 W: "the actual peak is between SXM and NVL" (989 and 835 TFLOP/s), say their authors.
H100_AT_500_W = replace(H100, memory_gib=95.0, memory_bandwidth=2.4e12, bf16_flops=912e12)
LLAMA2 = {"vocab_size": 32_000}
FLASH2 = {"attention": "flex", "collectives": "nccl"}
EAGER = {**FLASH2, "compile": "none"}
HSDP = {"shard_degree": 8}


@dataclass(frozen=True)
class Published:
    """A published run.

    Attributes:
        label: as on the page.
        speed: tokens per second and GPU.
        gpu: the GPU model, with the attention kernel used.
        num_gpus: eight per node.
        training: training settings.
        model: shipped architecture and its changes.
        half: whether half of the layers, or of their matmuls, were recomputed: between two of ftkit's settings.
        node_gbps: network bandwidth per node, in Gbit/s.
        micro: packs per micro-batch.
        accumulation: micro-batches per step.
    """

    label: str
    speed: float
    gpu: Gpu
    num_gpus: int
    training: dict[str, Any]
    model: tuple[str, dict[str, int]] = ("llama3-8b", {})
    half: bool = False
    node_gbps: float = 3200
    micro: int = 2
    accumulation: int = 1


LLAMA3_70B = ("llama3.3-70b", {})
LLAMA2_7B = ("llama3-8b", LLAMA2 | {"intermediate_size": 11_008, "num_key_value_heads": 32})
LLAMA2_13B = (
    "llama3-8b",
    LLAMA2
    | {"hidden_size": 5120, "intermediate_size": 13_824, "num_hidden_layers": 40}
    | {"num_attention_heads": 40, "num_key_value_heads": 40},
)
LLAMA2_34B = (
    "llama3-8b",
    LLAMA2 | {"hidden_size": 8192, "intermediate_size": 22_016, "num_hidden_layers": 48, "num_attention_heads": 64},
)
LLAMA2_70B = ("llama3.3-70b", LLAMA2)
FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
FP8 = {"precision": "fp8"}
AT_4K = {"sequence_length": 4096}
PUBLISHED = (
    Published("torchtitan [1], 8B", 6667, H100_AT_500_W, 8, FLASH2 | SELECTIVE, half=True),
    Published("torchtitan [1], 8B, not compiled", 5762, H100_AT_500_W, 8, EAGER | SELECTIVE, half=True),
    Published("torchtitan [1], 8B, FP8", 8532, H100_AT_500_W, 8, FLASH2 | SELECTIVE | FP8, half=True),
    Published("torchtitan [1], 8B, 32,768 tokens, FP8", 3890, H100_AT_500_W, 8,
              FLASH2 | FULL | FP8 | {"sequence_length": 32_768}, micro=1),
    Published("torchtitan [1], 8B", 6514, H100_AT_500_W, 128, FLASH2 | SELECTIVE, half=True),
    Published("torchtitan [1], 8B, not compiled", 5605, H100_AT_500_W, 128, EAGER | SELECTIVE, half=True),
    Published("torchtitan [1], 8B, FP8", 8380, H100_AT_500_W, 128, FLASH2 | SELECTIVE | FP8, half=True),
    Published("torchtitan by Trainy [2], 8B, FP8", 10_938, GPUS["h200"], 32, FLASH2 | SELECTIVE | FP8, half=True),
    Published("torchtitan by Trainy [2], 8B, FP8", 10_753, GPUS["h200"], 64, FLASH2 | SELECTIVE | FP8, half=True),
    Published("AutoModel [3], 70B, context parallel 2", 867, GPUS["h100-80gb"], 64, FULL | {"context_parallel": 2},
              LLAMA3_70B, micro=1, accumulation=4),
    Published("fms-fsdp [4], Llama 2 7B", 7500, H100, 96, EAGER | AT_4K | HSDP, LLAMA2_7B, node_gbps=800),
    Published("fms-fsdp [4], Llama 2 13B", 3800, H100, 96, EAGER | AT_4K | SELECTIVE, LLAMA2_13B, half=True,
              node_gbps=800),
    Published("fms-fsdp [4], 34B", 1550, H100, 96, EAGER | AT_4K | FULL, LLAMA2_34B, node_gbps=800),
    Published("Megatron-Bridge [5], 8B, FP8", 30_624, GPUS["b200"], 8, FP8, accumulation=8),
    Published("torchtitan [6], 8B, not compiled", 2973, A100, 64, EAGER | SELECTIVE, half=True,
              node_gbps=1600, micro=1),
    Published("torchtitan [6], 70B, not compiled", 331, A100, 64, EAGER | FULL, LLAMA3_70B, node_gbps=1600, micro=1),
    Published("torchtitan [6], Llama 2 13B, not compiled", 2162, A100, 64, EAGER | AT_4K, LLAMA2_13B, node_gbps=1600),
    Published("torchtitan [6], Llama 2 70B, not compiled", 353, A100, 64, EAGER | AT_4K | FULL, LLAMA2_70B,
              node_gbps=1600),
    Published("fms-fsdp [4], Llama 2 7B", 3700, A100, 128, EAGER | AT_4K | HSDP, LLAMA2_7B, node_gbps=400),
    Published("fms-fsdp [4], Llama 2 13B", 1800, A100, 128, EAGER | AT_4K | SELECTIVE, LLAMA2_13B, half=True,
              node_gbps=400),
    Published("fms-fsdp [4], 34B", 700, A100, 128, EAGER | AT_4K | FULL, LLAMA2_34B, node_gbps=400),
)  # fmt: skip


def predicted_speed(run: Published) -> float:
    """Return the tokens per second and GPU that today's planner predicts for a published run."""
    name, changed = run.model
    ranks = run.num_gpus // run.training.get("context_parallel", 1)
    spec = TrainingPlan.model_validate(
        {"sequence_length": 8192, "max_steps": 1, "learning_rate": 1e-5}
        | {"shard_degree": run.num_gpus, "sync_gradients": "every_micro_batch"}
        | {"micro_batch_size": run.micro, "global_batch_size": run.micro * run.accumulation * ranks}
        | run.training
    )
    shape = read_shape(read_shipped(assets.ARCHITECTURES / f"{name}.yaml")[0], name).model_copy(update=changed)
    nodes, bandwidth = -(-run.num_gpus // 8), run.node_gbps * 1e9 / 8
    setup = Setup(shape, spec, run.num_gpus, gpu=run.gpu, num_nodes=nodes, node_bandwidth=bandwidth)
    modes = [spec.activation_checkpointing, "full" if run.half else spec.activation_checkpointing]
    setups = [with_sharding(setup.with_training(activation_checkpointing=mode)) for mode in modes]
    seconds = sum(predict_step_time(each, run.gpu).step_seconds for each in setups) / 2
    return spec.global_batch_size * spec.sequence_length / seconds / run.num_gpus
