"""Export trained weights in Hugging Face's layout, or peft's for adapters, with a record of their logits."""

from __future__ import annotations

import logging
import shutil
import sys
from collections import ChainMap, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ftkit.config.recipe import RecipePlan
from ftkit.errors import TrainingError, one_line
from ftkit.files import atomic_folder, write_json
from ftkit.models.folder import ADAPTER_FILE, ADDED_TOKENS_FILE, EXPORT_RECORD, SENTENCEPIECE_FILE
from ftkit.process import num_usable_cpus
from ftkit.runs.model_card import read_license, write_card
from ftkit.train.checkpoint.weight_files import write_weights
from ftkit.train.components.batches import computed_ahead
from ftkit.train.components.export_record import (
    ExportRecord,
    make_prompts,
    sample_columns,
    streamed_logits,
    tokenizer_digests,
)
from ftkit.train.components.generation import Generation, end_token_setting
from ftkit.train.dtypes import DTYPES
from ftkit.train.model.build import TextConfig, build_empty, config_for_export, find_decoder_layers
from ftkit.train.model.expert_adapters import transposed_experts
from ftkit.train.model.linears import transposed_weights
from ftkit.train.model.lora import (
    AdaptedTensors,
    MergedTensors,
    is_adapter,
    peft_config,
    peft_names,
    prepare_method,
)
from ftkit.train.model.peft_names import find_text, to_peft
from ftkit.train.model.weight_conversion import LazyTensors, converts_layout, split_as_stored
from ftkit.train.model.weights import PretrainedTensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ftkit.config.training import Precision
    from ftkit.planning.layout import RunLayout
    from ftkit.runs.checkpoints import SavedFile
    from ftkit.train.engine import Engine
    from ftkit.train.world import World

log = logging.getLogger(__name__)
_MAX_THREADS = 4
"""Threads that compute tensors: more would compute faster than disks write, and hold more tensors."""
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
        units = _units(self._plain, weights, dtype)
        declared = _declared(self._plain, units, dtype)
        files = write_weights(declared, _as_stored(self._plain, weights, units, dtype), folder)
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


def _units(model: PreTrainedModel, names: Iterable[str], dtype: torch.dtype) -> list[list[str]]:
    """Group tensors that are converted together to the layout of files: each alone, or those of a decoder layer.

    Larger dtypes come first, as in the files.
    """
    tensors = dict((*model.named_buffers(), *model.named_parameters()))
    layers = find_decoder_layers(model)
    prefixes = [name for name, module in model.named_modules() if any(module is layer for layer in layers)]
    if not converts_layout(model):
        prefixes = []
    units = defaultdict(list)
    for name in names:
        prefix = next((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), name)
        units[_rounded(tensors[name].to("meta"), dtype).element_size(), prefix].append(name)
    return [units[key] for key in sorted(units, key=lambda key: -key[0])]


def _declared(model: PreTrainedModel, units: Iterable[Sequence[str]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of the files, on the meta device."""
    tensors = dict((*model.named_buffers(), *model.named_parameters()))
    stored: dict[str, torch.Tensor] = {}
    for unit in units:
        stored |= split_as_stored(model, {name: _rounded(tensors[name].to("meta"), dtype) for name in unit})
    return stored


def _as_stored(
    model: PreTrainedModel, weights: Mapping[str, torch.Tensor], units: Iterable[Sequence[str]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in the layout of files on the hub.

    The next units are computed in parallel, each by one thread, while one is written. The operations are short: on a
    loaded machine, several threads per operation spend most of their time waiting for each other.
    """

    def compute(unit: Sequence[str]) -> Mapping[str, torch.Tensor]:
        return split_as_stored(model, {name: _rounded(weights[name], dtype) for name in unit})

    size = min(_MAX_THREADS, num_usable_cpus())
    with one_thread_per_operation(), ThreadPoolExecutor(size) as threads:
        for tensors in computed_ahead(threads, compute, units, size):
            yield from tensors.items()


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """Have torch compute each CPU operation in the calling thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _RoundedTensors(LazyTensors):
    """Tensors in the dtype of an export; each is rounded on access."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__(tensors)
        self._tensors, self._dtype = tensors, dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        return _rounded(self._tensors[name], self._dtype)


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
