"""Choose by measurement how steps run: modes, timed trials, memory levers."""
