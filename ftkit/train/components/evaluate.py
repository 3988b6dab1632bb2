"""Evaluate the model on the validation split: loss, perplexity, and scores of completions."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

import torch
from transformers import PreTrainedTokenizerBase

from ftkit.data.cases import Case, EvaluationSet, ModelInput, Prompt, make_evaluation_set, take_rows
from ftkit.data.completion_metrics import Completion, choose_metrics
from ftkit.data.prepared_data import PreparedData
from ftkit.planning.plan import RunPlan
from ftkit.runs.records import EvaluationRecord, Sample, SourceLoss
from ftkit.train.causal_lm import CausalLM, SourceLosses
from ftkit.train.components.batches import BatchSchedule
from ftkit.train.components.generation import Generation
from ftkit.train.components.pictures import PictureFeed
from ftkit.train.components.references import References, reference_point
from ftkit.train.components.teacher import TeacherSplit
from ftkit.train.model.attention import generation_attention
from ftkit.train.world import World

if TYPE_CHECKING:
    from ftkit.train.engine import Engine

log = logging.getLogger(__name__)

When = Literal["before", "during", "after"]
GENERATION_BATCH_SIZE = 50
NUM_SAMPLES = 6  # samples in a record: enough to show right and wrong ones
_MAX_PROMPT_CHARACTERS = 2_000  # last characters of a sample's prompt that are kept: they have the question


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a model on the validation split. Collective: every rank must call it, and gets the same result."""

    plan: RunPlan
    data: PreparedData
    tokenizer: PreTrainedTokenizerBase
    generation: Generation
    world: World
    is_packed: bool = True
    references: References | None = None
    teacher: TeacherSplit | None = None  # of the validation split

    def evaluate(self, engine: Engine, step: int, when: When) -> EvaluationRecord:
        with engine.inference() as model:
            loss, sources, metrics = self._loss(model)
            scores, samples = self._score(model, when)
        # For preferences, the perplexity of the chosen completions; exp(loss) overflows above 709.
        side = "chosen" if "length_chosen" in metrics else "rejected"
        token_loss = metrics.get("next_token_loss", loss)
        if f"log_prob_{side}" in metrics:
            token_loss = -metrics[f"log_prob_{side}"] / metrics[f"length_{side}"]
        perplexity = math.exp(min(token_loss, 700.0))
        return EvaluationRecord(time.time(), step, when, loss, perplexity, samples, sources, metrics | scores)

    @cached_property
    def evaluation_set(self) -> EvaluationSet:
        settings, recipe = self.plan.recipe.evaluation.generation, self.plan.recipe
        num_rows = max(settings.num_rows, settings.num_rows_during) if settings else 0
        rows = take_rows(self.data.read_validation_rows(recipe.data.validation_sources), num_rows)
        shape = recipe.model.architecture
        limits = (shape.vocab_size, shape.max_position_embeddings)
        model = ModelInput(self.tokenizer, recipe.model.weights, *limits, recipe.model)
        return make_evaluation_set(model, rows, recipe.data, log.warning)

    def _loss(self, model: CausalLM) -> tuple[float, dict[str, SourceLoss], dict[str, float]]:
        """Return the mean loss over targets or samples, the losses per source, and the metrics of the objective."""
        names = self.plan.recipe.data.validation_sources
        store, training, device = self.data.read_validation(), self.plan.recipe.training, self.world.device
        num_packs = min(len(store), self.plan.recipe.evaluation.max_packs)
        packs = [number * len(store) // num_packs for number in range(num_packs)]  # in order, the longest come first
        batches = BatchSchedule.outside(
            training, store, self.world, is_packed=self.is_packed, is_mixed=bool(names),
            reference=self.references and self.references.validation, teacher=self.teacher and self.teacher.read,
            pictures=self._feed(model),
        )  # fmt: skip
        total, bits = torch.zeros((), device=device), None
        source_losses = SourceLosses(len(names), device, len(training.metric_names))
        if training.completions_per_sample == 1:
            mismatched = replace(batches, is_mismatched=True).in_turn(packs)
            bits = reference_point(model, (batch.on(device) for batch in mismatched))
        for batch in batches.in_turn(packs):
            total += model(batch=replace(batch.on(device), kl_bits=bits), source_losses=source_losses)
        own_sums = torch.cat([total.reshape(1), source_losses.flatten()])
        summed, *others = self.world.sum(own_sums.tolist())  # host sync: once an evaluation
        by_source, metrics = others[: 2 * len(names)], others[2 * len(names) :]
        num = int(store.num_targets[packs].sum())
        if training.completions_per_sample:
            num = len(store.documents(packs)) // training.completions_per_sample
        return summed / max(1, num), mean_losses(names, by_source), mean_metrics(training.metric_names, metrics, num)

    def _score(self, model: CausalLM, when: When) -> tuple[dict[str, float], tuple[Sample, ...]]:
        settings = self.plan.recipe.evaluation.generation
        if settings is None:
            return {}, ()
        num_rows = settings.num_rows_during if when == "during" else settings.num_rows
        cases = [case for case in self.evaluation_set.cases if case.number < num_rows]
        if not cases:
            return {}, ()
        completions = self._complete(model, cases, settings.max_new_tokens)
        by_metric = {
            metric: [metric.score(case, completion) for case, completion in zip(cases, completions, strict=True)]
            for metric in choose_metrics(settings.metrics, self.evaluation_set.cases, self.plan.recipe.data.task)
        }
        found = {metric.name: [score for score in scores if score is not None] for metric, scores in by_metric.items()}
        means = {name: sum(scores) / len(scores) for name, scores in found.items() if scores}
        first, scores = next(iter(by_metric.items()))
        best = 0.0 if first.is_lower_better else 1.0
        samples = []
        for case, completion, score in zip(cases[:NUM_SAMPLES], completions, scores, strict=False):
            question = case.columns.get("sql_prompt")
            if not isinstance(question, str):
                prompt = str(self.tokenizer.decode(case.prompt, skip_special_tokens=True))
                question = prompt.strip()[-_MAX_PROMPT_CHARACTERS:]
            reference, is_right = completion.reference or "", score == best
            samples.append(Sample(question, reference, completion.text, is_right, case.thumbnail()))
        return means, tuple(samples)

    def _complete(self, model: CausalLM, cases: Sequence[Case], max_new_tokens: int) -> list[Completion]:
        found: dict[int, list[int]] = {}
        for has_pictures in (False, True):  # separately, because all ranks must call the same modules together
            places = [place for place, case in enumerate(cases) if bool(case.prompt.pictures) == has_pictures]
            prompts = [cases[place].prompt for place in places]
            size = 1 if has_pictures else GENERATION_BATCH_SIZE
            found |= zip(places, self._complete_batches(model, prompts, size, max_new_tokens), strict=True)
        return [
            self.generation.to_completion(self.tokenizer, found[place], case.reference)
            for place, case in enumerate(cases)
        ]

    def _complete_batches(
        self, model: CausalLM, prompts: Sequence[Prompt], size: int, max_new_tokens: int
    ) -> list[list[int]]:
        own, feed = prompts[self.world.rank :: self.world.size], self._feed(model)
        completions: list[list[int]] = []
        for number in range(-(-len(prompts) // (self.world.size * size))):
            batch = own[number * size : (number + 1) * size]
            # A rank without prompts completes one and drops it: generation all-gathers the shards on all ranks.
            shown = batch or prompts[:1]
            inputs = feed.prompt_inputs(model.hf_model, shown[0], self.world.device) if feed else {}
            with generation_attention(model.hf_model):
                generated = self.generation.complete(
                    partial(model, compute=CausalLM.generate),
                    shown,
                    self.generation.greedy(self.tokenizer, max_new_tokens),
                    self.world.device,
                    synced_gpus=self.world.size > 1,
                    **inputs,
                )
            completions += generated[: len(batch)]
        parts = self.world.gather_objects(completions)
        return [parts[number % self.world.size][number // self.world.size] for number in range(len(prompts))]

    def _feed(self, model: CausalLM) -> PictureFeed | None:
        return PictureFeed.of(model.hf_model, self.data.read_manifest().pictures)


def mean_metrics(names: tuple[str, ...], sums: list[float], num_samples: int) -> dict[str, float]:
    """Return an objective's mean metrics from sums over all ranks; drop those of a side without completions."""
    found, num = dict(zip(names, sums, strict=True)), max(1, num_samples)
    num_chosen = found.get("desirable", num)
    num_rejected = num - num_chosen if "desirable" in found else num
    counts = {"chosen": num_chosen, "rejected": num_rejected, "token": found.get("length_chosen", num)}
    means = {name: value / count for name, value in found.items() if (count := counts.get(name.split("_")[-1], num))}
    if "desirable" in found and means.pop("margin") is not None and num_chosen and num_rejected:
        means["margin"] = means["reward_chosen"] - means["reward_rejected"]
    return means


def mean_losses(sources: tuple[str, ...], sums: list[float]) -> dict[str, SourceLoss]:
    """Return the losses of the sources that have targets, from flattened sums over all ranks of `SourceLosses.sums`."""
    measured = zip(sources, sums[: len(sources)], sums[len(sources) :], strict=True)
    return {name: SourceLoss(loss / count, int(count)) for name, loss, count in measured if count}
