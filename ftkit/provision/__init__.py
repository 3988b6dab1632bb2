"""Clusters and machines made by the provider's own tools: what is run, what it made, and how it is removed."""
