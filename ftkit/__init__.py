"""ftkit: container-first fine-tuning of language models on Slurm GPU clusters."""

__version__ = "0.1.0"
