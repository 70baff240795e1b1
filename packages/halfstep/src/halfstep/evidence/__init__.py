"""Evidence: what really ran, and why it failed."""
