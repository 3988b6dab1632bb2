"""Processes, engines, collectives, and the checks that a model is sharded as planned."""
