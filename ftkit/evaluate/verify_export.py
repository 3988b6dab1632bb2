"""Verify an export: load it with transformers and peft, and compare its logits with its record."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ftkit.errors import FtkitError, NotFoundError, PrerequisiteError, TrainingError, one_line, plural
from ftkit.evaluate.source import fetch_model
from ftkit.files import DamagedFileError, read_json, read_json_if_valid
from ftkit.models.folder import ADAPTER_CONFIG, EXPORT_RECORD
from ftkit.models.weight_files import readable_tensors, tensors_of_model
from ftkit.runs.certificate import Check
from ftkit.train.components.export_record import (
    ExportRecord,
    Logits,
    picture_inputs,
    render,
    sample_logits,
    tokenizer_digests,
)
from ftkit.train.memory.usage import available_bytes
from ftkit.train.model.hf_model import load_pretrained
from ftkit.train.private_apis.libraries import free_offloaded, import_peft, load_offloaded

TOLERANCE = 1e-4
"""Largest error of logits: the root-mean-square difference from the record's, relative to their standard deviation.
Both are computed in fp32 from the same numbers."""
CLOSER_THAN_BASE = 0.5
"""Largest error, and largest change by rounding, relative to the distance between the trained model and its base."""
_MAX_ERROR_OF_PROBABILITY = 0.01  # largest difference of the end token's probability after a reply
_NUM_TOKENS_BEFORE_END = 3
_DTYPES = {"bf16": "BF16", "fp32": "F32"}  # names of dtypes in safetensors
_MEMORY_BESIDES_WEIGHTS = 2**30  # bytes of activations, logits, and temporary allocations of loading


def verify_export(folder: Path, report: Callable[[str], None]) -> list[Check]:
    """Compare an export with its record; return every check, passed or not. `report` gets a line for each stage."""
    record = read_record(folder)
    report("reading the weight files")
    checks = [_check_files(folder, record)]
    if changed := [name for name, file in (record.settings or {}).items() if not file.is_content_of(folder / name)]:
        checks.append(Check("settings", f"differ from what was written: {', '.join(changed)}", passed=False))
    report("loading the tokenizer")
    checks += _check_tokenizer(folder, record)
    picture = None
    if record.picture is not None:
        check, picture = _check_processor(folder, record.picture)
        checks.append(check)
    try:
        with loaded(folder, record, report) as (model, is_streamed):
            checks += _check_logits(model, record, picture)
            checks.append(_check_end(folder, model, record, is_streamed=is_streamed))
    except FtkitError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged files make transformers, peft and safetensors raise anything
        checks.append(Check("loads in transformers", f"{type(error).__name__}: {one_line(error)}", passed=False))
    return checks


def require_passed(folder: Path, checks: list[Check]) -> None:
    if failed := [check for check in checks if not check.passed]:
        raise TrainingError(
            f"{folder} does not match the trained model: "
            + "; ".join(f"{check.name}: {check.found}" for check in failed),
            meaning="files were changed, renamed or truncated after the export, or a library loads them differently",
            fix="export again with 'ftkit export', and don't serve this folder",
        )


def read_record(folder: Path) -> ExportRecord:
    missing = NotFoundError(
        f"{folder} has no {EXPORT_RECORD} with the trained model's logits",
        meaning="ftkit did not export it, another version did, or the logits could not be computed",
        fix="export the run again: ftkit export RUN",
    )
    try:
        record = read_json(folder / EXPORT_RECORD, ExportRecord)
    except DamagedFileError as error:
        raise missing from error
    if record is None or record.trained is None:
        raise missing
    return record


def _check_files(folder: Path, record: ExportRecord) -> Check:
    files = record.files | {name: file for each in record.quantized for name, file in each.files.items()}
    wrong = [name for name, file in files.items() if not file.is_content_of(folder / name)]
    wrong += sorted({path.name for path in folder.glob("*.safetensors")} - record.files.keys())
    if wrong:
        return Check("weight files", f"differ from what was written: {', '.join(wrong)}", passed=False)
    tensors = [tensor for name in record.files for tensor in readable_tensors(folder / name).values()]
    floats = {"F16", "BF16", "F32", "F64"} & {tensor.kind[0] for tensor in tensors}
    if floats - {_DTYPES[record.precision]}:
        text = f"in {', '.join(sorted(floats))}, and it was exported in {_DTYPES[record.precision]}"
        return Check("weight files", text, passed=False)
    return Check("weight files", f"{len(files)}, sizes and digests as written", passed=True)


def _check_tokenizer(folder: Path, record: ExportRecord) -> list[Check]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        differing = []
        for prompt in record.prompts:
            text = render(tokenizer, prompt) if prompt.turns else prompt.text
            tokens = tokenizer(text, add_special_tokens=not prompt.turns)["input_ids"]
            if text != prompt.text or tuple(tokens) != prompt.tokens:
                differing.append(text)
    except Exception as error:  # noqa: BLE001 - templates and damaged files raise anything
        return [Check("chat template", f"{type(error).__name__}: {one_line(error)}", passed=False)]
    if differing:
        text = f"{len(differing)} of {len(record.prompts)} prompts rendered differently than in training"
        return [Check("chat template", f"{text}: {one_line(differing[0])!r}", passed=False)]
    found = tokenizer_digests(tokenizer)
    if changed := [name for name, digest in record.tokenizer.items() if found[name] != digest]:
        return [Check(name, "differs from that of training", passed=False) for name in changed]
    return [Check("chat template", f"renders {plural(len(record.prompts), 'prompt')} as in training", passed=True)]


@contextmanager
def loaded(
    folder: Path,
    record: ExportRecord,
    report: Callable[[str], None],
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> Iterator[tuple[PreTrainedModel, bool]]:
    """Load an export with options of `from_pretrained`; tell whether its weights stay in files for lack of memory."""
    base, adapters = (base_of(record), folder) if record.kind == "adapters" else (folder, None)
    counts = [math.prod(tensor.kind[1]) for tensor in tensors_of_model(base).values()]
    free = available_bytes()
    num_bytes = 4 * sum(counts)
    is_streamed = 0 < free < num_bytes + _MEMORY_BESIDES_WEIGHTS
    stage = "loading the model"
    if is_streamed:
        config = read_json_if_valid(adapters / ADAPTER_CONFIG, dict[str, object]) if adapters else None
        # peft replaces the experts' parameters before their weights are read.
        has_experts = bool(config and config.get("target_parameters"))
        check_memory(num_bytes + _MEMORY_BESIDES_WEIGHTS if has_experts else peak_bytes(max(counts)), free)
        gib = f"in fp32 it takes {num_bytes / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"
        stage += f", one module at a time: {gib}"
    report(stage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reasons for warnings, such as missing adapters, are checked later
        loading: AbstractContextManager[PreTrainedModel]
        if is_streamed:
            loading = _streamed_model(base, adapters, dtype=dtype, **options)
        else:
            loading = nullcontext(_with_adapters(load_pretrained(base, dtype, **options), adapters))
        with loading as hf_model:
            yield hf_model.eval(), is_streamed


def base_of(record: ExportRecord) -> Path:
    """Return the folder of the base model of an export's adapters."""
    try:
        return fetch_model(str(record.base), record.revision).folder
    except NotFoundError as error:
        raise NotFoundError(
            f"the base model {record.base} can't be loaded: {error.what}",
            meaning="adapters need it, and it is not on this machine",
            fix="copy it to this machine, or set HF_HOME to the cache that has it",
        ) from error


def _check_processor(folder: Path, expected: tuple[int, ...]) -> tuple[Check, dict[str, torch.Tensor] | None]:
    """Process a picture with the exported processor, and compare the tokens; the logits compare the pixels."""
    name = "processor of pictures"
    try:
        inputs = picture_inputs(folder)
    except Exception as error:  # noqa: BLE001 - damaged files raise anything
        return Check(name, f"{type(error).__name__}: {one_line(error)}", passed=False), None
    found = tuple(inputs["input_ids"][0].tolist())
    text = f"{plural(len(found), 'token')} for a picture and a question, in training {len(expected):,}"
    return Check(name, text, passed=found == expected), inputs


def _check_logits(model: PreTrainedModel, record: ExportRecord, picture: dict[str, torch.Tensor] | None) -> list[Check]:
    logits, trained = sample_logits(model, record, picture), record.trained or []
    error = distance(logits, expected := record.exported or trained)
    if picture is not None:  # its error would vanish among the errors of all texts
        error = max(error, distance(logits[-1:], expected[-1:]))
    tolerance = TOLERANCE
    checks, effect = [], None
    if record.untrained is not None:
        effect = distance(record.untrained, trained)
        tolerance = min(tolerance, CLOSER_THAN_BASE * effect)
        from_base = distance(logits, record.untrained, trained)
        text = f"differ by {from_base:.2g}, as trained: {effect:.2g}"
        checks.append(Check("logits and the base model's", text, passed=effect > 0 and from_base > error))
        if record.kind == "adapters":
            with model.disable_adapter():
                base_error = distance(sample_logits(model, record, picture), record.untrained)
            text = f"logits differ by {base_error:.2g} from those of the base of training"
            checks.append(Check("base model", text, passed=base_error <= TOLERANCE))
    if record.exported is not None:
        rounding = distance(record.exported, trained)
        text = f"to {record.precision} moves logits by {rounding:.2g}"
        is_small = effect is None or rounding <= CLOSER_THAN_BASE * effect
        checks.append(Check("rounding", text if is_small else f"{text}, training by {effect:.2g}", passed=is_small))
    text = f"differ by {error:.2g}, tolerance {tolerance:.2g}"
    checks.append(Check("logits and the trained model's", text, passed=error <= tolerance))
    return [*checks, *_check_reply_end(logits, record)]


def distance(one: Logits, other: Logits, scale: Logits | None = None) -> float:
    """Return the root-mean-square difference relative to the standard deviation of the last argument."""
    if [len(row) for row in one] != [len(row) for row in other]:
        return float("inf")
    first, second, third = (
        torch.tensor([token for row in rows for token in row]) for rows in (one, other, scale or other)
    )
    if first.shape != second.shape:
        return float("inf")
    found = float((first - second).square().mean().sqrt() / third.std())
    return float("inf") if math.isnan(found) else found


def _check_reply_end(logits: Logits, record: ExportRecord) -> list[Check]:
    """Compare the probability of the end token where a reply of the prompts ends, if one ends."""
    end = next(iter(record.end_tokens), None)
    trained = record.exported or record.trained or []
    for prompt, rows, expected_rows in reversed(list(zip(record.prompts, logits, trained, strict=False))):
        places = [number for number, token in enumerate(prompt.tokens) if token == end]
        if end not in record.columns or not prompt.turns or prompt.asks or not places or not places[-1]:
            continue
        column, row = record.columns.index(end), places[-1] - 1
        found, expected = (math.exp(each[row][column] - each[row][-1]) for each in (rows, expected_rows))
        text = f"token {end} has probability {found:.2g} there, as trained: {expected:.2g}"
        return [Check("end of a reply", text, passed=abs(found - expected) <= _MAX_ERROR_OF_PROBABILITY)]
    return []


def _check_end(folder: Path, model: PreTrainedModel, record: ExportRecord, *, is_streamed: bool) -> Check:
    """Generate with the exported settings; a completion must end at each end token.

    All tokens are forced, so logits don't matter. A streamed model would read its weights for each token, so a small
    model generates instead.
    """
    if not record.end_tokens:
        return Check("end of turn", "no token ends a completion, as in training", passed=True)
    settings = GenerationConfig.from_pretrained(folder)
    settings.update(max_new_tokens=2 * _NUM_TOKENS_BEFORE_END + 2, do_sample=False, num_beams=1)
    if settings.pad_token_id is None:
        settings.pad_token_id = record.end_tokens[0]
    prompt = torch.tensor([record.prompts[0].tokens])
    length = prompt.shape[1] + _NUM_TOKENS_BEFORE_END
    other = next(token for token in range(len(record.end_tokens) + 1) if token not in record.end_tokens)
    written = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    missed = [str(end) for end in record.end_tokens if end not in written]
    if is_streamed:
        size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        small = LlamaConfig(vocab_size=model.config.get_text_config().vocab_size, **size)
        model = LlamaForCausalLM(small).eval()
    for end in () if missed else record.end_tokens:
        done = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=settings,
            # All tokens are forced: the end token at this length, and before it a token that ends nothing.
            prefix_allowed_tokens_fn=lambda _, row, end=end: [end] if len(row) == length else [other],
        )
        missed += [] if done.shape[1] == length + 1 else [str(end)]
    if missed:
        return Check("end of turn", f"generation does not stop at token {', '.join(missed)}", passed=False)
    text = f"generation stops at {', '.join(map(str, record.end_tokens))}"
    if is_streamed:
        text += ", by the exported settings; the model itself generated nothing, for want of memory"
    return Check("end of turn", text, passed=True)


# --- Models larger than memory -------------------------------------------------------------------


_BYTES_PER_VALUE = 6  # of a tensor while loading: in bf16, as in the file, and in fp32
_PROCESS_BYTES = 2**29  # memory of a process that has imported torch and transformers, and of activations


def peak_bytes(largest: int) -> int:
    """Return the memory to verify a model module by module whose largest tensor has `largest` values."""
    return _BYTES_PER_VALUE * largest + _PROCESS_BYTES


def check_memory(needed: int, free: int) -> None:
    """Check the memory to verify an export with a part of its weights at a time, in bytes; 0 if `free` is unknown."""
    if 0 < free < needed:
        raise PrerequisiteError(
            f"verifying this export takes {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free",
            meaning="logits are computed in fp32, with one decoder layer or module at a time in memory; a model with "
            "adapters of experts is in memory as a whole",
            fix="use a machine with more memory, or export the merged model: --merge; ftkit export can leave the check "
            "out: --no-verify",
        )


@contextmanager
def _streamed_model(folder: Path, adapters: Path | None, **options: Any) -> Iterator[PreTrainedModel]:
    """Load a model with transformers, and adapters with peft; the model's weights stay in the files.

    accelerate loads the weights of one module at a time. Tensors that transformers converts, such as stacked experts,
    are first written to the disk. The adapters, a folder in peft's layout, stay in memory.
    """
    place = (adapters or folder).parent
    with tempfile.TemporaryDirectory(prefix=".ftkit-", dir=place if os.access(place, os.W_OK) else None) as scratch:
        logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # it warns that weights are on the disk
        model = load_pretrained(folder, device_map={"": "disk"}, offload_folder=scratch, **options)
        if adapters is not None:
            # Expanded zeros, which take the memory of one value, until accelerate loads the weights: peft moves
            # adapters of a layer on the meta device there, and then computes nonsense.
            for module in model.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                    setattr(module, name, nn.Parameter(zeros, requires_grad=False))
            del model.hf_device_map  # with it, peft would dispatch the model again, and fail
        adapted = _with_adapters(model, adapters)
        for module in adapted.modules():
            for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
                # DoRA computes with the base layer's weight after that layer has run.
                magnitude.register_forward_pre_hook(
                    lambda _module, _args, kwargs: load_offloaded(kwargs["base_layer"]), with_kwargs=True
                )
                magnitude.register_forward_hook(
                    lambda _module, _args, kwargs, _output: free_offloaded(kwargs["base_layer"]), with_kwargs=True
                )
        yield adapted


def _with_adapters(model: PreTrainedModel, folder: Path | None) -> PreTrainedModel:
    # peft's models have the attributes and methods of the model.
    return model if folder is None else cast("PreTrainedModel", import_peft().PeftModel.from_pretrained(model, folder))
