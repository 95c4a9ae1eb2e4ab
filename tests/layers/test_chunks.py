"""Layers in chunks equal layers in one, and need the memory of a chunk."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import experts
from support import call_order, gpus, helpers, moe_dense
from support.call_order import mesh as mesh
from support.errors import raises
from support.moe_ffn import config, param_specs

pytestmark = pytest.mark.usefixtures("quick_compiles")

HIDDEN, EXPERTS = moe_dense.HIDDEN, moe_dense.EXPERTS
T, CHUNKS = 8, 4


def relu_squared(up):
    return jnp.square(jax.nn.relu(up))


def of_users(rows, gate_up, down, group_sizes):
    """Experts that compute in the dtype of their weights."""
    gate, up = (
        experts.grouped_matmul(rows.astype(side.dtype), side, group_sizes)
        for side in (gate_up[:, :, 0], gate_up[:, :, 1])
    )
    h = jax.nn.silu(gate) * up
    return experts.grouped_matmul(h, down, group_sizes).astype(rows.dtype)


# Options of a layer, and of its config.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "of the user's": ({"experts": of_users}, {}),
    "fused": ({}, {"fused_shared_expert": True}),
    "weights on inputs": (
        {"apply_router_weight_on_input": True},
        {"top_k": 1},
    ),
    "identity": ({"num_identity_experts": 3}, {}),
    "given ids": ({"topk_ids": True}, {}),
    "mxfp8": ({}, {"dispatch_format": "mxfp8", "hidden_size": 32}),
    "at the source": ({}, {"reduce": "source"}),
    "fused, at the source, copied": (
        {},
        {"fused_shared_expert": True, "reduce": "source", "overlap": "copy"},
    ),
    "copied": ({}, {"overlap": "copy"}),
    "on a stream": ({}, {"overlap": "stream"}),
    "mxfp8, copied": (
        {},
        {"dispatch_format": "mxfp8", "hidden_size": 32, "overlap": "copy"},
    ),
}


AXES = ({"ep": 2, "tp": 2}, {"ep": 4}, {"dp": 2, "ep": 2})
# Each case on the first axes, and the first one on all; the rest is thorough.
SOME = [
    pytest.param(
        case,
        axes,
        marks=[] if at == 0 or case == "plain" else pytest.mark.thorough,
        id=f"{case}-{'-'.join(axes)}",
    )
    for case in CASES
    for at, axes in enumerate(AXES)
]


def layer(case: str, axes: dict[str, int]) -> Any:
    """(mesh, params, options, changes of the config) of a case."""
    mesh = helpers.make_mesh(helpers.fit(axes))
    options, changes = CASES[case]
    hidden = changes.get("hidden_size", HIDDEN)
    inner = moe_dense.INNER
    params = moe_dense.params(
        expert_bias=options.get("experts") is None,
        shared_gate="fused_shared_expert" not in changes,
        shared_inner=inner,
        hidden=hidden,
    )
    if "num_identity_experts" in options:
        router = moe_dense.params(experts=EXPERTS + 3, hidden=hidden)["router"]
        params["router"] = router
    return mesh, params, dict(options), changes


def results(mesh: Any, params: Any, options: Any, config: Any, chunks: int, n: int):
    """Loss, result, statistics and gradients of a layer, for n tokens per rank."""
    tp = "tp" if "tp" in mesh.axis_names else None
    tokens = P(tuple(name for name in mesh.axis_names if name != "tp"))
    ranks = mesh.size // mesh.shape.get("tp", 1)
    rng = np.random.default_rng(1)
    shape = (2, n * ranks, config.hidden_size)
    x, residual = rng.standard_normal(shape).astype(config.dtype)
    mask = rng.random(n * ranks) < 0.8
    own = dict(options)
    ids = None
    if own.pop("topk_ids", False):
        order = rng.random((n * ranks, EXPERTS)).argsort(1)
        ids = order[:, : config.top_k].astype(np.int32)
    ep = helpers.make_ep(mesh, config)

    def body(params, x, mask, residual, ids):
        given = {"mask": mask, "residual": residual, "topk_ids": ids}
        return jax_ep.moe_ffn(ep, x, params, tp_axis=tp, chunks=chunks, **given, **own)

    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(param_specs(params, tp), *[tokens] * 4),
        out_specs=(tokens, jax_ep.MoEAux.specs(tokens[0])),
    )

    def loss(params, x, residual):
        y, aux = run(params, x, mask, residual, ids)
        total = jnp.sum(jnp.sin(y.astype(jnp.float32)))
        return total + aux.balance_loss + aux.z_loss, (y, aux)

    grad = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    found = jax.jit(grad)(params, x, residual)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), found)


def assert_close(found: Any, wanted: Any, limit: float = 2e-6) -> None:
    paths = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, want), ours in zip(paths, jax.tree.leaves(found), strict=True):
        atol = limit * max(np.abs(want).max(initial=0), 1e-3)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(ours, want, rtol=0, atol=atol, err_msg=name)


@pytest.mark.few(2)
@pytest.mark.parametrize(("case", "axes"), SOME)
def test_a_layer_in_chunks_is_the_layer(case, axes):
    """T does not divide the tokens, and the last chunk has ids of -1."""
    mesh, params, options, changes = layer(case, axes)
    gpus.require_stream(changes.get("overlap", "sm"), helpers.TRANSPORT)
    n = T * CHUNKS - 3
    wanted, found = (
        results(
            mesh, params, options, config(max_tokens_per_rank=most, **changes), c, n
        )
        for most, c in ((n, 1), (T, CHUNKS))
    )
    assert_close(found, wanted)
    (_, (y, aux)), _ = found
    assert np.abs(y).max() > 0.1
    assert aux.num_dropped.sum() == 0 == aux.num_invalid.sum()


def test_few_tokens_are_one_chunk():
    """As in decode: the program is that of a layer without chunks."""
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    ep, params = helpers.make_ep(mesh, config()), moe_dense.params()

    def text(**options: Any) -> str:
        def body(params, x):
            return jax_ep.moe_ffn(ep, x, params, **options)[0]

        specs = (param_specs(params, None), P("ep"))
        run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("ep"))
        x = jnp.zeros((T * mesh.size, HIDDEN))
        return jax.jit(run).lower(params, x).as_text()

    assert text(chunks=CHUNKS) == text() == text(chunks=1)


@pytest.mark.parametrize(
    ("overlap", "pending"),
    [("sm", None), ("copy", None), ("stream", None), ("copy", 0)],
)
def test_the_next_dispatch_runs_beside_the_experts(overlap, pending):
    """Barriers keep the experts between its halves, forward and backward.

    On a stream one more lets the exchange of the cotangents, which waits for the
    dispatch, begin after the products that are made again.
    """
    gpus.require_stream(overlap, helpers.TRANSPORT)
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    made = config(overlap=overlap, pending_calls=pending)
    ep, params = helpers.make_ep(mesh, made), moe_dense.params(shared=False)
    x = jnp.zeros((CHUNKS * T * mesh.size, HIDDEN))

    def product(rows, gate_up, down, sizes):
        return rows @ gate_up[0, :, 0] @ down[0]

    def body(params, x):
        how = {"experts": product, "chunks": CHUNKS}
        return jax_ep.moe_ffn(ep, x, params, **how)[0]

    specs = (param_specs(params, None), P("ep"))
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("ep"))
    grad = jax.grad(lambda params, x: jnp.sum(run(params, x)))
    split = overlap != "sm" and pending != 0
    forward = ["barrier", "product", "barrier"] if split else ["product"]
    backward = forward
    if overlap == "stream":
        backward = ["barrier", "product", "barrier", "product", "barrier"]
    found = list(loops(jax.make_jaxpr(grad)(params, x).jaxpr))
    assert [kinds(body) for body in found] == [forward, backward]


def loops(jaxpr):
    """The bodies of loops over chunks."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and eqn.params["length"] == CHUNKS:
            yield eqn.params["jaxpr"].jaxpr
            continue
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from loops(inner)


def kinds(jaxpr):
    """What follows what in the body of a loop."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            found.append("barrier")
        elif "dot_general" in str(eqn) and found[-1:] != ["product"]:
            found.append("product")
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_flax_layers(kind):
    """With FSDP, a tensor axis and padding."""
    pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")
    from flax import nnx

    import jax_ep.flax.linen
    from support.flax_layers import fields, nnx_layer

    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2, "tp": 2}))
    params = moe_dense.params(expert_bias=True)
    x = np.random.default_rng(2).standard_normal((5, 7, HIDDEN)).astype(np.float32)
    most = -(-35 // (mesh.shape["dp"] * mesh.shape["ep"])) + 1
    how: dict[str, Any] = {"fsdp_axis_name": "dp", "expert_bias": True}
    both = []
    for chunks in (1, 3):
        own = {**how, "chunks": chunks, "max_tokens_per_rank": most}
        if kind == "nnx":
            layer = nnx_layer(mesh, params, **own)

            def loss(layer, x):
                y, aux = layer(x, return_aux=True)
                return jnp.sum(jnp.sin(y)) + aux.balance_loss, (y, aux.load)

            grad = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)
            found, (grads, of_x) = nnx.jit(grad)(layer, x)
            both.append((found, {name: grads[name][...] for name in grads}, of_x))
            ep = layer.ep
        else:
            layer = jax_ep.flax.linen.MoE(**fields(mesh, **own))
            given = {**params, "router_kernel": params["router"]}
            del given["router"]

            def loss(params, x, layer=layer):
                y, aux = layer.apply({"params": params}, x, return_aux=True)
                return jnp.sum(jnp.sin(y)) + aux.balance_loss, (y, aux.load)

            grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
            both.append(jax.jit(grad)(given, x))
            ep = layer._made().handle()
        assert ep.config.max_tokens_per_rank == -(-most // chunks)
    assert_close(both[1], both[0])


def test_stages_of_a_pipeline():
    """A vmap over a mesh axis, whose entries each have weights and losses."""
    pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")
    from flax import nnx

    from support.flax_layers import fields

    mesh = helpers.make_mesh(helpers.fit({"stage": 2, "ep": 2, "tp": 2}))
    x = np.random.default_rng(9).standard_normal((2, 22, HIDDEN)).astype(np.float32)

    def of(chunks):
        most = 22 // mesh.shape["ep"] + 1
        own = {"chunks": chunks, "spec": P("ep"), "max_tokens_per_rank": most}
        layer = jax_ep.flax.MoE(**fields(mesh, **own), rngs=nnx.Rngs(0))
        graph, state = nnx.split(layer)
        state = jax.tree.map(lambda leaf: jnp.stack([leaf, 1.1 * leaf]), state)

        def one(state, x):
            y, aux = nnx.merge(graph, state)(x, return_aux=True)
            return y, aux.balance_loss

        def loss(state, x):
            y, losses = jax.vmap(one, spmd_axis_name="stage")(state, x)
            return jnp.sum(jnp.sin(y)) + losses @ jnp.arange(1.0, 3.0), y

        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        return jax.jit(grad)(state, x)

    assert_close(of(3), of(1))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["closed over", "scattered", "source", "mxfp8"])
def test_apply_experts(name):
    """Also its counts, and the gradients of what `fn` closes over."""
    axes = {"ep": 2, "tp": 2} if name == "scattered" else {"ep": 4}
    mesh = helpers.make_mesh(helpers.fit(axes))
    scatter = "tp" if "tp" in mesh.axis_names else None
    ranks, hidden = mesh.shape["ep"], 32
    params = moe_dense.params(shared=False, hidden=hidden)
    fields: dict[str, Any] = {}
    if name == "source":
        fields = {"reduce": "source", "capacity_factor": 4.0}
    if name == "mxfp8":
        fields = {"dispatch_format": "mxfp8"}
    rng = np.random.default_rng(3)
    n = 4 * T - 1
    x = rng.standard_normal((n * ranks, hidden)).astype(np.float32)
    ids = rng.random((n * ranks, EXPERTS)).argsort(1)[:, :3].astype(np.int32)
    ids[:2] = EXPERTS + 5
    weights = rng.random((n * ranks, 3)).astype(np.float32)

    def body(chunks, gate_up, down, scale, x, ids, weights):
        def fn(rows, group_sizes, expert_of_row):
            sides = gate_up.reshape(*gate_up.shape[:2], -1)
            both = experts.grouped_matmul(rows, sides, group_sizes)
            gate, up = jnp.split(both, 2, axis=1)
            # Rows past the groups, and their cotangents, may hold anything.
            held = jnp.arange(len(rows)) < jnp.sum(group_sizes)
            gate, up = (jnp.where(held[:, None], side, 0) for side in (gate, up))
            h = jnp.where(held[:, None], jnp.tanh(scale * gate) * up, 0)
            return experts.grouped_matmul(h, down, group_sizes)

        return jax_ep.apply_experts(
            fn,
            x,
            ids,
            weights,
            num_experts=EXPERTS,
            axis_name="ep",
            mesh=mesh,
            scatter_axis=scatter,
            transport=helpers.TRANSPORT,
            return_dropped=True,
            return_invalid=True,
            chunks=chunks,
            **fields,
        )

    def of(chunks):
        run = jax.shard_map(
            functools.partial(body, chunks),
            mesh=mesh,
            in_specs=(
                P("ep", None, None, scatter),
                P("ep", scatter),
                P(),
                *[P("ep")] * 3,
            ),
            out_specs=(P("ep", scatter), P("ep"), P("ep")),
        )

        def loss(gate_up, down, scale, x, weights):
            y, dropped, invalid = run(gate_up, down, scale, x, ids, weights)
            return jnp.sum(jnp.sin(y)), (y, dropped, invalid)

        grad = jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)
        scale = np.float32(1.5)
        return jax.jit(grad)(params["gate_up"], params["down"], scale, x, weights)

    found, wanted = of(4), of(1)
    assert_close(found, wanted, 5e-6)  # the gradient of `scale` is the sum of all rows
    (_, (_, dropped, invalid)), grads = found
    assert np.sum(dropped) == 0
    assert np.sum(invalid) == 6
    assert np.abs(grads[2]) > 0.1


@pytest.mark.parametrize("fsdp", [None, "dp"])
def test_sharded_apply_experts(fsdp):
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2}))
    params = moe_dense.params(shared=False)
    weights_of = {name: params[name] for name in ("gate_up", "down")}
    rng = np.random.default_rng(4)
    shape = (mesh.size, 9)
    x = rng.standard_normal((*shape, HIDDEN)).astype(np.float32)
    ids = rng.random((*shape, EXPERTS)).argsort(-1)[..., :3].astype(np.int32)
    weights = rng.random((*shape, 3)).astype(np.float32)

    def fn(params, rows, group_sizes, expert_of_row):
        return of_users(rows, params["gate_up"], params["down"], group_sizes)

    def of(chunks):
        def loss(params, x, weights):
            y = jax_ep.sharded.apply_experts(
                fn,
                params,
                x,
                ids,
                weights,
                num_experts=EXPERTS,
                axis_name="ep",
                mesh=mesh,
                fsdp_axis=fsdp,
                transport=helpers.TRANSPORT,
                chunks=chunks,
            )
            return jnp.sum(jnp.sin(y)), y

        grad = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        return jax.jit(grad)(weights_of, x, weights)

    assert_close(of(3), of(1))


def test_experts_that_close_over_arrays():
    """An activation with a trained array, and experts that add a trained bias."""
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    params = moe_dense.params()
    rng = np.random.default_rng(5)
    n = 4 * T
    x = rng.standard_normal((n * mesh.size, HIDDEN)).astype(np.float32)
    own = {
        "slope": np.float32(1.25),
        "bias": rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32),
    }

    def of(chunks):
        ep = helpers.make_ep(mesh, config(max_tokens_per_rank=n // chunks))

        def body(params, own, x):
            def run(rows, gate_up, down, group_sizes, *, activation):
                given = rows, gate_up, down, group_sizes
                y = experts.auto(*given, activation=activation)
                return experts.add_bias(y, own["bias"], group_sizes)

            def activation(gate, up):
                return jnp.tanh(own["slope"] * gate) * up

            how = {"experts": run, "activation": activation, "chunks": chunks}
            return jax_ep.moe_ffn(ep, x, params, **how)[0]

        specs = {"slope": P(), "bias": P("ep")}
        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(param_specs(params, None), specs, P("ep")),
            out_specs=P("ep"),
        )

        def loss(params, own, x):
            return jnp.sum(jnp.sin(run(params, own, x)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(params, own, x)

    found = of(4)
    assert_close(found, of(1))
    assert all(np.abs(leaf).max() > 0.1 for leaf in jax.tree.leaves(found[1][1]))


def test_in_a_scan_with_remat_and_a_vmap():
    """Layers in a stack, each rematerialised, for two batches one after the other."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    stack = [moe_dense.params(seed, shared=False) for seed in range(2)]
    stack = jax.tree.map(lambda *leaves: np.stack(leaves), *stack)
    n = 3 * T
    rng = np.random.default_rng(6)
    x = rng.standard_normal((2, n * mesh.size, HIDDEN)).astype(np.float32)

    def of(chunks):
        ep = helpers.make_ep(mesh, config(max_tokens_per_rank=n // chunks))

        @functools.partial(jax.checkpoint, policy=jax_ep.save_route)
        def one(x, params):
            return x + jax_ep.moe_ffn(ep, x, params, chunks=chunks)[0], None

        def body(stack, x):
            return jax.vmap(lambda x: jax.lax.scan(one, x, stack)[0])(x)

        specs = param_specs(stack, None)
        specs = {name: P(None, *spec) for name, spec in specs.items()}
        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(specs, P(None, "ep")),
            out_specs=P(None, "ep"),
        )

        def loss(stack, x):
            return jnp.sum(jnp.sin(run(stack, x)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(stack, x)

    assert_close(of(3), of(1), 1e-5)


def test_fp8_experts():
    """Weights are quantised once, not for each chunk; gradients are of the masters."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    hidden, inner, n = 128, 128, 4 * T
    params = moe_dense.params(shared=False, hidden=hidden, inner=inner)
    rng = np.random.default_rng(7)
    x = rng.standard_normal((n * mesh.size, hidden)).astype(np.float32)
    fields = {"hidden_size": hidden, "dispatch_format": "fp8_block128"}

    def of(chunks):
        made = config(max_tokens_per_rank=n // chunks, **fields)
        ep = helpers.make_ep(mesh, made)

        def body(params, x):
            how = {"experts": experts.fp8, "chunks": chunks}
            return jax_ep.moe_ffn(ep, x, params, **how)[0]

        specs = (param_specs(params, None), P("ep"))
        run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("ep"))

        def loss(params, x):
            return jnp.sum(jnp.sin(run(params, x)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)

    # Rows of a token are quantised alike in any chunk.
    assert_close(of(4), of(1), 1e-4)


def test_sums_of_bfloat16_gradients():
    """Of many chunks they are no worse than of one: the sums are in float32."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    params = moe_dense.params()
    n, count = 16 * T, 16
    exact = results(mesh, params, {}, config(max_tokens_per_rank=n), 1, n)[1][0]
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    def errors(chunks):
        made = config(max_tokens_per_rank=n // chunks, dtype="bfloat16")
        found = results(mesh, low, {}, made, chunks, n)[1][0]
        return {
            name: np.linalg.norm(found[name] - exact[name])
            / np.linalg.norm(exact[name])
            for name in ("gate_up", "down", "shared_gate_up", "shared_down")
        }

    whole, parts = errors(1), errors(count)
    for name, error in parts.items():
        assert error < 1.1 * whole[name], (name, parts, whole)


@pytest.mark.parametrize("gradients", [False, True])
def test_memory(gradients):
    """With room for the worst case, an eighth of the tokens needs a fifth at most."""
    mesh = helpers.make_mesh(helpers.some_ranks(8))
    # The bound is for the worst-case room of 8 ranks. One rank has room for its own
    # rows alone, and there 8 chunks took half of what one takes.
    if mesh.size < 8:
        pytest.skip("needs 8 ranks: with fewer, tokens and gradients are most of it")
    hidden = inner = 1024
    n, groups = 4096, 2 * mesh.size
    weights = 2 * 2 * hidden * 3 * inner

    def temporaries(chunks: int) -> int:
        made = config(
            num_experts=groups,
            top_k=2,
            hidden_size=hidden,
            max_tokens_per_rank=n // chunks,
            dtype="bfloat16",
        )
        ep = helpers.make_ep(mesh, made)

        def body(params, x):
            return jax_ep.moe_ffn(ep, x, params, chunks=chunks)[0]

        shapes = {
            "router": (hidden, groups),
            "gate_up": (groups, hidden, 2, inner),
            "down": (groups, inner, hidden),
        }
        params, x = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
            (shapes, (n * mesh.size, hidden)),
            is_leaf=lambda leaf: isinstance(leaf, tuple) and isinstance(leaf[0], int),
        )
        specs = (param_specs(params, None), P("ep"))
        run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("ep"))
        call = run
        if gradients:

            def loss(params, x):
                return jnp.sum(run(params, x).astype(jnp.float32))

            call = jax.grad(loss, argnums=(0, 1))
        sizes = jax.jit(call).lower(params, x).compile().memory_analysis()
        return sizes.temp_size_in_bytes - weights

    assert temporaries(8) < temporaries(1) / 5


@pytest.mark.parametrize("chunks", [0, -1, 2.0, True, "2"])
def test_chunks_must_be_a_positive_int(chunks):
    ep = helpers.make_ep(helpers.make_mesh(helpers.some_ranks(2)), config())
    with raises() as caught:
        jax.shard_map(
            lambda x: jax_ep.moe_ffn(ep, x, {}, chunks=chunks)[0],
            mesh=ep.mesh,
            in_specs=P("ep"),
            out_specs=P("ep"),
        )(np.zeros((2 * T, HIDDEN), np.float32))
    assert "chunks must be an int of at least 1" in str(caught.value)


def test_too_many_tokens_and_second_derivatives():
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    ep, params = helpers.make_ep(mesh, config()), moe_dense.params()

    def run(params, x):
        def body(params, x):
            return jax_ep.moe_ffn(ep, x, params, chunks=2)[0]

        specs = (param_specs(params, None), P("ep"))
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("ep"))(
            params, x
        )

    def loss(x):
        return jnp.sum(jnp.sin(run(params, x)))

    x = np.zeros((mesh.size * (2 * T + 1), HIDDEN), np.float32)
    with raises() as caught:
        jax.eval_shape(run, params, x)
    assert "tokens must be at most chunks * max_tokens_per_rank = 2 * 8" in str(
        caught.value
    )
    with raises() as caught:
        twice = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))
        jax.eval_shape(twice, x[: mesh.size * 2 * T])
    assert "has first derivatives only" in str(caught.value)


def test_calls_follow_each_other_from_part_to_part(mesh):
    """Each part's first call comes after the last one of the part before."""
    ep = call_order.p2p_handle(mesh)
    most = ep.config.max_tokens_per_rank
    hidden, groups = ep.config.hidden_size, ep.config.num_experts
    rng = np.random.default_rng(8)
    shapes = {
        "router": (hidden, groups),
        "gate_up": (groups, hidden, 2, 8),
        "down": (groups, 8, hidden),
    }
    params = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    x = jnp.zeros((2 * 3 * most, hidden), jnp.bfloat16)

    def body(params, x):
        def loss(params, x):
            y = jax_ep.moe_ffn(ep, x, params, chunks=3)[0]
            y = jax_ep.moe_ffn(ep, y, params, chunks=3)[0]
            return jnp.sum(y.astype(jnp.float32))

        return jax.grad(loss, argnums=1)(params, x)

    specs = (param_specs(params, None), P("ep"))
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("ep"))
    text = jax.jit(run).lower(params, x).as_text()
    loops = call_order.loops(text)
    # Two layers forward; then for each of their parts its rows again, the cotangents of
    # rows, and those of tokens.
    forward = ["ep_dispatch", "ep_combine"]
    backward = ["ep_dispatch", "ep_dispatch_cached", "ep_combine"]
    assert [loop.targets for loop in loops] == [*[forward] * 2, *[backward] * 2]
    assert [loop.after for loop in loops] == [None, 0, 1, 2]
    assert all(loop.chained for loop in loops)
