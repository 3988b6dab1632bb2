"""From examples to packs: read, format, tokenize, pack. Runs before training, and its result is kept."""
