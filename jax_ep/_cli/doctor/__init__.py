"""`jax-ep doctor`: reports what this machine can do, and why."""
