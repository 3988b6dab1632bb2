"""The trained module: decoder, output projection and loss, for all engines."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ftkit.train import fused_loss
from ftkit.train.fused_loss import LogitTransform, linear_cross_entropy, linear_log_probs
from ftkit.train.model.adapted_linear import TokenKeys
from ftkit.train.model.attention import packed_masks
from ftkit.train.model.hf_model import accepted_inputs, find_body, has_recurrent_layers, sees_pictures, text_part_of
from ftkit.train.model.lora import adapters_off
from ftkit.train.model.routers import Routers
from ftkit.train.model.vision import vision_parameters
from ftkit.train.objectives import Pairs, Preferences, completion_sums
from ftkit.train.private_apis.torch import mark_dynamic
from ftkit.train.private_apis.transformers import changes_logits, masks_of_places, sees_whole_pictures

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ftkit.config.objectives import DistillSpec


PIXELS = "pixel_values"  # the input that has the pixels of pictures, in all classes of transformers


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of one process: B packs of T tokens, or B padded rows of one document each, with N labels.

    Positions restart at 0 in each document; nothing else separates documents. With context or tensor parallelism, this
    process has a part of the packs, but fields marked with * cover the full packs.
    """

    input_ids: torch.Tensor  # int64 [B, T]
    position_ids: torch.Tensor  # int64 [B, T]; * with tensor parallelism
    label_index: torch.Tensor  # int64 [N], indices of the flattened tokens whose next token is a label
    labels: torch.Tensor  # int64 [N], the next tokens at `label_index`
    cu_seqlens: torch.Tensor  # int32 [D + 1], offsets of D documents in the flattened tokens, then B * T; *
    max_seqlen: int  # upper bound of the documents' lengths
    is_token: torch.Tensor | None = None  # bool [B, T], false for padding; None without padding or if unused
    attention_mask: torch.Tensor | None = None  # int64 [B, T], 0 for the padding on the right; None for packs
    label_sources: torch.Tensor | None = None  # int64 [N], or [S], indices in `data.source`; None for a single source
    completion_lengths: torch.Tensor | None = None  # int64 [C], labels per completion of S preference samples
    # int32 [C], the bits of the stored reference's fp32 log-probabilities: FSDP2 would cast fp32 inputs.
    reference_bits: torch.Tensor | None = None
    is_desirable: torch.Tensor | None = None  # bool [S], for objective kto; whether mismatched completions count
    kl_bits: torch.Tensor | None = None  # int32, the bits of the reference point of objective kto
    teacher: torch.Tensor | None = None  # int32 [2, N, k + 1], as `fused_loss.Teacher.stored`
    token_keys: torch.Tensor | None = None  # int64 [B, T], random bits for dropout; * with tensor parallelism
    visible_until: torch.Tensor | None = None  # int32 [B, T], as `packing.visible_until`, if documents share prompts
    pictures: dict[str, torch.Tensor] | None = None  # inputs of the model, joined; `pixel_values` are uint8
    has_pictures: bool = True  # false if `pictures` is the sample, which no token refers to
    pixel_bits: torch.Tensor | None = None  # int32 [2, ...], the bits of scale and offset of pixels
    picture_tokens: torch.Tensor | None = None  # bool [B, T], tokens that features of pictures replace
    rope_positions: torch.Tensor | None = None  # int64 [3, B, T], of time, height and width, with M-RoPE

    def on(self, device: torch.device) -> MicroBatch:
        """Return a copy on a device; from pinned memory, the copy is only queued."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        changed = {name: change(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        pictures = self.pictures and {name: change(value) for name, value in self.pictures.items()}
        return replace(self, pictures=pictures, **changed)  # type: ignore[arg-type]


class SourceLosses:
    """The losses of each of S sources, and metrics of pairs, accumulated on the device over micro-batches.

    `sums`, fp32 [2, S], has the summed losses of each source's labels (or pairs), and their number (exact up to 2**24).
    `metrics`, fp32 [M], has the summed metrics of preferences or distillation. This is not a dataclass: FSDP2 casts
    tensors in dataclasses that are passed to `forward` to the compute dtype.
    """

    def __init__(self, num_sources: int, device: torch.device, num_metrics: int = 0) -> None:
        self.sums = torch.zeros((2, num_sources), dtype=torch.float32, device=device)
        self.metrics = torch.zeros(num_metrics, dtype=torch.float32, device=device)

    def add(self, losses: torch.Tensor, label_sources: torch.Tensor) -> None:
        """Add the detached losses of labels, fp32 [N], to their sources, int64 [N]."""
        self.sums.index_add_(1, label_sources, torch.stack([losses, torch.ones_like(losses)]))

    def flatten(self) -> torch.Tensor:
        """Return `sums` and `metrics` as one tensor, fp32 [2 * S + M]."""
        return torch.cat([self.sums.flatten(), self.metrics])


class CausalLM(nn.Module):
    """A transformers model, `hf_model`, with its loss.

    FSDP2 and DeepSpeed all-gather weights in hooks around `forward`. Therefore every computation with unsharded weights
    goes through `forward`: the loss by default, or its argument `compute`. In training, `forward` also collects the
    router statistics of a mixture of experts.

    If a model has layers between decoder and output projection (`has_head_layers`), as ModernBERT's decoder has, the
    loss is computed from all logits of the model's own class.
    """

    def __init__(
        self,
        hf_model: PreTrainedModel,
        *,
        routers: Routers | None = None,
        by_weight: bool = True,
        objective: Preferences | None = None,
        distill: DistillSpec | None = None,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Wrap a model; its parameters may be on the meta device.

        Args:
            hf_model: a causal language model of transformers.
            routers: the routers, found before an engine changed the model; None ignores them.
            by_weight: compute the loss from the output projection's weight, a chunk of logits at a time; otherwise call
                the projection as a module, for an engine that all-gathers weights in hooks of every module.
            objective: an objective on preferences; None for the next-token loss.
            distill: add the divergence from a teacher to the next-token loss.
            autocast: create the autocast context if the compute dtype differs from the parameters' dtype.
        """
        super().__init__()
        self.hf_model = hf_model
        self.logit_transform = LogitTransform.of(text_part_of(hf_model.config))
        if sees_pictures(hf_model) and not changes_logits(type(hf_model)):
            self.logit_transform = LogitTransform()
        self.routers = routers or Routers()
        body, projection = find_body(hf_model), hf_model.get_output_embeddings()
        inside = {id(parameter) for part in (body, projection) for parameter in part.parameters()}
        self.has_head_layers = any(id(parameter) not in inside for parameter in hf_model.parameters())
        has_bias = getattr(projection, "bias", None) is not None
        self._tokens = TokenKeys.of(hf_model)
        self._is_chunked = by_weight and not has_bias and not self.has_head_layers
        self.objective, self._distill = objective, distill
        self._autocast = autocast
        looks_ahead = sees_pictures(hf_model) and sees_whole_pictures(type(hf_model), hf_model.config)
        projector = vision_parameters(hf_model)[1]
        places = (name.rpartition(".") for name in projector if any(each.requires_grad for each in projector.values()))
        # Engines replace these parameters, so they are kept by name; a search in each micro-batch takes milliseconds.
        self._trained_projector = [(hf_model.get_submodule(owner), name) for owner, _, name in places]
        self._masks = masks_of_places if looks_ahead else nullcontext

    def forward(self, *, compute: Callable[..., Any] | None = None, **inputs: Any) -> Any:
        """Return `compute(self, **inputs)`, or `self.loss(**inputs)` without `compute`."""
        if (keys := getattr(inputs.get("batch"), "token_keys", None)) is not None:
            self._tokens.keys = keys
        with self._autocast(), self._masks():
            return self.loss(**inputs) if compute is None else compute(self, **inputs)

    def loss(
        self, batch: MicroBatch, source_losses: SourceLosses | None = None, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss summed over the labels or pairs, an fp32 scalar. Call it within `forward` only.

        The gradient includes the load-balancing loss, if the routers have one. `source_losses` accumulates the losses
        of each source, if there are several, and the metrics of pairs. `hidden` are the `hidden_states` if known.
        """
        if self.objective is not None:
            reference = self.reference_log_probs(batch, self.objective)
            pairs = self.pairs(batch, reference, self.label_states(batch, hidden))
            losses, rewards = self.objective.losses(pairs)
            loss = losses.sum()
            if source_losses is not None:
                has_reference = self.objective.has_reference
                source_losses.metrics += pairs.metrics(rewards.detach(), has_reference=has_reference)
        else:
            states, weight, transform = self._head(self.label_states(batch, hidden))
            teacher = None
            if self._distill is not None:
                if batch.teacher is None:
                    raise TypeError("the batch has no distributions of the teacher")
                teacher = fused_loss.Teacher(batch.teacher, self._distill)
            loss, losses = linear_cross_entropy(states, weight, batch.labels, transform, teacher)
            if teacher is not None:
                losses, *metrics = losses.unbind(1)
                if source_losses is not None:
                    source_losses.metrics += torch.stack(metrics).sum(dim=1)
        if source_losses is not None and batch.label_sources is not None:
            source_losses.add(losses.detach(), batch.label_sources)
        return self.routers.balance(loss, batch.label_index)

    def label_states(self, batch: MicroBatch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Return the hidden states or logits of the tokens whose next token is a label, [N, ...].

        `hidden` are the `hidden_states` if known.
        """
        zero = self._zero_of_vision(batch)  # first, because every rank calls the vision encoder before the decoder
        if self.has_head_layers:
            self.begin_routing(batch)
            states: torch.Tensor = self.hf_model(**model_inputs(self.hf_model, batch)).logits
        else:
            states = self.hidden_states(batch) if hidden is None else hidden
        return states.flatten(0, 1).index_select(0, batch.label_index) + zero

    def _zero_of_vision(self, batch: MicroBatch) -> torch.Tensor | float:
        """Return zero, computed from the projector's trained weights and, without pictures, the sample's features.

        This gives the same weights gradients on all ranks, even if a rank's micro-batch has no pictures, or none with
        several tiles. Otherwise, ranks would reduce different gradients and deadlock.
        """
        if batch.pictures is None:
            return 0.0
        used: list[torch.Tensor] = [getattr(module, name) for module, name in self._trained_projector]
        if not batch.has_pictures:
            body = find_body(self.hf_model)
            owner = body if hasattr(body, "get_image_features") else self.hf_model
            accepted = inspect.signature(owner.get_image_features).parameters
            inputs = {name: each for name, each in _normalized(self.hf_model, batch).items() if name in accepted}
            output = owner.get_image_features(**inputs, return_dict=True)
            used += [output.last_hidden_state] if output.pooler_output is None else output.pooler_output
        return sum(each.sum().float() for each in used) * 0.0

    def _head(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, LogitTransform]:
        """Return hidden, weight and transform: logits are the transformed `hidden @ weight.T`, or `hidden`."""
        if self.has_head_layers:
            return states.float(), None, LogitTransform()
        projection = self.hf_model.get_output_embeddings()
        if states.dtype == torch.float32:  # Mamba's residual stream is fp32; its class casts it too
            states = states.to(next(projection.parameters()).dtype)  # `weight` would be all-gathered by ZeRO-3
        if self._is_chunked:
            return states, projection.weight, self.logit_transform
        return projection(states).float(), None, self.logit_transform

    def log_probs(self, batch: MicroBatch, states: torch.Tensor | None = None) -> torch.Tensor:
        """Return the log-probability of each label, fp32 [N], from `states` if given, else from `label_states`.

        Within `forward` only.
        """
        hidden, weight, transform = self._head(self.label_states(batch) if states is None else states)
        return linear_log_probs(hidden, weight, batch.labels, transform)

    def top_log_probs(self, batch: MicroBatch, vocabulary: int, top_k: int) -> torch.Tensor:
        """Return this model's distributions in the format of `Teacher.stored`. Within `forward` only."""
        hidden, weight, transform = self._head(self.label_states(batch))
        return fused_loss.linear_top_log_probs(hidden, weight, transform, vocabulary, top_k)

    def completion_log_probs(self, batch: MicroBatch) -> torch.Tensor:
        """Return the log-probability of each completion, fp32 [C]. Within `forward` only."""
        if batch.completion_lengths is None:
            raise TypeError("the batch has no pairs")
        return completion_sums(self.log_probs(batch), batch.completion_lengths)

    def reference_log_probs(self, batch: MicroBatch, objective: Preferences) -> torch.Tensor | None:
        """Return the reference's `completion_log_probs`, without dropout; None without one. Within `forward` only."""
        if batch.reference_bits is not None:
            return batch.reference_bits.view(torch.float32)
        if objective.stores_reference:
            raise TypeError("the batch has no log-probabilities of the reference")
        if not objective.has_reference or batch.completion_lengths is None:
            return None
        # Gradients stay on in training: without them, the compiler fuses operations that round differently in bf16.
        with adapters_off(self.hf_model):
            states = self.label_states(batch).detach()
        return completion_sums(self.log_probs(batch, states).detach(), batch.completion_lengths)

    def mismatched_sums(self, batch: MicroBatch) -> torch.Tensor:
        """Return the summed log-ratios of mismatched completions, and their number, fp32 [2]. See `kto`."""
        reference = None if self.objective is None else self.reference_log_probs(batch, self.objective)
        if reference is None or batch.is_desirable is None:
            raise TypeError("the batch has no mismatched completions")
        ratios = self.completion_log_probs(batch) - reference
        return torch.stack([(ratios * batch.is_desirable).sum(), batch.is_desirable.sum()])

    def pairs(self, batch: MicroBatch, reference: torch.Tensor | None, states: torch.Tensor | None = None) -> Pairs:
        """Return the pairs, or single completions, with the reference's `completion_sums`. Within `forward` only."""
        if (lengths := batch.completion_lengths) is None:
            raise TypeError("the batch has no pairs")
        shape = (-1, 2 if batch.is_desirable is None else 1)  # in pairs, chosen and rejected completions alternate
        sums = completion_sums(self.log_probs(batch, states), lengths).view(shape).T
        expected = torch.zeros_like(sums) if reference is None else reference.view(shape).T
        kl = None if batch.kl_bits is None else batch.kl_bits.view(torch.float32)
        return Pairs(sums, expected, lengths.to(sums.dtype).view(shape).T, batch.is_desirable, kl)

    def hidden_states(self, batch: MicroBatch) -> torch.Tensor:
        """Return the last hidden states, [B, T, H]. Within `forward` only."""
        body = find_body(self.hf_model)
        self.begin_routing(batch)
        hidden: torch.Tensor = body(**model_inputs(body, batch)).last_hidden_state
        return hidden

    def begin_routing(self, batch: MicroBatch) -> None:
        """Prepare the routers' statistics of a micro-batch; `hidden_states` does so itself."""
        self.routers.begin(batch.input_ids, batch.is_token)

    def generate(self, **inputs: Any) -> torch.Tensor:
        """Return the result of transformers' `generate`: int64 [B, T + new]. Within `forward` only."""
        if PIXELS in inputs:
            inputs[PIXELS] = inputs[PIXELS].to(self.hf_model.get_input_embeddings().weight.dtype)
        tokens: torch.Tensor = self.hf_model.generate(**inputs)
        return tokens


def model_inputs(module: PreTrainedModel, batch: MicroBatch) -> dict[str, object]:
    """Return a micro-batch as the keyword arguments that a transformers model accepts.

    Packs have no attention mask and no cache: with either, transformers ignores the document boundaries. Attention
    kernels read the boundaries from the positions or from `cu_seqlens`. Recurrent layers get all packs as one row,
    because their kernels need `cu_seqlens` of a single row.
    """
    input_ids, positions, is_row = batch.input_ids, batch.position_ids, False
    inputs: dict[str, object] = {"use_cache": False}
    if getattr(text_part_of(module.config), "output_router_logits", False):
        inputs["output_router_logits"] = False  # ftkit's own hooks read them
    if batch.attention_mask is not None:
        inputs["attention_mask"] = batch.attention_mask
    else:
        if is_row := has_recurrent_layers(module.config):
            input_ids, positions = input_ids.view(1, -1), positions.view(1, -1)
            inputs["seq_idx"] = ((positions == 0).int().cumsum(1) - 1).int()
        mark_dynamic(batch.cu_seqlens)  # one compiled graph for any number of documents
        inputs |= {
            "attention_mask": packed_masks(module, positions, batch.visible_until),
            "cu_seq_lens_q": batch.cu_seqlens,
            "cu_seq_lens_k": batch.cu_seqlens,
            "max_length_q": batch.max_seqlen,
            "max_length_k": batch.max_seqlen,
        }
    inputs |= {"input_ids": input_ids, "position_ids": positions}
    return accepted_inputs(module, inputs | picture_arguments(module, batch, is_row=is_row))


def picture_arguments(module: PreTrainedModel, batch: MicroBatch, *, is_row: bool = False) -> dict[str, object]:
    """Return a multimodal model's arguments for pictures, and its positions with M-RoPE, [4, B, T].

    With `is_row`, all packs are in one row.
    """
    arguments: dict[str, object] = {}
    shape = (1, -1) if is_row else batch.position_ids.shape
    if any(hasattr(each, "get_rope_index") for each in (module, module.base_model)) and batch.attention_mask is None:
        own = batch.position_ids[None]  # of text, the positions of all axes are the same
        axes = own.expand(3, -1, -1) if batch.rope_positions is None else batch.rope_positions
        arguments["position_ids"] = torch.cat([own, axes]).view(4, *shape)
    if batch.picture_tokens is None:
        return arguments
    accepted = inspect.signature(module.forward).parameters
    types = batch.picture_tokens.view(shape).long()
    arguments |= {name: types for name in ("token_type_ids", "mm_token_type_ids") if name in accepted}
    return arguments | (_normalized(module, batch) if batch.has_pictures else {})


def _normalized(module: PreTrainedModel, batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Return the inputs of the vision encoder, with pixels normalized in fp32 and cast to the compute dtype."""
    if batch.pictures is None or batch.pixel_bits is None:
        raise TypeError("the batch has no pictures")
    scale, offset = batch.pixel_bits.view(torch.float32)
    pixels = batch.pictures[PIXELS].float().mul_(scale).add_(offset)
    return batch.pictures | {PIXELS: pixels.to(module.get_input_embeddings().weight.dtype)}
