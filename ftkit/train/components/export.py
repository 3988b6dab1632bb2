"""Export trained weights in Hugging Face's layout, or peft's for adapters, with a record of their logits."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections import ChainMap, defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ftkit.config.recipe import RecipePlan
from ftkit.data.workers import num_usable_cpus
from ftkit.errors import TrainingError, one_line
from ftkit.files import atomic_folder, mode_of_new_files, sync, write_json
from ftkit.model_folder import ADDED_TOKENS_FILE, EXPORT_RECORD, SENTENCEPIECE_FILE, WEIGHTS_FILE, WEIGHTS_INDEX
from ftkit.runs.card import read_license, write_card
from ftkit.runs.checkpoints import SavedFile
from ftkit.train.components.export_record import ExportRecord, make_prompts, streamed_logits
from ftkit.train.components.generation import Generation, end_token_setting
from ftkit.train.dtypes import DTYPES
from ftkit.train.model.build import TextConfig, build_empty, config_for_export, find_decoder_layers
from ftkit.train.model.lora import (
    ADAPTER_FILE,
    AdaptedTensors,
    MergedTensors,
    peft_config,
    prepare_method,
    to_peft_names,
)
from ftkit.train.model.weight_conversion import split_as_stored, wrapped_name, wrapped_targets
from ftkit.train.model.weights import PretrainedTensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftkit.config.training import Precision
    from ftkit.planning.layout import RunLayout
    from ftkit.train.engine import Engine
    from ftkit.train.world import World

log = logging.getLogger(__name__)
_SHARD_BYTES = 2 * 2**30
"""Maximum size of a file, which is held in memory until it is written."""
_FILES_IN_FLIGHT = 2
"""Files that are written while the next one is computed: one is being hashed or synced, and one is being written."""
_LENGTH_BYTES = 8
"""Bytes of the little-endian length of a header in a safetensors file (its format's specification)."""

_MAX_RECORDED_PARAMETERS = 4 * 10**9
"""Parameters of the largest model whose logits are recorded after training: on a CPU, while the GPUs are idle."""


@dataclass(frozen=True)
class ExportedParts:
    """All parts of an exported model besides its weights.

    Attributes:
        pretrained: the folder of the initial weights; None if they were random.
    """

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
                log.warning("the export is written, but 'ftkit verify-export' can't check it: %s", one_line(error))
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
    """Writes the trained weights of a run, one shard at a time, and records their logits.

    Merged adapters go into the unquantized base in fp32 and are rounded once.
    """

    def __init__(self, parts: ExportedParts, model: PreTrainedModel, trained: Mapping[str, torch.Tensor]) -> None:
        """Find the base model's weights, if there is one.

        Args:
            parts: all that is exported besides weights.
            model: the result of `build_export_model`.
            trained: the trained weights by the model's names; each is read on access.
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
            files={},
        )

    def with_logits(self, record: ExportRecord) -> ExportRecord:
        """Compute the logits of a record's prompts: of the trained weights, of the exported ones, and of the base."""

        def of_trained(weights: Mapping[str, torch.Tensor]) -> list[list[list[float]]]:
            if self._parts.recipe.training.adapters is None:
                return streamed_logits(self._model, self._with_untrained(weights), record.prompts)
            return streamed_logits(self._model, AdaptedTensors(self._required_base(), weights), record.prompts)

        exported, dtype = None, DTYPES[record.precision]
        if dtype is not torch.float32 and record.kind == "adapters":
            exported = of_trained(_RoundedTensors(self._trained, dtype))
        elif dtype is not torch.float32:
            exported = streamed_logits(self._plain, _RoundedTensors(self._full_weights(dtype), dtype), record.prompts)
        untrained = None if self._base is None else streamed_logits(self._plain, self._base, record.prompts)
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
        _let_others_read(folder)

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
        files = write_shards(_as_stored(self._plain, weights, dtype), folder)
        end_tokens = end_token_setting(self._parts.generation.end_tokens)
        config_for_export(config, type(self._plain).__name__, dtype, end_tokens).save_pretrained(folder)
        return files

    def _full_weights(self, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
        """Return the weights of a full model; adapters are merged into their base, and rounded to `dtype`, on access.

        Weights without adapters keep their dtype.
        """
        lora = self._parts.recipe.training.adapters
        if lora is None:
            return self._with_untrained(self._trained)
        return MergedTensors(self._required_base(), self._trained, lora, dtype)

    def _write_adapters(self, dtype: torch.dtype, folder: Path) -> dict[str, SavedFile]:
        """Write the files for `PeftModel.from_pretrained` on the pretrained model, which may be multimodal.

        Returns the adapter file.
        """
        lora, is_wrapped = self._parts.recipe.training.adapters, self._parts.config.is_wrapped
        if lora is None:
            raise AssertionError("a run without adapters exports the full model")
        name_of = wrapped_name if is_wrapped else str
        named = to_peft_names({name_of(name): _contiguous(tensor.to(dtype)) for name, tensor in self._trained.items()})
        save_file(named, folder / ADAPTER_FILE, metadata={"format": "pt"})
        config = peft_config(lora, base=self._parts.recipe.model.weights)
        if is_wrapped:
            config.target_modules = wrapped_targets(lora.targets)
        config.save_pretrained(str(folder))
        return {ADAPTER_FILE: SavedFile.of(folder / ADAPTER_FILE)}

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

    def _with_untrained(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Add tensors of the pretrained files that no checkpoint has: buffers; in older ones also frozen parameters."""
        if self._base is None:
            return weights
        parameters = self._plain.named_parameters()
        frozen = {name for name, parameter in parameters if not parameter.requires_grad} - weights.keys()
        untrained = frozen | {name for name, _ in self._plain.named_buffers()}
        return ChainMap(cast("Any", weights), {name: self._base[name] for name in untrained if name in self._base})

    def _required_base(self) -> PretrainedTensors:
        if self._base is None:
            raise TrainingError(
                "these adapters were trained on random weights, which were not saved",
                meaning="the recipe has no pretrained model (model.weights=random)",
                fix="train adapters on a pretrained model, or all weights: training.method=full",
            )
        return self._base


def _as_stored(
    model: PreTrainedModel, weights: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in the layout of files on the hub, one decoder layer at a time.

    The tensors of a layer are computed in parallel, each by one thread. The operations are short: on a loaded machine,
    several threads per operation spend most of their time waiting for each other.
    """
    layers = find_decoder_layers(model)
    prefixes = [name for name, module in model.named_modules() if any(module is layer for layer in layers)]
    units = defaultdict(list)
    for name in weights:
        units[next((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), name)].append(name)
    with one_thread_per_operation(), ThreadPoolExecutor(num_usable_cpus()) as threads:
        for unit in units.values():
            tensors = threads.map(lambda name: _rounded(weights[name], dtype), unit)
            yield from split_as_stored(model, dict(zip(unit, tensors, strict=True))).items()


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """Have torch compute each CPU operation in the calling thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _RoundedTensors(Mapping[str, torch.Tensor]):
    """Tensors in the dtype of an export; each is rounded on access."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._tensors, self._dtype = tensors, dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        return _rounded(self._tensors[name], self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _contiguous(tensor.to(dtype) if tensor.is_floating_point() else tensor)


def write_shards(
    tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, shard_bytes: int = _SHARD_BYTES
) -> dict[str, SavedFile]:
    """Write safetensors files with an index; return their sizes and digests.

    Complete files are written, hashed and synced by threads, while the tensors of the next one are computed. So the
    tensors of `1 + _FILES_IN_FLIGHT` files are in memory.

    Args:
        tensors: contiguous, by their names in the files.
        folder: the destination.
        shard_bytes: maximum size of a file, unless it has a single tensor.
    """
    places: dict[str, int] = {}
    total = 0
    saved: list[Future[SavedFile]] = []
    with ThreadPoolExecutor(_FILES_IN_FLIGHT) as writers:
        for number, shard in enumerate(_in_shards(tensors, shard_bytes)):
            places |= dict.fromkeys(shard, number)
            total += sum(tensor.nbytes for tensor in shard.values())
            saved.append(writers.submit(_save, shard, folder / f"{number}.part"))
            del shard  # the thread has it, and frees it
            if number >= _FILES_IN_FLIGHT:
                saved[number - _FILES_IN_FLIGHT].result()
        parts = [each.result() for each in saved]
    if len(parts) == 1:
        (folder / "0.part").rename(folder / WEIGHTS_FILE)
        return {WEIGHTS_FILE: parts[0]}
    files = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    for number, file in enumerate(files):
        (folder / f"{number}.part").rename(folder / file)
    index = {"metadata": {"total_size": total}, "weight_map": {name: files[place] for name, place in places.items()}}
    write_json(folder / WEIGHTS_INDEX, index)
    return dict(zip(files, parts, strict=True))


def _in_shards(tensors: Iterator[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of one file after another; no shard is kept once the next one is requested."""
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _save(shard: dict[str, torch.Tensor], file: Path) -> SavedFile:
    """Write a file; return its size and digest, computed from the tensors in memory in the file's order.

    The format is a length, a JSON header of that length, and the tensors at the header's offsets, without gaps.
    """
    save_file(shard, file, metadata={"format": "pt"})
    with file.open("rb") as written:
        # POSIX_FADV_DONTNEED has Linux write dirty pages to disk at once, while the digest is computed.
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        length = written.read(_LENGTH_BYTES)
        header = written.read(int.from_bytes(length, "little"))
    digest = hashlib.sha256(length + header)
    places = {name: each["data_offsets"] for name, each in json.loads(header).items() if name in shard}
    for name in sorted(places, key=places.__getitem__):
        digest.update(shard[name].flatten().view(torch.uint8).numpy().data)
    shard.clear()
    sync(file)
    return SavedFile(file.stat().st_size, digest.hexdigest())


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor that owns all of its storage, as safetensors requires.

    If the number of ranks does not divide the rows, an all-gathered tensor is a view of a larger one.
    """
    stored = tensor.contiguous()
    return stored if stored.untyped_storage().nbytes() == stored.nbytes else stored.clone()


def _let_others_read(folder: Path) -> None:
    """Give all files the mode that the umask gives new files: safetensors makes its files private."""
    mode = mode_of_new_files(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
