"""Faster implementations of torch's layers, restructured for the GPU. They hold no parameters."""
