"""Detect and check machines: the site, the login node, compute nodes, and samples of GPUs."""
