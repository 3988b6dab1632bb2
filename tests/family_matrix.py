"""Train a tiny model with random weights of each model family. `scripts/families` runs all of them.

Each model takes a user's path: transformers saves it; ftkit loads, verifies, trains and exports it.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from ftkit.config.context import Context
from ftkit.config.load import load_recipe
from ftkit.config.recipe import RecipePlan
from ftkit.config.training import TrainingPlan
from ftkit.data.packing import Document, build_pack
from ftkit.data.tokenizers import learn_tokenizer
from ftkit.errors import FtkitError, one_line
from ftkit.models.adapters import LoraSpec
from ftkit.planning.choices import least_memory
from ftkit.planning.layout import RunLayout
from ftkit.planning.planner import plan_model
from ftkit.train.components.batches import pad_documents, to_micro_batch, to_padded_micro_batch
from ftkit.train.components.exporter import ExportedParts, Exporter, build_export_model, export
from ftkit.train.components.generation import Generation
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.distributed.verification import (
    choose_packing,
    verify_causality,
    verify_isolation,
    verify_logits,
    verify_sharding,
)
from ftkit.train.model.attention import choose_kernel, register_kernel
from ftkit.train.model.expert_adapters import expert_matrices
from ftkit.train.model.hf_model import TextConfig, build_empty
from ftkit.train.model.linears import linears_in_layers
from ftkit.train.model.lora import init_adapters, prepare_method, targets_of_experts
from ftkit.train.model.pretrained import load_weights
from ftkit.train.model.token_mixers import choose_token_mixers
from ftkit.train.param_count import count_method
from ftkit.train.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftkit.config.data import Packing
    from ftkit.config.training import Method

LENGTH, VOCABULARY, STEPS = 128, 320, 3
MAX_PARAMETERS = 5_000_000
LAYERS = 4
TRAINING = TrainingPlan(
    sequence_length=LENGTH,
    micro_batch_size=2,
    global_batch_size=2,
    max_steps=STEPS,
    learning_rate=3e-3,
    precision="fp32",
)
COLUMNS = ("packed", "unpacked", "adapters", "4 bits", "exported")

SIZES: dict[tuple[str, ...], int] = {
    ("vocab_size", "vocab_size_per_layer_input"): VOCABULARY,
    ("hidden_size", "d_model", "n_embd", "emb_dim", "word_embed_proj_dim", "embedding_size", "embedding_dim"): 64,
    ("attention_hidden_size", "lru_width", "input_embedding_size", "output_embedding_size"): 64,
    ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "decoder_layers", "num_decoder_layers"): LAYERS,
    ("num_blocks",): LAYERS,
    ("encoder_layers", "num_encoder_layers"): 1,
    ("max_window_layers",): 2,
    ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "d_inner", "dff"): 96,
    ("intermediate_size_mlp", "dense_intermediate_size", "dim_ff", "feed_forward_size"): 96,
    ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"): 32,
    ("expert_ffn_hidden_size", "shared_intermediate_size", "index_n_heads"): 32,
    ("num_attention_heads", "n_heads", "n_head", "num_heads", "decoder_attention_heads", "attention_heads"): 4,
    ("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"): 4,
    ("swa_num_attention_heads", "linear_num_value_heads", "linear_num_heads"): 4,
    ("num_key_value_heads", "swa_num_key_value_heads", "linear_num_key_heads"): 2,
    ("head_dim", "swa_head_dim", "attention_head_dim", "kv_channels", "linear_head_dim"): 16,
    ("linear_key_head_dim", "linear_value_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"): 16,
    ("q_lora_rank", "kv_lora_rank", "o_lora_rank", "index_head_dim", "query_pre_attn_scalar", "dim_head"): 16,
    ("qk_head_dim", "global_head_dim"): 32,
    ("index_topk",): LENGTH,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): 4,
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk"): 2,
    ("n_shared_experts", "num_shared_experts", "zero_expert_num", "n_group", "topk_group", "num_expert_group"): 1,
    ("first_k_dense_replace", "num_dense_layers", "mamba_n_groups", "n_groups", "mamba_ngroups"): 1,
    ("sliding_window", "attention_window_size", "mamba_chunk_size", "chunk_size", "state_size", "block_size"): 16,
    ("mamba_d_state", "mamba_d_head", "mamba_head_dim", "mamba_headdim", "ssm_state_size"): 16,
    ("mamba_n_heads", "mamba_num_heads", "rotary_dim", "laurel_rank", "adapter_rank"): 8,
    ("mamba_dt_rank", "time_step_rank"): 4,
    ("n_mamba_heads",): 2,
    ("mamba_d_ssm",): 128,
    ("hidden_size_per_layer_input",): 16,
    ("num_kv_shared_layers",): 0,
    ("max_position_embeddings", "attention_chunk_size", "max_seq_len", "model_max_length", "n_positions", "n_ctx"): 512,
    ("max_target_positions", "max_source_positions"): 512,
}
"""Sizes of a tiny model, by the names that configurations have for them."""
SIZE_OF = {name: size for names, size in SIZES.items() for name in names}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "indexer_types")

ODD: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {"num_experts_per_tok": 2, "q_lora_rank": None, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {"intermediate_size": 96, "activation_sparsity_pattern": [0.5, 0.0] * (LAYERS // 2)},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 64},
    "zaya": {"num_experts_per_tok": 1},
}
"""Additional settings of a family."""


def tiny_config(model_type: str) -> PretrainedConfig:
    """Return the configuration of a tiny text model of a family."""
    default: Any = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    saved = default.to_dict()
    own = saved | {
        name: getattr(default, name) for name in SIZE_OF if name not in saved and _is_settable(default, name)
    }
    depth, public = own.get("num_hidden_layers"), {name: key for key, name in default.attribute_map.items()}
    fields: dict[str, Any] = {}
    for name, value in own.items():
        if "drop" in name and isinstance(value, float):
            fields[name] = 0.0  # with dropout, the loss need not fall within a few steps
        size = SIZE_OF.get(name, SIZE_OF.get(public.get(name, "")))
        if name in TOKENS:
            fields[name] = TOKENS[name]
        elif (name in KINDS and isinstance(value, list)) or (isinstance(value, list) and depth and len(value) == depth):
            fields[name] = _each_kind(value)
        elif size is not None and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            fields[name] = size
    if "kv_lora_rank" in own:
        fields["num_key_value_heads"] = SIZE_OF["num_attention_heads"]
    rope = own.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        halves = int(16 * rope.get("partial_rotary_factor", 1)) // 2
        fields["rope_parameters"] = rope | {"mrope_section": [halves - 2 * (halves // 4), halves // 4, halves // 4]}
    config: PretrainedConfig = type(default)(**(fields | ODD.get(default.model_type, {})))
    if hasattr(config, "is_decoder"):
        config.is_decoder = True  # encoder classes are causal only with this setting
    return config


def _is_settable(config: PretrainedConfig, name: str) -> bool:
    computed = getattr(type(config), name, None)
    return hasattr(config, name) and not (isinstance(computed, property) and computed.fset is None)


def _each_kind(values: list[Any]) -> list[Any]:
    """Return per-layer values for the tiny model that include as many kinds of layers as possible."""
    kinds = list({str(value): value for value in values}.values())[:LAYERS]
    return (kinds * LAYERS)[:LAYERS]


@dataclass(frozen=True)
class Tried:
    """The result of a family: 'yes' or the reason for a failure, for each of `COLUMNS`."""

    model_type: str
    class_name: str
    results: dict[str, str]


def try_family(model_type: str, world: World, *, use_dora: bool = False) -> Tried:
    """Run everything that ftkit does with a model on a tiny model of a family."""
    config = tiny_config(model_type)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    size = sum(parameter.numel() for parameter in empty.parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"the tiny model has {size:,} parameters")
    results = dict.fromkeys(COLUMNS, "not tried")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tried = _Family(config, Path(folder), world, use_dora)
        results["packed"] = said(lambda: tried.train("full", is_packed=True))
        results["unpacked"] = said(lambda: tried.train("full", is_packed=False))
        if results["unpacked"] == "yes":
            is_packed = results["packed"] == "yes"
            results["adapters"] = said(lambda: tried.train("lora", is_packed=is_packed))
            results["4 bits"] = said(lambda: tried.train("qlora", is_packed=is_packed))
            results["exported"] = said(tried.export)
    return Tried(model_type, type(empty).__name__, results)


def said(attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except FtkitError as error:
        return error.what
    except Exception as error:  # noqa: BLE001 - the table lists whatever a class of transformers raises
        return f"{type(error).__name__}: {one_line(error)}"


@dataclass(frozen=True)
class _Family:
    """A tiny model saved in a folder."""

    config: PretrainedConfig
    folder: Path
    world: World
    use_dora: bool

    def train(self, method: Method, *, is_packed: bool) -> str:
        """Verify and train; return 'yes', or the reason why its documents can't be packed."""
        engine, training = self._engine(method)
        if method == "full":
            wanted: Packing = "auto" if is_packed else "off"
            probe, reason = choose_packing(engine, self.world, wanted, VOCABULARY, TRAINING)
            if is_packed and reason is not None:
                return reason
            verify_causality(probe)
            verify_isolation(probe)
            verify_logits(probe)
        _train(engine, self.world, is_packed=is_packed)
        return self._try_adapters(engine, training) if method == "lora" else "yes"

    def export(self) -> str:
        """Export a trained model, load it with transformers, and compare."""
        engine, training = self._engine("full")
        _train(engine, self.world, is_packed=False)
        export(engine, parts_of(self.folder, training, self.config, None), RunLayout(self.folder), 0, self.world)
        return self._compare(engine, self._load(self.folder / "export"))

    def _try_adapters(self, engine: Fsdp2Engine, training: TrainingPlan) -> str:
        """Export trained adapters; load them with peft, and merged with transformers, and compare."""
        from peft import PeftModel

        parts = parts_of(self.folder, training, self.config, self.folder)
        export(engine, parts, RunLayout(self.folder), 0, self.world)
        adapted = PeftModel.from_pretrained(self._load(self.folder), self.folder / "export")
        if (compared := self._compare(engine, adapted.eval())) != "yes":
            return f"as peft loads the adapters, {compared}"
        merged = self.folder / "merged"
        merged.mkdir()
        exporter = Exporter(parts, build_export_model(parts), engine.trained_weights())
        exporter.write(exporter.record("run", 0, "fp32", merges=True), merged, RunLayout(self.folder))
        compared = self._compare(engine, self._load(merged))
        return compared if compared == "yes" else f"with the adapters merged, {compared}"

    def _load(self, folder: Path) -> Any:
        kernel = self.config._attn_implementation
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=kernel).eval()

    def _compare(self, engine: Fsdp2Engine, loaded: Any) -> str:
        """Compare a loaded model with the trained one, and generate with it; return 'yes', or how they differ."""
        tokens = torch.arange(3, 43)[None]
        with engine.inference() as model, torch.no_grad():
            expected = model(compute=lambda own: own.hf_model(input_ids=tokens, use_cache=False).logits)
            found = loaded(input_ids=tokens, use_cache=False).logits
        difference = float((found - expected).norm() / expected.norm())
        if not difference < 1e-4:
            is_kept = torch.arange(VOCABULARY) != TOKENS["pad_token_id"]
            if torch.allclose(found[..., is_kept], expected[..., is_kept], rtol=1e-3, atol=1e-5):
                return "transformers sets the row of the padding token to zero as it loads the export"
            return f"the logits of the export differ by {difference:.0e}"
        loaded.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False)
        return "yes"

    def _engine(self, method: Method) -> tuple[Fsdp2Engine, TrainingPlan]:
        kernel, _ = choose_kernel(TRAINING, self.config, self.world)
        model: Any = build_empty(self.config, register_kernel(kernel))
        choose_token_mixers(model, self.world)
        lora = adapters_of(model, use_dora=self.use_dora) if method != "full" else None
        training = TRAINING.model_copy(update={"method": method, "lora": lora})
        expected = count_method(model, training)
        prepare_method(model, training, self.world.device)

        def initialize(sharded: nn.Module) -> None:
            load_weights(sharded, self.folder)
            init_adapters(sharded, 0)

        engine = Fsdp2Engine(model, training, self.world, initialize)
        verify_sharding(engine.sharding_stats(), training, expected)
        return engine, training


def parts_of(folder: Path, training: TrainingPlan, config: PretrainedConfig, pretrained: Path | None) -> ExportedParts:
    """Return what an export of a tiny model has besides its weights."""
    tokenizer = learn_tokenizer(["SELECT name FROM table"], 300, "chatml")
    spec = load_recipe("demo", Context(folder, folder, {}), ["training.precision=fp32", "evaluation.generation=null"])
    recipe = RecipePlan.extend(spec, model=plan_model(spec.model, None), training=least_memory(spec.training))
    recipe = recipe.model_copy(update={"training": training})
    return ExportedParts(recipe, TextConfig(config), tokenizer, Generation((2,), {}), pretrained)


def adapters_of(model: Any, *, use_dora: bool) -> LoraSpec:
    """Return adapters for the linear layers that peft supports, and for the experts; DoRA for linear layers alone.

    Layers whose names peft takes for experts are excluded where experts can't be adapted, and the last projection of
    Mamba layers, whose kernels ignore adapters.

    Raises:
        ValueError: no layer supports adapters.
    """
    names = {name.rpartition(".")[2] for name, *_ in linears_in_layers(model)} - {"out_proj"}
    names = {name for name in names if name.isidentifier()}
    if not names:
        raise ValueError("its decoder layers have no linear layers")
    every = LoraSpec(rank=4, targets=tuple(sorted(names)), use_dora=use_dora)
    matrices = expert_matrices(model)
    of_experts = {name for each in matrices for name in (each.name, *each.parts)}
    adapted = set() if use_dora else {name for each in matrices for name in (each.parts or (each.name,))}
    names = names - targets_of_experts(model, every) - (of_experts if use_dora else set())
    return every.model_copy(update={"targets": tuple(sorted(names | adapted))})


def _train(engine: Fsdp2Engine, world: World, *, is_packed: bool) -> None:
    """Take a few steps on the same documents.

    Raises:
        ValueError: the loss does not fall.
    """
    packs = _packs()
    batches = [to_micro_batch(packs, world.device)]
    if not is_packed:
        batches = [to_padded_micro_batch(rows, world.device) for rows in pad_documents(packs, packs[:, 0].size, 1)]
    num_targets = sum(len(batch.labels) for batch in batches)
    losses = []
    for _ in range(STEPS):
        parts = [engine.model(batch=batch) for batch in batches]
        for part in parts:
            engine.backward(part, num_targets, is_last=part is parts[-1])
        losses.append(float(sum(part.detach() for part in parts)) / num_targets)
        engine.step(TRAINING.learning_rate, 1.0)
    if not (math.isfinite(losses[-1]) and losses[-1] < losses[0]):
        raise ValueError(f"the loss does not fall: {', '.join(f'{loss:.4f}' for loss in losses)}")


def _packs() -> Any:
    generator = np.random.default_rng(0)
    documents = []
    for length in (40, 25, 50, 120):
        tokens = generator.integers(3, VOCABULARY, length).astype(np.int32)
        documents.append(Document(tokens, np.append(tokens[1:], -100).astype(np.int32)))
    return np.stack([build_pack(documents[:3], LENGTH), build_pack(documents[3:], LENGTH)])
