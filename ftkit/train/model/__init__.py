"""The model: built, given weights, adapted, quantized, attended."""
