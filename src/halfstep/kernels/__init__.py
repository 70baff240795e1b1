"""Fast forms: the same functions as torch's layers, restructured for the chip. They hold no parameters."""
