"""Load a trained model for inference, on the CPU or on GPUs: an export, adapters, or a checkpoint of a run."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import accelerate
import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ftkit.data.cases import ModelInput, Prompt
from ftkit.data.packing import IGNORED, Document
from ftkit.data.prepared_data import PreparedData
from ftkit.data.tokenizers import load_saved_tokenizer
from ftkit.errors import DataError, NotFoundError, PrerequisiteError, TrainingError, one_line
from ftkit.evaluate.source import ModelFolder, ModelSource, TrainedStep, fetch_model, find_base
from ftkit.files import read_json
from ftkit.models.architecture import ModelSpec
from ftkit.models.folder import ADAPTER_CONFIG, check_folder, read_generation_config
from ftkit.train.causal_lm import PIXELS
from ftkit.train.checkpoint.loading import describe_damage, read_state, reason_of, saved_sizes
from ftkit.train.components.generation import Generation
from ftkit.train.components.pictures import PictureFeed
from ftkit.train.model.attention import generation_attention
from ftkit.train.model.hf_model import (
    TextConfig,
    build_empty,
    find_decoder_layers,
    load_pretrained,
    make_config,
    read_config,
    sees_pictures,
)
from ftkit.train.model.lora import prepare_method
from ftkit.train.model.pretrained import begin_weights, materialize
from ftkit.train.private_apis.libraries import import_peft
from ftkit.train.world import DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftkit.planning.plan import RunPlan


@dataclass(frozen=True)
class GeneratingModel(ABC):
    """A model ready for inference, in any engine."""

    schedules: ClassVar[bool] = False  # the engine forms its own batches, so it gets all requests at once
    label: str
    tokenizer: PreTrainedTokenizerBase
    generation: Generation

    @property
    @abstractmethod
    def input(self) -> ModelInput:
        """Limits of the model's inputs."""

    @abstractmethod
    def complete(
        self, prompts: Sequence[Prompt], config: GenerationConfig, streamer: TextStreamer | None = None
    ) -> list[list[int]]:
        """Return the completion of each prompt in tokens, with its end token if it has one.

        A streamer gets the prompt and the completion of a single prompt.
        """

    @abstractmethod
    def losses(self, documents: Sequence[Document]) -> list[list[float]]:
        """Return each document's summed loss, its number of labels, and how many labels are the most probable token."""


@dataclass(frozen=True)
class LoadedModel(GeneratingModel):
    """A model of transformers; `autocast` creates the context if adapters have another dtype than the weights."""

    hf_model: PreTrainedModel
    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    folder: Path | None = None  # of the model, with its processor

    @property
    def input(self) -> ModelInput:
        model = ModelSpec(weights=str(self.folder)) if self.folder and sees_pictures(self.hf_model) else None
        return ModelInput.of(self.tokenizer, self.label, self.hf_model.config, model)

    @cached_property
    def _feed(self) -> PictureFeed | None:
        processor = self.input.processor(is_needed=True)
        return None if processor is None else PictureFeed.of(self.hf_model, processor.inputs)

    def _picture_inputs(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        if not prompt.pictures or self._feed is None:
            return {}
        inputs = self._feed.prompt_inputs(self.hf_model, prompt, self.device)
        return inputs | {PIXELS: inputs[PIXELS].to(self.hf_model.get_input_embeddings().weight.dtype)}

    @contextmanager
    def inference(self) -> Iterator[PreTrainedModel]:
        """Yield the model for inference: without gradients, with an attention kernel that supports masks."""
        with torch.inference_mode(), self.autocast(), generation_attention(self.hf_model):
            yield self.hf_model

    def complete(
        self, prompts: Sequence[Prompt], config: GenerationConfig, streamer: TextStreamer | None = None
    ) -> list[list[int]]:
        options = {} if streamer is None else {"streamer": streamer}
        batches = [[each] for each in prompts] if any(each.pictures for each in prompts) else [prompts]
        completions: list[list[int]] = []
        with self.inference() as model:
            for batch in batches:
                inputs = options | self._picture_inputs(batch[0])
                completions += self.generation.complete(model.generate, batch, config, self.device, **inputs)
        return completions

    def losses(self, documents: Sequence[Document]) -> list[list[float]]:
        sums = []
        for logits, labels in self.label_logits(documents):
            total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            sums.append([float(total), float(len(labels)), float((logits.argmax(-1) == labels).sum())])
        return sums

    def label_logits(self, documents: Sequence[Document]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the logits at the labels, fp32 [N, vocabulary], and the labels, [N], of each document."""
        if len(documents) > 1 and any(document.pictures for document in documents):
            yield from chain.from_iterable(self.label_logits([document]) for document in documents)
            return

        def padded(rows: list[NDArray[np.int32]] | list[NDArray[np.int64]], value: int) -> torch.Tensor:
            tensors = [torch.from_numpy(row.astype(np.int64)) for row in rows]
            return pad_sequence(tensors, batch_first=True, padding_value=value).to(self.device)

        tokens = padded([document.tokens for document in documents], 0)
        labels = padded([document.labels for document in documents], IGNORED)
        mask = padded([np.ones_like(document.tokens) for document in documents], 0)
        with self.inference() as hf_model:
            inputs = self._picture_inputs(Prompt(tokens[0].tolist(), documents[0].pictures))
            logits = hf_model(input_ids=tokens, attention_mask=mask, use_cache=False, **inputs).logits
            for row_logits, row_labels in zip(logits, labels, strict=True):
                counts = row_labels != IGNORED
                yield row_logits[counts].float(), row_labels[counts]


def load_model(source: ModelSource, *devices: torch.device) -> LoadedModel:
    """Load a model onto the first device, or split it over all devices if it is larger.

    Raises:
        NotFoundError: files are missing.
        TrainingError: they can't be loaded.
        PrerequisiteError: the model is larger than the devices' memory.
    """
    if isinstance(source, TrainedStep):
        return _load_step(source, devices)
    base, tokenizer, generation = find_generation(source)
    try:
        model = load_pretrained(base.folder)
        if source.is_adapter and not source.is_base:
            with warnings.catch_warnings():
                # peft applies the ranks and scales of experts, but warns that it ignored them.
                warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
                model = import_peft().PeftModel.from_pretrained(model, source.folder).get_base_model()
    except Exception as error:  # transformers, peft and safetensors raise various errors on damaged files
        raise _unreadable(source, error) from error
    place(model, devices)
    return LoadedModel(source.label, tokenizer, generation, model.eval(), devices[0], folder=base.folder)


def find_generation(source: ModelFolder) -> tuple[ModelFolder, PreTrainedTokenizerBase, Generation]:
    """Return the folder of a model's weights, its tokenizer, and its end tokens."""
    base = source
    if source.is_adapter:
        stored = read_json(source.folder / ADAPTER_CONFIG, dict[str, object]) or {}
        name, revision = stored.get("base_model_name_or_path"), stored.get("revision")
        if not isinstance(name, str) or name in ("", "random"):
            raise NotFoundError(
                f"the adapters in {source.folder} do not say which model they are for",
                meaning="base_model_name_or_path of adapter_config.json is empty: the base model had random weights",
                fix="try a checkpoint of the run instead: RUN@STEP",
            )
        base = fetch_model(name, str(revision) if revision else None, source.hub_home)
    has_tokenizer = (source.folder / "tokenizer_config.json").is_file()
    try:
        tokenizer = load_saved_tokenizer(source.folder if has_tokenizer else base.folder)
    except Exception as error:  # transformers raises various errors on damaged files
        raise _unreadable(source, error) from error
    generation = Generation.of(tokenizer, base.folder)
    if source.is_adapter:
        own = read_generation_config(source.folder).get("eos_token_id")
        ends = [token for token in (own if isinstance(own, list) else [own]) if token is not None]
        generation = replace(generation, end_tokens=tuple(dict.fromkeys([*ends, *generation.end_tokens])))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return base, tokenizer, generation


def _unreadable(source: ModelFolder, error: Exception) -> TrainingError:
    return TrainingError(
        f"can't load the model {source.label}: {one_line(error)}",
        meaning="a file is missing or truncated, or it needs another version of transformers or peft",
        fix="copy or export it again; choose another model if this one has custom code, which ftkit never runs",
    )


# --- Checkpoints ---------------------------------------------------------------------------------


def _load_step(source: TrainedStep, devices: Sequence[torch.device]) -> LoadedModel:
    """Build the model like the trainer, and load the trained weights of a checkpoint."""
    recipe, training = source.plan.recipe, source.plan.recipe.training
    tokenizer = tokenizer_of(source)
    folder, config = config_of(source.plan, tokenizer)
    # Build a large model on the CPU, then split it over GPUs. Draw random weights on the same device as in training.
    device = devices[0] if len(devices) == 1 or folder is None else torch.device("cpu")
    model = build_empty(config.text, "eager")
    if training.adapters is not None:
        prepare_method(model, training, device)
    materialize(model, device, device)
    model.tie_weights()
    with torch.no_grad():
        begin_weights(model, recipe, folder, config.wrapper)
        if source.step:
            _load_trained(model, source)
    dtype = DTYPES[training.compute_precision]
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    if training.adapters is None:
        model.to(dtype)
    elif training.compute_precision == "bf16":
        autocast = partial(torch.autocast, devices[0].type, dtype)
    generation = Generation.of(tokenizer, folder)
    model.generation_config.eos_token_id = list(generation.end_tokens) or None
    place(model, devices)
    return LoadedModel(source.label, tokenizer, generation, model.eval(), devices[0], autocast, folder)


def config_of(plan: RunPlan, tokenizer: PreTrainedTokenizerBase) -> tuple[Path | None, TextConfig]:
    """Return the folder of a run's initial weights, None if they were random; and the model's configuration."""
    folder, model = find_base(plan), plan.recipe.model
    if folder is None:
        return None, TextConfig(make_config(model.architecture, tokenizer))
    check_folder(folder)
    sees = bool(plan.recipe.data.pictures)
    return folder, read_config(folder, model.architecture, model.vocab_size_of_weights, pictures=sees)


def tokenizer_of(source: TrainedStep) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the run's training, from the prepared data or the export."""
    for folder in (PreparedData(source.plan.data.root).tokenizer, source.layout.export):
        if (folder / "tokenizer_config.json").is_file():
            return load_saved_tokenizer(folder)
    raise DataError(
        f"the tokenizer of {source.plan.id} no longer exists",
        meaning=f"the prepared data in {source.plan.data.root} was deleted, and there is no export",
        fix=f"prepare the data again: ftkit resume {source.plan.id}",
    )


def _load_trained(model: torch.nn.Module, source: TrainedStep) -> None:
    """Load the trained parameters from a checkpoint of any engine and world size; ZeRO-3's are flat."""
    folder = source.layout.checkpoint(source.step)
    problem = describe_damage(folder, source.step)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if not problem:
        sizes = saved_sizes(folder, "model.")
        wrong = [name for name, each in trained.items() if name not in sizes or sizes[name].numel() != each.numel()]
        problem = f"it belongs to another model: {', '.join(wrong[:3])}" if wrong else ""
    saved = {}
    if not problem:
        saved = {name: torch.empty(sizes[name], dtype=each.dtype) for name, each in trained.items()}
        try:
            read_state({"model": saved}, folder)
        except CheckpointException as error:
            problem = reason_of(error)
    if problem:
        raise TrainingError(
            f"checkpoint {folder} can't be loaded: {problem}",
            meaning="the run still trains, and deleted it (training.keep_checkpoints); the file system lost data; or "
            "the checkpoint, the base model or the run's plan was changed",
            fix="try again; give another step of the run as RUN@STEP; or restore the files",
        )
    for name, parameter in trained.items():
        parameter.copy_(saved[name].view(parameter.shape))


# --- Devices -------------------------------------------------------------------------------------


_MAX_WEIGHTS_FRACTION = 0.8
"""Maximum fraction of a GPU's free memory for weights; the rest is for activations and the KV cache."""


def available_devices() -> tuple[torch.device, ...]:
    """Return all GPUs; with several processes, this rank's GPU; without GPUs, the CPU."""
    if not torch.cuda.is_available():
        return (torch.device("cpu"),)
    if local_rank := os.environ.get("LOCAL_RANK"):
        return (torch.device("cuda", int(local_rank)),)
    return tuple(torch.device("cuda", number) for number in range(torch.cuda.device_count()))


def place(model: PreTrainedModel, devices: Sequence[torch.device]) -> None:
    """Move a model to the first device; if it does not fit there, split its layers over all devices.

    The layers run sequentially, each on its device, so more GPUs add memory but no speed. Any model of transformers can
    be split this way, even with adapters or in 4 bits.
    """
    free = {} if devices[0].type == "cpu" else {each.index: torch.cuda.mem_get_info(each)[0] for each in devices}
    memory = {index: int(_MAX_WEIGHTS_FRACTION * num_bytes) for index, num_bytes in free.items()}
    num_bytes = weight_bytes(model)
    if not memory or num_bytes <= memory[devices[0].index]:
        model.to(devices[0])
        return
    split = split_layers(model, memory)
    if split is None:
        gib, room = num_bytes / 2**30, sum(memory.values()) / 2**30
        raise PrerequisiteError(
            f"the model's weights take {gib:.1f} GiB; {len(devices)} GPUs here have room for {room:.1f} GiB",
            meaning="the model is too large for them, other programs use them, or --gpus gives each process one GPU",
            fix="leave --gpus out, use a node with more GPUs, or serve the model: ftkit serve",
        )
    accelerate.dispatch_model(model, split)


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers()))


def split_layers(model: PreTrainedModel, memory: Mapping[int, int]) -> dict[str, int] | None:
    """Return a balanced assignment of modules to GPUs, with whole decoder layers; None if the model does not fit.

    `model` may be on any device, even the meta device; `memory` has the bytes for weights by GPU index.
    """
    layer_classes = sorted({type(layer).__name__ for layer in find_decoder_layers(model)})
    model.tie_weights()  # accelerate keeps tied parameters on one device, and warns if they are not tied
    balanced = accelerate.utils.get_balanced_memory(model, dict(memory), no_split_module_classes=layer_classes)
    for limits in (balanced, dict(memory)):
        split: dict[str, int] = accelerate.infer_auto_device_map(model, limits, no_split_module_classes=layer_classes)
        if set(split.values()) <= memory.keys():  # otherwise parts are assigned to the CPU or the disk
            return split
    return None
