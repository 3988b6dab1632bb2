"""What a run will be: whether it fits, how fast it is, what else would fit."""
