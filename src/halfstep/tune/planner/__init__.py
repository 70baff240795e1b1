"""Memory of a training step before anything runs: tensors without content, traced at the real sizes."""
