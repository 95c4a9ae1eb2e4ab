"""Meshes: more axes, permuted devices, tuple axes, axis types, set_mesh, eager use."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, moe, oracle
from support.errors import check_form, raises

pytestmark = pytest.mark.usefixtures("quick_compiles")

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)


def check(mesh, axis, spec, groups, config=None) -> None:
    """dispatch and combine are right on all groups; positions are along `spec`."""
    config = config or helpers.make_config()
    ep = helpers.make_ep(mesh, config, axis)
    assert ep.ep_size == len(groups[0])
    count = mesh.size
    rng = np.random.default_rng(count)
    inputs = helpers.make_inputs(rng, config, count, fill=helpers.normal)
    d = helpers.run_dispatch(ep, mesh, inputs, spec)
    helpers.assert_dispatched(config, d, inputs, groups)
    shape = ep.recv_capacity, config.hidden_size
    rows = [helpers.normal(rng, shape, inputs.tokens[0].dtype) for _ in range(count)]
    weights = [helpers.normal(rng, shape[:1], np.float32) for _ in range(count)]
    y = helpers.run_combine(ep, mesh, d.route, rows, weights, inputs.tokens, spec)
    for group in groups:
        part = inputs.pick(group)
        expected = oracle.combine(
            config,
            part.ids,
            [rows[i] for i in group],
            [weights[i] for i in group],
            part.tokens,
        )
        for rank, position in enumerate(group):
            helpers.assert_bits(y[position], expected[rank])


@KINDS
def test_one_axis(kind: AxisType) -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(8), kind=kind)
    check(mesh, "ep", P("ep"), [range(mesh.size)])


@KINDS
@pytest.mark.parametrize("order", [range(7, -1, -1), (3, 0, 6, 1, 7, 2, 5, 4)])
def test_permuted_devices(order, kind: AxisType) -> None:
    """A rank is a device's place in the mesh, whatever its ordinal."""
    mesh = helpers.make_mesh(8, order=order, kind=kind)
    check(mesh, "ep", P("ep"), [range(8)])


def test_part_of_the_devices() -> None:
    """A mesh of only later devices: no rank equals its device's ordinal."""
    if jax.device_count() < 3:
        pytest.skip("needs 3 devices")
    if helpers.IN_PROCESSES and helpers.TRANSPORT == "shmem":
        pytest.skip("NVSHMEM serves meshes of all processes that it was started in")
    devices = np.array(jax.devices()[2:0:-1])
    if jax.process_index() not in {device.process_index for device in devices}:
        return
    mesh = jax.sharding.Mesh(devices, ("ep",), axis_types=(AxisType.Auto,))
    check(mesh, "ep", P("ep"), [range(2)])


@KINDS
@pytest.mark.parametrize("axis", ["dp", "ep"])
def test_independent_groups(axis: str, kind: AxisType) -> None:
    mesh = helpers.make_mesh({"dp": 2, "ep": 4}, kind=kind)
    places = np.arange(8).reshape(2, 4)
    groups = places if axis == "ep" else places.T
    check(mesh, axis, P(("dp", "ep")), groups.tolist())


@KINDS
@pytest.mark.parametrize("axes", [("dp", "ep"), ("ep", "dp")])
def test_tuple_of_axes(axes: tuple[str, str], kind: AxisType) -> None:
    """The group is the product of the axes, of which the first is the slowest."""
    mesh = helpers.make_mesh({"dp": 2, "ep": 4}, kind=kind)
    check(mesh, axes, P(axes), [range(8)])


def test_tuple_beside_another_axis() -> None:
    mesh = helpers.make_mesh({"a": 2, "b": 2, "c": 2}, order=(5, 3, 0, 7, 1, 6, 2, 4))
    places = np.arange(8).reshape(2, 2, 2)
    # Positions are along P(("a", "b", "c")); the rank is c * 2 + a.
    groups = [places[:, b].T.reshape(-1).tolist() for b in range(2)]
    check(mesh, ("c", "a"), P(("a", "b", "c")), groups)


@pytest.mark.parametrize("axis", ["ep", ("ep", "dp")])
def test_gradient_over_tuple_axes_and_groups(axis) -> None:
    """check_vma's types are right if tokens also vary over another axis."""
    mesh = helpers.make_mesh({"dp": 2, "ep": 2})
    config = helpers.make_config(dtype="float32")
    ep = helpers.make_ep(mesh, config, axis)
    rng = np.random.default_rng(2)
    inputs = helpers.make_inputs(rng, config, 4, fill=helpers.normal)
    x, ids, w = map(np.concatenate, (inputs.tokens, inputs.ids, inputs.weights))
    params = helpers.normal(rng, (24, 16, 16), np.float32) / np.float32(4)
    spec, params_spec = P(("ep", "dp")), P(axis)
    run = moe.sharded(
        mesh,
        functools.partial(moe.layer, ep),
        in_specs=(spec, spec, spec, params_spec),
        out_specs=spec,
    )
    ids_on = helpers.put(mesh, [ids], spec)
    grad = jax.jit(jax.grad(lambda x, w, p: moe.wave(run(x, ids_on, w, p)), (0, 1, 2)))
    actual = grad(
        helpers.put(mesh, [x], spec),
        helpers.put(mesh, [w], spec),
        helpers.put(mesh, [params], params_spec),
    )
    expected = jax.grad(moe.dense_loss, (0, 1, 2))(x, w, params, ids)
    moe.assert_close(actual, expected)


@KINDS
def test_set_mesh(kind: AxisType) -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(4), kind=kind)
    config = helpers.make_config()
    inputs = helpers.make_inputs(np.random.default_rng(3), config, mesh.size)
    with jax.set_mesh(mesh):
        ep = jax_ep.init(None, "ep", config, transport=helpers.TRANSPORT)
        body = functools.partial(jax_ep.dispatch, ep)
        parts = inputs.tokens, inputs.ids, inputs.weights
        run = jax.jit(jax.shard_map(body, in_specs=P("ep"), out_specs=P("ep")))
        d = run(*(helpers.put(mesh, part) for part in parts))
    helpers.assert_dispatched(config, d, inputs)
    ep.close()


def test_eager() -> None:
    """shard_map without jit, forward and backward."""
    s = moe.setup(ranks=helpers.some_ranks(2))
    config, count = s.ep.config, s.ep.ep_size
    x, ids, w, p = s.global_arrays()
    d = moe.sharded(s.mesh, functools.partial(jax_ep.dispatch, s.ep))(x, ids, w)
    split = [np.split(a, count) for a in (s.tokens, s.ids, s.weights)]
    helpers.assert_dispatched(config, d, helpers.Inputs(*split))
    grads = jax.grad(moe.loss(s.mesh, functools.partial(moe.layer, s.ep)))(x, w, p, ids)
    expected = jax.grad(moe.dense_loss)(s.tokens, s.weights, s.params, s.ids)
    moe.assert_close(grads, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_results_vary_over_the_axes(check_vma: bool) -> None:
    """A psum of each result is accepted and right with both settings."""
    mesh = helpers.make_mesh({"dp": 2, "ep": 2})
    config = helpers.make_config()
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(4), config, 4)

    def body(x, ids, w):
        d = jax_ep.dispatch(ep, x, ids, w)
        return jax.lax.psum(d.expert_counts, ("dp", "ep"))

    run = moe.sharded(mesh, body, check_vma=check_vma, out_specs=P())
    parts = inputs.tokens, inputs.ids, inputs.weights
    total = jax.jit(run)(*(helpers.put(mesh, part) for part in parts))
    expected = sum(
        out.expert_counts
        for group in ([0, 1], [2, 3])
        for out in oracle.dispatch(config, *vars(inputs.pick(group)).values())
    )
    np.testing.assert_array_equal(total, expected)


def there_and_back(mesh, ep):
    """Sums of y and its gradient in a shard_map that leaves other axes to XLA.

    All tokens are ones and go to one expert. Returns the sums relative to their
    expected values.
    """
    config = ep.config
    x = np.ones((4, config.hidden_size), config.dtype)
    ids = np.full((4, config.top_k), -1, np.int32)
    ids[:, 0] = np.arange(4)

    def total(x):
        d = jax_ep.dispatch(ep, x, ids)
        return jax_ep.combine(ep, d.tokens, d.route).sum()

    def body():
        y, dx = jax.value_and_grad(total)(jax.lax.pcast(x, "ep", to="varying"))
        return jax.lax.psum((y, dx.sum()), "ep")

    run = jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P(), axis_names={"ep"})
    return [float(each) / x.size / mesh.shape["ep"] for each in jax.jit(run)()]


@KINDS
def test_axes_of_one_need_not_be_manual(kind: AxisType, recwarn) -> None:
    """XLA gathers nothing over axes of size 1, whatever their names are."""
    mesh = helpers.make_mesh(helpers.fit({"dp": 1, "ep": 2}), kind=kind)
    with helpers.init(mesh, dtype="float32") as ep:
        assert there_and_back(mesh, ep) == [1, 1]
    assert not [w for w in recwarn if "every mesh axis" in str(w.message)]


@KINDS
def test_axes_that_are_not_manual_are_named(kind: AxisType) -> None:
    mesh = helpers.make_mesh({"dp": 2, "ep": 2}, kind=kind)
    with helpers.init(mesh, dtype="float32") as ep:
        if kind == AxisType.Auto:
            words = r"should be manual, got automatic axes \['dp'\]"
            with pytest.warns(RuntimeWarning, match=words):
                assert there_and_back(mesh, ep) == [1, 1]
            return
        words = r"manual or automatic, got explicit axes \['dp'\]"
        with pytest.raises(ValueError, match=words):
            there_and_back(mesh, ep)


def test_devices_that_are_not_there(monkeypatch) -> None:
    """No handle can be opened on the devices of a topology description."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    others = jax.devices()[mesh.size :]
    for found in (lambda _: others, lambda _: (_ for _ in ()).throw(RuntimeError())):
        monkeypatch.setattr(jax, "devices", found)
        for make in (jax_ep.init, jax_ep.shared_handle):
            with raises() as caught:
                make(mesh, "ep", helpers.make_config())
            check_form(caught, "init", "devices that this job has", "topology")
        monkeypatch.undo()
