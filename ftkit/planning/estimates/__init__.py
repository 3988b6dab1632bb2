"""Parameters, memory, FLOPs and step time, from the configuration alone."""
