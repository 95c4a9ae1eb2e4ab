"""jax-ep doctor: what this machine can do and why."""
