"""Models of every family: built from an architecture and verified, with documents of a pack isolated."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, get_args

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, MambaConfig, PretrainedConfig

from ftkit.config.execution import ParameterCounts, method_counts
from ftkit.config.training import ActivationCheckpointing, TrainingPlan
from ftkit.data.packing import Document, build_pack
from ftkit.data.tokenizers import learn_tokenizer, load_tokenizer
from ftkit.errors import DataError, TrainingError
from ftkit.models.adapters import LoraSpec
from ftkit.models.architecture import ArchitectureSpec, ModelSpec
from ftkit.models.config_json import read_shape
from ftkit.models.families import MEASURED
from ftkit.models.parameters import count_model
from ftkit.train.causal_lm import CausalLM
from ftkit.train.components.batches import pad_documents, to_micro_batch, to_padded_micro_batch
from ftkit.train.components.optimizer import parameter_groups
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.distributed.probe import ProbeResult, _packed_layout, _padded_layout, run_probe
from ftkit.train.distributed.verification import (
    choose_packing,
    operations_explained,
    verify_causality,
    verify_isolation,
    verify_logits,
    verify_sharding,
    verify_targets,
)
from ftkit.train.engine import ShardingStats
from ftkit.train.fused_loss import LogitTransform
from ftkit.train.model.attention import choose_kernel, generation_attention, register_kernel
from ftkit.train.model.hf_model import build_empty, find_decoder_layers, load_pretrained, make_config, read_config
from ftkit.train.model.lora import freeze, prepare_method
from ftkit.train.model.pretrained import load_weights
from ftkit.train.model.varlen_attention import VARLEN
from ftkit.train.param_count import count_method
from ftkit.train.private_apis.transformers import CONVERTS_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from transformers import PreTrainedTokenizerBase

    from ftkit.config.data import Packing
    from ftkit.train.world import World

OTHERS = ("gpt_neox", "mistral", "phi3", "qwen2", "qwen3_moe")
"""Of other kinds: projections fused, biases, norms with biases, other names, experts."""
TRIED = [*(pytest.param(family, marks=pytest.mark.oldest) for family in MEASURED), *OTHERS]
TRAINING = TrainingPlan(sequence_length=32, global_batch_size=4, max_steps=1, learning_rate=1e-3, precision="fp32")


def architecture(family: str, **changes: object) -> ArchitectureSpec:
    fields = {
        "family": family, "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "tie_word_embeddings": family == "gemma3_text",
    }  # fmt: skip
    if family in {"gemma3_text", "olmo3"}:
        fields |= {"sliding_window": 6, "full_attention_every": 2}
    return ArchitectureSpec.model_validate(fields | changes)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return learn_tokenizer(["SELECT name FROM table"], 300, "chatml")


def build(family: str, tokenizer: PreTrainedTokenizerBase, **changes: object) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(make_config(architecture(family, **changes), tokenizer))


@pytest.mark.oldest
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", MEASURED)
def test_the_param_count_of_a_plan_matches_the_model_class(
    family: str,
    tied: bool,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    model = build(family, tokenizer, tie_word_embeddings=tied)
    counted = count_model(architecture(family, tie_word_embeddings=tied)).total
    assert counted == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", TRIED)
def test_the_loss_of_a_pack_is_the_sum_over_its_documents(
    family: str, tokenizer: PreTrainedTokenizerBase, world: World
) -> None:
    generator = np.random.default_rng(0)
    documents = []
    for length in (9, 14, 5):
        tokens = generator.integers(0, 320, length).astype(np.int32)
        labels = np.append(tokens[1:], -100).astype(np.int32)
        documents.append(Document(tokens, labels))
    model = Fsdp2Engine(build(family, tokenizer), TRAINING, world).model

    def loss(*rows: list[Document]) -> float:
        packs = np.stack([build_pack(row, 32) for row in rows])
        with torch.no_grad():
            return float(model(batch=to_micro_batch(packs, world.device)))

    separate = sum(loss([document]) for document in documents)
    assert loss(documents) == pytest.approx(separate, rel=1e-5)
    assert loss([documents[0]], [documents[2], documents[1]]) == pytest.approx(separate, rel=1e-5)


@pytest.mark.parametrize("checkpointing", get_args(ActivationCheckpointing))
@pytest.mark.parametrize("family", TRIED)
def test_every_family_passes_the_checks(
    family: str,
    checkpointing: ActivationCheckpointing,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
) -> None:
    training = TRAINING.model_copy(update={"activation_checkpointing": checkpointing})
    model = build(family, tokenizer)
    expected = count_method(model, training)
    if family in MEASURED:
        assert expected == method_counts(architecture(family), training)
    engine = Fsdp2Engine(model, training, world)
    checks = verify_sharding(engine.sharding_stats(), training, expected)
    assert checks["units"] == 0  # on one process
    assert checks[f"layers with checkpointing '{checkpointing}'"] == 4
    probe = run_probe(engine, world, 320, micro_batch_size=2, sequence_length=60)
    assert verify_isolation(probe)["documents isolated"].startswith("difference ")
    assert verify_isolation(probe, shares_scales=True)["documents isolated"] == "gradient 0"
    verify_logits(probe)


@pytest.mark.parametrize("checkpointing", get_args(ActivationCheckpointing))
@pytest.mark.parametrize("family", ["gemma3_text", "llama", "qwen3_moe"])
def test_one_process_computes_what_fsdp2_computes(
    family: str, checkpointing: ActivationCheckpointing, tokenizer: PreTrainedTokenizerBase, world: World
) -> None:
    """Offloaded parameters are FSDP2's on one process too. Gemma's tables are tied."""
    generator = np.random.default_rng(0)
    packs = []
    for _ in range(2):
        tokens = generator.integers(0, 320, 32).astype(np.int32)
        packs.append(build_pack([Document(tokens, np.append(tokens[1:], -100).astype(np.int32))], 32))
    batches = [to_micro_batch(pack[None], world.device) for pack in packs]
    changes = {"precision": "bf16", "activation_checkpointing": checkpointing}
    found = []
    for offload in ("none", "all"):
        training = TRAINING.model_copy(update=changes | {"offload": offload})
        engine = Fsdp2Engine(build(family, tokenizer), training, world)
        for _ in range(2):
            losses = []
            for batch in batches:
                losses.append(engine.forward(batch))
                engine.backward(losses[-1], 62, is_last=batch is batches[-1])
            norm = engine.step(1e-2, 1.0)
        with engine.inference() as model:
            losses.append(model(batch=batches[0]))
        found.append(([loss.item() for loss in losses], norm.item(), engine.trained_weights()))
    (losses, norm, weights), (of_fsdp2, norm_of_fsdp2, weights_of_fsdp2) = found
    assert losses == of_fsdp2
    assert norm == norm_of_fsdp2
    torch.testing.assert_close(weights, weights_of_fsdp2, rtol=0, atol=0)
    assert all(weight.dtype == torch.float32 for weight in weights.values())


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_last_backward_frees_the_copy_of_each_weight_after_its_last_use(
    checkpointing: ActivationCheckpointing, tokenizer: PreTrainedTokenizerBase, world: World
) -> None:
    tokens = np.arange(32, dtype=np.int32)
    pack = build_pack([Document(tokens, np.append(tokens[1:], -100).astype(np.int32))], 32)
    training = TRAINING.model_copy(update={"precision": "bf16", "activation_checkpointing": checkpointing})
    engine = Fsdp2Engine(build("llama", tokenizer), training, world)
    layers = find_decoder_layers(engine.model.hf_model)
    copies: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def count(_: torch.Tensor) -> None:
        alive.append(sum(each() is not None for each in copies))

    for is_last in (False, True):
        loss = engine.forward(to_micro_batch(pack[None], world.device))
        if not copies:  # both micro-batches compute with the same copies
            layers[0].self_attn.q_proj.weight.register_hook(count)
        copies[:] = [weakref.ref(each) for layer in layers[1:] for each in layer.parameters()]
        engine.backward(loss, 62, is_last=is_last)
    assert alive == [len(copies), 0]


def test_hooks_do_not_keep_a_model_in_memory(tokenizer: PreTrainedTokenizerBase, world: World) -> None:
    weight = weakref.ref(next(Fsdp2Engine(build("llama", tokenizer), TRAINING, world).model.parameters()))
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("odd", [{"intermediate_size": 50}, {"hidden_size": 36}])
def test_experts_of_sizes_unsupported_by_grouped_mm_are_trained(
    odd: dict[str, int], tokenizer: PreTrainedTokenizerBase
) -> None:
    model = build_empty(make_config(architecture("mixtral", **odd), tokenizer), "sdpa").bfloat16()
    real = {
        name: torch.full(parameter.shape, 0.02, dtype=torch.bfloat16, requires_grad=True)
        for name, parameter in model.named_parameters()
    }
    torch.func.functional_call(model, real, kwargs={"input_ids": torch.arange(8)[None]}).logits.sum().backward()
    assert all(weight.grad is not None for weight in real.values())


def test_settings_of_inference_in_a_published_configuration_have_no_effect(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    config = make_config(architecture("llama"), tokenizer)
    config.update({"return_dict": False, "output_hidden_states": True, "use_cache": True})
    ids = torch.tensor([[1, 2, 3]])
    output = build_empty(config, "sdpa").to_empty(device="cpu")(input_ids=ids)
    assert output.logits.shape[:2] == ids.shape
    assert (output.hidden_states, output.past_key_values) == (None, None)


def test_a_tied_table_is_sharded_once(tokenizer: PreTrainedTokenizerBase) -> None:
    model = build_empty(make_config(architecture("gemma3_text"), tokenizer), "sdpa")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_an_unsharded_model_is_rejected_with_both_numbers(tokenizer: PreTrainedTokenizerBase, world: World) -> None:
    engine = Fsdp2Engine.__new__(Fsdp2Engine)
    engine._world = world
    engine._is_unsharded = False
    engine.model = fully_shard(CausalLM(build("olmo3", tokenizer)), mesh=world.mesh)
    with pytest.raises(TrainingError, match=r"units: found 1, expected 5.*: found 0, expected 4"):
        verify_sharding(engine.sharding_stats(), TRAINING, method_counts(architecture("olmo3"), TRAINING))


GOOD = ShardingStats(
    num_layers=64, num_units=65, num_sharded_layers=64, checkpointed_layers={"none": 64}, total_elements=1000,
    local_elements=125, max_local_elements=130, trainable_elements=1000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_units": 1}, "units: found 1, expected 65"),
        ({"checkpointed_layers": {"full": 64}}, "layers with checkpointing 'none': found 0, expected 64"),
        ({"offloaded_layers": 3}, "offloaded layers: found 3, expected 0"),
        ({"local_elements": 1000}, "parameters on this rank: found 1,000, expected at most 130"),
        ({"trainable_elements": 7}, "trainable parameters: found 7, expected 1,000"),
        ({"total_elements": 999, "trainable_elements": 999}, "parameters: found 999, expected 1,000"),
    ],
)
def test_each_check_reports_the_actual_and_the_expected_value(changes: dict[str, Any], message: str) -> None:
    assert verify_sharding(GOOD, TRAINING, ParameterCounts(1000, 1000))["units"] == 65
    with pytest.raises(TrainingError, match=message):
        verify_sharding(ShardingStats(**(vars(GOOD) | changes)), TRAINING, ParameterCounts(1000, 1000))


def test_packs_without_a_target_are_rejected_by_number() -> None:
    assert list(verify_targets(np.array([3, 7])).values()) == [3]
    with pytest.raises(TrainingError, match=r"2 of 4 packs.* number 1"):
        verify_targets(np.array([3, 0, 7, 0]))


def call_class(model: CausalLM, **inputs: Any) -> Any:
    return model.hf_model(**inputs)


def probe(engine: Fsdp2Engine, world: World) -> ProbeResult:
    return run_probe(engine, world, 320, micro_batch_size=1, sequence_length=64)


def test_attention_across_documents_is_detected(
    tokenizer: PreTrainedTokenizerBase, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Fsdp2Engine(build("llama", tokenizer), TRAINING, world)
    decoder = type(engine.model.hf_model.get_decoder())
    forward = decoder.forward

    def with_mask(self: nn.Module, input_ids: torch.Tensor, **rest: Any) -> Any:
        return forward(self, input_ids, **(rest | {"attention_mask": torch.ones_like(input_ids)}))

    monkeypatch.setattr(decoder, "forward", with_mask)
    with pytest.raises(TrainingError, match="packed documents attend"):
        verify_isolation(probe(engine, world))


def packing_of(model: Any, world: World, wanted: Packing = "auto") -> str | None:
    model.config.use_cache = False
    probe, reason = choose_packing(
        Fsdp2Engine(model.train(), TRAINING, world),
        world,
        wanted,
        320,
        TRAINING.model_copy(update={"micro_batch_size": 2, "sequence_length": 256}),
    )
    verify_causality(probe)
    verify_isolation(probe)
    verify_logits(probe)
    return reason


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_class_that_mixes_dtypes_in_bf16_is_refused_with_what_to_do(
    precision: str, tokenizer: PreTrainedTokenizerBase, world: World
) -> None:
    model, training = build("llama", tokenizer), TRAINING.model_copy(update={"precision": precision})
    find_decoder_layers(model)[0].register_forward_hook(lambda _, __, output: output.float())
    engine = Fsdp2Engine(model.train(), training, world)
    expected = pytest.raises(TrainingError, match="same dtype") if precision == "bf16" else nullcontext()
    with expected as caught, operations_explained(training):
        choose_packing(engine, world, "auto", 320, training)
    assert caught is None or "training.precision=fp32" in caught.value.fix


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.bmm(x.float(), x),
        lambda x: functional.linear(x.float(), x[0]),
        lambda x: functional.scaled_dot_product_attention(x[None].float(), x[None].float(), x[None]),
        lambda x: functional.conv1d(x.float(), x),
        lambda x: torch.baddbmm(x, x.float(), x.float()),
        lambda x: torch.zeros(2, 2, 2).scatter_(0, torch.zeros(2, 2, 2, dtype=torch.long), x),
    ],
)
def test_torchs_errors_about_dtypes_are_recognized_with_the_operations_own_words(
    operation: Callable[[torch.Tensor], torch.Tensor], is_compiled: bool
) -> None:
    training = TRAINING.model_copy(update={"precision": "bf16"})
    run = torch.compile(operation, backend="eager") if is_compiled else operation
    with pytest.raises(TrainingError) as caught, operations_explained(training):
        run(torch.zeros(2, 2, 2, dtype=torch.bfloat16))
    assert len(caught.value.what) < 250, caught.value.what
    assert "FakeTensor" not in caught.value.what


@pytest.mark.parametrize("name", ["put_", "_histc_cuda with floating point input", "median CUDA with indices output"])
def test_an_operation_that_cannot_repeat_is_named_if_results_must_repeat(name: str) -> None:
    said = f"{name} does not have a deterministic implementation, but you set …"
    training = TRAINING.model_copy(update={"deterministic": True})
    with pytest.raises(TrainingError, match=f": {name} has no") as caught, operations_explained(training):
        raise RuntimeError(said)
    assert "training.deterministic" in caught.value.fix
    with pytest.raises(RuntimeError, match=name), operations_explained(TRAINING):
        raise RuntimeError(said)


@pytest.mark.parametrize(("precision", "message"), [("fp32", "expected the same dtype"), ("bf16", "shapes differ")])
def test_other_errors_of_a_model_are_left_as_they_are(precision: str, message: str) -> None:
    training = TRAINING.model_copy(update={"precision": precision})
    with pytest.raises(RuntimeError, match=message), operations_explained(training):
        raise RuntimeError(message)


def convolving(tokenizer: PreTrainedTokenizerBase) -> Any:
    """A model with a layer that adds the output for the token before, of whatever document."""
    model = build("llama", tokenizer)

    def add_previous(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output + functional.pad(output, (0, 0, 1, 0))[:, :-1]

    model.model.layers[0].mlp.register_forward_hook(add_previous)
    return model


def test_a_model_that_mixes_documents_of_a_pack_is_trained_on_padded_rows(
    tokenizer: PreTrainedTokenizerBase, world: World
) -> None:
    assert "documents attend" in str(packing_of(convolving(tokenizer), world))
    assert packing_of(build("llama", tokenizer), world) is None
    assert packing_of(build("llama", tokenizer), world, "off") is not None


def test_a_model_without_position_ids_is_trained_on_padded_rows(
    tokenizer: PreTrainedTokenizerBase, world: World
) -> None:
    bloom = AutoModelForCausalLM.from_config(make_config(architecture("bloom"), tokenizer))
    assert "BloomModel" in str(packing_of(bloom, world))


def test_a_non_causal_model_is_rejected(world: World) -> None:
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    bert = AutoModelForCausalLM.from_config(BertConfig(vocab_size=320, initializer_range=0.3, **sizes))
    with pytest.raises(TrainingError, match="to later ones"):
        packing_of(bert, world)


def test_the_embeddings_of_a_frozen_model_require_a_gradient_but_the_graph_does_not_hold_them(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    model = AutoModelForCausalLM.from_config(make_config(architecture("llama"), tokenizer))
    freeze(model, torch.float32)
    embedded = model.get_input_embeddings()(torch.arange(3)[None])
    squares = embedded.sin()  # saves its input, as a recomputed layer does
    assert squares.requires_grad
    held = [getattr(node, "variable", None) for node, _ in embedded.grad_fn.next_functions if node is not None]
    assert [each.numel() for each in held] == [1]
    squares.sum().backward()


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gpt_oss", {"num_local_experts": 32}), ("mixtral", {"num_local_experts": 4}), ("deepseek_v3", {}),
        ("glm4_moe", {"n_routed_experts": 16}), ("qwen3_moe", {"num_experts": 160}), ("qwen3_moe", {"num_experts": 0}),
    ],
)  # fmt: skip
def test_a_mixture_is_read_with_the_experts_of_its_configuration(
    family: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    AutoConfig.for_model(family, **sizes).save_pretrained(tmp_path)
    shape = read_shape(json.loads((tmp_path / "config.json").read_text()), "model")
    assert read_config(tmp_path, shape).text.model_type == family


@pytest.mark.parametrize(("family", "key"), [("gpt_oss", "num_local_experts"), ("qwen3_moe", "num_experts")])
def test_a_shape_sets_the_number_of_experts(family: str, key: str, tokenizer: PreTrainedTokenizerBase) -> None:
    assert getattr(make_config(architecture(family, num_experts=3), tokenizer), key) == 3
    assert getattr(make_config(architecture(family), tokenizer), key) == 128


def test_a_family_without_experts_can_not_get_any(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(TrainingError, match="'llama' has no experts"):
        make_config(architecture("llama", num_experts=8), tokenizer)


def test_documents_of_gpt_oss_are_isolated_by_ftkits_masks(tokenizer: PreTrainedTokenizerBase, world: World) -> None:
    shape = architecture("gpt_oss", sliding_window=6, full_attention_every=2)
    config = make_config(shape, tokenizer)
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    assert packing_of(AutoModelForCausalLM.from_config(config), world) is None


def test_padded_rows_and_packs_have_the_same_loss(tokenizer: PreTrainedTokenizerBase, world: World) -> None:
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 320, length).astype(np.int32) for length in (9, 14, 5, 30, 250, 3)]
    packs = np.stack(
        [
            build_pack([Document(each, np.append(each[1:], -100).astype(np.int32)) for each in pack], 256)
            for pack in (documents[:4], documents[4:])
        ]
    )
    model = Fsdp2Engine(build("olmo3", tokenizer, max_position_embeddings=256), TRAINING, world).model
    with torch.no_grad():
        packed = model(batch=to_micro_batch(packs, world.device))
        rows = [to_padded_micro_batch(each, world.device) for each in pad_documents(packs, 256, 2)]
        padded = [model(batch=each) for each in rows]
    assert [tuple(each.input_ids.shape) for each in rows] == [(1, 256), (2, 128), (2, 128), (2, 128)]
    assert float(sum(padded)) == pytest.approx(float(packed), rel=1e-5)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("granite", {"logits_scaling": 8.0}),
        ("cohere2", {"logit_scale": 0.0625}),
        ("gemma2", {"final_logit_softcapping": 0.05, "attn_logit_softcapping": 0.02}),
    ],
)
def test_scaled_and_capped_logits_are_used_in_training(
    family: str, fields: dict[str, float], tokenizer: PreTrainedTokenizerBase, world: World
) -> None:
    config = make_config(architecture(family, sliding_window=6, full_attention_every=2), tokenizer)
    vars(config).update(fields)
    kernel, _ = choose_kernel(TRAINING, config, world)
    config._attn_implementation = register_kernel(kernel)
    torch.manual_seed(3)
    engine = Fsdp2Engine(AutoModelForCausalLM.from_config(config), TRAINING, world)
    tried = probe(engine, world)
    verify_isolation(tried)
    verify_logits(tried)
    tokens = np.arange(40, dtype=np.int32)
    pack = build_pack([Document(tokens, np.roll(tokens, -1))], 40)
    with engine.inference() as model:
        batch = to_micro_batch(pack[None], world.device)
        logits = model(compute=call_class, input_ids=batch.input_ids).logits.flatten(0, 1)[batch.label_index]
        expected = functional.cross_entropy(logits, batch.labels, reduction="sum")
        assert float(model(batch=batch)) == pytest.approx(float(expected), rel=1e-5)


def test_adapters_of_layers_that_share_weights_are_refused(tokenizer: PreTrainedTokenizerBase, world: World) -> None:
    spec = TRAINING.model_copy(update={"method": "lora", "lora": LoraSpec(rank=4)})
    for is_refused in (False, True):
        model = build("llama", tokenizer)
        prepare_method(model, spec, world.device)
        layers = find_decoder_layers(model)
        if is_refused:
            layers[1] = layers[0]
        with pytest.raises(TrainingError, match="share weights") if is_refused else nullcontext():
            Fsdp2Engine(model, spec, world)


def test_a_class_may_scale_the_embeddings_of_a_frozen_model_in_place() -> None:
    config = AutoConfig.for_model("ctrl", n_embd=32, dff=32, n_layer=1, n_head=2, vocab_size=32, n_positions=16)
    model = AutoModelForCausalLM.from_config(config)
    freeze(model, torch.float32)
    hidden = model.transformer(torch.arange(8)[None]).last_hidden_state
    assert hidden.requires_grad, "the first layer computes its input's gradient"
    hidden.sum().backward()


def test_biases_and_norms_have_no_weight_decay_even_if_they_are_stacked() -> None:
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_local_experts=2, vocab_size=32,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    spec = TRAINING.model_copy(update={"weight_decay": 0.1})
    groups = parameter_groups(model, spec)
    decayed = {id(each) for group in groups if group["weight_decay"] for each in group["params"]}
    names = {name.rpartition("layers.0.")[2] for name, each in model.named_parameters() if id(each) in decayed}
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.q_proj.weight", "lm_head.weight"} <= names
    assert not [name for name in names if "bias" in name or "norm" in name]


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma2", {}),
        ("granite", {"logits_scaling": 8.0}),
        ("hyperclovax", {"logits_scaling": 0.125}),
        ("cohere2", {}),
        ("recurrent_gemma", {"lru_width": 32, "num_hidden_layers": 3}),
        ("falcon_h1", {"lm_head_multiplier": 0.05, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}),
    ],
)
def test_large_logits_are_transformed_as_by_the_class_of_the_model(family: str, fields: dict[str, Any]) -> None:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32) | {"num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = AutoConfig.for_model(
        family, **{**sizes, **heads, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **fields}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    head = model.get_output_embeddings()
    nn.init.normal_(head.weight, std=10)
    products: list[torch.Tensor] = []
    head.register_forward_hook(lambda _, __, output: products.append(output))
    with torch.no_grad():
        logits = model(torch.arange(1, 25)[None]).logits
    torch.testing.assert_close(LogitTransform.of(config).apply(products[0]), logits)
    assert float((logits - products[0]).abs().max()) > 10


def test_a_soft_cap_that_is_not_known_is_found_before_step_1(
    tokenizer: PreTrainedTokenizerBase, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.train.fused_loss._CAPS", ())
    config = make_config(architecture("gemma2", sliding_window=6, full_attention_every=2), tokenizer)
    assert config.final_logit_softcapping == 30  # far above the logits of a model with random weights
    kernel, _ = choose_kernel(TRAINING, config, world)
    config._attn_implementation = register_kernel(kernel)
    engine = Fsdp2Engine(AutoModelForCausalLM.from_config(config), TRAINING, world)
    with pytest.raises(TrainingError, match="logits"):
        verify_logits(probe(engine, world))


@pytest.mark.parametrize(("family", "expected"), [("gemma2", "eager"), ("llama", "sdpa")])
def test_generation_uses_the_attention_scores_of_the_model(
    family: str, expected: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    shape = architecture(family, sliding_window=6, full_attention_every=2)
    model = AutoModelForCausalLM.from_config(make_config(shape, tokenizer))
    chosen = model.config._attn_implementation
    with generation_attention(model):
        assert model.config._attn_implementation == expected
    assert model.config._attn_implementation == chosen


def test_every_rank_takes_part_in_the_check_of_kernels_for_packs_whatever_its_gpu(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    asked: list[str | None] = []

    def gather(own: str | None) -> list[str | None]:
        asked.append(own)
        return [None, "another GPU is older than Hopper"]

    several: Any = SimpleNamespace(device=torch.device("cuda"), gather_objects=gather)
    bf16 = TRAINING.model_copy(update={"precision": "bf16", "sequence_length": 128})
    kernel, reason = choose_kernel(bf16, make_config(architecture("llama"), tokenizer), several)
    assert len(asked) == len(VARLEN)
    assert kernel == "flex"
    assert "another GPU is older than Hopper" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    choose_kernel(bf16, make_config(architecture("llama"), tokenizer), several)
    assert asked[len(VARLEN) :] == len(VARLEN) * ["a GPU is older than Hopper"]


def test_unknown_changes_of_logits_are_rejected_even_if_the_loss_hardly_differs(
    tokenizer: PreTrainedTokenizerBase, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Fsdp2Engine(build("llama", tokenizer), TRAINING, world)
    kind = type(engine.model.hf_model)
    forward = kind.forward

    def scaled(self: nn.Module, **inputs: Any) -> Any:
        output = forward(self, **inputs)
        output.logits = output.logits * 1.1
        return output

    monkeypatch.setattr(kind, "forward", scaled)
    with pytest.raises(TrainingError, match=r"differ by 9\.1e-02"):
        verify_logits(probe(engine, world))


def test_a_gradient_across_documents_is_detected_even_if_hidden_states_are_correct(
    tokenizer: PreTrainedTokenizerBase, world: World
) -> None:
    right = probe(Fsdp2Engine(build("llama", tokenizer), TRAINING, world), world)
    norms = right.gradient_norms.clone()
    (first_neighbor, *_) = (~right.is_kept).nonzero()
    norms[first_neighbor] = 0.1 * right.kept_norm
    with pytest.raises(TrainingError, match=r"change by 0\.0e"):
        verify_isolation(replace(right, gradient_norms=norms))


def test_the_loss_includes_a_bias_of_the_output_projection(tokenizer: PreTrainedTokenizerBase, world: World) -> None:
    model = build("phi", tokenizer)
    torch.nn.init.normal_(model.lm_head.bias)
    verify_logits(probe(Fsdp2Engine(model, TRAINING, world), world))


def test_hidden_states_in_fp32_are_cast_to_the_output_projection_in_bf16(world: World) -> None:
    config = MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=8, residual_in_fp32=True)
    training = TRAINING.model_copy(update={"precision": "bf16", "offload": "all"})  # FSDP2 on one process too
    engine = Fsdp2Engine(AutoModelForCausalLM.from_config(config), training, world)
    verify_logits(probe(engine, world))
    tokens = np.arange(40, dtype=np.int32)
    (rows,) = pad_documents(build_pack([Document(tokens, np.roll(tokens, -1))], 40)[None], 40, 1)
    engine.backward(engine.model(batch=to_padded_micro_batch(rows, world.device)), 40, is_last=True)


@pytest.mark.parametrize("length", [2, 3, 7, 64, 1000, 20480])
def test_a_probe_fills_packs_with_alternating_kept_and_changed_documents(length: int) -> None:
    layout = _packed_layout(3, length)
    chosen, begins = layout.is_kept | layout.is_later, np.flatnonzero(layout.positions[0] == 0)
    assert chosen.shape == layout.positions.shape == (3, length)
    assert (chosen[0] == ~chosen[1]).all()
    assert (chosen[0] == chosen[2]).all()
    assert 0 < layout.is_kept[0].sum() < length
    assert not (layout.is_kept & layout.is_later).any()
    assert begins[0] == 0
    assert not np.any(begins[1:] % 2 == 0)  # never at the boundary of a kernel's tile


@pytest.mark.parametrize("length", [2, 7, 300, 1000])
def test_a_probe_of_padded_rows_keeps_every_other_row(length: int) -> None:
    layout = _padded_layout(2, length)
    assert layout.lengths is not None
    assert layout.is_kept.shape[0] * layout.is_kept.shape[1] <= 2 * length
    assert layout.is_kept[0].any()
    assert not layout.is_kept[1::2].any()
    assert not (layout.is_kept | layout.is_later)[0, layout.lengths[0] :].any()


@pytest.mark.parametrize(
    ("family", "attention", "message"),
    [
        ("t5", "sdpa", "can't build a 't5' with attention 'sdpa'"),
        ("gpt_oss", "sdpa", "can't build a 'gpt_oss'.*\n.*\n.*attention=auto"),
    ],
)
def test_a_model_without_support_for_packs_is_rejected(
    family: str, attention: str, message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(TrainingError, match=message):
        build_empty(make_config(architecture(family), tokenizer), attention)


def test_a_family_unknown_to_transformers_is_rejected(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(TrainingError, match=r"can't configure a 'llama9'.*\n.*model_type"):
        make_config(architecture("llama9"), tokenizer)


def test_a_multimodal_family_which_ignores_the_shape_is_rejected(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(TrainingError, match="family=gemma3_text"):
        make_config(architecture("gemma3"), tokenizer)


def test_a_missing_projection_is_reported_with_those_that_exist(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    lora = TRAINING.model_copy(update={"method": "lora"})
    with pytest.raises(TrainingError, match=r"no linear layer q_proj, .*\n.*: qkv_proj, gate_up_proj|o_proj, qkv_proj"):
        count_method(build("phi3", tokenizer), lora)


def test_a_model_without_decoder_layers_is_rejected() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    model.config = PretrainedConfig(num_hidden_layers=3)  # type: ignore[assignment]
    with pytest.raises(TrainingError, match=r"\b3 .*1 x Linear"):
        find_decoder_layers(model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "llama9"},
            r"does not have the architecture 'llama9' in .*config\.json\n.*\n.*newer transf",
        ),
        ({"model_type": "llama", "hidden_size": "wide"}, r"can't read .*config\.json as a 'llama': .*hidden_size"),
    ],
)
def test_a_configuration_that_transformers_rejects_is_reported(
    fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(TrainingError, match=message):
        read_config(tmp_path, architecture("llama"))


def test_a_tokenizer_next_to_an_invalid_configuration_is_a_data_error(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('["llama"]')
    with pytest.raises(DataError, match="can't load the tokenizer of"):
        load_tokenizer(ModelSpec(weights=str(tmp_path), architecture=architecture("llama")), "model")


def test_a_parameter_missing_from_all_files_is_reported(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    build("llama", tokenizer, num_hidden_layers=3).save_pretrained(tmp_path)
    with pytest.raises(TrainingError, match=r"^9 .*: model\.layers\.3\."):
        load_weights(build("llama", tokenizer), tmp_path)


def test_a_tokenizer_s_own_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers would prompt
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Own", null]}}')
    (tmp_path / "own.tiktoken").write_text("aGVsbG8= 0\n")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...\n")
    with pytest.raises(DataError, match="contains custom code"):
        load_tokenizer(ModelSpec(weights=str(tmp_path), architecture=architecture("llama")), "model")
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(not CONVERTS_WEIGHTS, reason="transformers 4 always computes experts one by one")
def test_a_saved_mixture_of_odd_sizes_computes_its_logits(tmp_path: Path) -> None:
    sizes = {"hidden_size": 36, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    mixture = {"num_experts": 4, "moe_intermediate_size": 34, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("qwen3_moe", vocab_size=64, **sizes, **mixture)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert load_pretrained(tmp_path, torch.bfloat16)(torch.arange(5)[None]).logits.isfinite().all()
