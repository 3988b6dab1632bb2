"""Copies of runs and exports elsewhere: folders, object stores through fsspec, and the Hugging Face hub."""
