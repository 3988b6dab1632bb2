"""Detection of how a script's model is sharded over the processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accelerate import FullyShardedDataParallelPlugin
from lone_world import lone_world
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments

from ftkit.config.context import Context
from ftkit.launch.resolve import RunArgs
from ftkit.launch.user_script import ScriptArgs, accelerate_json, placed, resolve_script
from ftkit.planning.plan import PlacementPlan
from ftkit.train.private_apis.libraries import accelerate_environment
from ftkit.train.script_process import FoundSharding, find_sharding


def build(num_layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))


def found(model: nn.Module, world_size: int = 2) -> FoundSharding:
    return find_sharding(list(model.modules()), world_size)


def test_the_sharding_or_replication_of_a_model_is_detected() -> None:
    alone = found(build())
    assert (alone.sharding, alone.num_held, alone.num_parameters) == ("none", 60, 60)
    assert "torch.distributed is not" in alone.explain_missing(was_asked=False, device="cuda")
    with lone_world("cpu"):
        assert "nothing wraps them" in found(build()).explain_missing(was_asked=False, device="cuda")
        copied = found(DistributedDataParallel(build()))
        assert copied.sharding == "ddp"
        assert "although accelerate.json enables" in copied.explain_missing(was_asked=True, device="cuda")
        assert "shard on CPUs" in copied.explain_missing(was_asked=True, device="cpu")
        sharded = build()
        fully_shard(sharded)
        whole = found(sharded)
        assert (whole.sharding, whole.num_units) == ("fsdp2", 1)
        assert "one piece" in whole.explain_missing(was_asked=True, device="cuda")
        layered = build()
        for layer in layered:
            fully_shard(layer)
        fully_shard(layered)
        assert found(layered).num_units == 4
        assert not found(layered).explain_missing(was_asked=True, device="cuda")
        assert not found(build(), world_size=1).explain_missing(was_asked=False, device="cuda")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"distributed_type": "FSDP", "mixed_precision": "bf16",
             "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}},
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
             "ACCELERATE_MIXED_PRECISION": "bf16"},
        ),
        (
            {"distributed_type": "DEEPSPEED", "mixed_precision": "no", "deepspeed_config": {"zero_stage": 3}},
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
        ),
    ],
)  # fmt: skip
def test_accelerate_gets_the_environment_that_its_launcher_would_set(
    config: dict[str, object], expected: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "accelerate.json"
    file.write_text(
        json.dumps(placed({"compute_environment": "LOCAL_MACHINE"} | config, PlacementPlan(1, 2, "cuda", 1)))
    )
    told = accelerate_environment(file)
    assert expected.items() <= told.items()
    assert "PATH" not in told


def test_accelerates_own_classes_read_what_is_made_from_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)

    def tell(*overrides: str) -> None:
        args = RunArgs("olmo3-7b-full", overrides, "olmo3:25.02", "a3-megagpu-8g", num_nodes=2)
        plan, _ = resolve_script(ScriptArgs(Path("train.py")), args, [], Context(tmp_path, tmp_path / "user", {}))
        file = tmp_path / "accelerate.json"
        file.write_text(accelerate_json(plan))
        for name, value in accelerate_environment(file).items():
            monkeypatch.setenv(name, value)

    tell("training.reshard_after_forward=never", "training.offload=all")
    fsdp = FullyShardedDataParallelPlugin()
    assert (fsdp.fsdp_version, fsdp.reshard_after_forward) == (2, False)
    assert fsdp.cpu_offload
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    tell("training.engine=zero3", "training.offload=optimizer")
    settings = TrainingArguments(str(tmp_path), gradient_accumulation_steps=4, use_cpu=True, report_to=[])
    deepspeed = settings.deepspeed_plugin.deepspeed_config
    zero = deepspeed["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"], zero["offload_param"]["device"]) == (3, "cpu", "none")
    assert deepspeed["gradient_accumulation_steps"] == "auto"  # or the Trainer refuses a script with another number
