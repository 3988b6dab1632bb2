"""Tiny processors of multimodal models that need torchvision, for the models of `picture_families`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers as t
from picture_families import tiny_picture_model
from tiny_processors import TEMPLATE, tokenizer_of


def _video() -> Any:
    return t.Qwen2VLVideoProcessor()


def _qwen(kind: Any) -> Any:
    pictures = t.Qwen2VLImageProcessor(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024})
    special = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    return kind(pictures, tokenizer_of(*special), video_processor=_video())


def _glm() -> Any:
    pictures = t.Glm4vImageProcessor(patch_size=4, merge_size=2, size={"shortest_edge": 128, "longest_edge": 2048})
    return t.Glm4vProcessor(
        pictures,
        tokenizer_of("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
        video_processor=t.Glm4vVideoProcessor(),
    )


def _pixtral() -> Any:
    pictures = t.PixtralImageProcessor(patch_size={"height": 8, "width": 8}, size={"longest_edge": 32})
    return t.PixtralProcessor(
        pictures, tokenizer_of("[IMG]", "[IMG_BREAK]", "[IMG_END]"), patch_size=4, spatial_merge_size=2
    )


def _llama4() -> Any:
    pictures = t.Llama4ImageProcessor(size={"height": 16, "width": 16}, max_patches=4)
    marks = ("<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
    tokenizer = tokenizer_of("<|image|>", "<|patch|>", *marks)
    names = {"fake_image_token": "<|image|>", "image_token": "<|image|>"}
    return t.Llama4Processor(pictures, tokenizer, patch_size=4, pixel_shuffle_ratio=0.5, **names)


def _onevision() -> Any:
    pictures = t.LlavaOnevisionImageProcessor(
        size={"height": 16, "width": 16}, image_grid_pinpoints=[[16, 16], [16, 32], [32, 16]]
    )
    return t.LlavaOnevisionProcessor(
        pictures,
        tokenizer_of("<image>", "<video>"),
        video_processor=t.LlavaOnevisionVideoProcessor(),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )


def _internvl() -> Any:
    pictures = t.GotOcr2ImageProcessor(
        size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    return t.InternVLProcessor(
        pictures, tokenizer_of(**named), video_processor=t.InternVLVideoProcessor(), image_seq_length=4
    )


def _smolvlm() -> Any:
    pictures = t.SmolVLMImageProcessor(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    special = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
    named = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
    }
    return t.SmolVLMProcessor(
        pictures, tokenizer_of(*special, **named), video_processor=t.SmolVLMVideoProcessor(), image_seq_len=4
    )


_MARKS = {
    "<|image_pad|>": "<|vision_start|><|image_pad|><|vision_end|>",
    "<|image|>": "<|begin_of_image|><|image|><|end_of_image|>",
}
"""What chat templates write for a picture, where that is more than its token."""

PROCESSORS: dict[str, Callable[[], Any]] = {
    "glm4v": _glm,
    "internvl": _internvl,
    "llama4": _llama4,
    "llava_onevision": _onevision,
    "mistral3": _pixtral,
    "qwen2_5_vl": lambda: _qwen(t.Qwen2_5_VLProcessor),
    "qwen3_5": lambda: _qwen(t.Qwen3VLProcessor),
    "qwen3_vl": lambda: _qwen(t.Qwen3VLProcessor),
    "smolvlm": _smolvlm,
}


def write_model(folder: Path, name: str) -> Any:
    """Write the folder of a tiny model, and return its processor."""
    processor = PROCESSORS[name]()
    processor.chat_template = processor.tokenizer.chat_template = TEMPLATE.replace(
        "IMAGE", _MARKS.get(processor.image_token, processor.image_token)
    )
    processor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    token = getattr(processor, "img_patch_token", processor.image_token)  # where Llama 4 puts features
    model = tiny_picture_model(name, image_token=processor.tokenizer.convert_tokens_to_ids(token))
    model.config.get_text_config().eos_token_id = processor.tokenizer.eos_token_id
    model.save_pretrained(folder)
    return processor
