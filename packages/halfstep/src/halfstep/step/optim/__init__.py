"""Optimizers by name and the ones of halfstep: 8-bit AdamW, bf16 AdamW, single-pass AdamW, with their kernels."""
