"""Generate with vLLM's engine if it is installed: the same prompts, end tokens and settings as with transformers.

vLLM is not an extra of ftkit, because it pins its own torch. It is in the serving image, or in a separate environment.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar, Literal, cast

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig, TextStreamer

from ftkit.data.cases import ModelInput, Prompt
from ftkit.data.packing import IGNORED, Document
from ftkit.errors import PrerequisiteError, TrainingError, one_line
from ftkit.evaluate.engines import num_gpus_for_vllm
from ftkit.evaluate.loaded_model import GeneratingModel, find_generation, tokenizer_of
from ftkit.evaluate.source import ModelFolder, ModelSource, find_base
from ftkit.models.architecture import ModelSpec
from ftkit.models.folder import max_lora_rank
from ftkit.train.components.generation import Generation

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest

EngineName = Literal["auto", "transformers", "vllm"]


def takes_vllm(source: ModelSource, engine: EngineName, *, has_pictures: bool = False) -> bool:
    """Return whether vLLM runs a model without pictures: on request, or with `auto` on GPUs if it is installed."""
    if has_pictures and engine == "vllm":
        raise _no_pictures()
    is_installed, has_files = find_spec("vllm") is not None, isinstance(source, ModelFolder)
    if not isinstance(source, ModelFolder) and source.step == 0:
        model = source.plan.recipe.model
        has_files = model.weights != "random" and model.adapter is None and model.vocab_size_of_weights is None
    if engine == "vllm" and not is_installed:
        raise PrerequisiteError(
            "--engine vllm: vLLM is not installed here",
            meaning="it pins its own torch, and so is in no training image",
            fix="run the same command in the serving image (vllm:0.33), or omit --engine",
        )
    if engine == "vllm" and not has_files:
        raise PrerequisiteError(
            f"--engine vllm: {source.label} is not in Hugging Face's layout, which vLLM loads",
            meaning="it is a checkpoint, or a model before training that differs from the pretrained files",
            fix="export it first (ftkit export), or omit --engine; with ftkit eval, --no-before leaves out RUN@0",
        )
    is_chosen = is_installed and has_files and not has_pictures and torch.cuda.is_available()
    return engine == "vllm" or (engine == "auto" and is_chosen)


def _no_pictures() -> PrerequisiteError:
    fix = "--engine transformers; 'ftkit serve' starts vLLM's server, which takes pictures"
    return PrerequisiteError("ftkit gives vLLM's engine no pictures", fix=fix)


class _Input(ModelInput):
    def processor(self, *, is_needed: bool) -> None:
        if is_needed and self.model:
            raise _no_pictures()


@dataclass(frozen=True)
class VllmModel(GeneratingModel):
    """A model in vLLM's engine; `base` is the folder of the full weights."""

    schedules: ClassVar[bool] = True
    engine: VllmEngine
    base: Path

    @property
    def input(self) -> ModelInput:
        config = AutoConfig.from_pretrained(self.base)
        is_text = config.get_text_config() is config
        return _Input.of(self.tokenizer, self.label, config, None if is_text else ModelSpec(weights=str(self.base)))

    def complete(
        self, prompts: Sequence[Prompt], config: GenerationConfig, streamer: TextStreamer | None = None
    ) -> list[list[int]]:
        """Return the completion of each prompt; a streamer gets it once it is complete, as the engine does."""
        params = _sampling(
            max_tokens=config.max_new_tokens,
            temperature=config.temperature if config.do_sample else 0.0,
            seed=torch.initial_seed() % 2**31 if config.do_sample else None,
            stop_token_ids=list(self.generation.end_tokens),
        )
        outputs = self.engine.generate(prompts, params)
        completions = [list(output.outputs[0].token_ids) for output in outputs]
        if streamer is not None:
            streamer.put(torch.tensor(prompts[0]))
            for token in completions[0]:
                streamer.put(torch.tensor([token]))
            streamer.end()
        return completions

    def losses(self, documents: Sequence[Document]) -> list[list[float]]:
        """Compute them from the log-probability and the rank that the engine returns for each token of a prompt."""
        params = _sampling(max_tokens=1, prompt_logprobs=0, flat_logprobs=True)
        given = [document.tokens.tolist() for document in documents]
        # With adapters, vLLM 0.32 mistakes the tokens of several prompts for those of one, and fails.
        batches = [[each] for each in given] if self.engine.adapter else [given]
        outputs = [output for batch in batches for output in self.engine.generate(batch, params)]
        sums = []
        for document, output in zip(documents, outputs, strict=True):
            flat = output.prompt_logprobs
            # The target of a token is the next one; the first one of the prompt has no log-probability.
            places = [flat.start_indices[number + 1] for number in np.flatnonzero(document.labels != IGNORED).tolist()]
            loss = -math.fsum(flat.logprobs[place] for place in places)
            sums.append([loss, float(len(places)), float(sum(flat.ranks[place] == 1 for place in places))])
        return sums

    def close(self) -> None:
        self.engine.close()


def load_with_vllm(source: ModelSource) -> VllmModel:
    """Load what `takes_vllm` accepts into vLLM's engine, sharded over the GPUs of this machine."""
    if isinstance(source, ModelFolder):
        base, tokenizer, generation = find_generation(source)
        folder, weights = source.folder, base.folder
    else:  # the pretrained model, with the tokenizer of training
        weights = cast("Path", find_base(source.plan))
        folder, tokenizer = weights, tokenizer_of(source)
        generation = Generation.of(tokenizer, weights)
    # "vllm": only the settings of each request apply, not those of the folder.
    engine = start_engine(folder, weights, generation_config="vllm")
    return VllmModel(source.label, tokenizer, generation, engine, weights)


# --- The engine ----------------------------------------------------------------------------------


_LOGGING_LEVEL = "VLLM_LOGGING_LEVEL"
_PREFIX = re.compile(r"^(?:\([^()]* pid=\d+\) ?)*(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
"""Process, level, time, and place in vLLM's code at the start of a line of its logs."""


class VllmError(TrainingError):
    """vLLM or a process of its engine failed; `last_lines` are what the engine wrote before.

    Closes `stderr`: the engine is not used any more.
    """

    def __init__(self, what: str, *, meaning: str, fix: str, stderr: IO[bytes]) -> None:
        with stderr:
            stderr.seek(0)
            text = stderr.read().decode(errors="replace")
        lines = [line for each in text.splitlines() if (line := _PREFIX.sub("", each).rstrip())]
        self.last_lines = lines[-8:]
        below = ["the engine's last lines:", *self.last_lines] if lines else []
        super().__init__(what, meaning=meaning, fix="\n".join([fix, *below]))


class VllmEngine:
    """vLLM's engine, with the adapters that it applies, and what its processes write to stderr."""

    def __init__(self, llm: LLM, adapter: LoRARequest | None, stderr: IO[bytes]) -> None:
        self.llm = llm
        self.adapter = adapter
        self.stderr = stderr
        weakref.finalize(self, stderr.close)  # commands that use it to their end don't close it

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        try:
            outputs: list[RequestOutput] = self.llm.generate(given, params, use_tqdm=False, lora_request=self.adapter)
        except Exception as error:
            is_dead = type(error).__name__ == "EngineDeadError"  # of vllm.v1.engine.exceptions: a process ended
            raise VllmError(
                f"vLLM's engine {'ended' if is_dead else 'failed'} while generating: {one_line(error)}",
                meaning="usually a GPU or this machine is out of memory, or a kernel fails on this GPU"
                if is_dead
                else "it does not take these prompts or settings, for example for want of memory for so long a prompt",
                fix="repeat the command with --engine transformers, or with a smaller --batch-size; completions in an "
                "--output file are kept",
                stderr=self.stderr,
            ) from error
        return outputs

    def close(self) -> None:
        """End the engine's processes, which hold the memory of the GPUs."""
        self.llm.llm_engine.engine_core.shutdown()
        self.stderr.close()


def start_engine(folder: Path, base: Path, **options: object) -> VllmEngine:
    """Start vLLM's engine, sharded over the GPUs of this machine, with further `options` of `LLM`.

    `folder` is a full model, or adapters in peft's layout; `base` is the folder of the full weights.

    Raises:
        VllmError: vLLM can't load the model.
    """
    is_quiet = _LOGGING_LEVEL not in os.environ  # else the user reads along
    os.environ.setdefault(_LOGGING_LEVEL, "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # by default it logs to stdout
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - the engine's processes write to it as long as they live
    adapter = None
    try:
        with _stderr_to(stderr) if is_quiet else nullcontext():
            if folder != base:
                options |= {"enable_lora": True, "max_lora_rank": max_lora_rank(folder)}
                adapter = import_module("vllm.lora.request").LoRARequest("trained", 1, str(folder))
            has_tokenizer = (folder / "tokenizer_config.json").is_file()
            llm = import_module("vllm").LLM(
                model=str(base),
                tokenizer=str(folder if has_tokenizer else base),
                tensor_parallel_size=num_gpus_for_vllm(base),
                enforce_eager=not torch.cuda.is_available(),  # compiling takes a CPU minutes
                **options,
            )
    except Exception as error:  # vLLM and its workers may raise any exception
        raise VllmError(
            f"vLLM can't load {folder}: {one_line(error)}",
            meaning="it does not know the model, or has too little memory for it",
            fix="leave --engine out, or try --engine transformers",
            stderr=stderr,
        ) from error
    return VllmEngine(llm, adapter, stderr)


def _sampling(**settings: object) -> SamplingParams:
    """Return vLLM's settings of a request, greedy by default, for completions as tokens."""
    return import_module("vllm").SamplingParams(**{"temperature": 0.0, "detokenize": False} | settings)


@contextmanager
def _stderr_to(file: IO[bytes]) -> Iterator[None]:
    """Send the stderr of this process to a file; processes that it starts meanwhile keep the file."""
    sys.stderr.flush()
    saved = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)
