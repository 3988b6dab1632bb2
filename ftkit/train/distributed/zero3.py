"""ZeRO-3: DeepSpeed partitions every parameter over the ranks, and all-gathers it for use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from ftkit.config.execution import ZERO3_BUCKET
from ftkit.errors import TrainingError
from ftkit.train.causal_lm import CausalLM, MicroBatch, SourceLosses
from ftkit.train.checkpoint.loading import check_model, read_state
from ftkit.train.components.optimizer import parameter_groups
from ftkit.train.engine import InitWeights, ShardingStats, State, collect_sharding_stats
from ftkit.train.memory.activation_checkpointing import apply_activation_checkpointing
from ftkit.train.model.expert_adapters import experts_in_layers
from ftkit.train.model.hf_model import find_decoder_layers
from ftkit.train.model.local_shard import local_shard
from ftkit.train.model.lora import saved_parameters
from ftkit.train.model.routers import Routers
from ftkit.train.objectives import Preferences
from ftkit.train.private_apis.libraries import (
    Zero3Optimizer,
    Zero3Partition,
    forget_pending_gradients,
    import_deepspeed,
    zero3_partition,
)
from ftkit.train.world import DTYPES, World

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ftkit.config.training import TrainingPlan

_STATES = ("exp_avg", "exp_avg_sq")


class Zero3Engine:
    """Weights in the compute dtype, their fp32 masters and optimizer states, partitioned over the ranks."""

    def __init__(
        self, hf_model: PreTrainedModel, training: TrainingPlan, world: World, init_weights: InitWeights | None = None
    ) -> None:
        self._world = world
        self._training = training
        # DeepSpeed returns offloaded states on the device, one parameter at a time; they are immediately moved back.
        self._state_mesh = world.mesh if training.offload == "none" else world.host_mesh
        for name, module in hf_model.named_modules():
            if isinstance(module, nn.ModuleList) and name.endswith("experts"):
                raise TrainingError(  # ranks that use different modules would deadlock
                    f"ZeRO-3 can't train '{name}', whose experts are separate modules",
                    meaning="this family, or this version of transformers, has no parameter for all experts of a layer",
                    fix="set training.engine=fsdp2",
                )
        hide_activations(hf_model)
        self._deepspeed = import_deepspeed(world.device)
        config = _deepspeed_config(training, world)
        precision = DTYPES[training.compute_precision]
        routers = Routers.of(hf_model, training, world)
        hf_model.tie_weights()  # while tied parameters are still one object
        layers = find_decoder_layers(hf_model)
        for unit in [*layers, hf_model]:
            _materialize(unit, world.device, precision)
            self._deepspeed.zero.Init(module=unit, config_dict_or_path=config, dtype=precision)
        exact = [] if init_weights is None else _init_in_fp32(hf_model, init_weights)
        apply_activation_checkpointing(
            layers,
            training.checkpointing_of_layers(len(layers), "zero3"),
            compiled=False,
            offloaded=training.offloaded_of_layers(len(layers), "zero3"),
            device=world.device,
        )
        # DeepSpeed all-gathers the output projection's weight only if it is called as a module.
        objective, distill = Preferences.of(training), training.distillation
        self.model = CausalLM(hf_model, routers=routers, by_weight=False, objective=objective, distill=distill)
        # Each step sets the learning rate. It is 0 until then, so that DeepSpeed's initialization of the states can't
        # change the weights.
        optimizer = torch.optim.AdamW(parameter_groups(hf_model, training), lr=0.0, betas=training.betas, fused=True)
        self._engine, *_ = self._deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)
        self._optimizer = Zero3Optimizer(self._engine)
        self._optimizer.init_states(_STATES)
        for parameter, master in exact:
            self._deepspeed.utils.safe_set_local_fp32_param(parameter, master)

    def sharding_stats(self) -> ShardingStats:
        hf_model = self.model.hf_model
        layers = find_decoder_layers(hf_model)
        in_layers = set(layers.parameters())
        rest = [parameter for parameter in hf_model.parameters() if parameter not in in_layers]
        sharded_layers = sum(all(map(self._is_partitioned, layer.parameters())) for layer in layers)
        return collect_sharding_stats(
            hf_model,
            self._shard_of,
            num_units=sharded_layers + all(map(self._is_partitioned, rest)),
            num_sharded_layers=sharded_layers,
        )

    def _shard_of(self, parameter: torch.Tensor) -> tuple[int, int, int]:
        partition = zero3_partition(parameter)
        total = parameter.numel() if partition is None else partition.shape.numel()
        even_share = -(-total // self._world.size)
        if partition is None:
            return total, total, even_share
        persistent = total if partition.is_persistent else 0
        return total, partition.values.numel() + parameter.numel(), even_share + persistent

    def _is_partitioned(self, parameter: nn.Parameter) -> bool:
        _, local, allowed = self._shard_of(parameter)
        return zero3_partition(parameter) is not None and local <= allowed

    def forward(self, batch: MicroBatch, source_losses: SourceLosses | None = None) -> torch.Tensor:
        loss: torch.Tensor = self._engine(batch=batch, source_losses=source_losses)
        return loss

    def backward(self, loss: torch.Tensor, num_labels: int, *, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed averages gradients over the ranks; the loss is a mean over the labels of all of them.
        self._engine.backward(loss * (self._world.size / num_labels))

    @contextmanager
    def inference(self) -> Iterator[CausalLM]:
        self._engine.eval()  # DeepSpeed frees all-gathered parameters after use
        try:
            with torch.no_grad():
                yield self.model
        finally:
            self._engine.train()

    @contextmanager
    def probe(self) -> Iterator[CausalLM]:
        try:
            yield self.model
        finally:
            forget_pending_gradients(self.model)

    def step(self, learning_rate: float, max_norm: float) -> torch.Tensor:
        self._optimizer.set_step(learning_rate, max_norm)
        self._engine.step()
        norm = self._optimizer.grad_norm
        # DeepSpeed skips a step with gradients that are not finite, and then has no norm.
        return torch.as_tensor(torch.nan if norm is None else norm, device=self._world.device).float()

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        partitions = (local_shard(parameter).values for parameter in self.model.parameters())
        return {
            "parameters": [*self._optimizer.masters, *partitions],
            "gradients": self._optimizer.gradients,
            "optimizer": [value for states in self._optimizer.states.values() for value in states.values()],
        }

    def load(self, folder: Path) -> None:
        check_model(self.model.hf_model, folder)
        state = self.state()
        read_state(state, folder)
        write = self._deepspeed.utils

        def padded(values: DTensor, partition: Zero3Partition) -> torch.Tensor:
            local = values.to_local()
            return functional.pad(local, (0, partition.values.numel() - local.numel()))

        for name, parameter, partition in self._saved():
            master = padded(state["model"][name], partition)
            partition.values.copy_(master)
            if not parameter.requires_grad:
                continue
            write.safe_set_local_fp32_param(parameter, master)
            for key in _STATES:
                write.safe_set_local_optimizer_state(parameter, padded(state["optimizer"][key][name], partition), key)
        for states in self._optimizer.states.values():
            states["step"].copy_(state["step"])
        self._optimizer.gather_persistent()

    def trained_weights(self) -> dict[str, torch.Tensor]:
        weights = {}
        for name, parameter, _ in self._saved():
            with self._deepspeed.zero.GatheredParameters([parameter]):
                if self._world.is_first:
                    weights[name] = parameter.detach().to("cpu", copy=True)
        return weights

    def _saved(self) -> list[tuple[str, nn.Parameter, Zero3Partition]]:
        return [
            (name, parameter, partition)
            for name, parameter in saved_parameters(self.model.hf_model, self._training).items()
            if (partition := zero3_partition(parameter)) is not None
        ]

    def state(self) -> State:
        """Return fp32 weights and optimizer states as shards of flat tensors: DeepSpeed divides as `chunk`."""
        read = self._deepspeed.utils
        saved = self._saved()
        trained = [each for each in saved if each[1].requires_grad]
        return {
            "model": {
                name: self._to_dtensor(
                    partition,
                    parameter,
                    read.safe_get_local_fp32_param(parameter) if parameter.requires_grad else partition.values.float(),
                )
                for name, parameter, partition in saved
            },
            "optimizer": {
                key: {
                    name: self._to_dtensor(partition, parameter, read.safe_get_local_optimizer_state(parameter, key))
                    for name, parameter, partition in trained
                }
                for key in _STATES
            },
            "step": next(iter(self._optimizer.states.values()))["step"].cpu(),
        }

    def _to_dtensor(self, partition: Zero3Partition, parameter: nn.Parameter, values: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            values[: local_shard(parameter).values.numel()],
            self._state_mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size([partition.shape.numel()]),
            stride=(1,),
        )


def hide_activations(model: nn.Module) -> None:
    """Hide the activation functions of experts from DeepSpeed, which adds hooks to every module.

    Ranks that call different modules deadlock. Experts that are computed one by one call their activation function once
    per expert with tokens, which differs between ranks.
    """
    for _, experts in experts_in_layers(model):
        for name, module in list(experts.named_children()):
            if not [*module.parameters(), *module.buffers()]:
                delattr(experts, name)
                object.__setattr__(experts, name, module)  # nn.Module would register it again


def _deepspeed_config(training: TrainingPlan, world: World) -> dict[str, object]:
    to_host = {"device": "cpu", "pin_memory": world.device.type == "cuda"}
    zero: dict[str, object] = {
        "stage": 3,
        "overlap_comm": world.device.type == "cuda",
        "reduce_bucket_size": ZERO3_BUCKET,
        # DeepSpeed would reduce the gradients of some mixtures in hooks of modules, which probes call too. That is for
        # experts in separate modules, of which a rank may use none; here they are one parameter.
        "leaf_module": {"classes": []},
    }
    if training.offload != "none":
        zero["offload_optimizer"] = to_host
    if training.offload == "all":
        zero["offload_param"] = to_host
    return {
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": 1,  # the loop accumulates, and decides which micro-batch is a step's last
        "gradient_clipping": training.max_grad_norm,
        "bf16": {"enabled": training.compute_precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": training.reduce_precision,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's optimizer would be compiled at each start
        "steps_per_print": 2**31,
    }


def _init_in_fp32(model: nn.Module, init_weights: InitWeights) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Initialize the partitions; return trained ones' fp32 values that rounding changed, for DeepSpeed's masters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    partitions = [(each, found.values) for each in trained if (found := zero3_partition(each)) is not None]
    rounded = [values.data for _, values in partitions]
    for _, values in partitions:
        values.data = values.float()
    init_weights(model)
    changed = []
    for (parameter, values), before in zip(partitions, rounded, strict=True):
        exact = values.data
        values.data = before.copy_(exact)
        if not torch.equal(before.float(), exact):
            changed.append((parameter, exact))
    return changed


def _materialize(unit: nn.Module, device: torch.device, precision: torch.dtype) -> None:
    """Allocate the parameters of one part of a model that are on the meta device; cast all to the compute dtype."""
    materialized: dict[nn.Parameter, nn.Parameter] = {}
    for module in unit.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
        for name, parameter in list(module.named_parameters(recurse=False)):
            if zero3_partition(parameter) is not None:
                continue
            if parameter.is_meta and parameter not in materialized:
                empty = torch.empty_like(parameter, device=device, dtype=precision)
                materialized[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            if parameter.is_meta:
                setattr(module, name, materialized[parameter])
            else:
                parameter.data = parameter.data.to(precision)
