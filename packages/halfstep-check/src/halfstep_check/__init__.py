"""What configs and training scripts say about precision, and where they are wrong. No torch."""

__version__ = "0.1.0"
