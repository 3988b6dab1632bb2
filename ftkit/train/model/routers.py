"""Routers of mixtures of experts: the load-balancing loss, and statistics of how tokens are spread over experts.

The load-balancing loss is that of transformers (`load_balancing_loss_func`; Fedus et al. 2021, equations 4 to 6, over
all layers at once): E * sum_i(f_i * P_i) over E experts. f_i is the frequency of expert i among the k largest logits of
a layer's router, and P_i is its probability, both averaged over tokens and layers. The experts that process a token may
differ: PhiMoE's routers sample them in training, and those of MiniMax-M2 and Ernie 4.5 add a bias. The statistics count
the experts that process the tokens. ftkit computes the loss per row, which is a pack or a padded document, and each
label's loss includes its row's. So it does not depend on micro-batches, accumulation, or the number of processes.

f has no gradient, so a layer needs only f of all layers for the gradient of P. Layers may be compiled and recomputed in
the backward pass, so no tensor with a graph leaves them. Instead, a hook of each router overwrites the sums of this
micro-batch, and returns the router's weights with a backward pass that adds the gradient of P. The backward pass of the
loss runs before those of the layers, and sets f for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ftkit.errors import TrainingError
from ftkit.models.parameters import read_experts
from ftkit.runs.records import RouterStats
from ftkit.train.model.hf_model import find_decoder, find_decoder_layers, text_part_of
from ftkit.train.model.lora import is_adapter
from ftkit.train.private_apis.transformers import router_classes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ftkit.config.training import TrainingSpec
    from ftkit.train.private_apis.torch import Ctx
    from ftkit.train.world import World


class Routers:
    """The routers of a model; none if it is dense.

    Attributes:
        coefficient: weight of the load-balancing loss; 0 for none.
    """

    def __init__(
        self,
        routers: Sequence[nn.Module] = (),
        num_experts: int = 0,
        *,
        coefficient: float = 0.0,
        has_loss: bool = False,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Register hooks at modules that return logits [N, E], the weights of the chosen experts, and indices [N, k].

        `has_loss` tells whether the family has a load-balancing loss; otherwise its logits may mean something else.
        `group` has the ranks with the other tokens of the same packs.
        """
        self.coefficient = coefficient
        self._group = group
        self._num_experts = num_experts
        self._taps = [_Tap(has_loss=has_loss, adds_gradient=coefficient > 0) for _ in routers]
        for router, tap in zip(routers, self._taps, strict=True):
            router.register_forward_hook(tap)
        self._buffers: dict[tuple[int, ...], _Buffers] = {}
        """By the shape of the micro-batch; kept, because CUDA graphs write to them."""
        self._current: _Buffers | None = None  # those of the current micro-batch
        self._new_sums = partial(RouterSums, len(routers), num_experts, has_loss=has_loss, device=device)
        self._step = self._new_sums()

    @classmethod
    def of(cls, hf_model: PreTrainedModel, training: TrainingSpec, world: World) -> Routers:
        """Find the routers of a transformers model, before an engine partitions its parameters."""
        config = text_part_of(hf_model.config)
        experts = read_experts(config.to_dict())
        routers = [] if experts is None else _find_routers(hf_model, experts.num)
        has_loss = bool(routers) and hasattr(config, "router_aux_loss_coef")
        coefficient = training.router_aux_loss_coef
        if coefficient is None:
            # As transformers' Trainer does. Adapters don't train routers: with them, only the recipe enables the loss.
            is_on = getattr(config, "output_router_logits", False) and training.adapters is None
            coefficient = float(getattr(config, "router_aux_loss_coef", None) or 0.0) if is_on else 0.0
        if coefficient and not has_loss:
            raise TrainingError(
                f"a load-balancing loss can't be computed for '{config.model_type}'",
                meaning="it has no routers that return what such a loss needs: the model is dense, its family balances "
                "experts in another way, such as DeepSeek-V3 by a bias of its routers (which training leaves as it "
                "is), or transformers is older than 5",
                fix="set training.router_aux_loss_coef=0",
            )
        return cls(
            routers,
            0 if experts is None else experts.num,
            coefficient=coefficient,
            has_loss=has_loss,
            group=world.context.group,
            device=world.device,
        )

    @property
    def exist(self) -> bool:
        return bool(self._taps)

    def begin(self, input_ids: torch.Tensor, is_token: torch.Tensor | None) -> None:
        """Prepare for a forward pass over a micro-batch, int64 [B, T].

        `is_token`, bool [B, T], is false for padding; None if there is none.
        """
        if not self._taps:
            return
        shape = (*input_ids.shape,)
        if shape not in self._buffers:
            zeros = partial(torch.zeros, device=input_ids.device)
            sums = zeros(len(self._taps), len(_SUMS), len(input_ids), self._num_experts)
            self._buffers[shape] = _Buffers(sums, zeros(len(input_ids), self._num_experts), zeros(shape))
        self._current = current = self._buffers[shape]
        current.gradient.zero_()  # for a pass without the loss, such as a check's
        current.is_token.copy_(torch.ones_like(input_ids) if is_token is None else is_token)
        for tap, sums in zip(self._taps, current.sums, strict=True):
            tap.sums, tap.gradient, tap.is_token = sums, current.gradient, current.is_token

    def balance(self, loss: torch.Tensor, label_index: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's loss with the same value, and with the gradient of the load-balancing loss added.

        The loss is summed over the labels; `label_index`, int64 [N], has the index of the token before each label.
        """
        if self._current is None or not torch.is_grad_enabled():
            return loss
        sums, pending, is_token = self._current
        _, probability, _, largest = sums.sum(0)
        row_of_label = label_index // is_token.shape[1]
        labels = largest.new_zeros(len(largest)).index_add_(0, row_of_label, torch.ones_like(row_of_label).float())
        # Sum over the ranks of a pack: counts of the largest logits, tokens and labels.
        whole = torch.cat([largest, is_token.sum(1, keepdim=True), labels[:, None]], dim=1)
        if self._group is not None:
            dist.all_reduce(whole, group=self._group)
        largest, tokens, labels = whole[:, :-2], whole[:, -2:-1], whole[:, -1:]
        rows = len(self._taps) * tokens.clamp(min=1)
        gradient = self._num_experts * labels * largest / rows.square()
        self._step.add(sums, is_token.sum(), (gradient * probability).sum())
        if not self.coefficient:
            return loss
        balanced: torch.Tensor = _AddBalance.apply(loss, self.coefficient * gradient, pending)  # type: ignore[no-untyped-call]
        return balanced

    def take(self) -> RouterSums:
        """Return the sums over the micro-batches since the last call."""
        taken = self._step
        self._step = self._new_sums()
        return taken


def _find_routers(hf_model: PreTrainedModel, num_experts: int) -> list[nn.Module]:
    """Return the routers; none if they also choose among other modules than the experts, as Zaya's do."""
    kinds = router_classes(type(find_decoder(hf_model)))
    routers = [part for layer in find_decoder_layers(hf_model) for part in layer.modules() if type(part) in kinds]
    for router in routers:
        matrices = [each for name, each in router.named_parameters() if each.ndim > 1 and not is_adapter(name)]
        if num_experts not in {each.shape[0] for each in matrices}:
            return []
    return routers


_SUMS = ("chosen", "probability", "entropy", "largest")
"""The sums of a router's hook over the tokens of each pack, per expert: how often it was chosen, its probability, its
share of the entropy, and how often it was among the k largest logits."""


class _Buffers(NamedTuple):
    """What the hooks write and read in a micro-batch of B rows of T tokens; L routers of E experts, all fp32."""

    sums: torch.Tensor  # [L, 4, B, E], see `_SUMS`
    gradient: torch.Tensor  # [B, E], of the probabilities
    is_token: torch.Tensor  # [B, T], 0 for padding


class _Tap:
    """Forward hook of a router, traced by torch.compile with the layer, and called again when it is recomputed.

    It writes a micro-batch's `sums`, [4, B, E], and reads the `gradient`, [B, E], of the probabilities. `is_token` is
    fp32 [B, T], 0 for padding.
    """

    def __init__(self, *, has_loss: bool, adds_gradient: bool) -> None:
        self._has_loss, self._adds_gradient = has_loss, adds_gradient
        self.sums = self.gradient = self.is_token = torch.zeros(0)

    def __call__(
        self, router: nn.Module, _: object, output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        if not router.training or not self.is_token.numel():
            return None
        logits, weights, experts, *others = output
        self._sum(logits.detach(), experts)
        if not self._adds_gradient:
            return None
        routed = _Routed.apply(weights, logits, self.gradient, self.is_token)  # type: ignore[no-untyped-call]
        return logits, routed, experts, *others

    @torch.no_grad()
    def _sum(self, logits: torch.Tensor, experts: torch.Tensor) -> None:
        _, num_rows, num_experts = self.sums.shape
        probability = _probability(logits, num_rows, num_experts) * self.is_token[..., None]
        chosen = largest = self._count(experts.long().reshape(num_rows, -1))
        if self._has_loss:
            num_chosen = experts.numel() // self.is_token.numel()
            largest = self._count(probability.topk(num_chosen).indices.flatten(1))
        self.sums.copy_(torch.stack([chosen, probability.sum(1), torch.special.entr(probability).sum(1), largest]))

    def _count(self, experts: torch.Tensor) -> torch.Tensor:
        """Return the number of tokens per expert, [B, E], given the experts of the tokens, int64 [B, T * k]."""
        counts = self.is_token.repeat_interleave(experts.shape[1] // self.is_token.shape[1], dim=1)
        return torch.zeros_like(self.sums[0]).scatter_add_(1, experts, counts)


def _probability(logits: torch.Tensor, num_rows: int, num_experts: int) -> torch.Tensor:
    """Return the probabilities of experts, fp32 [B, T, E]."""
    return logits.float().softmax(-1).view(num_rows, -1, num_experts)


class _Routed(torch.autograd.Function):
    """The identity of the experts' weights; the backward pass adds to the gradient of the logits."""

    @staticmethod
    def forward(
        ctx: Ctx, weights: torch.Tensor, logits: torch.Tensor, gradient: torch.Tensor, is_token: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(logits, gradient, is_token)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, gradient, is_token = ctx.saved_tensors
        probability, each = _probability(logits, *gradient.shape), gradient[:, None]
        of_logits = probability * (each - (probability * each).sum(-1, keepdim=True)) * is_token[..., None]
        return grads[0], of_logits.view_as(logits).to(logits.dtype), None, None


class _AddBalance(torch.autograd.Function):
    """The identity of the loss; the backward pass, which runs before all others, sets the gradient for `_Routed`."""

    @staticmethod
    def forward(ctx: Ctx, loss: torch.Tensor, gradient: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ctx.gradient, ctx.target = gradient, target
        return loss.clone()  # FSDP2 warns of views

    @staticmethod
    def backward(ctx: Ctx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # `.data`, because autograd rejects modified saved tensors, and this modification is intended.
        ctx.target.data.copy_(ctx.gradient * grads[0])
        return grads[0], None, None


class RouterSums:
    """Statistics of this rank's routers in a step, summed on the device; L routers of E experts each.

    `values`, fp32 [L * E + 3], has the number of tokens per expert, then tokens, entropy, and load-balancing loss times
    labels. It is empty for a dense model. Not a dataclass: see `SourceLosses`.
    """

    def __init__(self, num_routers: int, num_experts: int, *, has_loss: bool, device: torch.device | None) -> None:
        self._shape = num_routers, num_experts
        self._has_loss = has_loss
        size = num_routers * num_experts + 3 if num_routers else 0
        self.values = torch.zeros(size, dtype=torch.float32, device=device)

    @torch.no_grad()
    def add(self, sums: torch.Tensor, num_tokens: torch.Tensor, balance: torch.Tensor) -> None:
        """Add a micro-batch: the hooks' sums, [L, 4, B, E], the number of tokens, and the load-balancing loss."""
        entropy = sums[:, 2].sum()
        self.values += torch.cat([sums[:, 0].sum(1).flatten(), torch.stack([num_tokens, entropy, balance])])

    def summarize(self, values: torch.Tensor) -> torch.Tensor:
        """Return the input of `router_stats` on the device, given the sum of `values` over all ranks."""
        if not values.numel():
            return values
        (num_routers, num_experts), (tokens, entropy, balance) = self._shape, values[-3:]
        chosen = values[:-3].view(self._shape)
        largest = (chosen / chosen.mean(1, keepdim=True).clamp(min=1e-9)).amax(1)
        numbers = [largest.max(), largest.mean(), (chosen == 0).float().mean()]
        if self._has_loss:
            uniform = torch.full_like(tokens, num_experts).log()
            numbers += [entropy / (num_routers * tokens.clamp(min=1) * uniform), balance]
        return torch.stack(numbers)


def router_stats(numbers: Sequence[float], num_labels: int) -> RouterStats | None:
    """Return a step's statistics from `RouterSums.summarize` and its labels on all ranks; None for a dense model."""
    if not numbers:
        return None
    largest, mean_largest, dead, *of_loss = numbers
    entropy, balance = of_loss or (None, None)
    return RouterStats(largest, mean_largest, dead, entropy, None if balance is None else balance / num_labels)
