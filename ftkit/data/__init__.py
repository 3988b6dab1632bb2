"""Read, format, tokenize and pack data before training, once for all runs on the same data."""
