"""Add the pictures of documents to micro-batches."""

from __future__ import annotations

import base64
import inspect
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from ftkit.data.packing import find_padding
from ftkit.data.pictures import Arrays, PictureInputs, from_record
from ftkit.errors import TrainingError
from ftkit.train.causal_lm import PIXELS
from ftkit.train.model.hf_model import find_body, sees_pictures

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from ftkit.data.cases import Prompt
    from ftkit.train.causal_lm import MicroBatch

    RopeIndex = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class PictureFeed:
    """Adds pictures to micro-batches, in host memory."""

    inputs: PictureInputs
    rope_index: RopeIndex | None = None  # positions by `get_rope_index` of the model's class, if it has M-RoPE

    @classmethod
    def of(cls, model: PreTrainedModel, inputs: PictureInputs | None) -> Self | None:
        """Return the feed of a model that sees pictures, given the inputs of its prepared data; None for others."""
        if inputs is None or not sees_pictures(model):
            return None
        return cls(inputs, getattr(find_body(model), "get_rope_index", None))

    def add(self, batch: MicroBatch, packs: NDArray[np.int32], pictures: Sequence[Arrays] = ()) -> MicroBatch:
        """Return the micro-batch of packs, int32 [B, 4, T], with their documents' pictures, in their order.

        Without pictures, the micro-batch has the sample, so that each rank computes features: with FSDP2, ranks that
        don't would leave the others waiting.
        """
        tokens, positions, is_picture = packs[:, 0].copy(), packs[:, 2], self._is_picture(packs)
        if (is_wrong := np.isin(tokens, self.inputs.token_ids) & ~is_picture).any():
            tokens[is_wrong] = next(iter({*range(len(self.inputs.token_ids) + 1)} - {*self.inputs.token_ids}))
        seen = np.unique(_documents(packs)[is_picture.reshape(-1)])
        if len(seen) != len(pictures):
            raise TrainingError(
                f"{len(seen)} documents of packs have tokens of pictures, but {len(pictures)} have pictures",
                meaning="the prepared data is damaged",
                fix="delete the folder of the prepared data, and run again",
            )
        joined = self._join(pictures) if pictures else self._sample
        return replace(
            batch,
            input_ids=torch.from_numpy(tokens.astype(np.int64)),
            pictures={name: torch.from_numpy(array) for name, array in joined.items()},
            has_pictures=bool(pictures),
            pixel_bits=torch.from_numpy(self._pixel_range.view(np.int32)),
            picture_tokens=torch.from_numpy(is_picture),
            rope_positions=self._rope_positions(tokens, positions, is_picture, dict(zip(seen, pictures, strict=True))),
        )  # fmt: skip

    def prompt_inputs(self, model: PreTrainedModel, prompt: Prompt, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the inputs of a model's class for a prompt's pictures, in addition to tokens; empty without any."""
        if not prompt.pictures:
            return {}
        arrays = {name: torch.from_numpy(array.copy()) for name, array in from_record(prompt.pictures).items()}
        scale, offset = torch.from_numpy(self._pixel_range)
        arrays[PIXELS] = arrays[PIXELS].float().mul_(scale).add_(offset)
        types = torch.from_numpy(np.isin(prompt, self.inputs.token_ids)[None].astype(np.int64))
        accepted = inspect.signature(model.forward).parameters
        arrays |= {name: types for name in ("token_type_ids", "mm_token_type_ids") if name in accepted}
        return {name: each.to(device) for name, each in arrays.items()}

    def affected(self, packs: NDArray[np.int32], number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return masks, bool [B * T]: a document with pictures, and its tokens from the first picture on."""
        documents, is_picture = _documents(packs), self._is_picture(packs).reshape(-1)
        chosen = documents == np.unique(documents[is_picture])[number]
        first = np.flatnonzero(chosen & is_picture)[0]
        return torch.from_numpy(chosen), torch.from_numpy(chosen & (np.arange(len(chosen)) >= first))

    def _is_picture(self, packs: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return a mask of picture features, [B, T], without the padding, which repeats a pack's first token."""
        is_picture: NDArray[np.bool_] = np.isin(packs[:, 0], self.inputs.token_ids) & ~find_padding(packs)
        return is_picture

    @cached_property
    def _sample(self) -> Arrays:
        record = from_record(zlib.decompress(base64.b64decode(self.inputs.sample)))
        return {name: array.copy() for name, array in record.items()}

    @cached_property
    def _pixel_range(self) -> NDArray[np.float32]:
        """Scale and offset, [2, ...], in the shape that pixels are multiplied with."""
        shape = (2, -1, *[1] * (-self.inputs.channel_axis - 1))
        return np.array([self.inputs.scale, self.inputs.offset], np.float32).reshape(shape)

    def _join(self, pictures: Sequence[Arrays]) -> Arrays:
        """Concatenate the arrays of documents; other axes are padded with zeros on the right."""
        joined = {}
        for name, axis in self.inputs.joined_at.items():
            arrays = [each[name] for each in pictures]
            sizes = np.max([each.shape for each in arrays], axis=0)
            sizes[axis] = sum(each.shape[axis] for each in arrays)
            joined[name], begin = np.zeros(sizes, arrays[0].dtype), 0
            for each in arrays:
                places = [slice(size) for size in each.shape]
                places[axis] = slice(begin, begin + each.shape[axis])
                joined[name][tuple(places)] = each
                begin += each.shape[axis]
        return joined

    def _rope_positions(
        self, tokens: NDArray[np.int32], positions: NDArray[np.int32], is_picture: NDArray[np.bool_],
        pictures: dict[int, Arrays],
    ) -> torch.Tensor | None:  # fmt: skip
        """Return the positions of each document by M-RoPE, int64 [3, B, T]; None if the model has none."""
        if self.rope_index is None:
            return None
        accepted = inspect.signature(self.rope_index).parameters
        found = torch.from_numpy(positions.astype(np.int64)).reshape(1, -1).repeat(3, 1)
        begins = np.append(np.flatnonzero(positions == 0), positions.size)
        for document, arrays in pictures.items():
            part = slice(int(begins[document]), int(begins[document + 1]))
            own = {name: torch.from_numpy(array.copy()) for name, array in arrays.items() if name in accepted}
            ids, types = (
                torch.from_numpy(each.reshape(1, -1)[:, part].astype(np.int64)) for each in (tokens, is_picture)
            )
            found[:, part] = self.rope_index(input_ids=ids, mm_token_type_ids=types, **own)[0][:, 0]
        return found.view(3, *positions.shape)


def _documents(packs: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the number of each flattened token's document, int64 [B * T]."""
    numbers: NDArray[np.int64] = (packs[:, 2] == 0).reshape(-1).cumsum() - 1
    return numbers
