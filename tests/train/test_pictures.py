"""Training on pictures: tiny models of many families, whose losses are those of their own classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch
from family_matrix import TRAINING
from lone_world import lone_world
from numpy.typing import NDArray
from picture_families import (
    FAMILIES,
    IMAGE_TOKEN,
    Arrays,
    class_loss,
    make_documents,
    pack_of,
    packs_of,
    picture_inputs,
    tiny_picture_config,
    tiny_picture_model,
)
from picture_matrix import try_pictures

from ftkit.data.packing import Document, build_pack
from ftkit.errors import PrerequisiteError, TrainingError
from ftkit.train.causal_lm import CausalLM
from ftkit.train.components.pictures import PictureFeed
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.distributed.verification import verify_pictures
from ftkit.train.model import attention
from ftkit.train.model.attention import choose_kernel, masked_attention, register_kernel
from ftkit.train.model.hf_model import build_empty
from ftkit.train.model.token_mixers import choose_token_mixers
from ftkit.train.model.vision import vision_parameters

if TYPE_CHECKING:
    from ftkit.data.prepared_data import PackStore

TRAINED = [name for name in FAMILIES if name != "paligemma"]
LOOKING_AHEAD = ("gemma3", "gemma4")
"""Families in which the tokens of a picture attend to later ones of it."""


@pytest.mark.parametrize("name", TRAINED)
def test_the_loss_of_packed_pictures_is_that_of_the_models_own_class(name: str) -> None:
    model = tiny_picture_model(name)
    documents = make_documents(model, name)
    feed = PictureFeed.of(model, picture_inputs(name))
    assert feed is not None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = [class_loss(model, name, each) for each in documents]
    gradients = torch.autograd.grad(sum(expected), trained, allow_unused=True)
    with lone_world("cpu") as world:
        choose_token_mixers(model, world)
    module = CausalLM(model)
    alone = [module(batch=pack_of([each], 128, feed)) for each in documents]
    together = module(batch=pack_of(documents, 256, feed))
    found = torch.autograd.grad(together, trained, allow_unused=True)
    for one, other in zip(alone, expected, strict=True):
        assert one.item() == pytest.approx(other.item(), rel=1e-5)
    assert together.item() == pytest.approx(sum(expected).item(), rel=1e-5)
    norm = torch.stack([each.norm() for each in gradients if each is not None]).norm()
    assert (
        max((one - other).norm() / norm for one, other in zip(found, gradients, strict=True) if other is not None)
        < 1e-5
    )


@pytest.mark.parametrize("name", TRAINED)
def test_a_pack_without_pictures_has_the_loss_of_its_text_and_zero_gradients_of_the_tower(name: str) -> None:
    model = tiny_picture_model(name)
    (document,) = make_documents(model, name, numbers=(0,))
    feed = PictureFeed.of(model, picture_inputs(name))
    assert feed is not None
    with lone_world("cpu") as world:
        choose_token_mixers(model, world)
    loss = CausalLM(model)(batch=pack_of([document], 128, feed))
    loss.backward()
    assert loss.item() == pytest.approx(class_loss(model, name, document).item(), rel=1e-5)
    encoder, projector = vision_parameters(model)
    with_pictures = CausalLM(model)(batch=pack_of(make_documents(model, name), 256, feed))
    vision = [*encoder.values(), *projector.values()]
    used = torch.autograd.grad(with_pictures, vision, allow_unused=True)
    assert [each.grad is not None for each in vision] == [each is not None for each in used]
    assert not any(each.grad.any() for each in vision if each.grad is not None)


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen2_5_vl", "qwen3_5"])
def test_a_micro_batch_of_several_packs_has_the_sum_of_their_losses(name: str) -> None:
    model = tiny_picture_model(name)
    packs = [make_documents(model, name, seed, numbers) for seed, numbers in enumerate([(0, 2), (1, 1), (0, 0)])]
    feed = PictureFeed.of(model, picture_inputs(name))
    assert feed is not None
    with lone_world("cpu") as world:
        choose_token_mixers(model, world)
    expected = sum(class_loss(model, name, each).item() for documents in packs for each in documents)
    assert CausalLM(model)(batch=packs_of(packs, 192, feed)).item() == pytest.approx(expected, rel=1e-5)


def test_the_padding_behind_a_picture_at_the_beginning_of_a_pack_is_no_picture() -> None:
    """Padding repeats a pack's first token."""
    model = tiny_picture_model("llava")
    (document,) = make_documents(model, "llava", numbers=(1,))
    first = int(np.flatnonzero(document.tokens == IMAGE_TOKEN)[0])
    cut = replace(document, tokens=document.tokens[first:])
    feed = PictureFeed.of(model, picture_inputs("llava"))
    assert feed is not None
    batch = pack_of([cut], 128, feed)
    assert batch.picture_tokens is not None
    assert int(batch.picture_tokens.sum()) == int((cut.tokens == IMAGE_TOKEN).sum())
    loss = CausalLM(model)(batch=batch)
    assert loss.item() == pytest.approx(class_loss(model, "llava", cut).item(), rel=1e-5)


def test_tokens_of_a_picture_without_one_are_found() -> None:
    model = tiny_picture_model("llava")
    (document,) = make_documents(model, "llava", numbers=(1,))
    feed = PictureFeed.of(model, picture_inputs("llava"))
    assert feed is not None
    with pytest.raises(TrainingError, match="1 documents of packs have tokens of pictures, but 0 have pictures"):
        pack_of([replace(document, arrays={})], 128, feed)


@dataclass(frozen=True)
class Mixing(PictureFeed):
    """Gives pictures to documents in another order, or blackens them."""

    changes: str = "order"

    def _join(self, pictures: Sequence[Arrays]) -> Arrays:
        if self.changes == "order":
            return super()._join(pictures[::-1])
        return super()._join([each | {"pixel_values": each["pixel_values"] * 0} for each in pictures])


@pytest.mark.parametrize("changes", ["order", "pixels", ""])
def test_pictures_that_reach_other_documents_or_none_are_found_before_step_1(changes: str) -> None:
    model = tiny_picture_model("llava")
    documents = make_documents(model, "llava", numbers=(1, 0, 1))
    pack = build_pack([Document(each.tokens, each.labels) for each in documents], 256)
    arrays = [each.arrays for each in documents if each.arrays]
    store = cast("PackStore", StandInStore(np.concatenate([pack, pack[:1] * 0])[None], arrays))
    inputs = picture_inputs("llava")
    feed = Mixing(inputs, changes=changes) if changes else PictureFeed(inputs)
    training = TRAINING.model_copy(update={"micro_batch_size": 1})
    with lone_world("cpu") as world:
        engine = Fsdp2Engine(model, training, world)
        if changes:
            with pytest.raises(TrainingError, match="other pixels"):
                verify_pictures(engine, world, store, feed, training)
        else:
            assert verify_pictures(engine, world, store, feed, training)["pixels of other documents"] == "difference 0"


@dataclass(frozen=True)
class StandInStore:
    """One pack."""

    packs: NDArray[np.int32]
    arrays: list[Arrays]

    def __len__(self) -> int:
        return 1

    def read(self, packs: Sequence[int]) -> NDArray[np.int32]:
        return self.packs[list(packs)]

    def pictures(self, _: Sequence[int]) -> list[Arrays]:
        return self.arrays


@pytest.mark.parametrize("name", LOOKING_AHEAD)
def test_kernels_by_offsets_are_refused_where_tokens_of_a_picture_see_each_other(name: str) -> None:
    training = TRAINING.model_copy(update={"attention": "flash4"})
    with lone_world("cpu") as world, pytest.raises(PrerequisiteError, match="takes a mask"):
        choose_kernel(training, tiny_picture_config(name), world)


@pytest.mark.parametrize("name", [name for name in TRAINED if name not in LOOKING_AHEAD])
def test_kernels_by_offsets_get_the_documents_of_packs_with_pictures(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is replaced by masks of the same offsets."""

    def masked(*inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        query, key, value, cu_seqlens, _, scale, window, _ = inputs
        return masked_attention(query, key, value, cu_seqlens, cast("float", scale), cast("int | None", window)), None

    monkeypatch.setattr(attention, "varlen_attention", masked)
    expected = tiny_picture_model(name)
    model = build_empty(expected.config, register_kernel("cudnn")).to_empty(device="cpu")
    model.load_state_dict(expected.state_dict())
    for one, other in zip(model.buffers(), expected.buffers(), strict=True):
        one.copy_(other)
    model.tie_weights()
    with lone_world("cpu") as world:
        choose_token_mixers(model, world)
    documents = make_documents(expected, name)
    feed = PictureFeed.of(model, picture_inputs(name))
    assert feed is not None
    with torch.no_grad():
        loss = CausalLM(model)(batch=pack_of(documents, 256, feed))
        total = sum(class_loss(expected, name, each).item() for each in documents)
    assert loss.item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_the_parameters_of_tower_and_projector_are_told_apart(name: str) -> None:
    model = tiny_picture_model(name)
    encoder, projector = vision_parameters(model)
    assert encoder
    assert projector
    assert not encoder.keys() & projector.keys()
    rest = [key for key, _ in model.named_parameters() if key not in encoder | projector]
    assert not [key for key in rest if "vision" in key or "visual" in key or "projector" in key or "connector" in key]
    assert {
        key.split(".blocks.")[0].split(".layers.")[0] for key in projector if "layers" in key or "blocks" in key
    } == set()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("name", "packed"), [("llama4", "yes"), ("paligemma", "attend to each other")])
def test_the_table_of_families_says_what_a_model_can(name: str, packed: str) -> None:
    with lone_world("cpu") as world:
        results = try_pictures(name, world).results
    assert packed in results["packed"]
    assert {*results.values()} == ({"yes"} if packed == "yes" else {results["packed"], "not tried"})
