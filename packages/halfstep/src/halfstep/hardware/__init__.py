"""What devices can do: known GPUs by name (no torch), and facts of this machine, measured. No policy."""
