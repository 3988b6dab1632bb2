"""Optimizers, schedules, losses, batches, checkpoints, metrics: the parts of the training loop."""
