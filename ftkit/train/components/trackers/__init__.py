"""Experiment trackers: sinks of the records that metrics.jsonl holds, which stays the truth."""
