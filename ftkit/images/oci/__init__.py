"""Registries, layers and root file systems: images as OCI has them."""
