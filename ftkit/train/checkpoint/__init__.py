"""Checkpoints: saved while training continues, complete or absent, and read without unpickling."""
