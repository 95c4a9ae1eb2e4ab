"""Grouped matmuls, in 16 bits and of codes: XLA's, and kernels for Hopper GPUs."""
