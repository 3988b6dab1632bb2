"""The vision encoders of a multimodal model, and the projector into its text model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ftkit.train.model.hf_model import find_decoder, sees_pictures
from ftkit.train.private_apis.transformers import set_attention
from ftkit.train.world import DTYPES

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from ftkit.config.training import TrainingPlan
    from ftkit.models.vision import Vision


def vision_encoders(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return a multimodal model's vision encoders: its outermost models that neither are nor have its text model."""
    return [*_encoders_in(model, find_decoder(model))]


def _encoders_in(module: nn.Module, decoder: nn.Module) -> Iterator[PreTrainedModel]:
    for child in module.children():
        if child is decoder:
            continue
        if isinstance(child, PreTrainedModel) and all(part is not decoder for part in child.modules()):
            yield child
        else:
            yield from _encoders_in(child, decoder)


def vision_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a model's vision encoders: the modules with parameters in their outermost lists."""
    if not sees_pictures(model):
        return []
    lists = [part for each in vision_encoders(model) for part in each.modules() if isinstance(part, nn.ModuleList)]
    inner = {id(part) for each in lists for part in each.modules() if part is not each}
    return [layer for each in lists if id(each) not in inner for layer in each if any(True for _ in layer.parameters())]


def vision_parameters(model: PreTrainedModel) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return the parameters of the vision encoders, and those of the projector: all others outside of the text model.

    Some encoders, such as Qwen's, have the projector behind their layers.
    """
    if not sees_pictures(model):
        return {}, {}
    encoders = vision_encoders(model)
    text = _ids(find_decoder(model), model.get_input_embeddings(), model.get_output_embeddings())
    tower = _ids(*encoders)
    named = {name: each for name, each in model.named_parameters() if id(each) not in text}
    if tower >= {id(each) for each in named.values()}:
        tower -= _ids(*(child for each in encoders for child in _behind_layers(each)))
    encoder = {name: each for name, each in named.items() if id(each) in tower}
    return encoder, {name: each for name, each in named.items() if name not in encoder}


def trained_vision(model: PreTrainedModel, vision: Vision) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return the vision weights without adapters: those that `training.vision` trains, and the others."""
    encoder, projector = vision_parameters(model)
    each = {name: weight for name, weight in (encoder | projector).items() if ".lora_" not in name}
    trained = {name for part in {"frozen": (), "projector": (projector,), "full": (each,)}[vision] for name in part}
    return {name: each[name] for name in each.keys() & trained}, {name: each[name] for name in each.keys() - trained}


def train_vision(model: PreTrainedModel, training: TrainingPlan) -> None:
    """Train the vision encoder and projector as `training.vision` says; freeze the rest in the compute dtype."""
    trained, frozen = trained_vision(model, training.vision)
    for parameter in frozen.values():
        parameter.requires_grad_(False)  # noqa: FBT003
        parameter.data = parameter.data.to(DTYPES[training.compute_precision])
    for parameter in trained.values():
        parameter.requires_grad_()
        if training.adapters is not None:
            parameter.data = parameter.data.float()  # cast on use, like adapters


def _behind_layers(encoder: nn.Module) -> list[nn.Module]:
    children = [*encoder.children()]
    first = next((index for index, child in enumerate(children) if isinstance(child, nn.ModuleList)), len(children))
    return children[first + 1 :]


def _ids(*modules: nn.Module) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}


# --- Attention within chunks -------------------------------------------------------------------------
#
# Some encoders, such as Qwen's, attend within pictures or within windows, and a pack has hundreds of them. With SDPA,
# transformers computes them sequentially, with a host sync in each layer to read their sizes.

_IN_CHUNKS = "ftkit_flash_chunks"
"""With "flash" in the name, transformers passes all chunks at once, with their offsets."""


def attend_in_chunks(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """On GPUs, use torch's FlashAttention in vision encoders whose layers get the offsets of chunks."""
    if device.type != "cuda" or dtype != torch.bfloat16 or varlen_attn is None:
        return
    AttentionInterface.register(_IN_CHUNKS, _attention_in_chunks)
    for encoder in vision_encoders(model) if sees_pictures(model) else ():
        if any("cu_seqlens" in inspect.signature(part.forward).parameters for part in encoder.modules()):
            set_attention([(encoder.config, _IN_CHUNKS)])


def _attention_in_chunks(  # noqa: PLR0913 - the interface is transformers'
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute non-causal attention within chunks; an attention function for transformers.

    Shapes: query, key and value [1, H, T, D]; returns [1, T, H, D].
    """
    if cu_seq_lens_q is None or max_length_q is None:  # older versions of transformers call this per chunk
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
        return output, None
    scale = 1.0 if scaling is None else scaling * math.sqrt(query.shape[-1])  # relative to the kernel's own scale
    offsets = cu_seq_lens_q.int()
    flat = [each.transpose(1, 2).flatten(0, 1) for each in (query * scale if scale != 1.0 else query, key, value)]
    output = varlen_attn(flat[0], flat[1], flat[2], offsets, offsets, max_length_q, max_length_q)
    return cast("torch.Tensor", output).unsqueeze(0), None
