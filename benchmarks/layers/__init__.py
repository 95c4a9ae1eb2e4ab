"""Benchmarks of whole expert layers, their grouped matmuls and their routers."""
