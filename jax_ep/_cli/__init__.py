"""The command jax-ep."""
