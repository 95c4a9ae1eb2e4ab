"""Layers as trainers run them: a mesh with all their axes, scan, remat, stages, AOT.

Compared with the dense formula in float64.
"""

from __future__ import annotations

import functools
import os
import pathlib
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep.router import Router
from support import helpers, moe_dense

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")

from flax import nnx

import jax_ep
import jax_ep.flax
from support.flax_layers import fields
from support.launch import run_to_end

pytestmark = pytest.mark.usefixtures("quick_compiles")

AXES = ("data", "stage", "fsdp", "context", "expert", "tensor")
MESHES = {
    "data 2 x ep 4": {"data": 2, "expert": 4},
    "fsdp 2 x ep 4": {"fsdp": 2, "expert": 4},
    "fsdp 2 x tensor 2 x ep 2": {"fsdp": 2, "tensor": 2, "expert": 2},
    "context 2 x ep 4": {"context": 2, "expert": 4},
}
LAYERS, BATCH, LENGTH = 2, 8, 4
SPEC = P(("data", "fsdp", "expert"), "context")
NAMES = ("jax_ep_route", "jax_ep_rows", "jax_ep_out")
BIASED = {"expert_bias": True, "activation": moe_dense.clipped}


def make_mesh(sizes):
    """A mesh with all axes of trainers, most of size 1."""
    return helpers.make_mesh({name: sizes.get(name, 1) for name in AXES})


def told(mesh, **changes):
    found = {
        "axis_name": "expert",
        "tp_axis_name": "tensor",
        "fsdp_axis_name": "fsdp",
        "spec": SPEC,
        "capacity_factor": 1.25,
    }
    return fields(mesh, **found | changes)


def values(*, biased):
    """Stacked parameters of all layers, and x."""
    each = [moe_dense.params(i, expert_bias=biased) for i in range(LAYERS)]
    rng = np.random.default_rng(9)
    x = rng.standard_normal((BATCH, LENGTH, moe_dense.HIDDEN)).astype(np.float32)
    return jax.tree.map(lambda *a: np.stack(a), *each), x


def total(y, losses):
    return jnp.mean(jnp.sin(y / 4) * (1 + jnp.arange(y.shape[-1]))) + losses


def dense_layer(params, x, *, biased):
    """(y, balance and z loss) of one layer."""
    flat = x.reshape(-1, moe_dense.HIDDEN)
    _, ids = jax.lax.top_k(flat @ params["router"], moe_dense.TOP_K)
    chosen = jax.nn.one_hot(ids, moe_dense.EXPERTS, dtype=int).sum(1) > 0
    kind = moe_dense.clipped if biased else moe_dense.swiglu
    y, balance, z = moe_dense.layer(params, flat, chosen, Router(), activation=kind)
    return y.reshape(x.shape), balance + z


@functools.cache
def dense(*, biased, stages=False):
    """(y, gradients of params and x) of the stack, or of each layer separately."""

    def loss(params, x):
        losses = 0.0
        ys = []
        for index in range(LAYERS):
            own = jax.tree.map(lambda a, i=index: a[i], params)
            y, more = dense_layer(own, x[index] if stages else x, biased=biased)
            losses = losses + more
            x = x if stages else x + y
            ys.append(y)
        y = jnp.stack(ys) if stages else x
        return total(y, losses), y

    params, x = values(biased=biased)
    if stages:
        x = np.stack([x, x[::-1]])
    with jax.enable_x64(True):
        params, x = jax.tree.map(np.float64, (params, x))
        grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
        grads, y = jax.jit(grad)(params, x)
        return jax.tree.map(np.asarray, (y, grads))


def layer_of(mesh, **changes):
    """A function of (params, x) to (y, losses), and its parameters' specs by name."""
    layer = jax_ep.flax.MoE(**told(mesh, **changes), rngs=nnx.Rngs(0))
    definition, state = nnx.split(layer)
    specs = {name: state[name][...].sharding.spec for name in state}

    def run(params, x):
        own = nnx.State({name: nnx.Param(value) for name, value in params.items()})
        y, aux = nnx.merge(definition, own)(x, return_aux=True)
        return y, aux.balance_loss + aux.z_loss

    return run, specs


def placed(mesh, specs, params, *lead):
    return {
        name: jax.device_put(value, NamedSharding(mesh, P(*lead, *specs[name])))
        for name, value in params.items()
    }


def stack(run, names=NAMES):
    """A scanned, rematerialised stack of layers; returns the mean of losses, and y."""

    def body(carry, params):
        x, losses = carry
        y, more = run(params, x)
        return (x + y, losses + more), None

    policy = jax.checkpoint_policies.save_only_these_names(*names)
    body = jax.checkpoint(body, policy=policy, prevent_cse=False)

    def loss(params, x):
        (x, losses), _ = jax.lax.scan(body, (x, jnp.zeros(())), params)
        return total(x, losses), x

    return jax.grad(loss, argnums=(0, 1), has_aux=True)


def compare(found, wanted):
    (of_params, of_x), y = found
    want_y, (want_params, want_x) = wanted
    pairs = {"y": (y, want_y), "x": (of_x, want_x)}
    pairs |= {name: (of_params[name], want_params[name]) for name in want_params}
    for name, (got, want) in pairs.items():
        limit = np.abs(want).max()
        assert limit > 1e-4, name
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * limit, err_msg=name)


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_a_scanned_stack_against_the_dense_formula(sizes):
    mesh = make_mesh(sizes)
    biased = "tensor" in sizes or "context" in sizes
    run, specs = layer_of(mesh, **(BIASED if biased else {}))
    params, x = values(biased=biased)
    params = placed(mesh, specs, params, None)
    found = jax.jit(stack(run))(params, x)
    compare(found, dense(biased=biased))
    for name, value in params.items():
        got = found[0][0][name]
        assert got.sharding.is_equivalent_to(value.sharding, got.ndim), name


def test_stages_against_the_dense_formula():
    """A vmap over stages, each on its part of the mesh, which needs no spec."""
    mesh = make_mesh({"stage": 2, "expert": 2})
    run, specs = layer_of(mesh, spec=None, **BIASED)
    params, x = values(biased=True)
    x = np.stack([x, x[::-1]])
    params = placed(mesh, specs, params, "stage")

    def loss(params, x):
        y, losses = jax.vmap(run, spmd_axis_name="stage")(params, x)
        return total(y, losses.sum()), y

    found = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    compare(found, dense(biased=True, stages=True))


def test_micro_batches_accumulate():
    """Gradients of a scan over micro-batches equal those of their mean loss."""
    mesh = make_mesh({"fsdp": 2, "expert": 4})
    run, specs = layer_of(mesh)
    params, x = values(biased=False)
    params = placed(mesh, specs, jax.tree.map(lambda a: a[0], params))
    parts = np.stack([x, x[::-1], x + 1])

    def loss(params, x):
        return total(*run(params, x))

    def accumulated(params, parts):
        def body(sums, x):
            return jax.tree.map(jnp.add, sums, jax.grad(loss)(params, x)), None

        sums = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(body, sums, parts)[0]

    found = jax.jit(accumulated)(params, parts)
    grad = jax.jit(jax.grad(loss))
    each = [grad(params, part) for part in parts]
    for name, got in found.items():
        want = sum(np.asarray(grads[name]) for grads in each)
        np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())


LOADER = """
import pathlib, pickle, sys
import jax
import jax_ep
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import AxisType

folder = pathlib.Path(sys.argv[1])
sizes, config = pickle.loads((folder / "handle").read_bytes())
devices = np.array(jax.devices()).reshape(tuple(sizes.values()))
automatic = (AxisType.Auto,) * len(sizes)
mesh = jax.sharding.Mesh(devices, tuple(sizes), axis_types=automatic)
jax_ep.shared_handle(mesh, "expert", config, "collective")
step = serialize_executable.deserialize_and_load(
    *pickle.loads((folder / "program").read_bytes())
)
params = dict(np.load(folder / "params.npz"))
placed = {
    name: jax.device_put(value, step.input_shardings[0][0][name])
    for name, value in params.items()
}
np.savez(folder / "results.npz", **step(placed))
"""


def test_a_compiled_step_runs_in_another_process(tmp_path):
    """A step from `lower().compile()`; the process first makes the shared handle."""
    if jax.default_backend() != "cpu":
        pytest.skip("the other process would need the GPUs of this one")
    mesh = make_mesh({"fsdp": 2, "tensor": 2, "expert": 2})
    layer = jax_ep.flax.MoE(
        **told(mesh, transport="collective", **BIASED), rngs=nnx.Rngs(0)
    )
    run, specs = layer_of(mesh, transport="collective", **BIASED)
    params, x = values(biased=True)
    params = jax.tree.map(lambda a: a[0], params)
    arrays = placed(mesh, specs, params)

    def step(params):
        grads = jax.grad(lambda params: total(*run(params, x)))(params)
        return jax.tree.map(lambda a, g: a - 0.1 * g, params, grads)

    compiled = jax.jit(step).lower(arrays).compile()
    wanted = compiled(arrays)
    program = pickle.dumps(serialize_executable.serialize(compiled))
    (tmp_path / "program").write_bytes(program)
    handle = pickle.dumps((dict(mesh.shape), layer.ep.config))
    (tmp_path / "handle").write_bytes(handle)
    np.savez(tmp_path / "params.npz", **params)
    paths = [str(pathlib.Path(jax_ep.__file__).parent.parent)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    own = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}
    own |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(mesh.size)}
    done = run_to_end(
        [sys.executable, "-c", LOADER, str(tmp_path)],
        env={**os.environ, **own},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    got = dict(np.load(tmp_path / "results.npz"))
    assert set(got) == set(params)
    for name, array in got.items():
        np.testing.assert_array_equal(array, wanted[name])
        assert (array != params[name]).any()
