"""The model: build it, load weights, add adapters, quantize, and choose the attention kernel."""
