"""`ftkit data`: inspect and check data before training."""
