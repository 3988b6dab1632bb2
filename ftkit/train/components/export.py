"""Export trained weights in Hugging Face's layout, or peft's for adapters, with a record of their logits.

ftkit's modules compute the record from the weights of the checkpoint, before anything is written. `ftkit verify` loads
the files with transformers and peft, in another process. So the two share only the tokenizer's text.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections import ChainMap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ftkit.config.recipe import RecipePlan
from ftkit.config.training import Precision
from ftkit.errors import TrainingError, one_line
from ftkit.files import atomic_folder, write_json
from ftkit.models.folder import ADAPTER_FILE, ADDED_TOKENS_FILE, EXPORT_RECORD, SENTENCEPIECE_FILE
from ftkit.runs.checkpoints import SavedFile
from ftkit.runs.model_card import read_license, write_card
from ftkit.train.components.export_files import rounded, write_model, write_weights
from ftkit.train.components.generation import Generation, Prompt, end_token_setting, make_prompts, tokenizer_digests
from ftkit.train.model.expert_adapters import transposed_experts
from ftkit.train.model.hf_model import TextConfig, build_empty, config_for_export, find_decoder_layers
from ftkit.train.model.linears import transposed_weights
from ftkit.train.model.lora import AdaptedTensors, MergedTensors, is_adapter, peft_config, peft_names, prepare_method
from ftkit.train.model.peft_names import find_text, to_peft
from ftkit.train.model.pretrained import PretrainedTensors
from ftkit.train.model.weight_conversion import LazyTensors
from ftkit.train.world import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ftkit.planning.layout import RunLayout
    from ftkit.train.engine import Engine
    from ftkit.train.world import World

log = logging.getLogger(__name__)
_MAX_RECORDED_PARAMETERS = 4 * 10**9
"""Parameters of the largest model whose logits are recorded after training: on a CPU, while the GPUs are idle."""


@dataclass(frozen=True)
class ExportedParts:
    """All parts of an exported model besides its weights; `pretrained` is the folder of the initial ones, if any."""

    recipe: RecipePlan
    config: TextConfig
    tokenizer: PreTrainedTokenizerBase
    generation: Generation
    pretrained: Path | None


def export(engine: Engine, parts: ExportedParts, layout: RunLayout, step: int, world: World) -> None:
    """Write the trained model into the run's export folder, in the dtype of training.

    Collective: every rank must call it. The folder is renamed into place when complete, and replaces a former export.
    """
    weights = engine.trained_weights()
    if world.is_first:
        model = build_export_model(parts)
        exporter = Exporter(parts, model, weights)
        precision = parts.recipe.training.compute_precision
        record = exporter.record(layout.root.name, step, precision, merges=False)
        if sum(parameter.numel() for parameter in model.parameters()) > _MAX_RECORDED_PARAMETERS:
            log.info("no logits are recorded for so large a model while GPUs wait: to verify it, 'ftkit export %s'",
                     layout.root.name)  # fmt: skip
        else:
            try:
                record = exporter.with_logits(record)
            except Exception as error:  # noqa: BLE001 - any model's code may fail on a CPU: the trained weights are kept
                log.warning("the export is written, but 'ftkit verify' can't check it: %s", one_line(error))
        folder = layout.export
        with atomic_folder(folder, folder.with_name(f".{folder.name}.partial")) as temporary:
            exporter.write(record, temporary, layout)
    world.barrier()


def build_export_model(parts: ExportedParts) -> PreTrainedModel:
    """Build the model on the meta device as it is exported: unquantized, with its adapters if there are any."""
    model = build_empty(parts.config.text, "eager")
    training = parts.recipe.training
    unquantized = {"precision": training.compute_precision, "base_precision": "auto"}
    if training.adapters is not None:
        unquantized["method"] = "lora"
    prepare_method(model, training.model_copy(update=unquantized), torch.device("cpu"))
    return cast("PreTrainedModel", model)


class Exporter:
    """Writes the trained weights of a run, one tensor at a time, and records their logits.

    Merged adapters go into the unquantized base in fp32 and are rounded once.
    """

    def __init__(self, parts: ExportedParts, model: PreTrainedModel, trained: Mapping[str, torch.Tensor]) -> None:
        """Find the base model's weights, if there is one.

        `model` is the result of `build_export_model`; `trained` are the weights by its names, each read on access.
        """
        self._parts, self._model, self._trained = parts, model, trained
        self._plain = model
        if parts.recipe.training.adapters is not None:
            self._plain = cast("PreTrainedModel", build_empty(parts.config.text, "eager"))
        stored, folder = parts.recipe.model.vocab_size_of_weights, parts.pretrained
        self._base = None if folder is None else PretrainedTensors(self._plain, folder, stored)

    def record(self, run: str, step: int, precision: Precision, *, merges: bool) -> ExportRecord:
        """Return the record of an export, without logits and files."""
        source = self._parts.recipe.model
        is_adapters = self._parts.recipe.training.adapters is not None and not merges
        vocab_size = len(cast("torch.nn.Embedding", self._plain.get_output_embeddings()).weight)
        return ExportRecord(
            run=run,
            step=step,
            kind="adapters" if is_adapters else "model",
            precision=precision,
            base=None if self._parts.pretrained is None else source.weights,
            revision=source.revision,
            end_tokens=self._parts.generation.end_tokens,
            prompts=make_prompts(self._parts.tokenizer),
            trained=None,
            untrained=None,
            exported=None,
            files={},
            columns=sample_columns(vocab_size, self._parts.generation.end_tokens),
            tokenizer=tokenizer_digests(self._parts.tokenizer),
            version=1,
        )

    def with_logits(self, record: ExportRecord) -> ExportRecord:
        """Compute the logits of a record's prompts: of the trained weights, of the exported ones, and of the base."""

        def of_trained(weights: Mapping[str, torch.Tensor]) -> list[list[list[float]]]:
            if self._parts.recipe.training.adapters is None:
                return streamed_logits(self._model, self._with_buffers(weights), record)
            return streamed_logits(self._model, AdaptedTensors(self._required_base(), weights), record)

        exported, dtype = None, DTYPES[record.precision]
        if dtype is not torch.float32 and record.kind == "adapters":
            exported = of_trained(_RoundedTensors(self._trained, dtype))
        elif dtype is not torch.float32:
            exported = streamed_logits(self._plain, _RoundedTensors(self._full_weights(dtype), dtype), record)
        untrained = None if self._base is None else streamed_logits(self._plain, self._base, record)
        return replace(record, trained=of_trained(self._trained), exported=exported, untrained=untrained)

    def write(self, record: ExportRecord, folder: Path, layout: RunLayout) -> None:
        """Write weights, configurations, tokenizer, model card and record into an empty folder."""
        dtype = DTYPES[record.precision]
        write = self._write_adapters if record.kind == "adapters" else self._write_model
        files = write(dtype, folder)
        self._parts.tokenizer.save_pretrained(folder)
        self._write_sentencepiece(folder)
        self._parts.generation.save(folder)
        known = None if self._parts.pretrained is None else read_license(self._parts.pretrained)
        write_card(folder, layout, self._parts.recipe, record.step, record.kind, known)
        write_json(folder / EXPORT_RECORD, replace(record, files=files))

    def _write_model(self, dtype: torch.dtype, folder: Path) -> dict[str, SavedFile]:
        """Write the files for `AutoModelForCausalLM.from_pretrained`; of a multimodal model, its text model.

        Returns the weight files.
        """
        weights = self._full_weights(dtype)
        if missing := sorted({name for name, _ in self._plain.named_parameters()} - weights.keys()):
            raise TrainingError(
                f"{len(missing)} of the model's parameters are missing: {', '.join(missing[:3])} …",
                meaning="the weights of the base model are incomplete, or the checkpoint belongs to another model",
                fix="download the base model again",
            )
        config = self._parts.config.text
        files = write_model(self._plain, weights, dtype, folder)
        end_tokens = end_token_setting(self._parts.generation.end_tokens)
        config_for_export(config, type(self._plain).__name__, dtype, end_tokens).save_pretrained(folder)
        return files

    def _full_weights(self, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
        """Return the weights of a full model; adapters are merged into their base, and rounded to `dtype`, on access.

        Weights without adapters keep their dtype.
        """
        lora = self._parts.recipe.training.adapters
        if lora is None:
            return self._with_buffers(self._trained)
        transposed = transposed_weights(self._plain) | transposed_experts(self._plain)
        return MergedTensors(self._required_base(), self._trained, lora, dtype, transposed)

    def _write_adapters(self, dtype: torch.dtype, folder: Path) -> dict[str, SavedFile]:
        """Write the files for `PeftModel.from_pretrained` on the pretrained model, which may be multimodal.

        Returns the adapter file.
        """
        lora = self._parts.recipe.training.adapters
        if lora is None:
            raise AssertionError("a run without adapters exports the full model")
        place = find_text(self._plain, self._parts.config.wrapper)
        names = peft_names(self._plain, filter(is_adapter, self._trained), place)
        named = {stored: to_peft(name, self._trained[name]).to(dtype) for name, stored in names.items()}
        declared = {name: tensor.to("meta") for name, tensor in named.items()}
        files = write_weights(declared, named.items(), folder, ADAPTER_FILE, sys.maxsize)
        config = peft_config(lora, base=self._parts.recipe.model.weights, model=self._plain)
        if place is not None:
            config.target_modules = place.targets(each for each in lora.targets if each in config.target_modules)
        config.save_pretrained(str(folder))
        return files

    def _write_sentencepiece(self, folder: Path) -> None:
        """Copy the SentencePiece model of the pretrained tokenizer, if it has one, and list the added tokens.

        transformers reads both from `tokenizer.json`; llama.cpp's converter reads these files, for Gemma only these.
        """
        model, pretrained = self._parts.recipe.model, self._parts.pretrained
        if model.tokenizer.source != "model" or pretrained is None or not (pretrained / SENTENCEPIECE_FILE).is_file():
            return
        shutil.copyfile(pretrained / SENTENCEPIECE_FILE, folder / SENTENCEPIECE_FILE)
        if added := model.added_tokens:
            tokens = {token: self._parts.tokenizer.convert_tokens_to_ids(token) for token in added}
            write_json(folder / ADDED_TOKENS_FILE, tokens)

    def _with_buffers(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Add the buffers that files have: checkpoints have parameters."""
        names = [name for name, _ in self._plain.named_buffers()]
        stored = self._plain.state_dict() if self._base is None else self._base
        return ChainMap(cast("Any", weights), {name: stored[name] for name in names if name in stored})

    def _required_base(self) -> PretrainedTensors:
        if self._base is None:
            raise TrainingError(
                "these adapters were trained on random weights, which were not saved",
                meaning="the recipe has no pretrained model (model.weights=random)",
                fix="train adapters on a pretrained model, or all weights: training.method=full",
            )
        return self._base


class _RoundedTensors(LazyTensors):
    """Tensors in the dtype of an export; each is rounded on access."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__(tensors)
        self._tensors, self._dtype = tensors, dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        return rounded(self._tensors[name], self._dtype)


# --- The record ----------------------------------------------------------------------------------


_NUM_COLUMNS = 256
_SIGNIFICANT_DIGITS = 7
Logits = list[list[list[float]]]
"""Per prompt and token: logits of some tokens of the vocabulary, then the log-sum-exp of all."""


@dataclass(frozen=True)
class ExportRecord:
    """The source of an export, and its expected logits: ftkit-export.json.

    Attributes:
        base: hub id or folder of the pretrained model; None if training began with random weights.
        end_tokens: tokens that end a completion; the trained one is the first.
        trained: per prompt and token, logits of `columns` of the vocabulary, and the log-sum-exp of all of them; None
            if there is no base model to compute them with.
        untrained: the same for the base model.
        exported: the same for the trained weights rounded to `precision`; None if that changes nothing.
        columns: tokens of the vocabulary whose logits are recorded.
    """

    run: str
    step: int
    kind: Literal["model", "adapters"]
    precision: Precision
    base: str | None
    revision: str | None
    end_tokens: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    trained: Logits | None
    untrained: Logits | None
    files: dict[str, SavedFile]
    exported: Logits | None
    columns: tuple[int, ...]
    tokenizer: dict[str, str]
    version: Literal[1]
    """Of the record's fields and their meaning; a record with another version is refused."""


@torch.no_grad()
def sample_logits(model: PreTrainedModel, record: ExportRecord) -> Logits:
    """Compute the logits of a record's prompts in one batch, and return a sample that depends on the full vocabulary.

    Rows are padded on their right without a mask: in a causal model no token sees what follows.
    """
    prompts = record.prompts
    longest = max(len(prompt.tokens) for prompt in prompts)
    rows = [[*prompt.tokens, *[0] * (longest - len(prompt.tokens))] for prompt in prompts]
    logits: torch.Tensor = model(input_ids=torch.tensor(rows), use_cache=False).logits.float()
    kept = torch.cat([logits[..., list(record.columns)], logits.logsumexp(-1, keepdim=True)], -1).tolist()
    return [
        [[float(f"{value:.{_SIGNIFICANT_DIGITS}g}") for value in values] for values in row[: len(prompt.tokens)]]
        for row, prompt in zip(kept, prompts, strict=True)
    ]


def sample_columns(vocab_size: int, end_tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens whose logits are kept: evenly spaced ones, and end tokens."""
    evenly_spaced = torch.linspace(0, vocab_size - 1, min(vocab_size, _NUM_COLUMNS)).long().tolist()
    return tuple(sorted({*evenly_spaced, *(token for token in end_tokens if token < vocab_size)}))


def streamed_logits(model: nn.Module, tensors: Mapping[str, torch.Tensor], record: ExportRecord) -> Logits:
    """Compute `sample_logits` in fp32 on the CPU, with one decoder layer, or one embedding, at a time in memory.

    `model` is a transformers model on the meta device, with adapters or without; `tensors` are its parameters, and the
    buffers that are in files, by its names.
    """
    resident, units = _units(model)
    for name, buffer in model.named_buffers():
        if name in tensors:
            buffer.copy_(tensors[name])
    hooks = []
    for prefix, own in units.items():
        module = model.get_submodule(prefix)
        hooks.append(module.register_forward_pre_hook(lambda *_, own=own: _fill(model, tensors, own)))
        hooks.append(module.register_forward_hook(lambda *_, own=own: _empty(model, own)))
    model.eval()
    try:
        _fill(model, tensors, resident)
        return sample_logits(model, record)
    finally:
        for hook in hooks:
            hook.remove()
        for own in (resident, *units.values()):
            _empty(model, own)
        cast("PreTrainedModel", model).tie_weights()


def streamed_bytes(model: nn.Module) -> int:
    """Return the bytes of the most weights that `streamed_logits` holds at a time."""
    resident, units = _units(model)
    held = [sum(model.get_parameter(name).numel() for name in own) for own in units.values()]
    return 4 * (max(held) + sum(model.get_parameter(name).numel() for name in resident))


def _units(model: nn.Module) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Group parameters: those that stay in memory, and those of each decoder layer and of each table of tokens.

    Each name comes with the first name of its parameter: tables may be tied, and layers may share parameters.
    """
    first_names: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    names = {name: first_names.setdefault(id(parameter), name) for name, parameter in named}
    causal_lm = cast("PreTrainedModel", model)
    owners = [*find_decoder_layers(model), causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()]
    prefixes = [prefix for prefix, module in model.named_modules() if any(module is owner for owner in owners)]
    units = {
        prefix: {name: first for name, first in names.items() if name.startswith(f"{prefix}.")} for prefix in prefixes
    }
    resident = {name: first for name, first in names.items() if not any(name in own for own in units.values())}
    return resident, units


def _fill(model: nn.Module, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> None:
    for name, source in names.items():
        _set(model, name, tensors[source].float())


def _empty(model: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        _set(model, name, torch.empty_like(model.get_parameter(name), device="meta"))


def _set(model: nn.Module, name: str, values: torch.Tensor) -> None:
    owner, _, own_name = name.rpartition(".")
    setattr(model.get_submodule(owner), own_name, nn.Parameter(values, requires_grad=False))
