"""Benchmarks of what a host's GPUs can do at most, and what their launches wait for."""
