"""Experiment trackers: sinks of the records; metrics.jsonl stays authoritative."""
