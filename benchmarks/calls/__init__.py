"""Benchmarks of single calls, of the kernels alone, and of the steps of a call."""
