from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftkit.models.vision import VisionPlan, read_vision

SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14}
OF_896 = SIGLIP | {"image_size": 896}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"text_config": {"hidden_size": 2560}, "mm_tokens_per_image": 256, "vision_config": OF_896},
        {"size": {"height": 896, "width": 896}, "image_seq_length": 256},
    ),
    "llava": (
        {"text_config": {"hidden_size": 4096}, "vision_config": {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 14,
            "image_size": 336,
        }},
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    ),
    "qwen2_5_vl": (
        {"hidden_size": 3584, "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14,
            "spatial_merge_size": 2,
        }},
        {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "merge_size": 2},
    ),
    "qwen2_5_vl by size": (
        {"hidden_size": 3584, "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14,
            "spatial_merge_size": 2,
        }},
        {"size": {"longest_edge": 12_845_056, "shortest_edge": 3136}, "patch_size": 14, "merge_size": 2},
    ),
    "qwen3_vl": (
        {"text_config": {"hidden_size": 2560}, "vision_config": {
            "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 16, "spatial_merge_size": 2,
        }},
        {"size": {"longest_edge": 16_777_216, "shortest_edge": 65_536}, "patch_size": 16, "merge_size": 2},
    ),
    "idefics3": (
        {"text_config": {"hidden_size": 4096}, "scale_factor": 2, "vision_config": SIGLIP | {"image_size": 364}},
        {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}, "image_seq_len": 169},
    ),
    "internvl": (
        {"text_config": {"hidden_size": 2048}, "downsample_ratio": 0.5, "image_seq_length": 256, "vision_config": {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "image_size": [448, 448],
            "patch_size": [14, 14],
        }},
        {"crop_to_patches": True, "max_patches": 12},
    ),
    "mistral3": (
        {"text_config": {"hidden_size": 5120}, "spatial_merge_size": 2, "vision_config": {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 14,
            "image_size": 1540,
        }},
        {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "tiles", "patches", "tokens", "millions"),
    [
        ("gemma3", 1, 4096, 256, 412),
        ("llava", 1, 576, 576, 303),
        ("qwen2_5_vl", 1, 65_536, 16_384, 668),
        ("qwen2_5_vl by size", 1, 65_536, 16_384, 668),
        ("qwen3_vl", 1, 65_536, 16_384, 305),
        ("idefics3", 17, 17 * 676, 17 * 169, 412),
        ("internvl", 13, 13 * 1024, 13 * 256, 303),
        ("mistral3", 1, 12_100, 3025, 302),
    ],
)
def test_the_largest_picture_and_the_tower_of_published_configurations_are_known(
    family: str, tiles: int, patches: int, tokens: int, millions: int
) -> None:
    config, processor = PUBLISHED[family]
    found = read_vision({"model_type": family, **config}, processor)
    assert found is not None
    assert (found.family, found.tiles, found.patches, found.tokens) == (family, tiles, patches, tokens)
    assert found.tower == pytest.approx(millions * 1e6, rel=0.15)


def test_a_text_model_has_no_vision_part_and_an_unknown_tower_only_a_name() -> None:
    assert read_vision({"model_type": "llama", "vision_config": None}, {}) is None
    assert read_vision({"model_type": "new", "vision_config": {}}, {}) == VisionPlan("new")


def test_without_a_processor_pictures_of_any_size_have_no_known_number_of_tokens() -> None:
    config, processor = PUBLISHED["qwen3_vl"]
    found = read_vision({"model_type": "qwen3_vl", **config}, {})
    assert found == replace(read_vision({"model_type": "qwen3_vl", **config}, processor), patches=0, tokens=0)


@pytest.mark.parametrize(
    ("config", "processor"),
    [
        ({"image_grid_pinpoints": [[1, 2]]}, {}),
        ({"image_grid_pinpoints": 5}, {}),
        ({}, {"max_image_size": 4}),
        ({"text_config": "none"}, {"size": 3}),
        ({"vision_config": {"depth": 2, "hidden_size": 8, "patch_size": 2, "mlp_ratio": "wide"}}, {}),
    ],
)
def test_of_other_values_than_expected_only_the_family_is_known(
    config: dict[str, Any], processor: dict[str, Any]
) -> None:
    vision = {"vision_config": {"depth": 2, "hidden_size": 8, "patch_size": 2}}
    assert read_vision({"model_type": "new", **vision, **config}, processor) == VisionPlan("new")
