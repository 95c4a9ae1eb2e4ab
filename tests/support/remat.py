"""A layer under jax.checkpoint, and the exchanges in its programs."""

from __future__ import annotations

import jax

import jax_ep
from support import moe


def exchanges(fn, *args) -> int:
    """How many exchanges the compiled program of `fn` has."""
    return moe.exchanges(jax.jit(fn).lower(*args).compile())


def bare(fn):
    return fn


def save_route(fn):
    return jax.checkpoint(fn, policy=jax_ep.save_route)


def arguments(s: moe.Setup):
    x, ids, w, p = s.global_arrays()
    return x, w, p, ids
