"""Clusters that are reached over ssh: what is sent there, and what is asked of the ftkit there."""
