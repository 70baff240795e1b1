"""hs.Step: the guarded step in a user's training loop. docs/own_loop.md is its guide."""
