"""The trainer: from plan.json to checkpoints, metrics and an exported model. The only part that imports torch."""
