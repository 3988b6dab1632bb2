"""Faults that are injected into runs: by `scripts/chaos` on a real Slurm, and a dozen of them by the tests."""
