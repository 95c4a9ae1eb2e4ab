"""Grouped matmuls, in 16 bits and quantised: XLA's, and kernels for Hopper GPUs."""
