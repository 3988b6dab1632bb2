"""Gemma 3 in its multimodal wrapper, trained on text only."""

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

from ftkit.config.model import ArchitectureSpec, ModelSpec
from ftkit.config.training_plan import TrainingPlan
from ftkit.data.encoding import IGNORED
from ftkit.data.store import PreparedData
from ftkit.errors import TrainingError
from ftkit.launch.model import resolve_model
from ftkit.planning.layout import Workspace
from ftkit.runs.records import EvaluationRecord
from ftkit.train.causal_lm import CausalLM, MicroBatch
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.model.build import build_empty, load_pretrained, read_config
from ftkit.train.model.weights import load_weights

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
    store = PreparedData(run.plan.data_directory).read_validation()
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
    assert config.is_wrapped
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


def trained_on(folder: Path, name: str, make_run: Callable[..., Any], *overrides: str) -> Any:
    shape = [f"model.architecture.{key}={json.dumps(value)}" for key, value in SHAPE.model_dump().items()]
    short = ("training.max_steps=3", "training.learning_rate=0.02", "evaluation.sql_execution=null")
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
