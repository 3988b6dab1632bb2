"""Execute a plan on one rank: from joining the process group to the end of the run."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import accelerate
import numpy as np
import torch
import transformers
from transformers import PreTrainedTokenizerBase

from ftkit.config.execution import ParameterCounts, method_counts
from ftkit.config.training import TrainingPlan
from ftkit.data.packing import Document, build_pack
from ftkit.data.prepared_data import PackStore, PreparedData
from ftkit.data.tokenizers import learn_tokenizer, load_saved_tokenizer
from ftkit.errors import FtkitError, TrainingError, one_line
from ftkit.models.architecture import ArchitectureSpec
from ftkit.models.families import MEASURED
from ftkit.planning.plan import PlacementPlan, RunPlan
from ftkit.planning.planner import count_steps, plan_for_counts
from ftkit.runs.checkpoints import TrainState
from ftkit.runs.records import EndRecord, EvaluationRecord, StageRecord, StartRecord, VerificationRecord
from ftkit.train.checkpoint.loading import load_best, load_newest
from ftkit.train.checkpoint.saving import Checkpointer
from ftkit.train.components.batches import BatchSchedule, to_micro_batch
from ftkit.train.components.evaluate import Evaluator
from ftkit.train.components.exporter import ExportedParts, export
from ftkit.train.components.generation import Generation
from ftkit.train.components.recorder import Recorder, open_trackers
from ftkit.train.distributed import verification
from ftkit.train.distributed.fsdp2 import Fsdp2Engine
from ftkit.train.distributed.pack_parallel import check_context_parallel, check_tensor_parallel, whole_pack_attention
from ftkit.train.distributed.verification import run_probe
from ftkit.train.engine import DEFAULT_SHARDING, ShardingOptions
from ftkit.train.loop import Progress, check_is_measured, train
from ftkit.train.memory.usage import MemoryTrace, check_free_host_memory, out_of_memory_explained
from ftkit.train.model.attention import choose_kernel, register_kernel
from ftkit.train.model.hf_model import TextConfig, build_empty, check_positions, make_config, read_config
from ftkit.train.model.lora import init_adapters, load_adapters, prepare_method
from ftkit.train.model.pretrained import fetch_weights, init_weights, load_weights
from ftkit.train.model.token_mixers import choose_token_mixers
from ftkit.train.observers import make_observers
from ftkit.train.observers.profiler import check_profile
from ftkit.train.param_count import count_method, count_modules
from ftkit.train.world import World, init_world, with_tensor_parallel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from ftkit.config.training import EngineName
    from ftkit.train.engine import Engine, InitWeights

log = logging.getLogger(__name__)


def run_training(plan: RunPlan, world: World, begun: Mapping[str, float] | None = None) -> None:
    """Execute a plan in this process.

    `begun` has the times when earlier stages began, for the record of the first step.
    """
    world = with_tensor_parallel(world, plan.recipe.training.tensor_parallel)
    data = PreparedData(plan.data_directory)
    data.read_manifest()
    tokenizer = load_saved_tokenizer(data.tokenizer)
    with open_trackers(plan, world) as send:
        recorder = Recorder(plan.layout, world, send)
        Trainer(plan, world, data, tokenizer, recorder, MemoryTrace(world, recorder.write, begun)).run()


def make_engine(
    name: EngineName,
    hf_model: PreTrainedModel,
    training: TrainingPlan,
    world: World,
    init_weights: InitWeights,
    sharding: ShardingOptions = DEFAULT_SHARDING,
) -> Engine:
    """Shard a model that is prepared for its method, allocate and initialize its parameters, and return its engine.

    Parameters may be on the meta device. zero3 ignores `sharding`.
    """
    if name == "zero3":
        from ftkit.train.distributed.zero3 import Zero3Engine  # noqa: PLC0415 - DeepSpeed is an extra

        return Zero3Engine(hf_model, training, world, init_weights)
    return Fsdp2Engine(hf_model, training, world, init_weights, sharding)


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
        """Build, verify, resume or start, train, evaluate, export."""
        began = time.time()
        store = self.data.read_train()
        num_steps = count_steps(self.plan.recipe.training, len(store))
        if not num_steps:
            raise TrainingError("there are no packs to train on", fix="check 'data' in the recipe")
        check_profile(self.plan.recipe.profile, num_steps)
        check_free_host_memory(self.plan, self.world)
        with out_of_memory_explained(self.plan, self.world, self.trace):
            self._stage("building the model")
            engine, parts, expected, num_parameters = self._build_engine()
        with out_of_memory_explained(self.plan, self.world, self.trace, engine.tensors):
            is_packed = self._verify(engine, expected, store)
            progress = self._train(engine, parts, store, num_parameters, is_packed=is_packed)
        log.info("%s after %d steps, %.0f s in total", progress.outcome, progress.step, time.time() - began)

    def _build_engine(self) -> tuple[Engine, ExportedParts, ParameterCounts, int]:
        """Return the engine with its weights loaded, what an export needs, and the numbers of parameters.

        The numbers are those that the checks must find, and that of all parameters without adapters.
        """
        recipe = self.plan.recipe
        shape, training = recipe.model.architecture, recipe.training
        folder = None
        if recipe.model.weights == "random":
            config = TextConfig(make_config(shape, self.tokenizer))
        else:
            folder = fetch_weights(recipe.model, self.world)
            config = read_config(folder, shape, recipe.model.vocab_size_of_weights)
        generation = Generation.of(self.tokenizer, folder)
        model = build_empty(config.text, self._attention(config.text))
        check_positions(model, shape)
        choose_token_mixers(model, self.world)
        counts = count_modules(model, shape.intermediate_size)
        plan = plan_for_counts(self.plan, counts)
        if plan.num_parameters != self.plan.num_parameters:
            log.info(
                "the model has %s parameters (the plan's estimate was %s): predicted peak %.1f GiB, layers %s",
                f"{plan.num_parameters:,}",
                f"{self.plan.num_parameters:,}",
                plan.memory.total,
                "stay unsharded" if plan.engine.keeps_weights else "are resharded after the forward pass",
            )
        expected = method_counts(shape, training) if shape.is_measured else count_method(model, training)
        prepare_method(model, training, self.world.device)

        def initialize(sharded: nn.Module) -> None:
            self.trace.begin("initializing the weights")
            if folder is None:
                init_weights(sharded, shape, training.seed)
            else:
                load_weights(sharded, folder, recipe.model.vocab_size_of_weights)
            init_adapters(sharded, training.seed)
            if recipe.model.adapter is not None:
                load_adapters(sharded, Path(recipe.model.adapter), config.wrapper)
            self.trace.begin("creating the optimizer")

        sharding = ShardingOptions(
            reshard_after_forward=not plan.engine.keeps_weights, defer_sync=plan.engine.defers_sync
        )
        engine = make_engine(plan.engine.name, model, training, self.world, initialize, sharding)
        return engine, ExportedParts(recipe, config, self.tokenizer, generation, folder), expected, counts.total

    def _attention(self, config: PretrainedConfig) -> str:
        """Return transformers' name of the attention function; register one if several ranks divide a pack."""
        kernel, reason = choose_kernel(self.plan.recipe.training, config, self.world)
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

    def _verify(self, engine: Engine, expected: ParameterCounts, store: PackStore) -> bool:
        """Run the checks before step 1; return whether documents are trained in packs."""
        self._stage("verifying sharding and document isolation")
        recipe, training = self.plan.recipe, self.plan.recipe.training
        checks = verification.verify_sharding(engine.sharding_stats(), training, expected, self.plan.engine.name)
        checks |= verification.verify_targets(store.num_targets)
        probe, reason = verification.choose_packing(
            engine, self.world, recipe.data.packing, recipe.model.architecture.vocab_size, self.plan.batch, training
        )
        if reason is not None:
            log.info("documents are padded instead of packed, which is slower: %s", reason)
        checks |= {"documents are": "packed" if reason is None else "padded rows"}
        checks |= verification.verify_causality(probe) | verification.verify_logits(probe)
        checks |= verification.verify_isolation(probe, shares_scales=training.precision == "fp8")
        record = VerificationRecord(time.time(), checks)
        self.recorder.write(record)
        log.info("verified: %s", ", ".join(f"{name} {value}" for name, value in record.texts.items()))
        return reason is None

    def _train(
        self, engine: Engine, parts: ExportedParts, store: PackStore, num_parameters: int, *, is_packed: bool
    ) -> Progress:
        """Resume or start, train, evaluate and export."""
        plan, world = self.plan, self.world
        selection = plan.recipe.evaluation.selection
        manifest = self.data.read_manifest()
        self.trace.begin("loading the newest checkpoint")
        state = load_newest(engine, plan.layout, world, manifest.identity) or TrainState(0, manifest.identity)
        num_epochs, sources = plan.recipe.training.num_epochs, manifest.mixed_sources
        batches = BatchSchedule(
            store=store,
            plan=plan.batch,
            seed=plan.recipe.training.order_seed,
            num_packs_in_run=None if num_epochs is None else num_epochs * len(store),
            rank=world.data_rank,
            size=world.data_size,
            is_packed=is_packed,
            is_mixed=bool(sources),
            marks_padding=engine.model.routers.exist,
            context=world.context,
            state=state,
        )
        progress = Progress.resume(plan, batches, state)
        self._record_start(progress, num_parameters)
        evaluator = Evaluator(plan, self.data, self.tokenizer, parts.generation, world, is_packed)
        if state.step == 0:
            check_is_measured(self._evaluate(evaluator, engine, 0, "before"), selection)
        training_began = time.time()
        with Checkpointer(plan, world, self.recorder.write) as checkpointer:
            observers = make_observers(
                progress,
                engine,
                evaluator=evaluator,
                checkpointer=checkpointer,
                recorder=self.recorder,
                trace=self.trace,
                sources=sources,
            )
            train(world, engine, progress, observers, len(sources))
        training_seconds = time.time() - training_began
        if progress.is_complete:
            step = self._load_best(engine, progress.state)
            self._evaluate(evaluator, engine, step, "after")
            self._export(engine, parts, step)
        self.trace.begin("")
        best, patience = progress.state.best, plan.recipe.evaluation.early_stopping_patience
        exported = str(plan.layout.export) if progress.is_complete else None
        record = EndRecord(
            time.time(), progress.outcome, progress.step, training_seconds, exported, best.step if best else None,
            patience if progress.is_stopped_early else None,
        )  # fmt: skip
        self.recorder.write(record)
        return progress

    def _load_best(self, engine: Engine, state: TrainState) -> int:
        """Load the checkpoint of the best evaluation if a later one is loaded; return the step of the loaded state."""
        best = state.best
        if best is None or best.step == state.step:
            return state.step
        self._stage(f"loading the best checkpoint, of step {best.step} ({best.metric} {best.value:.4g})")
        return best.step if load_best(engine, self.plan.layout, self.world, best.step) else state.step

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

    def _record_start(self, progress: Progress, num_parameters: int) -> None:
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


# --- Self-check ----------------------------------------------------------------------------------


_VOCABULARY, _LENGTH = 320, 256


def self_check() -> str:
    """Take a training step with each family, on the first GPU if there is one; return families and losses."""
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})  # any port that is free
    with init_world(PlacementPlan(1, 1, device, 1)) as world:
        losses = {family: _take_step(family, world) for family in MEASURED}
    return f"{device}: " + ", ".join(f"{family} (loss {loss:.2f})" for family, loss in losses.items())


def _take_step(family: str, world: World) -> float:
    """Build, verify and train a tiny model of a family; return its mean loss, in nats."""
    shape = ArchitectureSpec(
        family=family,
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2 * _LENGTH,
        sliding_window=_LENGTH // 2,
        full_attention_every=2,
    )
    precision = "bf16" if world.device.type == "cuda" else "fp32"
    training = TrainingPlan(
        precision=precision, sequence_length=_LENGTH, global_batch_size=1, max_steps=1, learning_rate=1e-3
    )
    config = make_config(shape, learn_tokenizer(["self-check"], 300, "chatml"))
    kernel, _ = choose_kernel(training, config, world)
    model = build_empty(config, register_kernel(kernel))
    engine = make_engine("fsdp2", model, training, world, lambda sharded: init_weights(sharded, shape, 0))
    verification.verify_sharding(engine.sharding_stats(), training, method_counts(shape, training))
    probe = run_probe(engine, world, _VOCABULARY, micro_batch_size=1, sequence_length=_LENGTH)
    verification.verify_isolation(probe)
    verification.verify_logits(probe)
    tokens = np.arange(_LENGTH, dtype=np.int32)
    pack = build_pack([Document(tokens, np.roll(tokens, -1))], _LENGTH)
    loss = engine.forward(to_micro_batch(pack[None], world.device))
    engine.backward(loss, _LENGTH, is_last=True)
    engine.step(training.learning_rate, training.max_grad_norm)
    return float(loss.detach()) / _LENGTH  # host sync: once a family
