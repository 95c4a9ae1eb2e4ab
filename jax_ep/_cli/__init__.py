"""The command `jax-ep`."""
