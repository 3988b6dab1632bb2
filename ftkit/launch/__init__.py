"""Resolve a command line to a plan, check it, render its job script, submit it, and observe its state."""
