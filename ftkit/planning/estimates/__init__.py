"""Predict parameters, memory, FLOPs and step time from the configuration."""
