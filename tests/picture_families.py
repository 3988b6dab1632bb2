"""Tiny multimodal models with random weights, and arrays of random pictures as their processors give them."""

from __future__ import annotations

import base64
import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from family_matrix import VOCABULARY, tiny_config
from numpy.typing import NDArray
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from ftkit.data.packing import IGNORED, Document, build_pack
from ftkit.data.pictures import PictureInputs, to_record
from ftkit.train.components.batches import to_micro_batch

if TYPE_CHECKING:
    from ftkit.train.causal_lm import MicroBatch
    from ftkit.train.components.pictures import PictureFeed

Arrays = dict[str, np.ndarray[Any, Any]]
IMAGE_TOKEN = VOCABULARY - 2
WIDTH = 32
TOWER = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 16,
}  # fmt: skip


def _squares(generator: np.random.Generator, *, number: int = 1, size: int = 16) -> Arrays:
    return {"pixel_values": generator.integers(0, 256, (number, 3, size, size), dtype=np.uint8)}


def _tiles(generator: np.random.Generator) -> Arrays:
    pixels = generator.integers(0, 256, (1, 2, 3, 16, 16), dtype=np.uint8)
    return {"pixel_values": pixels, "pixel_attention_mask": np.ones((1, 2, 16, 16), np.int64)}


def _patches(generator: np.random.Generator) -> Arrays:
    """Patches of a picture, of 2 frames of 4 x 4 pixels, in a grid of any even size."""
    grid = np.array([[1, *(2 * generator.integers(1, 4, 2))]], np.int64)
    pixels = generator.integers(0, 256, (int(grid.prod()), 3 * 2 * 4 * 4), dtype=np.uint8)
    return {"pixel_values": pixels, "image_grid_thw": grid}


def _sized(generator: np.random.Generator) -> Arrays:
    """Pixels of any size."""
    size = 8 * generator.integers(2, 4, 2)  # Mistral 3 can't split the features of one with a single token
    pixels = generator.integers(0, 256, (1, 3, *size), dtype=np.uint8)
    return {"pixel_values": pixels, "image_sizes": size[None].astype(np.int64)}


def _positioned(generator: np.random.Generator) -> Arrays:
    """Patches with their places: 3 x 3 of them become one feature."""
    places = np.stack(np.meshgrid(np.arange(6), np.arange(3), indexing="xy"), axis=-1).reshape(1, -1, 2)
    pixels = generator.integers(0, 256, (1, places.shape[1], 3 * 4 * 4), dtype=np.uint8)
    return {"pixel_values": pixels, "image_position_ids": places.astype(np.int64)}


def _padded_tiles(generator: np.random.Generator) -> Arrays:
    pixels = generator.integers(0, 256, (1, 2, 3, 16, 16), dtype=np.uint8)
    return {"pixel_values": pixels, "image_sizes": np.array([[16, 16]], np.int64)}


def _onevision(generator: np.random.Generator) -> Arrays:
    pixels = generator.integers(0, 256, (1, 1, 3, 16, 16), dtype=np.uint8)
    sizes, numbers = np.array([[16, 16]], np.int64), np.array([2], np.int64)
    return {"pixel_values": pixels, "image_sizes": sizes, "batch_num_images": numbers}


@dataclass(frozen=True)
class Family:
    """How a tiny model of a family is made, and the arrays of a picture."""

    picture: Callable[[np.random.Generator], Arrays]
    joined_at: dict[str, int]
    vision: dict[str, Any]
    whole: dict[str, Any]
    text: dict[str, Any] = field(default_factory=dict)


_GRIDS = {"pixel_values": 0, "image_grid_thw": 0}
_QWEN = {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4, "hidden_size": WIDTH}
_QWEN["intermediate_size"] = 48
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
_IDEFICS = {"pixel_values": 1, "pixel_attention_mask": 1}

FAMILIES: dict[str, Family] = {
    "aya_vision": Family(
        _squares, {"pixel_values": 0}, TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"downsample_factor": 2, "adapter_layer_norm_eps": 1e-6, "vision_feature_layer": -1},
    ),
    "cohere2_vision": Family(
        _squares, {"pixel_values": 0}, TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"downsample_factor": 2, "alignment_intermediate_size": 64},
    ),
    "gemma4": Family(
        _positioned, {"pixel_values": 0, "image_position_ids": 0},
        TOWER
        | {"model_type": "gemma4_vision", "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 64},
        {"audio_config": None}, {"use_bidirectional_attention": "vision"},
    ),
    "gemma3": Family(
        _squares, {"pixel_values": 0}, TOWER, {"mm_tokens_per_image": 4}
    ),
    "glm4v": Family(_patches, _GRIDS, _QWEN | {"image_size": 16}, {}, _SECTIONS),
    "idefics3": Family(_tiles, _IDEFICS, TOWER, {"scale_factor": 2}),
    "internvl": Family(
        _squares, {"pixel_values": 0}, TOWER | {"image_size": [16, 16], "patch_size": [4, 4]}, {"image_seq_length": 4}
    ),
    "llama4": Family(
        _squares, {"pixel_values": 0},
        TOWER | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
                 "intermediate_size": 128},
        {},
    ),
    "llava": Family(
        _squares, {"pixel_values": 0}, TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
        {"image_seq_length": 16},
    ),
    "llava_next": Family(
        _padded_tiles, {"pixel_values": 0, "image_sizes": 0},
        TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
        {"image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]], "image_seq_length": 16},
    ),
    "llava_onevision": Family(
        _onevision, {"pixel_values": 0, "image_sizes": 0, "batch_num_images": 0},
        TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]]},
    ),
    "mistral3": Family(
        _sized, {"pixel_values": 0, "image_sizes": 0}, TOWER | {"model_type": "pixtral", "head_dim": 16},
        {},
    ),
    "qwen2_5_vl": Family(
        _patches, _GRIDS, _QWEN | {"window_size": 16, "fullatt_block_indexes": [1]}, {}, _SECTIONS
    ),
    "paligemma": Family(
        _squares, {"pixel_values": 0},
        TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 64},
        {"projection_dim": 64},
    ),
    "qwen2_vl": Family(
        _patches, _GRIDS,
        {"depth": 2, "embed_dim": WIDTH, "num_heads": 2, "patch_size": 4, "hidden_size": 64, "mlp_ratio": 2}, {},
        _SECTIONS,
    ),
    "qwen3_5": Family(_patches, _GRIDS, _QWEN | {"num_position_embeddings": 16}, {}),
    "qwen3_vl": Family(
        _patches, _GRIDS, _QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, {}
    ),
    "qwen3_vl_moe": Family(
        _patches, _GRIDS, _QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, {}
    ),
    "smolvlm": Family(_tiles, _IDEFICS, TOWER, {"scale_factor": 2}),
}  # fmt: skip


def tiny_picture_config(name: str, image_token: int = IMAGE_TOKEN) -> PretrainedConfig:
    family = FAMILIES[name]
    text = tiny_config(name)
    default = CONFIG_MAPPING[name]()
    kind = family.vision.get("model_type")
    vision: Any = {**(CONFIG_MAPPING[kind]() if kind else default.vision_config).to_dict(), **family.vision}
    tokens = {"image_token_id": image_token, "image_token_index": image_token, "video_token_id": VOCABULARY - 1}
    whole = {key: value for key, value in tokens.items() if key in default.to_dict()} | family.whole
    return type(default)(text_config=text.to_dict() | family.text, vision_config=vision, **whole)


def tiny_picture_model(name: str, seed: int = 3, image_token: int = IMAGE_TOKEN) -> PreTrainedModel:
    """Return a model whose weights are all random: Gemma 3's projector would begin with zeros, and see nothing."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        tiny_picture_config(name, image_token), dtype=torch.float32, attn_implementation="sdpa"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.train()


# --- Documents -----------------------------------------------------------------------------------

SCALE, OFFSET = (0.011, 0.012, 0.013), (-1.1, -1.2, -1.3)  # of each channel


@dataclass(frozen=True)
class PictureDocument:
    """A document with pictures, as a model's class takes it, and as prepared data has it."""

    tokens: NDArray[np.int32]
    arrays: Arrays

    @property
    def labels(self) -> NDArray[np.int32]:
        following = np.append(self.tokens[1:], IGNORED)
        return np.where(following == IMAGE_TOKEN, IGNORED, following).astype(np.int32)


def picture_inputs(name: str) -> PictureInputs:
    """Return what a model's processor would tell; flattened patches have the channels one after the other."""
    family = FAMILIES[name]
    pixels = family.picture(np.random.default_rng(9))
    is_flat = pixels["pixel_values"].ndim <= 3
    each = pixels["pixel_values"].shape[-1] // 3 if is_flat else 1
    scale, offset = (tuple(np.repeat(values, each).tolist()) for values in (SCALE, OFFSET))
    blank = {key: np.zeros_like(value) if key == "pixel_values" else value for key, value in pixels.items()}
    sample = base64.b64encode(zlib.compress(to_record(blank))).decode()
    return PictureInputs(family.joined_at, scale, offset, -1 if is_flat else -3, (IMAGE_TOKEN,), sample, name, "")


def normalized(inputs: PictureInputs, arrays: Arrays) -> dict[str, torch.Tensor]:
    """Return the inputs of a model's class: what its processor returns."""
    shape = [-1, *[1] * (-inputs.channel_axis - 1)]
    scale, offset = (torch.tensor(values).view(shape) for values in (inputs.scale, inputs.offset))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return tensors | ({"pixel_values": tensors["pixel_values"] * scale + offset} if tensors else {})


def join(pictures: list[Arrays], joined_at: dict[str, int]) -> Arrays:
    """Join the arrays of pictures as a processor would for the pictures of one document."""
    joined: Arrays = {}
    for name, axis in joined_at.items() if pictures else ():
        arrays = [each[name] for each in pictures]
        shape = [max(sizes) for sizes in zip(*(each.shape for each in arrays), strict=True)]
        widths = [[(0, 0 if at == axis else shape[at] - size) for at, size in enumerate(one.shape)] for one in arrays]
        joined[name] = np.concatenate([np.pad(one, width) for one, width in zip(arrays, widths, strict=True)], axis)
    return joined


def make_documents(model: Any, name: str, seed: int = 0, numbers: tuple[int, ...] = (1, 0, 2)) -> list[PictureDocument]:
    """Return documents of random tokens, each with a number of random pictures; they begin and end with text."""
    generator, family, inputs = np.random.default_rng(seed), FAMILIES[name], picture_inputs(name)
    documents = []
    for number in numbers:
        parts, pictures = [generator.integers(3, 300, 3 + number)], [family.picture(generator) for _ in range(number)]
        for picture in pictures:
            parts += [[IMAGE_TOKEN] * _num_features(model, normalized(inputs, picture)), generator.integers(3, 300, 3)]
        parts.append(generator.integers(3, 300, 10))
        documents.append(PictureDocument(np.concatenate(parts).astype(np.int32), join(pictures, family.joined_at)))
    return documents


def _num_features(model: Any, picture: dict[str, torch.Tensor]) -> int:
    owner = model.model if hasattr(model, "model") else model
    with torch.no_grad():
        output = owner.get_image_features(**picture, return_dict=True)
    features = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    return sum(
        part.numel() // part.shape[-1] for part in (features if isinstance(features, list | tuple) else [features])
    )


def class_loss(model: Any, name: str, document: PictureDocument) -> torch.Tensor:
    """Return the summed loss of a document by the model's own class, unpacked."""
    ids, labels = (torch.from_numpy(each.astype(np.int64))[None] for each in (document.tokens, document.labels))
    types = (ids == IMAGE_TOKEN).long()
    accepted = inspect.signature(model.forward).parameters
    kinds = {key: types for key in ("token_type_ids", "mm_token_type_ids") if key in accepted}
    inputs = normalized(picture_inputs(name), document.arrays)
    logits = model(input_ids=ids, **inputs, **kinds, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[0].float(), labels[0], reduction="sum", ignore_index=IGNORED)


def pack_of(documents: list[PictureDocument], length: int, feed: PictureFeed) -> MicroBatch:
    """Return documents as one pack."""
    return packs_of([documents], length, feed)


def packs_of(packs: list[list[PictureDocument]], length: int, feed: PictureFeed) -> MicroBatch:
    """Return a micro-batch of packs."""
    built = [build_pack([Document(each.tokens, each.labels) for each in documents], length) for documents in packs]
    values = np.stack([np.concatenate([pack, np.zeros_like(pack[:1])]) for pack in built])
    arrays = [each.arrays for documents in packs for each in documents if each.arrays]
    return feed.add(to_micro_batch(values, torch.device("cpu")), values, arrays)
