"""The names that options accept: `Literal` types, and tuples of the same names.

The types let a type checker find a misspelt name; the tuples serve checks at run time.
Each name is spelled only here. Tests compare `Format` and `WireFormat` with the native
module.
"""

from __future__ import annotations

from typing import Literal, get_args

Dtype = Literal["bfloat16", "float16", "float32"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

Format = Literal["bf16", "fp8_block128", "mxfp8", "mxfp4", "fp8_block128_e8m0", "nvfp4"]

# Formats that combine and the backward pass can quantise their rows to.
WireFormat = Literal["fp8_block128"]

# Formats of experts' weights, of `jax_ep.experts.quantize_weights`.
WeightFormat = Literal["fp8_block128", "mxfp4"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)

# What `jax_ep.experts.fp8` multiplies for the gradients of weights.
Wgrad = Literal["bf16", "fp8"]
WGRADS: tuple[Wgrad, ...] = get_args(Wgrad)

Reduce = Literal["rank", "source", "none"]
REDUCES: tuple[Reduce, ...] = get_args(Reduce)

ScaleLayout = Literal["rows", "tiled_128x4", "columns"]
SCALE_LAYOUTS: tuple[ScaleLayout, ...] = get_args(ScaleLayout)

Overlap = Literal["sm", "copy", "stream"]
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)

# The transport of a handle, chosen by init if it is given "auto".
HandleTransport = Literal["p2p", "shmem", "collective"]
Transport = Literal["auto", HandleTransport]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SCORES: tuple[Score, ...] = get_args(Score)

# The biases of a layer's router, besides True (only the one for choosing) and False.
RouterBiases = Literal["logits", "both"]
ROUTER_BIASES: tuple[RouterBiases, ...] = get_args(RouterBiases)

# How a checkpoint keeps a matrix; that of a PyTorch Linear is "out_in".
MatrixOrder = Literal["out_in", "in_out"]
MATRIX_ORDERS: tuple[MatrixOrder, ...] = get_args(MatrixOrder)

# The kind of a pending call (dispatch_async, combine_async).
CallKind = Literal["dispatch", "combine"]
