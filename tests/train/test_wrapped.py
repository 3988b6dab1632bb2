"""Multimodal models, trained on text only."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from ftkit.config.training import TrainingPlan
from ftkit.data.packing import IGNORED
from ftkit.data.prepared_data import PreparedData
from ftkit.errors import TrainingError
from ftkit.launch.model import resolve_model
from ftkit.models.architecture import ArchitectureSpec, ModelSpec
from ftkit.planning.layout import Workspace
from ftkit.runs.records import EvaluationRecord
from ftkit.train.causal_lm import CausalLM, MicroBatch
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.model.hf_model import build_empty, find_text, load_pretrained, read_config
from ftkit.train.model.pretrained import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ftkit.train.world import World

SHAPE = ArchitectureSpec(
    family="gemma3_text", vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, sliding_window=16,
    full_attention_every=6, tie_word_embeddings=True, rope_theta=1_000_000.0,
)  # fmt: skip
TEXT = SHAPE.model_dump(exclude={"family", "full_attention_every", "rope_theta"})
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
AS_ON_THE_HUB, AS_IN_THE_CLASS = "language_model.model.", "model.language_model."


def save_as(prefix: str, source: Path, folder: Path) -> Path:
    """Write the weights under one of the two naming schemes, with the vision tower in a separate file."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(source / "model.safetensors")
    files: dict[str, dict[str, torch.Tensor]] = {"text.safetensors": {}, "vision.safetensors": {}}
    for name, tensor in weights.items():
        is_text = name.startswith((AS_ON_THE_HUB, AS_IN_THE_CLASS))
        stored = prefix + name.removeprefix(AS_ON_THE_HUB).removeprefix(AS_IN_THE_CLASS) if is_text else name
        files["text.safetensors" if is_text else "vision.safetensors"][stored] = tensor
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    places = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a vision tower, as `save_pretrained` leaves it."""
    torch.manual_seed(7)
    vision = VISION | {"image_size": 28, "patch_size": 14}
    rope = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = Gemma3Config(text_config=TEXT | rope, vision_config=vision, mm_tokens_per_image=4)
    folder = tmp_path_factory.mktemp("wrapper")
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def held_out_loss(model: Any, run: Any) -> float:
    store = PreparedData(run.plan.data.root).read_validation()
    total = 0.0
    for tokens, labels, positions, _ in torch.from_numpy(store.read(range(len(store))).astype(np.int64)):
        for document in torch.tensor_split(torch.arange(len(tokens)), torch.nonzero(positions == 0)[1:, 0]):
            with torch.no_grad():
                logits = model(tokens[document][None], use_cache=False).logits[0]
            kept = labels[document]
            total += float(torch.nn.functional.cross_entropy(logits, kept, ignore_index=IGNORED, reduction="sum"))
    return total / float(store.num_targets.sum())


@pytest.mark.parametrize("prefix", [AS_ON_THE_HUB, AS_IN_THE_CLASS])
def test_the_text_model_computes_the_same_as_within_the_multimodal_model(
    prefix: str, wrapper: Path, tmp_path: Path, world: World
) -> None:
    folder = save_as(prefix, wrapper, tmp_path / "weights")
    (folder / "vision.safetensors").unlink()  # nothing reads it
    config = read_config(folder, SHAPE)
    assert config.wrapper is not None
    training = TrainingPlan(sequence_length=48, global_batch_size=1, max_steps=1, learning_rate=1e-3, precision="fp32")
    engine = Fsdp2Engine(
        build_empty(config.text, "sdpa"), training, world, lambda sharded: load_weights(sharded, folder)
    )
    tokens = torch.randint(0, 512, (1, 48), generator=torch.Generator().manual_seed(1))
    nothing = torch.empty(0, dtype=torch.long)
    batch = MicroBatch(tokens, torch.arange(48)[None], nothing, nothing, torch.tensor([0, 48]).int(), 48)
    whole = Gemma3ForConditionalGeneration.from_pretrained(wrapper)
    with engine.inference() as model, torch.no_grad():
        expected = whole.model.language_model(tokens, use_cache=False).last_hidden_state[0]
        assert torch.allclose(model(compute=CausalLM.hidden_states, batch=batch)[0], expected, atol=1e-5)
        logits = model(compute=lambda model: model.hf_model(input_ids=tokens, use_cache=False).logits)
        assert torch.allclose(logits, whole(tokens, use_cache=False).logits, atol=1e-5)


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True)])
def test_tied_embeddings_follow_the_files_if_the_wrappers_configuration_contradicts_them(
    outer: bool, inner: bool, tmp_path: Path, world: World
) -> None:
    torch.manual_seed(7)
    text = {name: value for name, value in TEXT.items() if name != "sliding_window"} | {"model_type": "ministral3"}
    vision = VISION | {"image_size": 28, "patch_size": 14, "head_dim": 8}
    config = Mistral3Config(
        text_config=text | {"tie_word_embeddings": inner}, vision_config=vision, tie_word_embeddings=outer
    )
    whole = Mistral3ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path)
    planned = resolve_model(ModelSpec(weights=str(tmp_path)), {}, Workspace(tmp_path)).architecture
    assert planned.tie_word_embeddings == outer
    read = read_config(tmp_path, planned)
    built = build_empty(read.text, "sdpa")
    assert planned.counts is not None
    assert planned.counts.total == sum(parameter.numel() for parameter in built.parameters())
    training = TrainingPlan(sequence_length=48, global_batch_size=1, max_steps=1, learning_rate=1e-3, precision="fp32")
    engine = Fsdp2Engine(built, training, world, lambda sharded: load_weights(sharded, tmp_path))
    tokens = torch.randint(0, 512, (1, 48), generator=torch.Generator().manual_seed(1))
    with engine.inference() as model, torch.no_grad():
        logits = model(compute=lambda model: model.hf_model(input_ids=tokens, use_cache=False).logits)
        assert torch.allclose(logits, whole(tokens, use_cache=False).logits, atol=1e-5)


def test_a_multimodal_model_of_another_shape_is_rejected(wrapper: Path) -> None:
    with pytest.raises(TrainingError, match="hidden_size: 64 in the recipe, 32 in the weights"):
        read_config(wrapper, SHAPE.model_copy(update={"hidden_size": 64}))


def trained_on(
    folder: Path, name: str, make_run: Callable[..., Any], *overrides: str, architecture: ArchitectureSpec = SHAPE
) -> Any:
    fields = architecture.model_dump(include={*ArchitectureSpec.model_fields})
    shape = [f"model.architecture.{key}={json.dumps(value)}" for key, value in fields.items()]
    short = ("training.max_steps=3", "training.learning_rate=0.02", "evaluation.generation=null")
    run = make_run(name, f"model.weights={folder}", *shape, *short, *overrides)
    run.train()
    return run


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_match_the_wrappers_parameter_names_and_exclude_the_vision_tower(
    wrapper: Path, tmp_path: Path, make_run: Callable[..., Any]
) -> None:
    source = save_as(AS_ON_THE_HUB, wrapper, tmp_path / "weights")
    run = trained_on(source, "wrapped-lora", make_run, "training.method=lora", "training.lora={rank: 4}")
    before, after = run.records(EvaluationRecord)
    base = AutoModelForCausalLM.from_pretrained(source)
    assert isinstance(base, Gemma3ForConditionalGeneration)
    assert held_out_loss(base, run) == pytest.approx(before.loss, rel=1e-5)
    adapted = PeftModel.from_pretrained(base, str(run.layout.export)).eval()
    assert held_out_loss(adapted, run) == pytest.approx(after.loss, rel=1e-5)
    assert after.loss < before.loss
    assert not any("lora_" in name for name, _ in adapted.base_model.model.model.vision_tower.named_parameters())


@pytest.mark.parametrize("family", ["llava", "mistral3", "qwen3_5"])
def test_the_base_of_adapters_is_loaded_as_the_multimodal_model_that_they_are_named_for(
    family: str, tmp_path: Path
) -> None:
    """`AutoModelForCausalLM` has no class for the first two, and Qwen 3.5's text model for the third."""
    text = TEXT | {"model_type": "qwen3_5_text" if family == "qwen3_5" else "mistral", "layer_types": None}
    vision = {} if family == "qwen3_5" else {"vision_config": VISION | {"image_size": 28, "patch_size": 14}}
    built = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[family](text_config=text, **vision))
    built.save_pretrained(tmp_path)
    assert type(load_pretrained(tmp_path)) is type(built)


def test_a_full_fine_tune_is_exported_as_a_text_model(wrapper: Path, make_run: Callable[..., Any]) -> None:
    run = trained_on(wrapper, "wrapped-full", make_run)
    before, after = run.records(EvaluationRecord)
    model = AutoModelForCausalLM.from_pretrained(run.layout.export)
    assert model.config.architectures == ["Gemma3ForCausalLM"]
    assert held_out_loss(model, run) == pytest.approx(after.loss, rel=1e-5)
    assert after.loss < before.loss


VISION_OF_28_PIXELS = VISION | {"image_size": 28, "patch_size": 14}
LLAMA = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
OTHER_PLACES: dict[str, dict[str, Any]] = {
    "llama4": {
        "text_config": LLAMA | {
            "intermediate_size_mlp": 64, "num_local_experts": 2, "interleave_moe_layer_step": 2, "use_qk_norm": False,
        },
        "vision_config": VISION_OF_28_PIXELS | {
            "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16,
        },
    },
    "idefics2": {
        "text_config": LLAMA | {"model_type": "mistral"},
        "vision_config": VISION_OF_28_PIXELS,
        "perceiver_config": {"hidden_size": 32, "resampler_depth": 1, "resampler_n_heads": 2,
                             "resampler_head_dim": 16, "num_key_value_heads": 2},
    },
    "idefics3": {"text_config": LLAMA | {"model_type": "llama"}, "vision_config": VISION_OF_28_PIXELS},
    "smolvlm": {"text_config": LLAMA | {"model_type": "llama"}, "vision_config": VISION_OF_28_PIXELS},
}  # fmt: skip
"""Configurations of classes whose text model is not `model.language_model`."""


def elsewhere(family: str, folder: Path) -> Any:
    """Save a tiny model of a class of `OTHER_PLACES`, and return the shape of its text model."""
    torch.manual_seed(7)
    config = CONFIG_MAPPING[family](**OTHER_PLACES[family], tie_word_embeddings=False)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return resolve_model(ModelSpec(weights=str(folder)), {}, Workspace(folder)).architecture


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("family", OTHER_PLACES)
def test_adapters_have_the_names_of_a_class_whose_text_model_lies_elsewhere(
    family: str, tmp_path: Path, make_run: Callable[..., Any]
) -> None:
    shape = elsewhere(family, tmp_path)
    lora = ("training.method=lora", "training.lora={rank: 4, targets: [q_proj, k_proj, v_proj, o_proj]}")
    run = trained_on(tmp_path, f"{family}-lora", make_run, *lora, architecture=shape)
    before, after = run.records(EvaluationRecord)
    base = load_pretrained(tmp_path)
    assert held_out_loss(base, run) == pytest.approx(before.loss, rel=1e-5)
    adapted = PeftModel.from_pretrained(base, str(run.layout.export)).eval()
    assert held_out_loss(adapted, run) == pytest.approx(after.loss, rel=1e-5)
    assert after.loss < before.loss
    assert not any("lora_" in name and "vision" in name for name, _ in adapted.named_parameters())


@pytest.mark.parametrize("family", OTHER_PLACES)
def test_a_text_model_that_lies_elsewhere_is_exported_as_a_text_model(
    family: str, tmp_path: Path, make_run: Callable[..., Any]
) -> None:
    shape = elsewhere(family, tmp_path)
    run = trained_on(tmp_path, f"{family}-full", make_run, architecture=shape)
    before, after = run.records(EvaluationRecord)
    assert held_out_loss(load_pretrained(tmp_path), run) == pytest.approx(before.loss, rel=1e-5)
    exported = AutoModelForCausalLM.from_pretrained(run.layout.export)
    assert held_out_loss(exported, run) == pytest.approx(after.loss, rel=1e-5)
    assert after.loss < before.loss


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_are_named_as_in_most_classes_if_the_vision_tower_needs_a_missing_package(
    wrapper: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ImportError("TimmWrapperModel requires the timm library")

    config = read_config(wrapper, SHAPE)
    model = build_empty(config.text, "sdpa")
    monkeypatch.setattr(Gemma3ForConditionalGeneration, "__init__", fail)
    place = find_text(model, config.wrapper)
    assert place is not None
    assert place.rename("model.norm.weight") == "model.language_model.norm.weight"
    assert "requires the timm library" in caplog.text


def test_finding_the_text_model_leaves_its_attention_as_it_is(wrapper: Path) -> None:
    config = read_config(wrapper, SHAPE)
    model = build_empty(config.text, "sdpa")
    place = find_text(model, config.wrapper)
    assert place is not None
    assert place.wrapped == AS_IN_THE_CLASS
    assert model.config._attn_implementation == "sdpa"
