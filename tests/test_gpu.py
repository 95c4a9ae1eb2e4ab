"""What only a machine with GPUs can show: the CPU's bits, captured graphs."""

import os
import pathlib
import subprocess
import sys

import helpers
import jax
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, Mesh

import jax_ep

pytestmark = pytest.mark.gpu

WORKER = pathlib.Path(__file__).parent / "graph_worker.py"


def mesh_of(platform, ranks):
    devices = np.array(jax.devices(platform)[:ranks])
    return Mesh(devices, ("ep",), axis_types=(AxisType.Auto,))


def round_trip(platform, config, ranks, seed):
    """Every leaf of a dispatch, and the combine of its rows, on one platform."""
    rng = np.random.default_rng(seed)
    mesh = mesh_of(platform, ranks)
    inputs = helpers.make_inputs(
        rng, config, ranks, routing="duplicates", fill=helpers.normal
    )
    with jax_ep.init(mesh, "ep", config) as ep:
        d = helpers.run_dispatch(ep, mesh, inputs)
        y = helpers.combine_fn(ep, mesh, jax.P("ep"))(
            d.tokens, d.route, d.router_weights, None
        )
    leaves = [*jax.tree.leaves(d), y]
    return [np.asarray(leaf) for leaf in leaves]


@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("hidden", [16, 7168])
def test_same_bits_as_on_cpus(dtype, hidden):
    ranks = helpers.some_ranks(4)
    config = helpers.make_config(
        dtype=dtype, hidden_size=hidden, max_tokens_per_rank=64, top_k=8
    )
    on_gpu = round_trip("gpu", config, ranks, 7)
    on_cpu = round_trip("cpu", config, ranks, 7)
    for index, (gpu, cpu) in enumerate(zip(on_gpu, on_cpu, strict=True)):
        helpers.assert_bits(gpu, cpu, f"leaf {index}")


@pytest.mark.parametrize("when", ["open", "close"])
def test_captured_graphs_replay_with_changing_routing(when):
    """Graphs from one node up, so that the custom calls are captured."""
    env = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    env["XLA_FLAGS"] = "--xla_gpu_graph_min_graph_size=1"
    run = subprocess.run(
        [sys.executable, str(WORKER), when],
        capture_output=True,
        text=True,
        timeout=300,
        env=env,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "bad 0" in run.stdout
