"""From examples to packs: read, format, tokenise, pack. Runs before training, and its result is kept."""
