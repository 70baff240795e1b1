"""Timers, peak memory and energy: small and alone."""
