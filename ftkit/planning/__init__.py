"""Plan a run: predict its memory and speed, and suggest settings that fit or are faster."""
