"""What other people's configs and training scripts say about precision, and where they are wrong. No torch."""
