"""jax_ep's native modules for NVIDIA GPUs and CUDA 13, which `import jax_ep` finds."""
