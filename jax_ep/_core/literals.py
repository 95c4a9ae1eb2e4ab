"""The names that options take: `Literal` types, and tuples of the same names.

Annotations find a misspelt name before the program runs; the tuples check it at run
time. Each name is spelled here alone. The formats are those of the native module, which
tests compare with `Format` and `WireFormat`.
"""

from __future__ import annotations

from typing import Literal, get_args

Dtype = Literal["bfloat16", "float16", "float32"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

Format = Literal["bf16", "fp8_block128", "mxfp8", "mxfp4", "fp8_block128_e8m0", "nvfp4"]

# What combine and the backward pass can quantise their rows to.
WireFormat = Literal["fp8_block128"]

Reduce = Literal["rank", "source", "none"]
REDUCES: tuple[Reduce, ...] = get_args(Reduce)

ScaleLayout = Literal["rows", "tiled_128x4"]
SCALE_LAYOUTS: tuple[ScaleLayout, ...] = get_args(ScaleLayout)

Overlap = Literal["sm", "copy", "stream"]
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)

# A handle has one of these; "auto" chooses one.
HandleTransport = Literal["p2p", "shmem", "collective"]
Transport = Literal["auto", HandleTransport]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

Score = Literal["softmax", "sigmoid"]
SCORES: tuple[Score, ...] = get_args(Score)

# Of calls in halves.
CallKind = Literal["dispatch", "combine"]
