"""Copies of runs and exports in folders, object stores (through fsspec), and on the Hugging Face hub."""
