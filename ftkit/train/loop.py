"""The training loop."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from ftkit.train.causal_lm import SourceLosses
from ftkit.train.components.batches import prefetched
from ftkit.train.components.optimizer import learning_rate_at
from ftkit.train.engine import Engine
from ftkit.train.observers.observer import Observers, StepOutcome
from ftkit.train.observers.progress import Progress
from ftkit.train.world import World


@dataclass(frozen=True)
class TrainingLoop:
    """Runs the optimizer steps of a run; all else is attached to it (`ftkit.train.observers.make_observers`)."""

    world: World
    engine: Engine
    progress: Progress
    observers: Observers
    num_sources: int = 0

    def train(self) -> None:
        """Train until the last step, early stopping or a stop request."""
        engine, progress, device = self.engine, self.progress, self.world.device
        training = progress.plan.recipe.training
        steps = range(progress.step, progress.num_steps)
        with self.observers as observers, prefetched(progress.batches.step, steps, device) as batches:
            while not progress.is_over:
                observers.begin("batch")
                batch = next(batches)
                torch.manual_seed(self._seed_of_step())
                losses, source_losses = [], SourceLosses(self.num_sources, device)
                for number, micro_batch in enumerate(batch.micro_batches, start=1):
                    observers.begin("forward")
                    loss = engine.forward(micro_batch, source_losses)
                    observers.begin("backward")
                    engine.backward(loss, batch.num_targets, is_last=number == len(batch.micro_batches))
                    losses.append(loss.detach())
                    del loss  # and its graph
                observers.begin("update")
                learning_rate = learning_rate_at(progress.step, progress.num_steps, training)
                grad_norm = engine.step(learning_rate, training.max_grad_norm)  # clips the gradient first
                router_sums = engine.model.routers.take()
                progress.advance(batch)
                total = torch.stack(losses).sum()
                observers.end_step(StepOutcome(batch, total, source_losses, router_sums, grad_norm, learning_rate))

    def _seed_of_step(self) -> int:
        """Return the seed of what a model's own class draws; adapters' dropout has its own (`Dropout`).

        Equal when a step is repeated after a resume, and on ranks that divide layers.
        """
        seed, step = self.progress.plan.recipe.training.seed, self.progress.step
        text = f"{seed} {step} {self.world.rank // self.world.tensor_parallel}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
