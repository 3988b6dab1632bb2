"""Where activations, compiled layers and host copies are, and what happens when memory runs out."""
