"""Grouped matmuls: XLA's, and Pallas kernels for Hopper GPUs."""
