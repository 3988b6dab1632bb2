"""Configure, build and inspect models of transformers."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ftkit.config.execution import GROUPED_MULTIPLE
from ftkit.errors import TrainingError, one_line
from ftkit.models.architecture import ArchitectureSpec
from ftkit.models.config_json import (
    CONFIG_KEYS,
    NUM_EXPERTS,
    find_contradictions,
    text_part,
    unquantized_fix,
    why_not_dequantizable,
)
from ftkit.models.families import family_of
from ftkit.models.folder import read_model_config, read_model_type
from ftkit.models.weight_files import CONFIG_FILE, WRAPPED

log = logging.getLogger(__name__)

_PASSED_ON = set(ArchitectureSpec.model_fields) - {
    "family", "num_experts", "sliding_window", "full_attention_every", "rope_scaling",
}  # fmt: skip


def make_config(shape: ArchitectureSpec, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Create the Hugging Face configuration of an architecture, for a model without pretrained weights.

    Fields that `ArchitectureSpec` lacks keep transformers' defaults.
    """
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    try:
        config = AutoConfig.for_model(shape.family, **shape.model_dump(include=_PASSED_ON), **_windows(shape), **tokens)
    except ValueError as error:
        raise TrainingError(
            f"transformers {transformers.__version__} can't configure a '{shape.family}': {one_line(error)}",
            meaning="the name is not a model_type, or only a newer version knows it",
            fix="correct model.architecture.family, or use an image with a newer transformers",
        ) from error
    text = config.get_text_config(decoder=True)
    if text.model_type != config.model_type:  # it did not take the shape
        raise TrainingError(
            f"'{shape.family}' is a multimodal model, whose text model has a shape of its own",
            fix=f"set model.architecture.family={text.model_type}",
        )
    if shape.num_experts is not None:
        if not (names := [name for name in NUM_EXPERTS if hasattr(config, name)]):
            raise TrainingError(f"a '{shape.family}' has no experts", fix="remove model.architecture.num_experts")
        config.update(dict.fromkeys(names, shape.num_experts))
    _scale_positions(config, shape)
    return config


def _windows(shape: ArchitectureSpec) -> dict[str, object]:
    """Return the configuration keys of the layers' attention windows, for families that have them."""
    if shape.is_measured and not family_of(shape.family).full_attention_every:
        return {}
    if not shape.is_measured and shape.sliding_window is None:
        return {"sliding_window": None}
    return {"sliding_window": shape.sliding_window or shape.max_position_embeddings, "layer_types": shape.layer_types}


@dataclass(frozen=True)
class TextConfig:
    """The configuration of the trained text model, and of the multimodal model that contains it, if any.

    A model that sees pictures is trained as a whole: `text` is then the multimodal model's configuration.
    """

    text: PretrainedConfig
    wrapper: PretrainedConfig | None = None


def text_part_of(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a multimodal model's text model; a text model's is returned unchanged."""
    return config.get_text_config(decoder=True)


def has_causal_class(config: PretrainedConfig) -> bool:
    """Return whether transformers has a class for the text model alone; it has none for Qwen2.5-VL's, for example."""
    return type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING


def sees_pictures(model: PreTrainedModel) -> bool:
    """Return whether a model was built as a whole, with its vision tower."""
    return auto_class_of(model.config) is not AutoModelForCausalLM


def read_config(
    folder: Path, shape: ArchitectureSpec, stored_vocab_size: int | None = None, *, pictures: bool = False
) -> TextConfig:
    """Read the configuration of the weights; for a multimodal model, the text model's, if that has its own class.

    With `pictures`, or without such a class, return the whole model's configuration. `stored_vocab_size` is the number
    of rows of the embedding in the files, if added tokens need more.
    """
    model_type, version = read_model_type(folder), transformers.__version__
    if model_type not in CONFIG_MAPPING:
        raise TrainingError(
            f"transformers {version} does not have the architecture '{model_type}' in {folder / CONFIG_FILE}",
            meaning="only a newer version has it, or it comes with custom code, which ftkit never runs",
            fix="use an image with a newer transformers, or choose another model",
        )
    try:
        stored = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each architecture and version raises different errors on odd values
        raise TrainingError(
            f"transformers {version} can't read {folder / CONFIG_FILE} as a '{model_type}': {one_line(error)}",
            meaning="the file was edited manually, or belongs to another version of the architecture",
            fix="correct the file, or copy or download it again",
        ) from error
    config = text_part_of(stored)
    raw = read_model_config(folder)
    if (tied := text_part(raw).get("tie_word_embeddings")) is not None:
        config.tie_word_embeddings = tied
    if problem := why_not_dequantizable(stored.to_dict()):
        raise TrainingError(
            f"{folder}: {problem}",
            meaning="fine-tuning starts from weights in bf16 or fp32",
            fix=unquantized_fix(str(folder)),
        )
    of_files = shape if stored_vocab_size is None else shape.model_copy(update={"vocab_size": stored_vocab_size})
    if found := find_contradictions(of_files, shape_fields(config)):
        wrong = "; ".join(f"{key}: {values}" for key, values in found.items())
        raise TrainingError(
            f"the weights in {folder} have another shape than model.architecture: {wrong}",
            meaning="ftkit trains the shape in the weights' own config.json; the plan is for another model",
            fix="correct model.architecture in the recipe; if it is not set there, submit again: the plan then "
            "reads the files that are downloaded now",
        )
    _scale_positions(config, shape)
    if stored_vocab_size is not None:
        config.vocab_size = shape.vocab_size
    is_whole = pictures or config is stored or not has_causal_class(config)
    return TextConfig(stored) if is_whole else TextConfig(config, stored)


def shape_fields(config: PretrainedConfig) -> dict[str, object]:
    """Return a configuration's fields of the shape, by their public names."""
    saved = config.to_dict()  # if layers differ, the configuration lacks these attributes
    keys = (*CONFIG_KEYS, *NUM_EXPERTS)
    return {key: saved[key] if key in saved else getattr(config, key, None) for key in keys}


def _scale_positions(config: PretrainedConfig, shape: ArchitectureSpec) -> None:
    """Write the recipe's rope scaling into a configuration; sliding-window layers keep their frequencies."""
    if shape.rope_scaling is None:
        return
    values = shape.rope_scaling.model_dump(exclude_none=True)
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):  # transformers 4
        config.rope_scaling = values
    else:
        scaled = rope.get("full_attention", rope)
        scaled = {key: scaled[key] for key in ("rope_theta", "partial_rotary_factor") if key in scaled} | values
        config.rope_parameters = rope | {"full_attention": scaled} if "full_attention" in rope else scaled
    config.max_position_embeddings = shape.max_position_embeddings


def check_positions(model: nn.Module, shape: ArchitectureSpec) -> None:
    """Refuse a model whose class does not apply the recipe's rope scaling."""
    if shape.rope_scaling is None:
        return
    kinds = [getattr(module, "rope_type", None) for module in model.modules()]
    found = {kind for each in kinds for kind in (each.values() if isinstance(each, dict) else [each])}
    if shape.rope_scaling.rope_type not in found:
        raise TrainingError(
            f"{type(model).__name__} does not scale its positions by '{shape.rope_scaling.rope_type}'",
            meaning="its class in transformers has other rotary positions, or none",
            fix="leave model.architecture.rope_scaling out, or choose another model",
        )


def build_empty(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    """Build a model with its parameters on the meta device, and real buffers.

    `attention` applies to the text model. Other parts of a multimodal model, such as its vision tower, use SDPA.
    """
    text = text_part_of(config)
    kernels = {name: attention if getattr(config, name) is text else "sdpa" for name in config.sub_configs}
    try:
        with init_empty_weights(include_buffers=False):
            built = auto_class_of(config).from_config(
                config, dtype=torch.float32, attn_implementation={"": attention, **kernels} if kernels else attention
            )
    except Exception as error:  # classes raise different errors on invalid values
        raise TrainingError(
            f"transformers {transformers.__version__} can't build a '{config.model_type}' with attention "
            f"'{attention}': {type(error).__name__}: {one_line(error)}",
            meaning="it is not a causal language model, its class does not have this attention kernel, or config.json "
            "has a value that it does not know",
            fix="set training.attention=auto, correct config.json, or choose another model",
        ) from error
    built.tie_weights()  # `init_empty_weights` untied the parameters
    if find_decoder(built) is built or built.get_output_embeddings() is None:
        raise TrainingError(
            f"{type(built).__name__} has no decoder separate from its output projection",
            meaning="its class in transformers is not built like a causal language model",
            fix="choose another model, or an image with a newer transformers",
        )
    _avoid_grouped_mm_of_odd_sizes(built)
    # With a cache, transformers ignores document boundaries: packed documents would attend to each other.
    for each in (built.config, text):
        each.use_cache = False
        # Some published configurations request tuples, or the outputs of each layer.
        each.return_dict = True
        each.output_hidden_states = each.output_attentions = False
    return built.train()


def load_pretrained(folder: Path, dtype: torch.dtype | None = None, **options: object) -> PreTrainedModel:
    """Load a model in Hugging Face's layout as transformers does, in the files' dtype by default.

    Experts of odd sizes are computed one by one.
    """
    auto_class = auto_class_of(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    model = auto_class.from_pretrained(folder, dtype=dtype or "auto", trust_remote_code=False, **options)
    _avoid_grouped_mm_of_odd_sizes(model)
    return model


def auto_class_of(config: PretrainedConfig) -> Any:
    """Return the auto class that loads a model as published: a multimodal model with its vision tower.

    Adapters use the names of that class. `AutoModelForCausalLM` has no class for most multimodal models, such as LLaVA
    and Mistral 3. For others, such as Qwen 3.5, its class has the names of the text model.
    """
    is_multimodal = text_part_of(config) is not config
    has_class = is_multimodal and type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if has_class else AutoModelForCausalLM


def _avoid_grouped_mm_of_odd_sizes(model: PreTrainedModel) -> None:
    """Compute experts one by one if `torch._grouped_mm` can't: it needs rows of multiples of 16 bytes (8 in bf16)."""
    stacked = (each.shape for name, each in model.named_parameters() if ".experts." in name and each.ndim == 3)  # noqa: PLR2004
    is_odd = any(size % GROUPED_MULTIPLE for shape in stacked for size in shape[1:])
    if is_odd and hasattr(model, "set_experts_implementation"):  # transformers 4 always computes them one by one
        model.set_experts_implementation("eager")


def accepted_inputs(module: nn.Module, inputs: dict[str, object]) -> dict[str, object]:
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    # A forward that lists its inputs without positions has `**kwargs` for other purposes, and may reject positions.
    is_listed = "input_ids" in parameters and "position_ids" not in parameters
    if takes_any and not is_listed:
        return inputs
    return {name: value for name, value in inputs.items() if name in parameters}


def has_recurrent_layers(config: PretrainedConfig) -> bool:
    """Return whether some layers are recurrent, in addition to or instead of attention."""
    kinds = getattr(text_part_of(config), "layer_types", None) or ()
    return any("attention" not in kind or "linear" in kind for kind in kinds)


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the decoder, which feeds the output projection; the model itself if there is none.

    For some models, `get_decoder` returns the model itself: in transformers 4, and for Llama 4's text model, which has
    another class's `base_model_prefix`. For ModernBERT's decoder, it returns the output projection.
    """
    decoder, projection = model.get_decoder(), model.get_output_embeddings()
    if decoder is model or decoder is projection:
        decoder = model.base_model
    elif any(part is projection for part in decoder.modules()):  # of Llama 4 it is a text model with a projection
        return find_decoder(decoder)
    if decoder is model:
        layers = find_decoder_layers(model)
        decoder = next((child for child in model.children() if any(part is layers for part in child.modules())), model)
    return decoder


def find_body(model: PreTrainedModel) -> PreTrainedModel:
    """Return the outermost module without the output projection; in a multimodal model, it has the vision tower too."""
    decoder, projection = find_decoder(model), model.get_output_embeddings()
    if not sees_pictures(model):
        return decoder
    parts = {child: [*child.modules()] for child in model.children()}
    has_decoder = (child for child, inner in parts.items() if decoder in inner and projection not in inner)
    return next(has_decoder, decoder)


def find_decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers.

    Find them by structure, never by class name, so that a renamed class can't leave a model in one FSDP unit. Layers
    may have several classes, as in models that mix attention with other layers.
    """
    text = text_part_of(model.config)
    searched = model if text is model.config else model.get_decoder()  # a vision tower may have as many layers
    lists = [module for module in searched.modules() if isinstance(module, nn.ModuleList) and len(module)]
    expected = getattr(text, "num_hidden_layers", None)
    matching = [layers for layers in lists if len(layers) == expected]
    if not matching:  # LongCat counts each layer as two, because it has two attention layers
        nested = {id(part) for layers in lists for part in layers.modules() if part is not layers}
        outermost = [layers for layers in lists if id(layers) not in nested]
        matching = outermost if len(outermost) == 1 and 2 * len(outermost[0]) == expected else []
    if not matching:
        found = ", ".join(f"{len(layers)} x {type(layers[0]).__name__}" for layers in lists) or "none"
        raise TrainingError(
            f"the model's {expected} decoder layers were not found; its lists of modules are: {found}",
            meaning="this model is not a stack of decoder layers",
            fix="choose a model of another family",
        )
    return max(matching, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))


@dataclass(frozen=True)
class TextPlace:
    """The prefixes of the decoder's tensors, with a period: in the text model, and in the multimodal one."""

    own: str = "model."
    wrapped: str = WRAPPED

    def rename(self, name: str) -> str:
        """Return the multimodal class's name of a tensor or module of the text model."""
        return self.wrapped + name.removeprefix(self.own) if name.startswith(self.own) else name

    def targets(self, projections: Iterable[str], others: Iterable[str] = ()) -> str:
        """Return peft's pattern for adapted modules: the vision tower may have some of the same names.

        Only the tower has the `others`.
        """
        inner, outer = ("|".join(map(re.escape, names)) for names in (projections, others))
        return rf"{re.escape(self.wrapped)}.*\.({inner})" + (rf"|.*\.({outer})" if outer else "")


def find_text(model: PreTrainedModel, wrapper: PretrainedConfig | None) -> TextPlace | None:
    """Return the place of a text model in the multimodal class that loads the weights, found by the decoder's class.

    `wrapper` is the multimodal model's configuration; None if the model is not part of one, or is one itself.
    """
    decoder = find_decoder(model)
    own = next(name for name, module in model.named_modules() if module is decoder)
    if wrapper is None:
        return TextPlace(f"{own}.", f"{own}.") if sees_pictures(model) else None
    try:
        with torch.device("meta"):
            # `from_config` sets the attention of its configuration, whose text part is this model's: pass a copy.
            whole = auto_class_of(wrapper).from_config(copy.deepcopy(wrapper), attn_implementation="eager")
    except Exception as error:  # noqa: BLE001 - a vision tower may need a package that training on text does not
        reason = f"{type(error).__name__}: {one_line(error)}"
    else:
        # FSDP2 makes a subclass of a sharded module's class.
        found = [name for name, module in whole.named_modules() if isinstance(decoder, type(module))]
        if len(found) == 1:
            return TextPlace(f"{own}.", f"{found[0]}.")
        reason = f"{type(whole).__name__} has {len(found)} modules of class {type(decoder).__name__}"
    log.warning("adapters are named for a text model at '%s', as in most multimodal models: %s", WRAPPED, reason)
    return TextPlace()


def config_for_export(
    config: PretrainedConfig, class_name: str, dtype: torch.dtype, end_tokens: int | list[int] | None
) -> PretrainedConfig:
    exported = copy.deepcopy(config)
    exported.architectures = [class_name]
    vars(exported).pop("quantization_config", None)  # weights were dequantized while loading
    exported.use_cache = True
    exported.dtype = dtype
    exported.eos_token_id = end_tokens
    return exported
