"""A jax.distributed process of test_multiprocess.py or test_processes_gpu.py.

Arguments: port of the coordinator, number of processes, this process, devices of each
("2" for CPU devices, "gpu2" for GPUs); a further argument makes it run few cases. The
transport is JAX_EP_TEST_TRANSPORT. Every process checks its own ranks, and all must
reach the end.
"""

from __future__ import annotations

import functools
import sys

import jax_ep

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from support import gpus, helpers, moe, oracle
from support.loads import check_numbers
from support.worker_process import bound_life, local_ids


def start(port: str, processes: int, process: int, devices: str) -> None:
    """Joins the cluster; must be called before the backend starts."""
    bound_life()
    jax.config.update("jax_default_matmul_precision", "highest")
    count, local = int(devices.removeprefix("gpu")), None
    if devices.startswith("gpu"):
        local = local_ids(process, count)
        gpus.share_one(process)
    else:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        processes,
        process,
        local_device_ids=local,
        cluster_detection_method="deactivate",
    )
    assert jax.process_count() == processes
    assert jax.device_count() == processes * count


def semantics(mesh, axis, spec, groups, **changes) -> None:
    """Compares dispatch and combine with the oracle, on this process's positions."""
    n, routing = changes.pop("n", None), changes.pop("routing", "random")
    config = helpers.make_config(**changes)
    rng = np.random.default_rng(len(changes))
    inputs = helpers.make_inputs(
        rng, config, mesh.size, n=n, routing=routing, fill=helpers.normal
    )
    with jax_ep.init(mesh, axis, config, transport=helpers.TRANSPORT) as ep:
        local = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        assert ep.my_rank.shape == (len(local),)
        assert ep.dev_ptrs.shape == (len(local), 2, 3)
        d = helpers.run_dispatch(ep, mesh, inputs, spec)
        helpers.assert_dispatched(config, d, inputs, groups)
        dtype, shape = inputs.tokens[0].dtype, (ep.recv_capacity, config.hidden_size)
        rows = [helpers.normal(rng, shape, dtype, 4) for _ in inputs.ids]
        weights = [helpers.normal(rng, shape[:1], np.float32) for _ in rows]
        y = helpers.run_combine(ep, mesh, d.route, rows, weights, inputs.tokens, spec)
        assert len(y) == len(local)
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
                if position in y:
                    helpers.assert_bits(y[position], expected[rank])


def gradients(mesh, wrap) -> None:
    """Compares a layer's gradients, in each process the shards that it holds."""
    s = moe.setup(3, ranks=mesh.size)
    x, ids, w, p = s.global_arrays()
    layer = wrap(functools.partial(moe.layer, s.ep))
    run = jax.jit(jax.grad(moe.loss(mesh, layer), (0, 1, 2)))
    expected = jax.grad(moe.dense_loss, (0, 1, 2))(s.tokens, s.weights, s.params, s.ids)
    for got, want in zip(run(x, w, p, ids), expected, strict=True):
        want = np.asarray(want)
        for shard in got.addressable_shards:
            np.testing.assert_allclose(
                shard.data, want[shard.index], rtol=0, atol=moe.ATOL
            )
    helpers.make_ep.cache_clear()


def invalid_ids(mesh) -> None:
    """Only the process of the bad rank sees the error, and none hangs or aborts."""
    config = helpers.make_config(top_k=2)
    with jax_ep.init(mesh, "ep", config, transport=helpers.TRANSPORT) as ep:
        inputs = helpers.make_inputs(np.random.default_rng(7), config, mesh.size)
        rank = mesh.size - 1
        inputs.ids[rank][3, 1] = 99
        d = helpers.run_dispatch(ep, mesh, inputs)
        helpers.assert_dispatched(config, d, inputs)
        total = jax.jit(lambda c: jnp.sum(c))(d.num_invalid)
        assert int(total) == 1
        if mesh.devices.flat[rank].process_index == jax.process_index():
            try:
                ep.check()
            except (ValueError, RuntimeError) as error:
                message = str(error)
                assert all(word in message for word in (str(rank), "3", "1", "99"))
            else:
                raise AssertionError("check() did not raise")
        else:
            assert ep.check() is None


def loads(size: int) -> None:
    """jax_ep.stats counts devices of all processes, in each of them."""
    for kind in (AxisType.Auto, AxisType.Explicit):
        check_numbers(kind, {"dp": 2, "ep": size // 2})
    helpers.make_ep.cache_clear()


def moves(size: int) -> None:
    """Moves weights outside of jit, between devices of all processes."""
    load = np.arange(1, 2 * size + 1)
    first, after = (
        jax_ep.placement.balance(each, 3 * size, ep_size=size)
        for each in (load, load**2)
    )
    weights = np.random.default_rng(0).standard_normal((2 * size, 3))
    weights = weights.astype(np.float32)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = helpers.make_mesh(size, kind=kind)
        found = first.gather(helpers.put(mesh, [weights]))
        moved = after.reshard(found, first)
        for placed, array in ((first, found), (after, moved)):
            want = weights[placed.expert_of].reshape(size, 3, 3)
            for position, own in helpers.unstack(array, size).items():
                np.testing.assert_array_equal(own, want[position])


def part() -> None:
    """Calls on a mesh of all devices but the first, only in their processes."""
    devices = jax.devices()[:0:-1]
    if not any(device.process_index == jax.process_index() for device in devices):
        return
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
    count = len(devices)
    semantics(mesh, "ep", P("ep"), [range(count)], num_experts=3 * count)


def main(port: str, processes: str, process: str, devices: str, *few: str) -> None:
    start(port, int(processes), int(process), devices)
    size = jax.device_count()
    mesh = helpers.make_mesh(size)
    ranks = [range(size)]
    if helpers.TRANSPORT != "shmem":  # NVSHMEM serves all processes or none
        part()
    if few:
        semantics(mesh, "ep", P("ep"), ranks, routing="invalid", recv_capacity=9)
        print("right", flush=True)
        return
    for changes in (
        {},
        {"dtype": "float32", "combine_dtype": "bfloat16", "expert_alignment": 4},
        {"recv_capacity": 9, "routing": "invalid"},
        {"n": 1, "routing": "full"},
        {"routing": "one:3", "zero_tail": False},
    ):
        semantics(mesh, "ep", P("ep"), ranks, **changes)
    # A process's ranks are not adjacent, and groups cross the processes.
    order = [*range(0, size, 2), *range(1, size, 2)]
    semantics(helpers.make_mesh(size, order=order), "ep", P("ep"), ranks)
    square = helpers.make_mesh({"dp": 2, "ep": size // 2})
    places = np.arange(size).reshape(2, -1)
    both = P(("dp", "ep"))
    semantics(square, "dp", both, places.T.tolist())
    semantics(square, "ep", both, places.tolist())
    semantics(square, ("ep", "dp"), P(("ep", "dp")), ranks)
    gradients(mesh, lambda fn: fn)
    gradients(mesh, functools.partial(jax.checkpoint, policy=jax_ep.save_route))
    invalid_ids(mesh)
    loads(size)
    moves(size)
    print("right", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
