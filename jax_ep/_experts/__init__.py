"""Grouped matmuls on Hopper."""
