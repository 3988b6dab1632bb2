"""Training on pictures: tiny models of many families, whose losses are those of their own classes."""

from __future__ import annotations

import pytest
import torch
from lone_world import lone_world
from picture_families import FAMILIES, class_loss, make_documents, pack_of, picture_inputs, tiny_picture_model
from picture_matrix import try_pictures

from ftkit.train.causal_lm import CausalLM
from ftkit.train.components.pictures import PictureFeed
from ftkit.train.model.token_mixers import choose_token_mixers
from ftkit.train.model.vision import vision_parameters

TRAINED = [name for name in FAMILIES if name != "paligemma"]


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
