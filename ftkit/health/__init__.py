"""What machines have and how well they work: detection, checks on the login node and on the nodes, samples of GPUs."""
