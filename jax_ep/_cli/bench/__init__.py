"""`jax-ep bench`: times dispatch and combine; benchmarks/ uses the same programs."""
