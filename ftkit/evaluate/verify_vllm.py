"""Verify an export through vLLM's engine: check that it serves the trained model."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import torch

from ftkit.errors import NotFoundError, one_line, plural
from ftkit.evaluate.source import fetch_model
from ftkit.evaluate.verify_export import CLOSER_THAN_BASE, Check, distance
from ftkit.evaluate.vllm import VllmEngine, VllmError, start_engine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ftkit.train.components.export import ExportRecord

_TOLERANCE = 1e-3
"""Largest error of log-probabilities in fp32, as `verify_export.TOLERANCE` is that of logits; measured: see
docs/use-the-model.md."""
_ROUNDED_TOLERANCE = 5e-2
"""The same on GPUs, where vLLM computes in the dtype of the files: its attention kernels take no fp32."""
_NUM_TOKENS = 4

_Rows = list[list[list[float]]]


def verify_with_vllm(folder: Path, record: ExportRecord) -> list[Check]:
    """Load an export as `vllm serve` does, and compare what the engine computes with the record.

    vLLM silently drops tensors of an adapter that it does not know, and then serves the base model. So the
    log-probabilities must be the trained model's, and not the base's. The engine's end tokens and chat template are
    compared too.
    """
    try:
        base = folder if record.kind == "model" else fetch_model(str(record.base), record.revision).folder
        longest = max(len(prompt.tokens) for prompt in record.prompts)
        engine = start_engine(
            folder,
            base,
            generation_config=str(folder),
            dtype="auto" if torch.cuda.is_available() else "float32",
            max_model_len=2 * longest + _NUM_TOKENS,  # another template may render longer prompts
            max_logprobs=-1,
        )
        with closing(engine):
            return [*_check_logprobs(engine, record), _check_end(engine, record), _check_template(engine, record)]
    except NotFoundError:
        raise
    except VllmError as error:
        return [Check("vLLM: loads", ": ".join((error.what, *error.last_lines[-1:])), passed=False)]
    except Exception as error:  # noqa: BLE001 - vLLM and its workers raise anything
        return [Check("vLLM: loads", f"{type(error).__name__}: {one_line(error)}", passed=False)]


def _check_logprobs(engine: VllmEngine, record: ExportRecord) -> list[Check]:
    trained = _logprobs(record.exported or record.trained or [])
    found = _engine_logprobs(engine, record)
    error, tolerance = distance(found, trained), _ROUNDED_TOLERANCE if torch.cuda.is_available() else _TOLERANCE
    checks = []
    if record.untrained is not None:
        untrained = _logprobs(record.untrained)
        effect, from_base = distance(untrained, trained), distance(found, untrained, trained)
        tolerance = min(tolerance, CLOSER_THAN_BASE * effect)
        text = f"differ by {from_base:.2g}, as trained: {effect:.2g}"
        checks.append(Check("vLLM: and the base model's", text, passed=from_base > error))
    text = f"log-probabilities differ by {error:.2g}, tolerance {tolerance:.2g}"
    return [*checks, Check("vLLM: and the trained model's", text, passed=error <= tolerance)]


def _logprobs(logits: Sequence[Sequence[Sequence[float]]]) -> _Rows:
    """Return log-probabilities, from logits with their log-sum-exp last, of all tokens but each prompt's last."""
    return [[[value - row[-1] for value in row[:-1]] for row in rows[:-1]] for rows in logits]


def _engine_logprobs(engine: VllmEngine, record: ExportRecord) -> _Rows:
    """Return the engine's log-probabilities after each token of the prompts, in the columns of the record."""
    from vllm import SamplingParams  # noqa: PLC0415 - see ftkit.evaluate.vllm

    columns = record.columns
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1, flat_logprobs=True, detokenize=False)
    found = []
    for prompt in record.prompts:  # one by one: each has the whole vocabulary for each token
        given = {"prompt_token_ids": list(prompt.tokens)}
        (output,) = engine.generate([given], params)
        flat = output.prompt_logprobs
        rows = []
        for first, last in list(zip(flat.start_indices, flat.end_indices, strict=True))[1:]:  # none for the first token
            values = dict(zip(flat.token_ids[first:last], flat.logprobs[first:last], strict=True))
            rows.append([values[column] for column in columns])
        found.append(rows)
    return found


def _check_end(engine: VllmEngine, record: ExportRecord) -> Check:
    """Have the engine generate nothing but an end token: it must stop at the first one."""
    from vllm import SamplingParams  # noqa: PLC0415

    prompt, missed = {"prompt_token_ids": list(record.prompts[0].tokens)}, []
    for end in record.end_tokens:
        params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, allowed_token_ids=[end], detokenize=False)
        (output,) = engine.generate([prompt], params)
        if output.outputs[0].finish_reason != "stop" or len(output.outputs[0].token_ids) != 1:
            missed.append(str(end))
    if missed:
        return Check("vLLM: end of turn", f"does not stop at token {', '.join(missed)}", passed=False)
    return Check("vLLM: end of turn", f"stops at {', '.join(map(str, record.end_tokens))}", passed=True)


def _check_template(engine: VllmEngine, record: ExportRecord) -> Check:
    """Have the engine render the record's conversations as its server does."""
    from vllm import SamplingParams  # noqa: PLC0415

    open_prompts = [prompt for prompt in record.prompts if prompt.asks]
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    outputs = (
        engine.llm.chat(
            [prompt.messages for prompt in open_prompts], params, use_tqdm=False, lora_request=engine.adapter
        )
        if open_prompts
        else []
    )
    wrong = sum(
        tuple(output.prompt_token_ids) != prompt.tokens for output, prompt in zip(outputs, open_prompts, strict=True)
    )
    text = (
        f"{wrong} of {len(open_prompts)} prompts rendered differently than in training"
        if wrong
        else f"renders {plural(len(open_prompts), 'prompt')} as in training"
    )
    return Check("vLLM: chat template", text, passed=not wrong)
