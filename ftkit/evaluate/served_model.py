"""Generate with vLLM's server if vLLM is installed: the same prompts, end tokens and settings as with transformers.

vLLM is not an extra of ftkit, because it pins its own torch. It is in the serving image, or in a separate environment.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig, TextStreamer

from ftkit.data.cases import ModelInput, Prompt
from ftkit.data.packing import IGNORED, Document
from ftkit.errors import PrerequisiteError
from ftkit.evaluate.engines import EngineError, LlamaCpp, Setup, Vllm, serve
from ftkit.evaluate.loaded_model import GeneratingModel, find_generation, tokenizer_of
from ftkit.evaluate.source import ModelFolder, ModelSource, find_base
from ftkit.models.architecture import ModelSpec
from ftkit.train.components.generation import Generation

_MAX_REQUESTS = 64  # at a time
EngineName = Literal["auto", "transformers", "vllm"]
Distributions = list[Mapping[int, float]]
"""Log-probabilities of tokens by their ids: of the next token of the text, and of the most probable ones."""


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
class ServedModel(GeneratingModel):
    """A model that an engine's server serves.

    Losses append to `targets` the distribution at each label, with at least `num_compared` tokens.
    """

    schedules: ClassVar[bool] = True
    engine: Vllm | LlamaCpp
    num_compared: int = 1
    targets: Distributions = field(default_factory=list)

    @property
    def input(self) -> ModelInput:
        base = self.engine.setup.base
        config = AutoConfig.from_pretrained(base)
        is_text = config.get_text_config() is config
        return _Input.of(self.tokenizer, self.label, config, None if is_text else ModelSpec(weights=str(base)))

    def complete(
        self, prompts: Sequence[Prompt], config: GenerationConfig, streamer: TextStreamer | None = None
    ) -> list[list[int]]:
        """Return the completion of each prompt; a streamer gets it once it is complete."""
        settings: dict[str, object] = {"stop_token_ids": list(self.generation.end_tokens)}
        if config.min_new_tokens:
            settings = {"ignore_eos": True}
        most = int(config.max_new_tokens or 1)
        if config.do_sample:  # a seed is of a request: equal prompts in one would get equal completions

            def draw(prompt: Prompt, seed: int) -> list[int]:
                return self.engine.complete([prompt], most, temperature=config.temperature, seed=seed, **settings)[0]

            with ThreadPoolExecutor(_MAX_REQUESTS) as pool:
                completions = list(pool.map(draw, prompts, torch.randint(2**31, (len(prompts),)).tolist()))
        else:
            completions = self.engine.complete(prompts, most, **settings)
        if streamer is not None:
            streamer.put(torch.tensor(prompts[0]))
            for token in completions[0]:
                streamer.put(torch.tensor([token]))
            streamer.end()
        return completions

    def losses(self, documents: Sequence[Document]) -> list[list[float]]:
        sums = []
        for document in documents:
            places = np.flatnonzero(document.labels != IGNORED)
            found = self.engine.distributions(document.tokens.tolist(), places.tolist(), self.num_compared)
            self.targets.extend(found)
            pairs = [(each[label], each) for label, each in zip(document.labels[places].tolist(), found, strict=True)]
            num_best = sum(logprob == max(each.values()) for logprob, each in pairs)
            sums.append([-math.fsum(logprob for logprob, _ in pairs), float(len(pairs)), float(num_best)])
        return sums


@contextmanager
def served_by_vllm(source: ModelSource, report: Callable[[str], None], num_models: int = 1) -> Iterator[ServedModel]:
    """Serve a model that `takes_vllm` accepts in the block, sharded over the GPUs, which `num_models` models share.

    Raises as `serve` does.
    """
    if isinstance(source, ModelFolder):
        base, tokenizer, generation = find_generation(source)
        folder, weights = source.folder, base.folder
    else:  # the pretrained model, with the tokenizer of training
        weights = cast("Path", find_base(source.plan))
        folder, tokenizer = weights, tokenizer_of(source)
        generation = Generation.of(tokenizer, weights)
    with_tokenizer = folder if (folder / "tokenizer_config.json").is_file() else weights
    # "vllm": only the settings of each request apply, not those of the folder.
    options = ["--generation-config", "vllm", "--tokenizer", str(with_tokenizer)]
    if num_models > 1:  # by default, a server takes about all of their memory
        options += ["--gpu-memory-utilization", f"{0.9 / num_models:.2f}"]
    engine = Vllm(Setup(folder, weights, "", (*options,), sys.executable, None, scratch=weights))
    try:
        with serve(engine, 0, report):
            yield ServedModel(source.label, tokenizer, generation, engine)
    except EngineError as error:
        error.fix = f"try --engine transformers; {error.fix}"
        raise
