"""The trainer: from plan.json to checkpoints, metrics and an exported model."""
