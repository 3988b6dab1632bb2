"""Export trained weights in Hugging Face's layout, or peft's for adapters, with a record of their logits.

ftkit's modules compute the record from the checkpoint's weights before anything is written. `ftkit verify` loads the
files with transformers and peft in another process. The two share only the tokenizer's text.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ftkit.config.recipe import RecipePlan
from ftkit.errors import TrainingError, one_line, plural
from ftkit.files import atomic_folder, sync, write_json
from ftkit.models.folder import ADAPTER_FILE, ADDED_TOKENS_FILE, EXPORT_RECORD, PROCESSOR_FILES, SENTENCEPIECE_FILE
from ftkit.models.weight_files import LENGTH_BYTES, WEIGHTS_FILE, WEIGHTS_INDEX
from ftkit.process import num_usable_cpus
from ftkit.runs.checkpoints import SavedFile
from ftkit.runs.model_card import append_table, read_license, write_card
from ftkit.train.components import export_record
from ftkit.train.components.batches import computed_ahead
from ftkit.train.components.export_record import ExportRecord, Logits, ResultT, picture_inputs, sample_logits, streamed
from ftkit.train.components.generation import Generation, end_token_setting
from ftkit.train.model.expert_adapters import transposed_experts
from ftkit.train.model.hf_model import TextConfig, build_empty, config_for_export, find_decoder_layers, find_text
from ftkit.train.model.linears import split_targets, transposed_weights
from ftkit.train.model.lora import (
    dequantized_base,
    is_adapter,
    merge_adapters,
    peft_config,
    peft_names,
    prepare_method,
    to_peft,
    with_adapters,
)
from ftkit.train.model.pretrained import open_pretrained
from ftkit.train.model.weight_conversion import LazyTensors, converts_layout, split_as_stored
from ftkit.train.world import DTYPES, World

if TYPE_CHECKING:
    from ftkit.config.training import Precision
    from ftkit.planning.layout import RunLayout
    from ftkit.train.engine import Engine

    Tensors = Mapping[str, torch.Tensor]

log = logging.getLogger(__name__)
_MAX_RECORDED_PARAMETERS = 4 * 10**9
"""Parameters of the largest model whose logits are recorded after training: on a CPU, while the GPUs are idle."""


@dataclass(frozen=True)
class ExportedParts:
    """All parts of an exported model except its weights; `pretrained` is the folder of the initial weights, if any."""

    recipe: RecipePlan
    config: TextConfig
    tokenizer: PreTrainedTokenizerBase
    generation: Generation
    pretrained: Path | None


def export(engine: Engine, parts: ExportedParts, layout: RunLayout, step: int, world: World) -> None:
    """Write the trained model in the dtype of training; replace a former export. Collective."""
    weights = engine.trained_weights()
    if world.is_first:
        model = build_export_model(parts)
        exporter = Exporter(parts, model, weights)
        record = exporter.record(layout.root.name, step, parts.recipe.training.compute_precision, merges=False)
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
    """Build the exported model on the meta device: unquantized, with its adapters if there are any."""
    model = build_empty(parts.config.text, "eager")
    training = parts.recipe.training
    unquantized = {"precision": training.compute_precision, "base_precision": "auto"}
    if training.adapters is not None:
        unquantized["method"] = "lora"
    prepare_method(model, training.model_copy(update=unquantized), torch.device("cpu"))
    return model


class Exporter:
    """Writes the trained weights of a run, one tensor at a time, and records their logits."""

    def __init__(self, parts: ExportedParts, model: PreTrainedModel, trained: Tensors) -> None:
        """`model` is the result of `build_export_model`; `trained` are its weights by name, each read on access."""
        self._parts = parts
        self._model = self._plain = model
        self._trained = trained
        self._lora = parts.recipe.training.adapters
        self._trains_vision = parts.recipe.training.vision != "frozen"  # adapter files can't contain vision weights
        if self._lora is not None:
            self._plain = build_empty(parts.config.text, "eager")
        stored, folder = parts.recipe.model.vocab_size_of_weights, parts.pretrained
        self._base = None if folder is None else open_pretrained(self._plain, folder, stored)

    def record(self, run: str, step: int, precision: Precision, *, merges: bool) -> ExportRecord:
        source, end_tokens = self._parts.recipe.model, self._parts.generation.end_tokens
        vocab_size = len(self._plain.get_output_embeddings().weight)
        return ExportRecord(
            run=run,
            step=step,
            kind="model" if self._lora is None or merges or self._trains_vision else "adapters",
            precision=precision,
            base=None if self._base is None else source.weights,
            revision=source.revision,
            end_tokens=end_tokens,
            prompts=export_record.make_prompts(self._parts.tokenizer),
            trained=None,
            untrained=None,
            exported=None,
            files={},
            columns=export_record.sample_columns(vocab_size, end_tokens),
            tokenizer=export_record.tokenizer_digests(self._parts.tokenizer),
            version=1,
        )

    def with_logits(self, record: ExportRecord) -> ExportRecord:
        folder = self._parts.pretrained if self._parts.recipe.data.pictures else None
        picture = None if folder is None else picture_inputs(folder)
        tokens = None if picture is None else tuple(picture["input_ids"][0].tolist())

        def of(model: PreTrainedModel, weights: Tensors) -> Logits:
            return streamed(model, weights, lambda filled: sample_logits(filled, record, picture))

        def of_trained(weights: Tensors) -> Logits:
            if self._lora is None:
                return of(self._model, self._with_buffers(weights))
            base = self._trained_base() if record.kind == "model" else self._required_base()
            return of(self._model, with_adapters(base, weights))

        exported, dtype = None, DTYPES[record.precision]
        if dtype is not torch.float32 and record.kind == "adapters":
            exported = of_trained(_all_rounded(self._trained, dtype))
        elif dtype is not torch.float32:
            exported = of(self._plain, _all_rounded(self._full_weights(dtype), dtype))
        untrained = None if self._base is None else of(self._plain, self._base)
        trained = of_trained(self._trained)
        return replace(record, trained=trained, exported=exported, untrained=untrained, picture=tokens)

    def compare_bases(self, measure: Callable[[PreTrainedModel], ResultT]) -> tuple[ResultT, ResultT]:
        """Measure the model with adapters on the base of training, and on the unquantized base."""
        bases = (self._trained_base(), self._required_base())
        first, second = (streamed(self._model, with_adapters(base, self._trained), measure) for base in bases)
        return first, second

    def write(self, record: ExportRecord, folder: Path, layout: RunLayout) -> None:
        parts, dtype = self._parts, DTYPES[record.precision]
        files = (self._write_adapters if record.kind == "adapters" else self._write_model)(dtype, folder)
        parts.tokenizer.save_pretrained(folder)
        if parts.pretrained is not None and parts.recipe.model.tokenizer.source == "model":
            sentencepiece = parts.pretrained / SENTENCEPIECE_FILE
            if sentencepiece.is_file():  # llama.cpp's converter reads it, for Gemma only it; transformers does not
                shutil.copyfile(sentencepiece, folder / SENTENCEPIECE_FILE)
                if added := parts.recipe.model.added_tokens:
                    tokens = {token: parts.tokenizer.convert_tokens_to_ids(token) for token in added}
                    write_json(folder / ADDED_TOKENS_FILE, tokens)
        processor = parts.pretrained if parts.recipe.data.pictures else None
        for file in (processor / name for name in PROCESSOR_FILES) if processor else ():
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
        parts.generation.save(folder)
        known = None if parts.pretrained is None else read_license(parts.pretrained)
        write_card(folder, layout, parts.recipe, record.step, record.kind, known)
        if record.merged is not None:
            names = ("the 4-bit base of training, dequantized: these files", "the unquantized base")
            rows = [[name, f"{loss:.4f}"] for name, loss in zip(names, record.merged[:2], strict=True)]
            measured = f"loss on the first {plural(record.merged[2], 'validation document')}"
            append_table(folder, "## Merged adapters", ["merged into", measured], rows)
        settings = export_record.settings_in(folder, files)
        write_json(folder / EXPORT_RECORD, replace(record, files=files, settings=settings))

    def _write_model(self, dtype: torch.dtype, folder: Path) -> dict[str, SavedFile]:
        """Write the files for `from_pretrained` of the built class, which may be a text model's."""
        weights = self._full_weights(dtype)
        if missing := sorted({name for name, _ in self._plain.named_parameters()} - weights.keys()):
            raise TrainingError(
                f"{len(missing)} of the model's parameters are missing: {', '.join(missing[:3])} …",
                meaning="the weights of the base model are incomplete, or the checkpoint belongs to another model",
                fix="download the base model again",
            )
        files = write_model(self._plain, weights, dtype, folder)
        end_tokens = end_token_setting(self._parts.generation.end_tokens)
        config = config_for_export(self._parts.config.text, type(self._plain).__name__, dtype, end_tokens)
        config.save_pretrained(folder)
        return files

    def _full_weights(self, dtype: torch.dtype) -> Tensors:
        """Return a full model's weights. On access, adapters are merged into their base in fp32, and cast once."""
        if self._lora is None:
            return self._with_buffers(self._trained)
        transposed = transposed_weights(self._plain) | transposed_experts(self._plain)
        return merge_adapters(self._trained_base(), self._trained, self._lora, dtype, transposed)

    def _write_adapters(self, dtype: torch.dtype, folder: Path) -> dict[str, SavedFile]:
        """Write the files for `PeftModel.from_pretrained` on the pretrained model, which may be multimodal."""
        if self._lora is None:
            raise AssertionError("a run without adapters exports the full model")
        place = find_text(self._plain, self._parts.config.wrapper)
        names = peft_names(self._plain, filter(is_adapter, self._trained), place)
        named = {stored: to_peft(name, self._trained[name]).to(dtype) for name, stored in names.items()}
        declared = {name: tensor.to("meta") for name, tensor in named.items()}
        files = write_weights(declared, named.items(), folder, ADAPTER_FILE, sys.maxsize)
        config = peft_config(self._lora, base=self._parts.recipe.model.weights, model=self._plain)
        if place is not None:
            targets = [each for each in self._lora.targets if each in config.target_modules]
            config.target_modules = place.targets(*split_targets(self._plain, targets))
        config.save_pretrained(str(folder))
        return files

    def _with_buffers(self, weights: Tensors) -> Tensors:
        """Add the buffers that files have: checkpoints have only parameters."""
        stored = self._plain.state_dict() if self._base is None else self._base
        buffers = {name: stored[name] for name, _ in self._plain.named_buffers() if name in stored}
        return ChainMap(cast("MutableMapping[str, torch.Tensor]", weights), buffers)

    def _trained_base(self) -> Tensors:
        """Return the base weights of training's forward pass: after QLoRA, the dequantized ones."""
        base, training = self._required_base(), self._parts.recipe.training
        if training.quantization != "nf4":
            return base
        return dequantized_base(base, build_empty(self._parts.config.text, "eager"), DTYPES[training.compute_precision])

    def _required_base(self) -> Tensors:
        if self._base is None:
            raise TrainingError(
                "these adapters were trained on random weights, which were not saved",
                meaning="the recipe has no pretrained model (model.weights=random)",
                fix="train adapters on a pretrained model, or all weights: training.method=full",
            )
        own = {name for name in self._trained if not is_adapter(name)}
        base, trained = self._base, self._trained
        return LazyTensors([*base, *own], lambda name: trained[name] if name in own else base[name]) if own else base


def _all_rounded(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return LazyTensors(tensors, lambda name: _rounded(tensors[name], dtype))


# --- Weight files --------------------------------------------------------------------------------
#
# Tensors are computed while they are written, so that no whole file is in memory. The format is a length, a JSON header
# of that length, and the tensors at the header's offsets, without gaps (https://huggingface.co/docs/safetensors). The
# header comes first, so all shapes must be known before the first tensor.


_MAX_THREADS = 4  # threads that compute tensors: more would outpace the disk, and hold more tensors
_SHARD_BYTES = 2 * 2**30
_PIECE_BYTES = 2**23
"""Bytes that are hashed and written at a time: they are read from memory once, then from the CPU's cache."""
_ALIGNMENT = 8  # of headers, which are padded with spaces
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The format's names of dtypes."""


def write_weights(
    declared: Tensors,
    tensors: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    name: str = WEIGHTS_FILE,
    shard_bytes: int = _SHARD_BYTES,
) -> dict[str, SavedFile]:
    """Write tensors to one file, or to several with an index; return the files' sizes and digests.

    `declared` has their shapes and dtypes, on the meta device, by their names in the files; `tensors` their values in
    host memory, in the same order. Larger dtypes come first: readers need tensors aligned to their dtype, and the
    format allows no gaps. A file is larger than `shard_bytes` only if it has a single tensor.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for tensor_name, tensor in declared.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][tensor_name] = tensor
        size += tensor.nbytes
    files = [name]
    if len(shards) > 1:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    values, saved = iter(tensors), {}
    with ThreadPoolExecutor(1) as hashing, ThreadPoolExecutor(1) as syncing:
        synced = []
        for file, shard in zip(files, shards, strict=True):
            saved[file] = _write_file(folder / file, shard, values, hashing)
            synced.append(syncing.submit(sync, folder / file))
        for each in synced:
            each.result()
    if len(shards) > 1:
        places = {tensor: file for file, shard in zip(files, shards, strict=True) for tensor in shard}
        total = sum(each.nbytes for each in declared.values())
        write_json(folder / WEIGHTS_INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    return saved


def _write_file(
    path: Path, declared: Tensors, tensors: Iterator[tuple[str, torch.Tensor]], hashing: ThreadPoolExecutor
) -> SavedFile:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in declared.items():
        offsets = [offset, offset + tensor.nbytes]
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": offsets}
        offset = offsets[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    digest = hashlib.sha256(header)
    with path.open("wb") as file:
        file.write(header)
        for name, expected in declared.items():
            given, tensor = next(tensors)
            if (name, expected.dtype, expected.shape) != (given, tensor.dtype, tensor.shape):
                raise TrainingError(
                    f"'{given}' is {_describe(tensor)}, and '{name}' of the model is {_describe(expected)}",
                    meaning="the weights belong to another model, or their files were changed",
                    fix="check the base model's files against its config.json, or download them again",
                )
            # A tensor with one element counts as contiguous with any stride, but `view` as bytes requires stride 1.
            flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
            data = flat.view(torch.uint8).numpy().data
            for begin in range(0, len(data), _PIECE_BYTES):
                piece = data[begin : begin + _PIECE_BYTES]
                hashed = hashing.submit(digest.update, piece)
                file.write(piece)
                hashed.result()
            # POSIX_FADV_DONTNEED has Linux begin to write dirty pages to disk, which shortens the sync at the end.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return SavedFile(file.tell(), digest.hexdigest())


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"


def write_model(model: PreTrainedModel, weights: Tensors, dtype: torch.dtype, folder: Path) -> dict[str, SavedFile]:
    """Write a model's weights in the layout of files on the hub, rounded to `dtype`; return sizes and digests.

    `weights` are by the model's names, each computed on access. Each unit of tensors is computed in advance by one
    thread: operations are short, and on a loaded machine, the threads of one operation mostly wait for each other.
    """
    tensors = {name: each.to("meta") for name, each in (*model.named_buffers(), *model.named_parameters())}

    def stored(unit: Sequence[str], source: Tensors) -> Tensors:
        return split_as_stored(model, {name: _rounded(source[name], dtype) for name in unit})

    # Tensors that are converted together are one unit: a single tensor, or all tensors of a decoder layer.
    layers = find_decoder_layers(model) if converts_layout(model) else ()
    prefixes = [name for name, module in model.named_modules() if any(module is layer for layer in layers)]
    by_size_and_prefix = defaultdict(list)
    for name in weights:
        prefix = next((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), name)
        by_size_and_prefix[_rounded(tensors[name], dtype).element_size(), prefix].append(name)
    # Larger dtypes come first, as in the files.
    units = [by_size_and_prefix[key] for key in sorted(by_size_and_prefix, key=lambda key: -key[0])]
    declared = dict(item for unit in units for item in stored(unit, tensors).items())
    num_threads = min(_MAX_THREADS, num_usable_cpus())
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads) as threads:
            computed = computed_ahead(threads, lambda unit: stored(unit, weights), units, num_threads)
            return write_weights(declared, (item for unit in computed for item in unit.items()), folder)
    finally:
        torch.set_num_threads(before)


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
