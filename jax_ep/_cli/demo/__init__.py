"""`jax-ep demo`: trains a byte-level mixture-of-experts model, expert-parallel.

`moe.py` is the layer with jax_ep, `model.py` the network around it, `dense.py` the same
layer without jax_ep, `train.py` the optimiser, and `run.py` the main program.
"""
