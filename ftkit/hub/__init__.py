"""The Hugging Face hub: its caches on this machine, requests, and access to weights and data."""
