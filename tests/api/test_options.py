"""reduce=, fused_shared_expert and skip_a2a: every bit against the oracle."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, options, oracle, quantized, quantizer

pytestmark = pytest.mark.usefixtures("quick_compiles")

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "aligned": {"expert_alignment": 8},
    "cut": {"recv_capacity": 13},
    # Fewer rows than tokens, so that the shared expert's are cut, too.
    "cut_short": {"recv_capacity": 5, "expert_alignment": 4},
    "free_tail": {"zero_tail": False, "expert_alignment": 4},
    "float32": {"dtype": "float32", "combine_dtype": "bfloat16"},
    "wide_wire": {"dtype": "float16", "combine_dtype": "float32"},
}
wide = functools.partial(helpers.normal, spread=6)


def check(config: Any, ranks: int, rng: Any, fill: Any = wide, **made: Any) -> None:
    """Checks a dispatch and a combine of other rows along its route, bit for bit."""
    mesh = helpers.make_mesh(ranks)
    ep = helpers.make_ep(mesh, config)
    assert ep.recv_capacity == oracle.capacity(config, ranks)
    ids = made.pop("ids", None)
    inputs = options.make_inputs(rng, config, ranks, **made)
    if ids is not None:
        inputs.ids = ids
    d = helpers.run_dispatch(ep, mesh, inputs)
    helpers.assert_dispatched(config, d, inputs)
    outputs = oracle.dispatch(config, inputs.tokens, inputs.ids, inputs.weights)
    operands = options.combine_operands(rng, config, outputs, inputs, fill)
    for rows, weights, residual in (operands, (operands[0], None, None)):
        actual = helpers.run_combine(ep, mesh, d.route, rows, weights, residual)
        expected = oracle.combine(config, inputs.ids, rows, weights, residual)
        for rank, y in actual.items():
            helpers.assert_sums(y, expected[rank], f"y of rank {rank}")


@pytest.mark.few(6)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", options.MODES)
def test_matches_oracle(mode: str, shape: str) -> None:
    config = helpers.make_config(**options.changes(mode, SHAPES[shape]))
    rng = np.random.default_rng(zlib.crc32(f"{mode} {shape}".encode()))
    check(config, helpers.some_ranks(4), rng, routing="invalid")


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "n"), [(1, 2), (3, 7), (8, 1), (8, 7)])
@pytest.mark.parametrize("mode", options.MODES)
def test_ranks_and_tokens(mode: str, ranks: int, n: int) -> None:
    """Also with tokens that do not split evenly over ranks, or fewer than ranks."""
    config = helpers.make_config(**options.MODES[mode])
    check(config, ranks, np.random.default_rng(ranks * 8 + n), n=n)


@pytest.mark.few(3)
@pytest.mark.parametrize(("world", "n"), [(1, 5), (2, 7), (2, 8), (4, 6)])
@pytest.mark.parametrize("mode", ["local", "local_shared", "local_shared_source"])
def test_smaller_allreduce_worlds(mode: str, world: int, n: int) -> None:
    """Each world has its own tokens, which its ranks split."""
    changes = options.MODES[mode] | {"allreduce_world_size": world}
    config = helpers.make_config(**changes, expert_alignment=4)
    check(config, 4, np.random.default_rng(world * 8 + n), n=n)


@pytest.mark.parametrize("mode", options.MODES)
def test_masked_tokens(mode: str) -> None:
    """All ids -1 on some ranks, or on all."""
    config = helpers.make_config(**options.MODES[mode])
    for routing in (("none", "full", "none", "random"), "none"):
        check(config, 4, np.random.default_rng(2), routing=routing)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", options.MODES)
def test_values(mode: str) -> None:
    """Infinities, NaNs and denormals; duplicates, also more than experts."""
    config = helpers.make_config(**options.MODES[mode], num_experts=8)
    rng = np.random.default_rng(3)
    with np.errstate(all="ignore"):
        check(config, 4, rng, fill=helpers.any_bits, routing="duplicates")


@pytest.mark.parametrize("mode", options.MODES)
def test_no_token(mode: str) -> None:
    mesh = helpers.make_mesh(4)
    config = helpers.make_config(**options.MODES[mode], expert_alignment=4)
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(8), config, 4)

    def body(x: Any, ids: Any) -> Any:
        d = jax_ep.dispatch(ep, x[:0], ids[:0])
        y = jax_ep.combine(ep, d.tokens, d.route)
        assert y.size == 0
        return d.tokens, d.row_offsets, d.src_info, jax.numpy.sum(y)[None]

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    operands = (helpers.put(mesh, part) for part in (inputs.tokens, inputs.ids))
    tokens, offsets, src_info, total = run(*operands)
    assert not np.any(np.asarray(tokens, np.float32))
    assert not np.any(offsets)
    assert np.all(np.asarray(src_info) == -1)
    assert not np.any(np.asarray(total, np.float32))


@pytest.mark.thorough
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", ["ep", ("ep", "dp")])
@pytest.mark.parametrize("mode", options.MODES)
def test_meshes(mode: str, axes: Any, check_vma: bool) -> None:
    """Several groups, and one group over two axes in another order."""
    mesh = helpers.make_mesh({"dp": 2, "ep": 2})
    config = helpers.make_config(**options.MODES[mode])
    ep = helpers.make_ep(mesh, config, axes)
    groups = [[0, 1], [2, 3]] if axes == "ep" else [[0, 2, 1, 3]]
    rng = np.random.default_rng(9)
    inputs = helpers.make_inputs(rng, config, 4)
    if config.skip_a2a:
        inputs = inputs.pick([0, 0, 3, 3] if axes == "ep" else [0] * 4)
    spec = P(("dp", "ep"))
    operands = (inputs.tokens, inputs.ids, inputs.weights)
    placed = [helpers.put(mesh, part, spec) for part in operands]
    d = helpers.dispatch_fn(ep, mesh, spec, check_vma)(*placed)
    helpers.assert_dispatched(config, d, inputs, groups)
    combine = helpers.combine_fn(ep, mesh, spec, check_vma)
    y = helpers.unstack(combine(d.tokens, d.route, None, None), 4)
    for group in groups:
        part = inputs.pick(group)
        out = oracle.dispatch(config, part.tokens, part.ids, part.weights)
        rows = [rank.tokens for rank in out]
        with np.errstate(all="ignore"):
            expected = oracle.combine(config, part.ids, rows)
        for position, want in zip(group, expected, strict=True):
            helpers.assert_sums(y[position], want)


CHANGES = [
    {"top_k": 4, "recv_capacity": 30},
    {"num_experts": 8, "expert_alignment": 4},
    {"num_experts": 8, "top_k": 5, "dtype": "float32"},
]


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    st.sampled_from(list(options.MODES)),
    st.sampled_from(CHANGES),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_any_routing(mode: str, changes: Any, seed: int, data: st.DataObject) -> None:
    config = helpers.make_config(**options.changes(mode, changes))
    experts = st.one_of(
        st.integers(-2, config.num_experts + 4),
        st.sampled_from([helpers.INT_MIN, helpers.INT_MAX]),
    )
    pool = np.array(data.draw(st.lists(experts, min_size=1, max_size=9)), np.int32)
    rng = np.random.default_rng(seed)
    ids = list(rng.choice(pool, (4, config.max_tokens_per_rank, config.top_k)))
    check(config, 4, rng, ids=[ids[0]] * 4 if config.skip_a2a else ids)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["rows", "tiled_128x4"])
@pytest.mark.parametrize("mode", ["shared", "local", "local_shared"])
@pytest.mark.parametrize("name", quantized.QUANTIZED)
def test_formats(name: str, mode: str, layout: str) -> None:
    """Rows of the shared expert and of local experts in every format."""
    if layout != "rows" and name not in quantizer.TILED:
        pytest.skip("no tiled scales")
    mesh = helpers.make_mesh(4)
    changes = options.MODES[mode] | {"scale_layout": layout, "expert_alignment": 4}
    config = helpers.make_config(**quantized.config_of(name, **changes))
    ep = helpers.make_ep(mesh, config)
    inputs = options.make_inputs(np.random.default_rng(4), config, 4)
    quantized.check(mesh, ep, inputs, 0.5 if name == "nvfp4" else None)


@pytest.mark.parametrize("mode", ["source", "none", "shared", "shared_source"])
def test_rows_quantised_on_the_wire(mode: str) -> None:
    mesh = helpers.make_mesh(4)
    changes = options.MODES[mode] | {"combine_format": "fp8_block128"}
    config = helpers.make_config(hidden_size=256, **changes)
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(5)
    inputs = helpers.make_inputs(rng, config, 4, fill=helpers.normal)
    d = helpers.run_dispatch(ep, mesh, inputs)
    outputs = oracle.dispatch(config, inputs.tokens, inputs.ids, inputs.weights)
    rows, weights, residual = options.combine_operands(
        rng, config, outputs, inputs, helpers.normal
    )

    def wire(sums: np.ndarray) -> np.ndarray:
        coded = quantizer.quantize(sums[None], "fp8_block128", 1.0)
        return quantizer.dequantize(*coded, "fp8_block128", 1.0)[0]

    actual = helpers.run_combine(ep, mesh, d.route, rows, weights, residual)
    expected = oracle.combine(config, inputs.ids, rows, weights, residual, wire)
    for rank, y in actual.items():
        helpers.assert_sums(y, expected[rank])


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", ["shared", "local", "local_shared"])
@pytest.mark.parametrize("value", [24, 25, 28, 1000, helpers.INT_MAX, -2])
def test_invalid_ids_are_reported_as_they_were(mode: str, value: int) -> None:
    mesh = helpers.make_mesh(4)
    with helpers.init(mesh, **options.MODES[mode]) as ep:
        inputs = options.make_inputs(np.random.default_rng(6), ep.config, 4)
        inputs.ids[0][3, 1] = value
        helpers.run_dispatch(ep, mesh, inputs)
        # A process knows only its own devices; without an exchange all have these ids.
        told = [
            rank
            for rank, device in enumerate(mesh.devices.flat)
            if device.process_index == jax.process_index()
            and (inputs.ids[rank] == value).any()
        ]
        if not told:
            assert helpers.IN_PROCESSES
            ep.check()
            return
        with pytest.raises(
            jax_ep.InvalidIdError,
            match=f"got {value} at rank {told[0]}, token 3, k 1 ",
        ):
            ep.check()


@pytest.mark.parametrize("mode", ["local", "local_source"])
def test_partial_sums_are_the_whole(mode: str) -> None:
    """The psum of the ranks' results equals the result with an exchange."""
    mesh = helpers.make_mesh(4)
    config = helpers.make_config(**options.MODES[mode], dtype="float32")
    ep = helpers.make_ep(mesh, config)
    inputs = options.make_inputs(
        np.random.default_rng(7), config, 4, fill=helpers.normal
    )

    def body(x: Any, ids: Any, w: Any) -> Any:
        d = jax_ep.dispatch(ep, x, ids, w)
        weights = w if config.reduce == "source" else d.router_weights
        return jax.lax.psum(jax_ep.combine(ep, d.tokens, d.route, weights), "ep")

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P()))
    x, ids, w = inputs.tokens[0], inputs.ids[0], inputs.weights[0]
    y = run(*(helpers.put(mesh, [part], P()) for part in (x, ids, w)))
    np.testing.assert_allclose(
        y, x * np.sum(np.where(ids < 0, 0, w), axis=1)[:, None], rtol=1e-5, atol=1e-6
    )
