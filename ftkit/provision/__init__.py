"""Create and remove clusters and machines with the providers' own tools."""
