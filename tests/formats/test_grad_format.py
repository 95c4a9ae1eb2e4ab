"""Quantised backward exchanges: what they send is NumPy's, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, oracle, quantizer
from support.quantized_grads import HIDDEN, cotangents, handle, pulled


def over_the_wire(sums: np.ndarray) -> np.ndarray:
    name = "fp8_block128"
    return quantizer.dequantize(*quantizer.quantize(sums, name), name)


@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
@pytest.mark.parametrize("size", [1e-4, 1e6])
def test_grad_format_of_dispatch(name: str, size: float) -> None:
    """Its backward is a combine that quantises each rank's float32 sums."""
    mesh, ep = handle(dispatch_format=name, grad_format="fp8_block128", dtype="float32")
    inputs = helpers.make_inputs(
        np.random.default_rng(5), ep.config, ep.ep_size, fill=helpers.normal
    )
    ct, ct_weights = cotangents(ep, "float32", size)
    dx, dw = pulled(mesh, ep, inputs, ct, ct_weights)
    wanted = oracle.combine(ep.config, inputs.ids, ct, wire=over_the_wire)
    _, wanted_weights = oracle.dispatch_vjp(ep.config, inputs.ids, ct, ct_weights)
    exact, _ = oracle.dispatch_vjp(ep.config, inputs.ids, ct, ct_weights)
    for rank, actual in helpers.unstack(dx, ep.ep_size).items():
        helpers.assert_bits(actual, wanted[rank])
        error = np.abs(actual - exact[rank]).max() / np.abs(exact[rank]).max()
        assert 0 < error < 1 / 27
    for rank, actual in helpers.unstack(dw, ep.ep_size).items():
        helpers.assert_bits(actual, wanted_weights[rank].astype(np.float32))


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
def test_grad_format_of_combine(dtype: str) -> None:
    """Its backward sends quantised cotangents along the route."""
    mesh, ep = handle(grad_format="fp8_block128", dtype=dtype)
    rng = np.random.default_rng(6)
    inputs = helpers.make_inputs(rng, ep.config, ep.ep_size, fill=helpers.normal)
    np_dtype = oracle.DTYPES[dtype]
    dy = [helpers.normal(rng, (8, HIDDEN), np_dtype) for _ in range(ep.ep_size)]

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    def body(tokens: Any, ids: Any, dy: Any) -> Any:
        d = jax_ep.dispatch(ep, tokens, ids)
        _, pull = jax.vjp(lambda rows: jax_ep.combine(ep, rows, d.route), d.tokens)
        return pull(dy)[0]

    operands = (inputs.tokens, inputs.ids, dy)
    got = jax.jit(body)(*(helpers.put(mesh, part) for part in operands))
    sent = [over_the_wire(part).astype(np_dtype) for part in dy]
    wanted = oracle.dispatch(ep.config, sent, inputs.ids)
    for rank, actual in helpers.unstack(got, ep.ep_size).items():
        helpers.assert_bits(actual, wanted[rank].tokens)
