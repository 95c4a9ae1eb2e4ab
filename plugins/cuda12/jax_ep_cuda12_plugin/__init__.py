"""jax_ep's native modules for NVIDIA GPUs and CUDA 12, which `import jax_ep` finds."""
