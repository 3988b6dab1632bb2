"""Plan a run: whether it fits, how fast it is, and what else would fit."""
