"""The vision part of a multimodal model, and the largest picture that its processor makes, for plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

Vision = Literal["frozen", "projector", "full"]  # what of the vision part is trained
_CHANNELS = 3
_NUM_TOKENS = ("mm_tokens_per_image", "image_seq_length", "image_seq_len")
_MERGE = ("spatial_merge_size", "merge_size", "scale_factor")
"""Patches along each side of a square that becomes one token."""
_INVERSE_MERGE = ("downsample_ratio", "pixel_shuffle_ratio")


@dataclass(frozen=True)
class VisionPlan:
    """The vision tower and the projector of a multimodal model."""

    family: str  # the whole model's `model_type`
    tower: int = 0  # parameters
    projector: int = 0  # parameters
    layers: int = 0  # of the tower, 0 if its shape is not known
    hidden: int = 0  # width of a layer
    intermediate: int = 0
    patch: int = 0  # side in pixels
    tiles: int = 1  # parts of the largest picture that don't attend to each other
    patches: int = 0  # of the largest picture, in all tiles; 0, as `tokens`, if its size is not known
    tokens: int = 0  # that it takes in the text
    is_counted: bool = False  # whether the parameters are counted on the model's class, not estimated

    @property
    def total(self) -> int:
        return self.tower + self.projector

    def num_trained(self, vision: Vision) -> int:
        return {"frozen": 0, "projector": self.projector, "full": self.total}[vision]


def read_vision(config: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionPlan | None:
    """Return the vision part of a raw config.json, as far as known, and pictures of the processor's configuration.

    None if the model has none; of other values than expected, only the family is known. Parameters are estimated:
    matrices of attention, feed-forward layers, embeddings, and of a projector with two layers.
    """
    vision, family = config.get("vision_config"), str(config.get("model_type")).removesuffix("_text")
    if not isinstance(vision, dict):
        return None
    try:
        return _read_sizes(family, config, processor, vision)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return VisionPlan(family)


def _read_sizes(
    family: str, config: Mapping[str, Any], processor: Mapping[str, Any], vision: Mapping[str, Any]
) -> VisionPlan:
    layers = _number(vision, "num_hidden_layers", "depth")
    hidden = _number(vision, "embed_dim", "hidden_size")
    patch = _number(vision, "patch_size") or _number(processor, "patch_size")
    inner = _number(vision, "intermediate_size") or int(hidden * float(vision.get("mlp_ratio") or 4))
    if not (layers and hidden and patch):
        return VisionPlan(family)
    places = (config, processor, vision)
    side = next((_number(each, *_MERGE) for each in places if _number(each, *_MERGE)), 1)
    inverse = next((each[key] for each in places for key in _INVERSE_MERGE if isinstance(each.get(key), float)), 1.0)
    side = max(side, round(1 / inverse))
    tiles, pixels = _largest_picture(config, processor, vision)
    patches = max(1, pixels // patch**2) if pixels else 0
    fixed = next((number for each in places if (number := _number(each, *_NUM_TOKENS))), 0)
    tokens = (fixed or ceil(patches / side**2)) if patches else 0
    width = _number(config.get("text_config") or config, "hidden_size")
    positions = (_number(vision, "image_size") // patch) ** 2
    matrices = 3 if vision.get("hidden_act") == "silu" else 2  # with a gate
    tower = layers * (4 * hidden**2 + matrices * hidden * inner) + hidden * (_CHANNELS * patch**2 + positions)
    projector = side**2 * hidden * width + width**2
    return VisionPlan(family, tower, projector, layers, hidden, inner, patch, tiles, tiles * patches, tiles * tokens)


def _largest_picture(
    config: Mapping[str, Any], processor: Mapping[str, Any], vision: Mapping[str, Any]
) -> tuple[int, int]:
    """Return the number of tiles, and the pixels of one."""
    size: dict[str, Any] = found if isinstance(found := processor.get("size"), dict) else {}
    own = _number(vision, "image_size")
    if pixels := _number(processor, "max_pixels") or _number(size, "max_pixels"):
        return 1, pixels
    longest = _number(size, "longest_edge")
    shortest = _number(size, "shortest_edge")  # those of Qwen and GLM are numbers of pixels
    if "min_pixels" in processor or shortest > longest**0.5 > 0 or (shortest and longest and not own):
        return 1, longest
    if tile := _number(processor.get("max_image_size") or {}, "longest_edge"):  # Idefics 3: tiles, and a whole picture
        return 1 + ceil(longest / tile) ** 2 * (processor.get("do_image_splitting") is not False), tile**2
    if points := processor.get("image_grid_pinpoints") or config.get("image_grid_pinpoints"):
        return 1 + max(ceil(high * wide / own**2) for high, wide in points), own**2
    if processor.get("crop_to_patches"):
        return 1 + _number(processor, "max_patches"), own**2
    return 1, longest**2 or _number(size, "height") * _number(size, "width") or own**2


def _number(values: Mapping[str, Any], *keys: str) -> int:
    """Return the first of these values that is a whole number, or a list of equal ones; 0 without one."""
    found = (each[0] if isinstance(each, list) and each else each for each in map(values.get, keys))
    return next((each for each in found if isinstance(each, int) and not isinstance(each, bool)), 0)
