"""Fault injection: `scripts/chaos` on a real Slurm, and a dozen faults in the tests."""
