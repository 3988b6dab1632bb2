"""Execute a plan on one rank of the process group, from building the model to the export."""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import accelerate
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ftkit.config.execution import ParameterCounts, method_counts
from ftkit.data.prepared_data import PackStore, PreparedData
from ftkit.data.tokenizers import check_same_tokenizer, load_saved_tokenizer, load_tokenizer
from ftkit.errors import FtkitError, TrainingError, one_line
from ftkit.planning.plan import RunPlan
from ftkit.planning.planner import count_steps, packs_of_epochs, plan_for_counts
from ftkit.planning.training_setup import teacher_settings
from ftkit.runs.checkpoints import TrainState
from ftkit.runs.records import EndRecord, EvaluationRecord, StageRecord, StartRecord, VerificationRecord
from ftkit.train.checkpoint.loading import load_best, load_newest
from ftkit.train.checkpoint.saving import Checkpointer
from ftkit.train.components.batches import BatchSchedule
from ftkit.train.components.evaluate import Evaluator
from ftkit.train.components.exporter import ExportedParts, export
from ftkit.train.components.generation import Generation
from ftkit.train.components.pictures import PictureFeed
from ftkit.train.components.recorder import Recorder, open_trackers
from ftkit.train.components.references import References, compute_references
from ftkit.train.components.teacher import TeacherSplit, compute_distributions
from ftkit.train.distributed import verification
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.distributed.pack_parallel import check_context_parallel, check_tensor_parallel, whole_pack_attention
from ftkit.train.loop import Observers, Progress, check_is_measured, train
from ftkit.train.memory.compile import compiles
from ftkit.train.memory.usage import MemoryTrace, check_free_host_memory, out_of_memory_explained
from ftkit.train.model.attention import choose_kernel, register_kernel
from ftkit.train.model.hf_model import (
    TextConfig,
    build_empty,
    check_positions,
    find_decoder_layers,
    make_config,
    read_config,
)
from ftkit.train.model.lora import freeze, prepare_method
from ftkit.train.model.pretrained import begin_weights, fetch_weights, load_weights
from ftkit.train.model.token_mixers import choose_token_mixers
from ftkit.train.model.vision import attend_in_chunks
from ftkit.train.observers import Evaluation, FirstStep, HangWatch, Profiler, RankTimes, Saving, check_profile
from ftkit.train.observers.step_metrics import AnomalyWatch, StepMetrics, Stopwatch
from ftkit.train.param_count import count_method, count_modules
from ftkit.train.private_apis.torch import start_compile_workers
from ftkit.train.world import DTYPES, World, with_tensor_parallel

if TYPE_CHECKING:
    from torch import nn

    from ftkit.config.training import TrainingPlan
    from ftkit.planning.choices import EnginePlan
    from ftkit.train.engine import Engine, InitWeights

log = logging.getLogger(__name__)


def run_training(plan: RunPlan, world: World, begun: Mapping[str, float] | None = None) -> None:
    """Execute a plan in this process; `begun` has the start times of earlier stages."""
    if plan.recipe.training.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it at its first use
        torch.use_deterministic_algorithms(True)  # noqa: FBT003
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # none is read
    if world.device.type == "cuda" and compiles(plan.recipe.training, world.device):
        start_compile_workers()
    world = with_tensor_parallel(world, plan.recipe.training.tensor_parallel)
    data = PreparedData(plan.data.root)
    data.read_manifest()
    tokenizer = load_saved_tokenizer(data.tokenizer)
    with open_trackers(plan, world) as send:
        recorder = Recorder(plan.layout, world, send)
        Trainer(plan, world, data, tokenizer, recorder, MemoryTrace(world, recorder.write, begun)).run()


def make_engine(
    chosen: EnginePlan, hf_model: PreTrainedModel, training: TrainingPlan, world: World, init_weights: InitWeights
) -> Engine:
    """Shard a model that is prepared for its method, allocate and initialize its parameters; return the engine."""
    if chosen.name == "zero3":
        from ftkit.train.distributed.zero3 import Zero3Engine  # noqa: PLC0415 - DeepSpeed is an extra

        return Zero3Engine(hf_model, training, world, init_weights)
    return Fsdp2Engine(hf_model, training, world, init_weights, chosen)


@dataclass(frozen=True)
class Trainer:
    plan: RunPlan
    world: World
    data: PreparedData
    tokenizer: PreTrainedTokenizerBase
    recorder: Recorder
    trace: MemoryTrace

    def run(self) -> None:
        """Build, verify, resume or start, train, evaluate, export."""
        began = time.time()
        store = self.data.read_train()
        num_steps = count_steps(self.plan.recipe.training, len(store))
        if not num_steps:
            raise TrainingError("there are no packs to train on", fix="check 'data' in the recipe")
        check_profile(self.plan.recipe.profile, num_steps)
        check_free_host_memory(self.plan, self.world)
        explained = partial(verification.operations_explained, self.plan.recipe.training)
        with out_of_memory_explained(self.plan, self.world, self.trace), explained():
            teacher = self._compute_teacher()
            self._stage("building the model")
            engine, parts, expected, num_parameters = self._build_engine()
        with out_of_memory_explained(self.plan, self.world, self.trace, engine.tensors), explained():
            is_packed, references = self._verify(engine, expected, store, teacher)
            progress = self._train(engine, parts, store, num_parameters, (references, teacher), is_packed=is_packed)
        log.info("%s after %d steps, %.0f s in total", progress.outcome, progress.step, time.time() - began)

    def _compute_teacher(self) -> list[TeacherSplit]:
        """Return the teacher's stored distributions for both splits, and free the teacher; empty without a teacher."""
        teacher, training = self.plan.recipe.teacher, teacher_settings(self.plan.recipe.training)
        if teacher is None:
            return []
        self._stage("computing the teacher's distributions")

        def build() -> Engine:
            folder = fetch_weights(teacher, self.world, is_teacher=True)
            own = load_tokenizer(teacher.model_copy(update={"weights": str(folder)}), None)
            check_same_tokenizer(self.tokenizer, own, teacher.weights)
            config = read_config(folder, teacher.architecture).text
            model = build_empty(config, self._attention(config))
            choose_token_mixers(model, self.world)
            freeze(model, DTYPES[training.compute_precision])
            chosen = replace(self.plan.engine, name="fsdp2", keeps_weights=False, defers_sync=False)
            engine = make_engine(chosen, model, training, self.world, lambda sharded: load_weights(sharded, folder))
            size = teacher.architecture.vocab_size
            verification.verify_logits(verification.choose_packing(engine, self.world, "auto", size, training)[0])
            return engine

        def report(progress: str) -> None:
            text = f"computing the teacher's distributions: {progress}"
            self.recorder.write(StageRecord(time.time(), text))
            log.info("%s", text)

        return compute_distributions(self.plan, self.data, self.world, build, report)

    def _build_engine(self) -> tuple[Engine, ExportedParts, ParameterCounts, int]:
        """Return the engine with weights, an export's parts, the expected counts, and the number without adapters."""
        recipe = self.plan.recipe
        shape, training = recipe.model.architecture, recipe.training
        folder = None
        if recipe.model.weights == "random":
            config = TextConfig(make_config(shape, self.tokenizer))
        else:
            folder = fetch_weights(recipe.model, self.world)
            sees = bool(recipe.data.pictures)
            config = read_config(folder, shape, recipe.model.vocab_size_of_weights, pictures=sees)
        generation = Generation.of(self.tokenizer, folder)
        model = build_empty(config.text, self._attention(config.text))
        attend_in_chunks(model, self.world.device, DTYPES[training.compute_precision])
        check_positions(model, shape)
        choose_token_mixers(model, self.world)
        plan = plan_for_counts(self.plan, count_modules(model, shape.intermediate_size))
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if plan.num_parameters != self.plan.num_parameters:
            log.info(
                "the model has %s parameters (the plan's estimate was %s): predicted peak %.1f GiB, layers %s",
                f"{num_parameters:,}",
                f"{self.plan.num_parameters:,}",
                plan.memory.total,
                "stay unsharded" if plan.engine.keeps_weights else "are resharded after the forward pass",
            )
        is_counted = shape.is_measured and not recipe.data.pictures
        expected = method_counts(shape, training) if is_counted else count_method(model, training)
        prepare_method(model, training, self.world.device)

        def initialize(sharded: nn.Module) -> None:
            self.trace.begin("initializing the weights")
            begin_weights(sharded, recipe, folder, config.wrapper)
            self.trace.begin("creating the optimizer")

        engine = make_engine(plan.engine, model, training, self.world, initialize)
        return engine, ExportedParts(recipe, config, self.tokenizer, generation, folder), expected, num_parameters

    def _attention(self, config: PretrainedConfig) -> str:
        """Return transformers' name of the attention function; register one if several ranks divide a pack."""
        training, shares = self.plan.recipe.training, self.data.read_train().shares_prompts
        kernel, reason = choose_kernel(training, config, self.world, shares_prompts=shares)
        log.info("attention: %s (%s)", kernel, reason)
        exchange, tensor_parallel = self.world.exchange, self.world.tensor_parallel
        if tensor_parallel > 1:
            check_tensor_parallel(config, kernel, tensor_parallel)
            log.info("tensor parallelism: %d GPUs divide each layer, and the tokens of a pack", tensor_parallel)
        if exchange.size > 1:
            check_context_parallel(config, kernel, exchange.size, tensor_parallel)
            log.info("context parallelism: %d GPUs divide the tokens of a pack", exchange.size)
        is_divided = exchange.size > 1 or tensor_parallel > 1
        return whole_pack_attention(kernel, exchange) if is_divided else register_kernel(kernel)

    def _verify(
        self, engine: Engine, expected: ParameterCounts, store: PackStore, teacher: list[TeacherSplit]
    ) -> tuple[bool, References | None]:
        """Run the checks before step 1; return whether documents are packed, and the stored reference."""
        self._stage("verifying sharding and document isolation")
        recipe, training = self.plan.recipe, self.plan.recipe.training
        pictures = PictureFeed.of(engine.model.hf_model, self.data.read_manifest().pictures)
        checks = verification.verify_sharding(engine.sharding_stats(), training, expected, self.plan.engine.name)
        checks |= verification.verify_targets(store.num_targets)
        probe, reason = verification.choose_packing(
            engine, self.world, recipe.data.packing, recipe.model.architecture.vocab_size, training,
            shares_prompts=store.shares_prompts, pictures=pictures,
        )  # fmt: skip
        if reason is not None:
            log.info("documents are padded instead of packed, which is slower: %s", reason)
        checks |= {"documents are": "packed" if reason is None else "padded rows"}
        checks |= verification.verify_causality(probe) | verification.verify_logits(probe)
        checks |= verification.verify_isolation(probe, shares_scales=training.precision == "fp8")
        if pictures is not None and store.has_pictures:
            checks |= verification.verify_pictures(engine, self.world, store, pictures, training)
        references = None
        if training.stores_reference:
            self._stage("computing the log-probabilities of the reference")
            references = compute_references(engine, self.plan, self.data, self.world)
        if training.completions_per_sample or teacher:
            batches = BatchSchedule.outside(
                training, store, self.world, is_packed=reason is None, reference=references and references.train,
                teacher=teacher[0].read if teacher else None, pictures=pictures,
            )  # fmt: skip
            first = range(min(len(store), training.micro_batch_size))  # on each rank
            batch = next(replace(batches, rank=0, size=1).in_turn(first)).on(self.world.device)
            if not teacher:
                checks |= verification.verify_pairs(engine, batch, training.compute_precision)
            else:
                checks |= verification.verify_teacher(engine, batch, recipe)
        record = VerificationRecord(time.time(), checks)
        self.recorder.write(record)
        log.info("verified: %s", ", ".join(f"{name} {value}" for name, value in record.texts.items()))
        return reason is None, references

    def _train(
        self, engine: Engine, parts: ExportedParts, store: PackStore, num_parameters: int,
        stored: tuple[References | None, list[TeacherSplit]], *, is_packed: bool,
    ) -> Progress:  # fmt: skip
        plan, world, (references, teacher) = self.plan, self.world, stored
        manifest = self.data.read_manifest()
        self.trace.begin("loading the newest checkpoint")
        loaded, damaged = load_newest(engine, plan.layout, world, manifest.identity)
        state = loaded or TrainState(0, manifest.identity)
        num_epochs, sources = plan.recipe.training.num_epochs, plan.recipe.data.mixed_sources
        batches = BatchSchedule(
            store=store,
            plan=plan.batch,
            seed=plan.recipe.training.order_seed,
            num_packs_in_run=None if num_epochs is None else packs_of_epochs(num_epochs, len(store)),
            rank=world.data_rank,
            size=world.data_size,
            is_packed=is_packed,
            is_mixed=bool(sources),
            marks_padding=engine.model.routers.exist,
            completions_per_sample=plan.recipe.training.completions_per_sample,
            reference=references and references.train,
            teacher=teacher[0].read if teacher else None,
            pictures=PictureFeed.of(engine.model.hf_model, manifest.pictures),
            context=world.context,
            state=state,
        )
        progress = Progress.resume(plan, batches, state)
        self._record_start(progress, num_parameters, damaged)
        held_out = teacher[1] if teacher else None
        evaluator = Evaluator(plan, self.data, self.tokenizer, parts.generation, world, is_packed, references, held_out)
        if state.step == 0:
            check_is_measured(self._evaluate(evaluator, engine, 0, "before"), plan.recipe.evaluation.selection)
        ranks = world.gather_objects((socket.gethostname(), os.getpid()))
        training_began = time.time()
        with Checkpointer(plan, world, self.recorder.write) as checkpointer:
            recorder, trace, stopwatch = self.recorder, self.trace, Stopwatch()
            observers = [
                StepMetrics(progress, world, stopwatch, recorder, trace, sources),
                FirstStep(progress, trace, recorder),
                AnomalyWatch(plan.id, plan.recipe.training.on_nonfinite, recorder, batches.packs_of_step),
                HangWatch(plan.layout, world.rank, ranks, lambda: progress.step, plan.resources.hang_timeout_seconds),
                stopwatch,  # later observers can take long: they count neither as a hang nor as step time
                Evaluation(progress, engine, evaluator, recorder),  # may end training, and selects the best checkpoint
                # RankTimes writes its file before the last save, in which all ranks wait for each other.
                RankTimes(progress, world, find_decoder_layers(engine.model.hf_model)),
                Saving(progress, engine, checkpointer),
                Profiler(plan.recipe.profile, plan.layout, world),
            ]
            train(world, engine, progress, Observers(observers), len(sources))
        training_seconds = time.time() - training_began
        if progress.is_complete:
            step, best = progress.step, progress.state.best
            if best is not None and best.step != step:
                self._stage(f"loading the best checkpoint, of step {best.step} ({best.metric} {best.value:.4g})")
                step = best.step if load_best(engine, plan.layout, world, best.step) else step
            self._evaluate(evaluator, engine, step, "after")
            self._export(engine, parts, step)
        self.trace.begin("")
        self._record_end(progress, training_seconds)
        return progress

    def _record_end(self, progress: Progress, training_seconds: float) -> None:
        best, patience = progress.state.best, self.plan.recipe.evaluation.early_stopping_patience
        exported = str(self.plan.layout.export) if progress.is_complete else None
        record = EndRecord(
            time.time(), progress.outcome, progress.step, training_seconds, exported, best.step if best else None,
            patience if progress.is_stopped_early else None,
        )  # fmt: skip
        self.recorder.write(record)

    def _export(self, engine: Engine, parts: ExportedParts, step: int) -> None:
        self._stage("exporting the model")
        try:
            export(engine, parts, self.plan.layout, step, self.world)
        except (OSError, FtkitError) as error:  # any other error is a bug, or follows another rank's failure
            where = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
            raise TrainingError(
                f"training is complete, but the export failed: {one_line(error)}{where}",
                meaning=f"nothing trained is lost: the checkpoint of step {step} is complete",
                fix=f"once the cause is gone: ftkit export {self.plan.id} --step {step}, or ftkit resume "
                f"{self.plan.id}, which exports it without training",
            ) from error

    def _record_start(self, progress: Progress, num_parameters: int, damaged: tuple[int, ...]) -> None:
        device = self.world.device
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
        }
        extras = {"bitsandbytes", "deepspeed", "peft"} & sys.modules.keys()
        versions |= {extra: sys.modules[extra].__version__ for extra in sorted(extras)}
        if torch.version.cuda:
            versions["cuda"] = torch.version.cuda
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        record = StartRecord(
            time=time.time(),
            num_steps=progress.num_steps,
            resumed_from=progress.step,
            world_size=self.world.size,
            engine=self.plan.engine.name,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            num_parameters=num_parameters,
            versions=versions,
            damaged=damaged,
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
