"""Execute a plan on one rank: from joining the process group to the end of the run."""

from __future__ import annotations

import logging
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import accelerate
import torch
import transformers
from torch import nn
from transformers import PreTrainedTokenizerBase

from ftkit.config.execution import ParameterCounts, method_counts
from ftkit.data.store import PackStore, PreparedData
from ftkit.data.tokenizers import load_saved_tokenizer
from ftkit.errors import FtkitError, TrainingError, one_line
from ftkit.planning.plan import RunPlan
from ftkit.planning.planner import count_steps, plan_for_counts
from ftkit.runs.checkpoints import TrainState
from ftkit.runs.records import EndRecord, EvaluationRecord, StageRecord, StartRecord, VerificationRecord
from ftkit.train.checkpoint.loading import load_best, load_newest
from ftkit.train.checkpoint.saving import Checkpointer
from ftkit.train.components.batches import BatchSchedule
from ftkit.train.components.evaluate import Evaluator
from ftkit.train.components.export import ExportedParts, export
from ftkit.train.components.generation import Generation
from ftkit.train.components.recorder import Recorder, open_trackers
from ftkit.train.distributed.checks import (
    choose_packing,
    verify_causality,
    verify_isolation,
    verify_logits,
    verify_sharding,
    verify_targets,
)
from ftkit.train.distributed.engines import make_engine
from ftkit.train.distributed.pack_parallel import (
    check_context_parallel,
    check_tensor_parallel,
    whole_pack_attention,
)
from ftkit.train.engine import ShardingOptions
from ftkit.train.loop import TrainingLoop
from ftkit.train.memory.usage import MemoryTrace, check_free_host_memory, out_of_memory_explained
from ftkit.train.model.attention import choose_kernel, register_kernel
from ftkit.train.model.hf_model import (
    TextConfig,
    build_empty,
    check_positions,
    make_config,
    read_config,
)
from ftkit.train.model.lora import init_adapters, load_adapters, prepare_method
from ftkit.train.model.pretrained import fetch_weights, init_weights, load_weights
from ftkit.train.model.token_mixers import choose_token_mixers
from ftkit.train.observers import make_observers
from ftkit.train.observers.profiler import check_profile
from ftkit.train.observers.progress import Progress, by_criterion, check_is_measured, last_step
from ftkit.train.param_count import count_method, count_modules
from ftkit.train.world import World, with_tensor_parallel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PretrainedConfig

    from ftkit.train.engine import Engine
    from ftkit.train.model.attention import Kernel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltModel:
    """Facts about a built model, besides its weights."""

    config: TextConfig
    generation: Generation
    pretrained: Path | None  # the folder of the initial weights, unless they are random
    num_parameters: int  # without adapters
    expected: ParameterCounts  # that the checks must find once it is sharded


@dataclass(frozen=True)
class Trainer:
    """Executes a plan: build, verify, resume or start, train, evaluate, export."""

    plan: RunPlan
    world: World
    data: PreparedData
    tokenizer: PreTrainedTokenizerBase
    recorder: Recorder
    trace: MemoryTrace

    def run(self) -> None:
        """Build, verify, resume or start, train, evaluate, export.

        Raises:
            MemoryExhaustedError: with suggestions that would fit.
        """
        began = time.time()
        store = self.data.read_train()
        self._check_steps(len(store))
        check_free_host_memory(self.plan, self.world)
        with out_of_memory_explained(self.plan, self.world, self.trace):
            self._stage("building the model")
            engine, built = self._build_engine()
        with out_of_memory_explained(self.plan, self.world, self.trace, engine.tensors):
            progress = self._train(engine, built, store)
        log.info("%s after %d steps, %.0f s in total", progress.outcome, progress.step, time.time() - began)

    def _train(self, engine: Engine, built: BuiltModel, store: PackStore) -> Progress:
        """Verify, train, evaluate and export with an engine."""
        is_packed = self._verify(engine, built.expected, store)
        manifest = self.data.read_manifest()
        identity = manifest.identity
        self.trace.begin("loading the newest checkpoint")
        state = load_newest(engine, self.plan.layout, self.world, identity)
        state = by_criterion(state or TrainState(0, identity), self.plan.recipe.evaluation.selection)
        batches = self._batches(store, engine, state, is_packed=is_packed, is_mixed=bool(manifest.mixed_sources))
        progress = Progress(self.plan, batches, state, last_step(self.plan, batches, state))
        self._record_start(progress, built.num_parameters)
        evaluator = Evaluator(self.plan, self.data, self.tokenizer, built.generation, self.world, is_packed)
        if state.step == 0:
            before = self._evaluate(evaluator, engine, 0, "before")
            check_is_measured(before, self.plan.recipe.evaluation.selection)
        training_began = time.time()
        with Checkpointer(self.plan, self.world, self.recorder.write) as checkpointer:
            observers = make_observers(
                progress,
                engine,
                evaluator=evaluator,
                checkpointer=checkpointer,
                recorder=self.recorder,
                trace=self.trace,
                sources=manifest.mixed_sources,
            )
            TrainingLoop(self.world, engine, progress, observers, len(manifest.mixed_sources)).train()
        training_seconds = time.time() - training_began
        exported = None
        if progress.is_complete:
            step = self._load_best(engine, progress.state)
            self._evaluate(evaluator, engine, step, "after")
            parts = ExportedParts(self.plan.recipe, built.config, self.tokenizer, built.generation, built.pretrained)
            self._export(engine, parts, step)
            exported = str(self.plan.layout.export)
        self.trace.begin("")
        best = progress.state.best
        record = EndRecord(
            time.time(), progress.outcome, progress.step, training_seconds, exported, best.step if best else None,
            self.plan.recipe.evaluation.early_stopping_patience if progress.is_stopped_early else None,
        )  # fmt: skip
        self.recorder.write(record)
        return progress

    def _export(self, engine: Engine, parts: ExportedParts, step: int) -> None:
        """Export the model; an error says that the checkpoint has it."""
        self._stage("exporting the model")
        try:
            export(engine, parts, self.plan.layout, step, self.world)
        except (OSError, FtkitError) as error:  # any other is a bug, or follows another rank's failure
            where = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
            raise TrainingError(
                f"training is complete, but the export failed: {one_line(error)}{where}",
                meaning=f"nothing trained is lost: the checkpoint of step {step} is complete",
                fix=f"once the cause is gone: ftkit export {self.plan.id} --step {step}, or ftkit resume "
                f"{self.plan.id}, which exports it without training",
            ) from error

    def _load_best(self, engine: Engine, state: TrainState) -> int:
        """Load the checkpoint of the best evaluation if a later one is loaded; return the step of the loaded state."""
        best = state.best
        if best is None or best.step == state.step:
            return state.step
        self._stage(f"loading the best checkpoint, of step {best.step} ({best.metric} {best.value:.4g})")
        return best.step if load_best(engine, self.plan.layout, self.world, best.step) else state.step

    def _check_steps(self, num_packs: int) -> None:
        """Check, before the model is built, that there are steps, and enough of them for the profiler."""
        num_steps = count_steps(self.plan.recipe.training, num_packs)
        if not num_steps:
            raise TrainingError("there are no packs to train on", fix="check 'data' in the recipe")
        check_profile(self.plan.recipe.profile, num_steps)

    def _batches(
        self, store: PackStore, engine: Engine, state: TrainState, *, is_packed: bool, is_mixed: bool
    ) -> BatchSchedule:
        training = self.plan.recipe.training
        return BatchSchedule(
            store=store,
            plan=self.plan.batch,
            seed=training.order_seed,
            num_packs_in_run=None if training.num_epochs is None else training.num_epochs * len(store),
            rank=self.world.data_rank,
            size=self.world.data_size,
            is_packed=is_packed,
            is_mixed=is_mixed,
            marks_padding=engine.model.routers.exist,
            context=self.world.context,
            state=state,
        )

    def _build_engine(self) -> tuple[Engine, BuiltModel]:
        """Return the engine with its weights loaded, and the facts of its model."""
        recipe = self.plan.recipe
        folder = None
        if recipe.model.weights == "random":
            config = TextConfig(make_config(recipe.model.architecture, self.tokenizer))
        else:
            folder = fetch_weights(recipe.model, self.world)
            config = read_config(folder, recipe.model.architecture, recipe.model.vocab_size_of_weights)
        generation = Generation.of(self.tokenizer, folder)
        kernel, reason = choose_kernel(recipe.training, config.text, self.world)
        log.info("attention: %s (%s)", kernel, reason)
        model = build_empty(config.text, self._attention(config.text, kernel))
        check_positions(model, recipe.model.architecture)
        self._choose_token_mixers(model)
        counts = count_modules(model, recipe.model.architecture.intermediate_size)
        plan = plan_for_counts(self.plan, counts)
        if plan.num_parameters != self.plan.num_parameters:
            log.info(
                "the model has %s parameters (the plan's estimate was %s): predicted peak %.1f GiB, layers %s",
                f"{plan.num_parameters:,}",
                f"{self.plan.num_parameters:,}",
                plan.memory.total,
                "stay unsharded" if plan.engine.keeps_weights else "are resharded after the forward pass",
            )
        expected = count_method(model, recipe.training)
        if recipe.model.architecture.is_measured:
            expected = method_counts(recipe.model.architecture, recipe.training)
        built = BuiltModel(config, generation, folder, counts.total, expected)
        prepare_method(model, recipe.training, self.world.device)

        def initialize(sharded: nn.Module) -> None:
            self.trace.begin("initializing the weights")
            if folder is None:
                init_weights(sharded, recipe.model.architecture, recipe.training.seed)
            else:
                load_weights(sharded, folder, recipe.model.vocab_size_of_weights)
            init_adapters(sharded, recipe.training.seed)
            if recipe.model.adapter is not None:
                load_adapters(sharded, Path(recipe.model.adapter), config.wrapper)
            self.trace.begin("creating the optimizer")

        sharding = ShardingOptions(
            reshard_after_forward=not plan.engine.keeps_weights, defer_sync=plan.engine.defers_sync
        )
        engine = make_engine(plan.engine.name, model, recipe.training, self.world, initialize, sharding)
        return engine, built

    def _choose_token_mixers(self, model: nn.Module) -> None:
        """Choose what computes linear attention and convolutions, and log it."""
        choices = choose_token_mixers(model, self.world)
        for choice in choices:
            log.info("%s", choice.text)
        if any(choice.is_slow for choice in choices):
            log.warning(
                "linear attention without a kernel is slow: install what is missing; images on 26.05 have "
                "flash-linear-attention"
            )

    def _attention(self, config: PretrainedConfig, kernel: Kernel) -> str:
        """Return transformers' name of the attention function; register one if several ranks divide a pack."""
        exchange, tensor_parallel = self.world.exchange, self.world.tensor_parallel
        if tensor_parallel > 1:
            check_tensor_parallel(config, kernel, tensor_parallel)
            log.info("tensor parallelism: %d GPUs divide each layer, and the tokens of a pack", tensor_parallel)
        if exchange.size > 1:
            check_context_parallel(config, kernel, exchange.size, tensor_parallel)
            log.info("context parallelism: %d GPUs divide the tokens of a pack", exchange.size)
        is_divided = exchange.size > 1 or tensor_parallel > 1
        return whole_pack_attention(kernel, exchange) if is_divided else register_kernel(kernel)

    def _verify(self, engine: Engine, expected: ParameterCounts, store: PackStore) -> bool:
        """Run the checks before step 1; return whether documents are trained in packs."""
        self._stage("verifying sharding and document isolation")
        recipe = self.plan.recipe
        checks = verify_sharding(engine.sharding_stats(), recipe.training, expected, self.plan.engine.name)
        checks |= verify_targets(store.num_targets)
        packing = choose_packing(
            engine,
            self.world,
            recipe.data.packing,
            recipe.model.architecture.vocab_size,
            self.plan.batch,
            recipe.training,
        )
        if packing.reason is not None:
            log.info("documents are padded instead of packed, which is slower: %s", packing.reason)
        checks |= {"documents are": "packed" if packing.is_packed else "padded rows"}
        checks |= verify_causality(packing.probe) | verify_logits(packing.probe)
        checks |= verify_isolation(packing.probe, shares_scales=recipe.training.precision == "fp8")
        record = VerificationRecord(time.time(), checks)
        self.recorder.write(record)
        log.info("verified: %s", ", ".join(f"{name} {value}" for name, value in record.texts.items()))
        return packing.is_packed

    def _record_start(self, progress: Progress, num_parameters: int) -> None:
        device = self.world.device
        record = StartRecord(
            time=time.time(),
            num_steps=progress.num_steps,
            resumed_from=progress.step,
            world_size=self.world.size,
            engine=self.plan.engine.name,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            num_parameters=num_parameters,
            versions=_versions(),
        )
        self.recorder.write(record)
        if progress.step:
            log.info("resumed from the checkpoint after step %d", progress.step)

    def _evaluate(
        self, evaluator: Evaluator, engine: Engine, step: int, when: Literal["before", "after"]
    ) -> EvaluationRecord | None:
        if len(self.data.read_validation()) == 0:
            return None
        self._stage(f"evaluating on the validation split, {when} training")
        record = evaluator.evaluate(engine, step, when)
        self.recorder.write(record)
        log.info("validation: loss %.4f, perplexity %.2f", record.loss, record.perplexity)
        return record

    def _stage(self, text: str) -> None:
        self.trace.begin(text)
        self.recorder.write(StageRecord(time.time(), text))
        log.info("%s", text)


def run_training(plan: RunPlan, world: World, begun: Mapping[str, float] | None = None) -> None:
    """Execute a plan in this process.

    `begun` has the times when earlier stages began, for the record of the first step.

    Raises:
        TrainingError: a check failed, or a checkpoint can't be loaded.
        DataError: the data is not prepared.
        PrerequisiteError: a package, or a tracker's key or address, is missing.
    """
    world = with_tensor_parallel(world, plan.recipe.training.tensor_parallel)
    data = PreparedData(plan.data_directory)
    data.read_manifest()
    tokenizer = load_saved_tokenizer(data.tokenizer)
    with open_trackers(plan, world) as send:
        recorder = Recorder(plan.layout, world, send)
        Trainer(plan, world, data, tokenizer, recorder, MemoryTrace(world, recorder.write, begun)).run()


def _versions() -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
    }
    for extra in ("bitsandbytes", "deepspeed", "peft"):
        if extra in sys.modules:
            versions[extra] = sys.modules[extra].__version__
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions
