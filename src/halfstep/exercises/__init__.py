"""Three exercises in mixed precision that run on a laptop in under two minutes each, with what to expect and why."""
