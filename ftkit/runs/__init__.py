"""The folder of a run, as both the submitting side and the trainer know it."""
