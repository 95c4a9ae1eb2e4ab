"""Times of single calls, of the kernels alone, and of their steps."""
