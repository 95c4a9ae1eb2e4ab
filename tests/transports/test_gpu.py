"""What only a machine with GPUs can test: equal bits to CPUs, CUDA graphs, traces."""

import warnings

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jax_ep
from support import compare_transports, gpus, helpers, oracle
from support.gpus import CAPTURE

pytestmark = pytest.mark.gpu

CONCURRENT = (
    "--xla_gpu_graph_min_graph_size=1"
    " --xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
)


def mesh_of(platform, ranks):
    devices = np.array(jax.devices(platform)[:ranks])
    return Mesh(devices, ("ep",), axis_types=(AxisType.Auto,))


def round_trip(platform, config, ranks, seed, transport):
    """All leaves of a dispatch, and the combine of its rows, on one platform."""
    rng = np.random.default_rng(seed)
    mesh = mesh_of(platform, ranks)
    inputs = helpers.make_inputs(
        rng, config, ranks, routing="duplicates", fill=helpers.normal
    )
    with jax_ep.init(mesh, "ep", config, transport=transport) as ep:
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
    on_gpu = round_trip("gpu", config, ranks, 7, helpers.TRANSPORT)
    on_cpu = round_trip("cpu", config, ranks, 7, "collective")
    for index, (gpu, cpu) in enumerate(zip(on_gpu, on_cpu, strict=True)):
        helpers.assert_bits(gpu, cpu, f"leaf {index}")


def replay(mode, transport, flags):
    env = {"XLA_FLAGS": flags, "JAX_EP_TEST_TRANSPORT": transport}
    return gpus.run_worker("graph_worker.py", mode, timeout=600, **env)


def test_captured_graphs_replay_with_changing_routing():
    result = replay("open", helpers.TRANSPORT, CAPTURE)
    gpus.assert_captured(result.pop("launches"), result["calls"])
    assert result == {"transport": helpers.TRANSPORT, "calls": 400, "wrong": 0}


def test_independent_calls_of_concurrent_graphs():
    """XLA runs unordered work concurrently, but a handle's calls run one by one."""
    compare_transports.p2p_mesh()
    result = replay("open", "p2p", CONCURRENT)
    gpus.assert_captured(result.pop("launches"), result["calls"])
    assert result == {"transport": "p2p", "calls": 400, "wrong": 0}


def test_captured_graphs_replay_after_close():
    """Results are right or empty, as the transport promises, without a fault."""
    result = replay("close", helpers.TRANSPORT, CAPTURE)
    assert result["launches"][0] > 0
    assert result["wrong"] == 0
    assert result["right_afterwards"]
    if helpers.TRANSPORT == "collective":
        assert result["right"] == result["calls"]
    else:
        assert result["nothing"] + result["refused"] == result["calls"]


def test_kernels_show_by_name_in_a_trace(tmp_path):
    config, ranks = helpers.make_config(), helpers.some_ranks(4)
    with jax.profiler.trace(str(tmp_path)):
        round_trip("gpu", config, ranks, 3, helpers.TRANSPORT)
    (path,) = tmp_path.glob("**/*.xplane.pb")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from its binding
        data = jax.profiler.ProfileData.from_file(str(path))
        names = {
            event.name
            for plane in data.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            for event in line.events
        }
    wanted = ("DispatchLowLatencyKernel", "CombineLowLatencyKernel")
    if helpers.TRANSPORT == "collective":
        wanted = ("DispatchPackKernel", "CombinePackKernel", "CombineUnpackKernel")
    for word in wanted:
        assert any(word in name for name in names), (word, sorted(names))
