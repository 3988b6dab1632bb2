"""Folders of tiny multimodal models without weights: configuration, tokenizer, chat template, and processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    Gemma3Processor,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

try:
    from transformers import CLIPImageProcessorPil, Gemma3ImageProcessorPil, Idefics3ImageProcessorPil
except ImportError:
    pytest.skip("this transformers has no processors for Pillow", allow_module_level=True)

_TURN = """{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'IMAGE' }}{% else %}{{ part['text'] }}
{%- endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"""
TEMPLATE = (
    "{% for message in messages %}" + _TURN + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer_of(*special: str, **named: str) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: number for number, each in enumerate([*alphabet, "ĊĊ"])}, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106
        pad_token="<pad>",  # noqa: S106
        extra_special_tokens=named,
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *special]})
    return fast


def _gemma3() -> Gemma3Processor:
    named = {"image_token": "<img>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    pictures = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return Gemma3Processor(pictures, tokenizer_of(**named), image_seq_length=4)


def _llava() -> LlavaProcessor:
    pictures = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return LlavaProcessor(
        pictures, tokenizer_of("<image>"), patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip


def _idefics3() -> Idefics3Processor:
    special = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return Idefics3Processor(pictures, tokenizer_of(*special), image_seq_len=4)


PROCESSORS: dict[str, Callable[[], Any]] = {"gemma3": _gemma3, "llava": _llava, "idefics3": _idefics3}


_TEXT = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def write_model(folder: Path, name: str, *, has_weights: bool = False) -> Any:
    """Write a folder of a tiny model, and return its processor."""
    processor = PROCESSORS[name]()
    processor.chat_template = processor.tokenizer.chat_template = TEMPLATE.replace("IMAGE", processor.image_token)
    processor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    token = getattr(processor.tokenizer, "image_token_id", None) or processor.image_token_id
    kind = CONFIG_MAPPING[name]
    default = kind()
    text = type(default.text_config)(**_TEXT, eos_token_id=processor.tokenizer.eos_token_id)
    vision = type(default.vision_config)(**_VISION)
    key = "image_token_id" if "image_token_id" in default.to_dict() else "image_token_index"
    fewer = {"gemma3": {"mm_tokens_per_image": 4}, "idefics3": {"scale_factor": 1}}.get(name, {})
    config = kind(text_config=text.to_dict(), vision_config=vision.to_dict(), **{key: token}, **fewer)
    if has_weights:
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    config.save_pretrained(folder)
    return processor
