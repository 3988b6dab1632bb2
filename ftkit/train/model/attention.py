"""Choose the fastest attention kernel on this device that isolates packed documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AttentionInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ftkit.config.execution import FLEX_MINIMUM
from ftkit.config.recipe import SHARING_KERNELS
from ftkit.errors import PrerequisiteError, TrainingError, one_line
from ftkit.train.model.hf_model import text_part_of
from ftkit.train.model.varlen_attention import VARLEN, varlen_attention
from ftkit.train.private_apis.transformers import (
    CONVERTS_WEIGHTS,
    attention_backends,
    attention_implementation,
    attention_implementations,
    mask_documents_always,
    sees_whole_pictures,
    set_attention,
)

if TYPE_CHECKING:
    from ftkit.config.training import TrainingPlan
    from ftkit.train.world import World

Kernel = Literal["flash4", "cudnn", "flex", "sdpa", "eager"]

_UNSUPPORTED_BY_VARLEN = ("softcap", "s_aux", "position_bias")
"""Arguments of models that change the attention scores: soft caps, sinks, biases."""
_IGNORES_POSITIONS = ("gpt_oss",)
"""Families whose decoder builds masks without `position_ids` (transformers 5.23), so that packed documents would attend
to each other."""
KERNEL_TOLERANCE = 0.05
"""Largest difference of outputs and gradients, relative to their norm, that bf16 rounding explains. flash-attn-4
4.0.0b36 on an H200 computed gradients that were off by 70 to 90% for head dimensions 16 and 48."""


def choose_kernel(
    training: TrainingPlan, config: PretrainedConfig, world: World, *, shares_prompts: bool = False
) -> tuple[Kernel, str]:
    """Return the attention kernel and the reason for it, the same on all ranks. Collective.

    flash-attn-4 and cuDNN run on Hopper and newer, in bf16, with packed documents of any length. Flex attention is
    compiled for any CUDA device. torch's SDPA and transformers' eager attention run everywhere, with a mask of sequence
    length squared. Only flex and eager attention support models that change their attention scores. Only kernels with
    arbitrary masks support documents that share prompts (`shares_prompts`).
    """
    if shares_prompts:
        _check_shared_prompts(text_part_of(config), training.attention)
    if training.attention == "auto":
        kernels: tuple[Kernel, ...] = ("flash4", "cudnn", "flex", "sdpa") if world.device.type == "cuda" else ("sdpa",)
        kernels = tuple(kernel for kernel in kernels if kernel in SHARING_KERNELS or not shares_prompts)
        reason = "the fastest one here"
        for kernel in kernels:
            failure = _failure(kernel, training, config, world)
            if failure is None:
                return kernel, reason
            reason = f"not {kernel}: {failure}"
        if shares_prompts:
            _check_shared_prompts(text_part_of(config), "eager")
        return "eager", reason
    if failure := _failure(training.attention, training, config, world):
        raise PrerequisiteError(
            f"training.attention={training.attention}: {failure}",
            meaning="this model, this GPU, or the installed packages can't compute it",
            fix="set training.attention=auto; or install flash-attn-4 or nvidia-cudnn-frontend in the image if missing",
        )
    return training.attention, "the recipe asks for it"


def _check_shared_prompts(config: PretrainedConfig, kernel: str) -> None:
    has_windows = getattr(config, "sliding_window", None) is not None
    others = {*(getattr(config, "layer_types", None) or ["sliding_attention"] * has_windows)} - {"full_attention"}
    if kernel not in SHARING_KERNELS:
        reason = f"attention '{kernel}' does not take their mask; {' and '.join(SHARING_KERNELS[1:])} do"
    elif others:
        reason = f"a '{config.model_type}' has layers of type {', '.join(sorted(others))}"
    else:
        return
    raise TrainingError(
        f"the prompts of pairs can't be computed once: {reason}",
        fix="set data.share_prompts=false, which prepares the data again",
    )


def _failure(kernel: Kernel, training: TrainingPlan, config: PretrainedConfig, world: World) -> str | None:
    """Return why a kernel can't train a model here; None if it can."""
    text = text_part_of(config)
    classes = MODEL_FOR_CAUSAL_LM_MAPPING if text is config else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = classes.get(type(config), None)
    backend = "custom" if kernel in VARLEN else kernel
    if kernel != "eager" and kind is not None and backend not in attention_backends(kind):
        return "the model's class in transformers does not have it"
    special = _changed_scores(text)
    if kernel in VARLEN and text is not config and sees_whole_pictures(kind, config):
        special = "has tokens of a picture attend to later ones, which takes a mask"
    if kernel in {*VARLEN, "sdpa"} and special is not None:
        return f"the model {special}"
    if kernel == "flex" and training.sequence_length < FLEX_MINIMUM:
        return f"flex attention needs packs of {FLEX_MINIMUM} tokens, not {training.sequence_length}"
    if kernel not in VARLEN:
        return None
    if training.compute_precision != "bf16":
        return f"it does not compute in {training.compute_precision}"
    failures = world.gather_objects(_varlen_failure(kernel, text, world.device))
    return next((failure for failure in failures if failure is not None), None)


def _changed_scores(config: PretrainedConfig) -> str | None:
    """Return how a model changes its attention scores, which only flex and eager attention support; None if not."""
    if config.model_type == "gpt_oss":  # config.json does not record it
        return "has attention sinks"
    return None if getattr(config, "attn_logit_softcapping", None) is None else "caps its attention scores"


def _varlen_failure(kernel: Kernel, config: PretrainedConfig, device: torch.device) -> str | None:
    """Return why a kernel can't train this model on this rank, or None if it can.

    Compare forward and backward with torch's SDPA for the model's heads, also with a window if the model has one: some
    versions compute wrong gradients for some head dimensions. Training reuses the compiled kernels.
    """
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"{torch.cuda.get_device_name(device)} is older than Hopper"
    if kernel == "cudnn" and torch.are_deterministic_algorithms_enabled():  # gradients leak: cuDNN 9.19, H200
        return "its deterministic backward pass is wrong for packs"
    windows = (None,) if getattr(config, "sliding_window", None) is None else (None, FLEX_MINIMUM // 8)
    try:
        error_ratio = max(_varlen_difference(kernel, config, device, window) for window in windows)
    except Exception as error:  # noqa: BLE001 - many packages may be missing or too old, each with its own errors
        return f"{type(error).__name__}: {one_line(error)}"
    if error_ratio <= KERNEL_TOLERANCE:
        return None
    return f"it computes this model's heads wrongly: results or gradients are off by {error_ratio:.0%}"


def _varlen_difference(kernel: Kernel, config: PretrainedConfig, device: torch.device, window: int | None) -> float:
    """Return the largest difference of a kernel's output and gradients from SDPA's, relative to SDPA's norm."""
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    cu_seqlens = torch.tensor([0, FLEX_MINIMUM // 3, FLEX_MINIMUM], dtype=torch.int32, device=device)
    query, key, value = (
        torch.randn(FLEX_MINIMUM, num, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        for num in (heads, key_heads, key_heads)
    )
    scale = 1 / math.sqrt(width)
    output, _ = varlen_attention(query, key, value, cu_seqlens, FLEX_MINIMUM, scale, window, kernel)
    expected = masked_attention(query, key, value, cu_seqlens, scale, window)
    return largest_difference(output, expected, (query, key, value))


def largest_difference(computed: torch.Tensor, expected: torch.Tensor, inputs: Sequence[torch.Tensor]) -> float:
    """Return the largest difference, relative to its norm, of an output and its inputs' gradients; inf for NaN."""
    gradient = torch.randn(expected.shape, dtype=expected.dtype, device=expected.device)
    of_each = [torch.autograd.grad(one, inputs, gradient) for one in (computed, expected)]
    pairs = [(computed, expected), *zip(*of_each, strict=True)]
    # Host syncs.
    ratios = [float(((one - other).float().norm() / other.float().norm()).detach()) for one, other in pairs]
    return math.inf if any(math.isnan(ratio) for ratio in ratios) else max(ratios)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Compute attention within documents with torch's SDPA and a mask of size tokens squared.

    Shapes: query [T, H, D], key and value [T, K, D]; returns [T, H, D].
    """
    places = torch.arange(len(query), device=query.device)
    document = torch.bucketize(places, cu_seqlens, right=True)
    distance = places[:, None] - places
    mask = (document[:, None] == document) & (distance >= 0)
    if sliding_window is not None:
        mask &= distance < sliding_window
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    output = functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    return output[0].transpose(0, 1)


def _varlen(  # noqa: PLR0913 - the interface is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kernel: Kernel,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **unused: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention within documents, given their offsets; an attention function for transformers.

    Shapes: query [B, H, T, D], key and value [B, K, T, D]; returns [B, T, H, D]. Without `cu_seq_lens_q`, each row is a
    document. It is causal, so no token attends to the padding on its right.
    """
    refuse_changed_scores(module, unused)
    del attention_mask
    batch, _, length, width = query.shape
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
        max_length_q = length
    flat = [tensor.transpose(1, 2).reshape(batch * length, -1, width) for tensor in (query, key, value)]
    scale = scaling if scaling is not None else 1 / math.sqrt(width)
    output, _ = varlen_attention(*flat, cu_seq_lens_q, max_length_q, scale, sliding_window, kernel)
    return output.view(batch, length, -1, width), None


def refuse_changed_scores(module: torch.nn.Module, arguments: Mapping[str, object]) -> None:
    name = next((name for name in _UNSUPPORTED_BY_VARLEN if arguments.get(name) is not None), None)
    if name is not None:
        raise TrainingError(
            f"{type(module).__name__} changes its attention scores ('{name}'), which kernels for packs do not support",
            fix="set training.attention=flex",
        )


def packed_masks(
    module: PreTrainedModel, position_ids: torch.Tensor, visible_until: torch.Tensor | None
) -> dict[str, object] | torch.Tensor | BlockMask | None:
    """Return attention masks of packs, [B, T], for families that build masks without positions; None for others.

    Other decoders find document boundaries in `position_ids`. If documents share prompts, all decoders get the mask of
    `visible_until`, which transformers passes to the kernel.
    """
    if visible_until is not None:
        return _shared_mask(visible_until, attention_implementation(module.config))
    if module.config.model_type not in _IGNORES_POSITIONS or not CONVERTS_WEIGHTS:
        return None
    dtype = next(module.parameters()).dtype
    inputs: dict[str, object] = {
        "config": module.config,
        "inputs_embeds": torch.empty(*position_ids.shape, 0, dtype=dtype, device=position_ids.device),
        "position_ids": position_ids,
        **dict.fromkeys(("attention_mask", "past_key_values")),
    }
    return {
        "full_attention": create_causal_mask(**inputs),
        "sliding_attention": create_sliding_window_causal_mask(**inputs),
    }


def _shared_mask(visible_until: torch.Tensor, attention: str) -> torch.Tensor | BlockMask:
    """Return the mask [B, 1, T, T] of `packing.visible_until`, int32 [B, T], for transformers' attention function."""
    rows, length = visible_until.shape
    if attention == "flex_attention":

        def is_visible(row: torch.Tensor, _: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= query) & (query < visible_until[row, key])

        device, is_compiled = visible_until.device, visible_until.is_cuda
        return create_block_mask(is_visible, rows, None, length, length, device, _compile=is_compiled)
    places = torch.arange(length, device=visible_until.device)
    queries, keys = places[:, None], places
    return ((keys <= queries) & (queries < visible_until[:, None]))[:, None]


@contextmanager
def generation_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switch to a kernel for generation: kernels for packs don't support a cache, a mask or varying shapes."""
    chosen = attention_implementations(model.config)
    # With SDPA, transformers would silently ignore a model's changes of its attention scores.
    model.set_attn_implementation(register_kernel("eager" if _changed_scores(text_part_of(model.config)) else "sdpa"))
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        set_attention(chosen)


def register_kernel(kernel: Kernel) -> str:
    """Register a kernel if transformers lacks it; return its name in transformers (`attn_implementation`)."""
    if kernel in VARLEN:
        AttentionInterface.register(VARLEN[kernel], partial(_varlen, kernel=kernel))
        return VARLEN[kernel]
    if kernel == "flex":
        mask_documents_always()
        return "flex_attention"
    return kernel
