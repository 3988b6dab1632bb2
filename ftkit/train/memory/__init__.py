"""Activation checkpointing and offloading, compiled layers, host snapshots, and out-of-memory errors."""
