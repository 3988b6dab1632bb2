"""`ftkit cluster`: create a cluster with its provider's own tools, and remove it."""
