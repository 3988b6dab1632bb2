"""FSDP2: torch's `fully_shard`, applied per decoder layer."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ftkit.train.model import enable_checkpointing, find_decoder_layers
from ftkit.train.objective import MicroBatch, add_objective, summed_loss
from ftkit.train.proofs import ShardingFacts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftkit.specs.training import TrainingSpec
    from ftkit.train.world import World


class Fsdp2Engine:
    """Master weights, gradients and optimizer states in fp32, each rank holding its shard.

    One process is a mesh of one: the same code with nothing to gather.
    """

    def __init__(self, model: nn.Module, training: TrainingSpec, world: World) -> None:
        self._world = world
        self.model = shard(model, training, world)
        self._optimizer: torch.optim.Optimizer | None = None
        self._training = training

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, made when it is first needed: by then the weights are in place."""
        if self._optimizer is None:
            self._optimizer = _make_optimizer(self.model, self._training)
        return self._optimizer

    def facts(self) -> ShardingFacts:
        """Return what is true of the model on this rank."""
        layers = find_decoder_layers(self.model)
        parameters = list(self.model.parameters())
        return ShardingFacts(
            num_layers=len(layers),
            num_units=sum(isinstance(module, FSDPModule) for module in self.model.modules()),
            num_sharded_layers=sum(isinstance(layer, FSDPModule) for layer in layers),
            num_checkpointed_layers=sum(bool(getattr(layer, "gradient_checkpointing", False)) for layer in layers),
            total_elements=sum(parameter.numel() for parameter in parameters),
            local_elements=sum(_local(parameter).numel() for parameter in parameters),
            largest_local_elements=sum(_even_share(parameter, self._world.size) for parameter in parameters),
            trainable_elements=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        )

    def backward(self, batch: MicroBatch, num_targets: int, *, is_last: bool) -> torch.Tensor:
        """Run forward and backward; see `Engine.backward`."""
        cast("FSDPModule", self.model).set_requires_gradient_sync(is_last)
        loss = summed_loss(self.model, batch)
        # Reduction averages over ranks; the loss is a mean over the targets of all of them.
        torch.autograd.backward(loss * (self._world.size / num_targets))
        return loss.detach()

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """Give the model for evaluation, without gradients; put everything back into shards afterwards."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield self.model
        finally:
            self.model.train()
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale gradients down to a global norm; return the norm that they had."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, learning_rate: float) -> None:
        """Update the weights and clear the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        """Write weights and optimizer states; every rank writes its own part."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Read back what `save` wrote, at any world size."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        # DCP fills the tensors of these dictionaries in place.
        state_dict_loader.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def full_weights(self) -> dict[str, Any]:
        """Return all weights, whole and in main memory, on rank 0; an empty dictionary elsewhere."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.model, options=options)


def shard(model: nn.Module, training: TrainingSpec, world: World) -> nn.Module:
    """Shard a model: each decoder layer is a unit, and what is outside the layers is one more.

    Layers are gathered for their forward and again for their backward; embedding and output projection stay
    gathered in between.
    """
    if training.activation_checkpointing:
        enable_checkpointing(model)
    compute = torch.bfloat16 if training.precision == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in find_decoder_layers(model):
        fully_shard(layer, mesh=world.mesh, mp_policy=policy, reshard_after_forward=world.size > 1)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    add_objective(model)
    return model


def _make_optimizer(model: nn.Module, training: TrainingSpec) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": training.weight_decay},  # noqa: PLR2004
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},  # noqa: PLR2004
    ]
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas, fused=True)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _even_share(parameter: torch.Tensor, num_shards: int) -> int:
    """Return the most elements of a parameter that one of `num_shards` ranks may hold, split along its rows."""
    rows = parameter.shape[0] if parameter.ndim else 1
    return -(-rows // num_shards) * (parameter.numel() // max(1, rows))
