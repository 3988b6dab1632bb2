"""Evaluate the model on the validation split: loss, perplexity, and execution accuracy for text-to-SQL."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from ftkit.config.data import PromptCompletionFormat
from ftkit.data.formats import read_prompt
from ftkit.data.rendering import ChatRenderer
from ftkit.data.store import PreparedData
from ftkit.data.tasks.sql_score import execution_match, read_question
from ftkit.planning.plan import RunPlan
from ftkit.runs.records import EvaluationRecord, Sample, SourceLoss
from ftkit.train.causal_lm import CausalLM, SourceLosses
from ftkit.train.components.batches import to_micro_batch, to_padded_micro_batch
from ftkit.train.components.generation import Generation
from ftkit.train.components.metrics import mean_losses
from ftkit.train.components.padding import pad_documents
from ftkit.train.model.attention import generation_attention
from ftkit.train.world import World

if TYPE_CHECKING:
    from ftkit.config.training import SqlExecutionSpec
    from ftkit.train.engine import Engine

ANSWERS_AT_ONCE = 50
NUM_SAMPLES = 6
"""Samples in a record: enough to show right and wrong ones."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluate a model on the validation split. Collective: every rank must call it, and gets the same result."""

    plan: RunPlan
    data: PreparedData
    tokenizer: PreTrainedTokenizerBase
    generation: Generation
    world: World
    is_packed: bool = True

    def evaluate(self, engine: Engine, step: int, when: Literal["before", "during", "after"]) -> EvaluationRecord:
        """Compute loss and perplexity; before and after training, also execute its SQL if the recipe says so."""
        with engine.inference() as model:
            loss, sources = self._loss(model)
            asked = self.plan.recipe.evaluation.sql_execution
            answers = [] if asked is None or when == "during" else self._answer_questions(model, asked)
        accuracy = sum(answer.correct for answer in answers) / len(answers) if answers else None
        # exp(loss) overflows above 709.
        perplexity = math.exp(min(loss, 700.0))
        samples = tuple(answers[:NUM_SAMPLES])
        return EvaluationRecord(time.time(), step, when, loss, perplexity, accuracy, samples, sources)

    def _loss(self, model: CausalLM) -> tuple[float, dict[str, SourceLoss]]:
        """Return the mean loss over the targets of the validation packs, and that of each of several sources."""
        names = self.data.read_manifest().mixed_sources
        store = self.data.read_validation()
        num_packs = min(len(store), self.plan.recipe.evaluation.max_packs)
        micro = self.plan.recipe.training.micro_batch_size
        total = torch.zeros((), device=self.world.device)
        source_losses = SourceLosses(len(names), self.world.device)
        for first in range(0, num_packs, micro * self.world.data_size):
            if not self.is_packed:
                packs = store.read(range(first, min(first + micro * self.world.size, num_packs)))
                rows = pad_documents(packs, micro * packs.shape[2], self.world.size)
                for own in rows[self.world.rank :: self.world.size]:
                    batch = to_padded_micro_batch(own, self.world.device, is_mixed=bool(names))
                    total += model(batch=batch, source_losses=source_losses)
                continue
            # Ranks beyond the end compute the last packs again, without counting them.
            begin = first + self.world.data_rank * micro
            counts = begin < num_packs
            chosen = range(begin, min(begin + micro, num_packs)) if counts else range(num_packs - 1, num_packs)
            packs = store.read(chosen)
            batch = to_micro_batch(packs, self.world.device, is_mixed=bool(names), context=self.world.context)
            loss = model(batch=batch, source_losses=source_losses if counts else None)
            total += loss if counts else 0
        own_sums = torch.cat([total.reshape(1), source_losses.sums.flatten()])
        summed, *by_source = self.world.sum(own_sums.tolist())  # host sync: once an evaluation
        return summed / max(1, int(store.num_targets[:num_packs].sum())), mean_losses(names, by_source)

    def _answer_questions(self, model: CausalLM, asked: SqlExecutionSpec) -> list[Sample]:
        """Return the questions in order, each answered by one of the ranks."""
        examples = self.data.read_validation_rows()[: asked.num_questions]
        own = examples[self.world.rank :: self.world.size]
        rounds = -(-len(examples) // (self.world.size * ANSWERS_AT_ONCE))
        samples: list[Sample] = []
        for number in range(rounds):
            batch = own[number * ANSWERS_AT_ONCE : (number + 1) * ANSWERS_AT_ONCE]
            # A rank without questions answers one for nothing: generation gathers the shards on all ranks.
            answers = self._generate(model, batch or examples[:1], asked.max_new_tokens)
            samples += [_judge(example, answer) for example, answer in zip(batch, answers, strict=False)]
        parts = self.world.gather_objects(samples)
        return [parts[index % self.world.size][index // self.world.size] for index in range(len(examples))]

    def _generate(self, model: CausalLM, examples: list[dict[str, Any]], max_new_tokens: int) -> list[str]:
        form = self.plan.recipe.data.format
        if not isinstance(form, PromptCompletionFormat):
            raise TypeError("the plan's checks let only prompt-completion data through")
        renderer = ChatRenderer.of(self.tokenizer, self.plan.recipe.data.template_options)
        prompts = [renderer.render(read_prompt(example, form), open_turn=True) for example in examples]
        with generation_attention(model.hf_model):
            answers = self.generation.complete(
                partial(model, compute=CausalLM.generate),
                self.tokenizer(prompts, add_special_tokens=False)["input_ids"],
                self.generation.greedy(self.tokenizer, max_new_tokens),
                self.world.device,
                synced_gpus=self.world.size > 1,
            )
        texts: list[str] = self.tokenizer.batch_decode(
            [self.generation.up_to_end(answer) for answer in answers], skip_special_tokens=True
        )
        return [text.strip() for text in texts]


def _judge(example: dict[str, Any], answer: str) -> Sample:
    reference = read_question(example)
    return Sample(reference.sql_prompt, reference.sql, answer, execution_match(reference, answer).matched)
