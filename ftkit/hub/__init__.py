"""Hugging Face's hub: what of it is in the caches here, requests, and access to weights and data."""
