"""FSDP2: torch's `fully_shard`, applied per decoder layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ftkit.errors import TrainingError
from ftkit.planning.choices import EnginePlan
from ftkit.train.causal_lm import CausalLM, MicroBatch, SourceLosses
from ftkit.train.checkpoint.loading import check_model, read_state, saved_sizes
from ftkit.train.components.optimizer import HostStateAdamW, make_optimizer
from ftkit.train.distributed.collectives import choose_collectives
from ftkit.train.distributed.cuda_graphs import GraphedDecoder, can_capture
from ftkit.train.distributed.pack_parallel import divide_layers
from ftkit.train.engine import InitWeights, ShardingStats, State, collect_sharding_stats
from ftkit.train.memory.activation_checkpointing import apply_activation_checkpointing
from ftkit.train.memory.compile import compiles
from ftkit.train.model.float8 import GatheredScales
from ftkit.train.model.hf_model import find_decoder, find_decoder_layers
from ftkit.train.model.local_shard import gradient_norm, local_tensor, with_ordinary_shard
from ftkit.train.model.lora import saved_parameters
from ftkit.train.model.pretrained import materialize
from ftkit.train.model.routers import Routers
from ftkit.train.model.vision import vision_layers
from ftkit.train.objectives import Preferences
from ftkit.train.private_apis.torch import (
    FSDP2_ON_CPUS,
    TORCH,
    ReplacedParameters,
    cast_all,
    complete_cpu_streams,
    set_collectives,
)
from ftkit.train.world import DTYPES, World

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from ftkit.config.training import TrainingPlan
    from ftkit.train.distributed.cuda_graphs import Receive
    from ftkit.train.private_apis.torch import Ctx

_DEFAULT = EnginePlan("fsdp2", "")
_STEPS_BEFORE_GRAPHS = 2  # the first ones compile, and a second number of documents may compile again
_NORM_EPSILON = 1e-6
"""Added to the norm of gradients when they are clipped, as in `torch.nn.utils.clip_grads_with_norm_`."""


class Fsdp2Engine:
    """Master weights, gradients and optimizer states in fp32, sharded over the ranks.

    On one process, nothing is sharded unless parameters are offloaded: FSDP2 would copy each weight into a buffer and
    out of it, and keep the host busier than the GPU (docs/adr/0001). The arithmetic is the same as FSDP2's. From a
    step's first forward to its last backward, the model has copies of its weights in the compute dtype. That backward
    frees each copy after its last use; CUDA graphs have their own copies. Their gradients are added to fp32 ones; those
    of a step's only micro-batch stay in the compute dtype, which takes half the memory and gives the same update.
    Adapters are cast on use.
    """

    def __init__(
        self,
        hf_model: PreTrainedModel,
        training: TrainingPlan,
        world: World,
        init_weights: InitWeights | None = None,
        chosen: EnginePlan = _DEFAULT,
    ) -> None:
        self._world = world
        self._training = training
        self._is_unsharded = world.size == 1 and training.offload != "all"
        self._weights_of_step: ExitStack | None = None
        self._has_all_copies = False  # of weights; otherwise of the output projection's
        self._is_last_backward = False  # of a step
        self._anchor = torch.zeros((), requires_grad=True)
        self._chosen = chosen
        has_adapters = training.adapters is not None
        _check_support(hf_model, world, is_sharded=not self._is_unsharded, has_adapters=has_adapters)
        is_empty = any(parameter.is_meta for parameter in hf_model.parameters())
        self._gathered_scales = GatheredScales.of(find_decoder_layers(hf_model), training, world)
        self.model = _prepare_layers(hf_model, training, world)
        if not self._is_unsharded:
            _shard(self.model, training, world, reshard_after_forward=not chosen.keeps_weights)
        if is_empty:
            parameter_device = torch.device("cpu") if training.offload == "all" else world.device
            materialize(self.model, world.device, parameter_device)
            hf_model.tie_weights()  # `to_empty` untied them
        if init_weights is not None:
            init_weights(hf_model)
        self._shards = list(hf_model.parameters())
        """The sharded parameters; forward and backward replace them with unsharded ones in the model."""
        self._parameters = ReplacedParameters(hf_model)
        self.optimizer = make_optimizer(hf_model, training)
        self._num_steps, self._num_backwards = 0, 0  # so far, and in the current step
        self._has_one_backward = True  # in the last step
        self._graphs = None
        if self._is_unsharded and chosen.replays_graphs and can_capture(self.model):
            leaves = [self._anchor, *(shard for shard in self._shards if shard.requires_grad)]
            cast = partial(self._cast_weights, [*find_decoder(hf_model).parameters()])
            self._graphs = GraphedDecoder(self.model, leaves, cast, self.add_gradient)
        self._update_scales()

    def sharding_stats(self) -> ShardingStats:
        layers = find_decoder_layers(self.model.hf_model)
        return collect_sharding_stats(
            self.model.hf_model,
            lambda each: (each.numel(), local_tensor(each).numel(), self._even_share(each)),
            num_units=sum(isinstance(module, FSDPModule) for module in self.model.modules()),
            num_sharded_layers=sum(isinstance(layer, FSDPModule) for layer in layers),
            is_unsharded=self._is_unsharded,
        )

    def _even_share(self, parameter: torch.Tensor) -> int:
        """Return the maximum number of elements of a parameter on one rank, if it is sharded by rows.

        Before that, tensor parallelism divides a layer's matrices by rows or columns, but only one of an adapter's two.
        """
        world, shape, num_shards = self._world, [*parameter.shape], self._world.num_shards
        if isinstance(parameter, DTensor) and parameter.device_mesh == world.tensor_mesh:
            num_shards = world.num_layer_shards
            may_be_whole = parameter.ndim < 2 or (parameter.requires_grad and self._training.adapters is not None)  # noqa: PLR2004
            placement = parameter.placements[-1]
            if not (may_be_whole and placement.is_replicate()):
                shape[placement.dim if isinstance(placement, Shard) else 0] //= world.tensor_parallel
        rows = shape[0] if shape else 1
        return -(-rows // num_shards) * (torch.Size(shape).numel() // max(1, rows))

    def _cast_weights(
        self, parameters: Iterable[torch.Tensor] | None = None, receive: Receive | None = None
    ) -> AbstractContextManager[object]:
        """Replace an unsharded model's weights, or some, by copies in the compute dtype; otherwise, others cast.

        `receive` is called once per parameter, with its gradient, which frees the copy. By default, `add_gradient` is
        called in each backward pass, and frees copies in a step's last one.
        """
        dtype = DTYPES[self._training.compute_precision]
        if not self._is_unsharded or self._training.adapters is not None or dtype == torch.float32:
            return nullcontext()
        receive = self.add_gradient if receive is None else partial(self._pass_on, receive)
        chosen = [*(self._shards if parameters is None else parameters)]
        copies = dict(zip(chosen, cast_all(chosen, dtype), strict=True))

        def copy(parameter: torch.Tensor) -> torch.Tensor:
            copied: torch.Tensor = copies.pop(parameter)
            if not parameter.requires_grad:
                return copied
            own: torch.Tensor = ComputeCopy.apply(self._anchor, copied, partial(receive, parameter))  # type: ignore[no-untyped-call]
            return own

        return self._parameters.by(copy, chosen)

    def _pass_on(self, receive: Receive, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self._parameters.restore(parameter)
        receive(parameter, gradient)

    def add_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the gradient of a micro-batch, in the parameter's or in the compute dtype; may keep the tensor itself."""
        kept, gradient = self.optimizer.gradients, gradient.contiguous()  # as autograd, with the parameter's strides
        if self._is_last_backward:
            self._parameters.restore(parameter)  # frees its copy
        is_only = self._is_last_backward and self._num_backwards == 1
        if is_only and gradient.dtype != parameter.dtype:
            kept[parameter] = kept[parameter] + gradient if parameter in kept else gradient
        elif parameter.grad is None:
            parameter.grad = gradient.to(parameter.dtype)
        else:
            parameter.grad += gradient

    def forward(self, batch: MicroBatch, source_losses: SourceLosses | None = None) -> torch.Tensor:
        hidden = None
        if self._graphs is not None and self._num_steps >= _STEPS_BEFORE_GRAPHS:
            hidden = self._graphs.hidden_states(batch, is_only=self._has_one_backward)
        if self._weights_of_step is None or (hidden is None and not self._has_all_copies):
            self._end_copies()
            self._weights_of_step, self._has_all_copies = ExitStack(), hidden is None
            projection = self.model.hf_model.get_output_embeddings().parameters()
            self._weights_of_step.enter_context(self._cast_weights(None if hidden is None else projection))
        loss: torch.Tensor = self.model(batch=batch, source_losses=source_losses, hidden=hidden)
        return loss

    def _end_copies(self) -> None:
        if self._weights_of_step is not None:
            self._weights_of_step.close()
            self._weights_of_step = None

    def backward(self, loss: torch.Tensor, num_labels: int, *, is_last: bool) -> None:
        """Accumulate gradients; see `Engine.backward`.

        Each micro-batch's gradients are reduce-scattered immediately. If the sync is deferred, they are accumulated
        unsharded until the last one. Replicas all-reduce their shards in the last micro-batch.
        """
        root = cast("FSDPModule", self.model)
        if self._world.num_replicas > 1:
            root.set_requires_all_reduce(is_last)
        if self._chosen.defers_sync:
            root.set_requires_gradient_sync(is_last)
            root.set_reshard_after_backward(is_last or not self._chosen.keeps_weights)
        self._is_last_backward = is_last
        self._num_backwards += 1
        # FSDP2 averages gradients over the ranks that share a layer; the loss is a mean over the labels of all ranks.
        torch.autograd.backward(loss * (self._world.num_layer_ranks / num_labels))
        self._is_last_backward = False
        if is_last:
            self._has_one_backward, self._num_backwards = self._num_backwards == 1, 0
            self._end_copies()

    @contextmanager
    def inference(self) -> Iterator[CausalLM]:
        if self._graphs is not None:
            self._graphs.release()
        self.model.eval()
        try:
            with torch.no_grad(), self._cast_weights():
                yield self.model
        finally:
            self.model.train()
            self._reshard()

    @contextmanager
    def probe(self) -> Iterator[CausalLM]:
        try:
            with warnings.catch_warnings(), self._cast_weights():
                # torch warns of outputs that are later modified in place; a probe does not modify any.
                warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
                yield self.model
        finally:
            self._reshard()

    def _reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def step(self, learning_rate: float, max_norm: float) -> torch.Tensor:
        norm = gradient_norm(self._gradients())
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group["factor"]
        self.optimizer.grad_scale = ((norm + _NORM_EPSILON) / max_norm).clamp(min=1.0)
        self.optimizer.found_inf = 1.0 - norm.isfinite().float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.gradients.clear()
        self._update_scales()
        self._num_steps += 1
        return norm

    def _gradients(self) -> list[torch.Tensor]:
        found = (self.optimizer.gradients.get(shard, shard.grad) for shard in self._shards)
        return [each for each in found if each is not None]

    def _update_scales(self) -> None:
        if self._gathered_scales is not None:
            mesh = self._world.layer_mesh
            self._gathered_scales.update(mesh.get_group(mesh.ndim - 1))

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "parameters": [local_tensor(shard) for shard in self._shards],
            "gradients": [local_tensor(gradient) for gradient in self._gradients()],
            "optimizer": [local_tensor(value) for value in states if torch.is_tensor(value)],
        }

    def state(self) -> State:
        model, optimizer = self._state_dicts()
        # Omit the parameter groups: the plan defines them.
        return {"model": model, "optimizer": {"state": optimizer["state"]}}

    def _state_dicts(self) -> tuple[State, State]:
        hf_model = self.model.hf_model
        model, optimizer = get_state_dict(hf_model, self.optimizer, options=self._state_options())
        # `get_state_dict` also returns buffers, and tied parameters under each of their names.
        saved = saved_parameters(hf_model, self._training)
        return {name: with_ordinary_shard(cast("torch.Tensor", model[name])) for name in saved}, optimizer

    def _state_options(self, *, full: bool = False) -> StateDictOptions:
        ignores_frozen = self._training.adapters is not None
        return StateDictOptions(
            full_state_dict=full, cpu_offload=full, ignore_frozen_params=ignores_frozen, strict=False
        )

    def load(self, folder: Path) -> None:
        hf_model = self.model.hf_model
        check_model(hf_model, folder)
        model, optimizer = self._state_dicts()
        # A parameter that never had a gradient has no state in a checkpoint, and keeps its initial state.
        saved = saved_sizes(folder, "optimizer.state.")
        has_state = {name.rpartition(".")[0] for name in saved}
        states = {name: each for name, each in optimizer["state"].items() if name in has_state or not saved}
        read_state({"model": model, "optimizer": {"state": states}}, folder)
        options = self._state_options()
        set_state_dict(hf_model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options)
        if isinstance(self.optimizer, HostStateAdamW):
            self.optimizer.to_host()
        self._update_scales()

    def trained_weights(self) -> dict[str, torch.Tensor]:
        hf_model = self.model.hf_model
        weights = get_model_state_dict(hf_model, options=self._state_options(full=True))
        saved = saved_parameters(hf_model, self._training)
        return {name: cast("torch.Tensor", value) for name, value in weights.items() if name in saved}


class ComputeCopy(torch.autograd.Function):
    """A copy in the compute dtype, whose gradient goes to a function instead of to autograd, which would cast it."""

    @staticmethod
    def forward(
        ctx: Ctx, _: torch.Tensor, copied: torch.Tensor, receive: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        ctx.receive = receive
        return copied.detach()

    @staticmethod
    def backward(ctx: Ctx, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.receive(gradient)
        return None, None, None


def _check_support(model: nn.Module, world: World, *, is_sharded: bool, has_adapters: bool) -> None:
    torch_version = f"FSDP2 of torch {TORCH[0]}.{TORCH[1]}"
    layers = [{id(parameter) for parameter in layer.parameters()} for layer in find_decoder_layers(model)]
    if world.size > 1 and world.device.type == "cpu" and not FSDP2_ON_CPUS:
        raise TrainingError(
            f"{torch_version} can't train with {world.size} processes without GPUs",
            meaning="it sums gradients that should be averaged; newer versions train on CPUs",
            fix="use GPUs, one process, or a newer torch",
        )
    if is_sharded and TORCH < (2, 8) and len({parameter.dtype for parameter in model.parameters()}) > 1:
        raise TrainingError(
            f"{torch_version} can't shard frozen weights in bf16 together with adapters in fp32",
            meaning="torch supports this from version 2.8 on",
            fix="use an image with torch 2.8 or newer, or set training.engine=zero3",
        )
    if (is_sharded or has_adapters) and sum(map(len, layers)) > len(set().union(*layers)):
        raise TrainingError(
            f"decoder layers of {type(model).__name__} share weights: they can't be sharded, nor have adapters",
            meaning="some of its layers are one layer that is computed several times, as in Zamba",
            fix="train it on one process with training.method=full, or choose another model",
        )


def _prepare_layers(hf_model: PreTrainedModel, training: TrainingPlan, world: World) -> CausalLM:
    """Apply tensor parallelism, activation checkpointing and compilation to decoder layers; add the loss."""
    complete_cpu_streams()
    routers = Routers.of(hf_model, training, world)
    layers = find_decoder_layers(hf_model)
    if world.tensor_mesh is not None:
        divide_layers(layers, hf_model.config.model_type, world.tensor_mesh["tensor"], training.adapters)
    apply_activation_checkpointing(
        layers,
        training.checkpointing_of_layers(len(layers), "fsdp2"),
        compiled=compiles(training, world.device),
        offloaded=training.offloaded_of_layers(len(layers), "fsdp2"),
        device=world.device,
    )
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    if training.adapters is not None and training.compute_precision == "bf16":
        # Adapters are trained in fp32 and cast on use.
        autocast = partial(torch.autocast, world.device.type, torch.bfloat16)
    objective = Preferences.of(training)
    return CausalLM(hf_model, routers=routers, objective=objective, distill=training.distillation, autocast=autocast)


def _shard(model: CausalLM, training: TrainingPlan, world: World, *, reshard_after_forward: bool) -> None:
    """Apply FSDP2: each decoder layer and each layer of a vision encoder is a unit, and the rest is one more.

    Layers are all-gathered for their forward, and again for their backward if they are resharded in between. Embedding
    and output projection stay unsharded between forward and backward.

    With adapters, parameters are all-gathered in their storage dtype: frozen ones in the compute dtype, trained ones in
    fp32, which are cast on use, as on one process. FSDP2 then copies bytes. With a single dtype, it would copy values,
    and `torch._foreach_copy_` on GPUs replaces all NaNs with one NaN, which would change 4-bit weights.
    """
    collectives = choose_collectives(training, world)
    compute = None if training.adapters is not None else DTYPES[training.compute_precision]
    reduced = DTYPES[training.reduce_precision] if collectives is None else compute
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduced)
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if training.offload == "all" else OffloadPolicy()
    layers = find_decoder_layers(model.hf_model)
    reshards = world.num_layer_shards > 1 and reshard_after_forward
    vision = vision_layers(model.hf_model)
    for layer in (*vision, *layers):
        fully_shard(
            layer, mesh=world.layer_mesh, reshard_after_forward=reshards, mp_policy=precision, offload_policy=offload
        )
    root = fully_shard(model, mesh=world.mesh, mp_policy=precision, offload_policy=offload)
    if world.tensor_parallel > 1:  # the rest is sharded over more ranks, but needs the same gradient divisor
        root.set_force_sum_reduction_for_comms(True)
        root.set_gradient_divide_factor(world.num_layer_ranks)
    if collectives is not None:
        for module in (*vision, *layers, model):
            set_collectives(cast("FSDPModule", module), *collectives)
