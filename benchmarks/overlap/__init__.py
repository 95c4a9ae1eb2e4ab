"""Benchmarks of how much of an exchange hides beside other work."""
