"""The folder of a run, shared by the submitting side and the trainer."""
