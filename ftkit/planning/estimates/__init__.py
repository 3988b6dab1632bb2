"""Parameters, memory, FLOPs and step time, computed from the configuration."""
