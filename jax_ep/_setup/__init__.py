"""init, shared handles, and the preparation of a process for them."""
