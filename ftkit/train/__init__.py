"""The trainer: turns plan.json into checkpoints, metrics and an exported model."""
