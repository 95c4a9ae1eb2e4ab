"""init, shared handles, and what a process needs before them."""
