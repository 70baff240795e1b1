"""How fast, how much memory and energy, and where the time goes."""
