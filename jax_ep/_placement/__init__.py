"""How `jax_ep.placement` chooses places, and moves weights to them."""
