"""Recorders of test runs; benchmarks/__init__.py says how to run them."""
