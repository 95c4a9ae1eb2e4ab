"""`jax-ep demo`: trains a byte-level mixture-of-experts model, expert-parallel.

`moe.py` is the layer on jax_ep, `model.py` the network around it, `dense.py` the same
layer without jax_ep, `train.py` the optimiser, `run.py` the command's course.
"""
