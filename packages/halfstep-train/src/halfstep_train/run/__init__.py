"""A run from config to checkpoints: the one composition root, the loop, exact resume."""
