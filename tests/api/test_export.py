"""Programs that `jax.export` serialises run in processes that never made a handle."""

from __future__ import annotations

import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers
from support.launch import run_to_end
from support.pages import python_blocks

RANKS, TOKENS, HIDDEN = 2, 8, 128
# Loads the program as the page does. The blob and the arguments are files in argv[1].
LOADER = """
import os, pathlib, sys
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

folder = pathlib.Path(sys.argv[1])
program = bytearray((folder / "program").read_bytes())
{block}
mesh = jax.make_mesh((2,), ("ep",), axis_types=(AxisType.Auto,))
arguments = np.load(folder / "arguments.npz").values()
placed = [jax.device_put(a, NamedSharding(mesh, P("ep"))) for a in arguments]
results = jax.tree.leaves(step(*placed))
np.savez(folder / "results.npz", *results)
"""


def mapped(ep, mesh):
    """Experts that differ by rank, between a dispatch and a combine in halves."""

    def body(x, ids, weights):
        d = jax_ep.dispatch(ep, x, ids, weights)
        rank = 1 + jax.lax.axis_index("ep").astype(jnp.float32)
        rows = jnp.tanh(rank * jax_ep.dequantize(d))
        pending = jax_ep.combine_async(ep, rows, d.route, d.router_weights)
        return jax_ep.combine_wait(pending)

    return jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))


def test_an_exported_step_runs_in_another_process(tmp_path, quick_compiles):
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    if jax.default_backend() != "cpu":
        pytest.skip("the other process would need the GPUs of this one")
    mesh = helpers.make_mesh(RANKS)
    config = helpers.make_config(
        num_experts=8,
        top_k=2,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        dtype="float32",
        dispatch_format="fp8_block128",
        pending_calls=1,
    )
    rng = np.random.default_rng(0)
    arguments = (
        rng.standard_normal((RANKS * TOKENS, HIDDEN)).astype(np.float32),
        np.argsort(rng.random((RANKS * TOKENS, 8)))[:, :2].astype(np.int32),
        rng.random((RANKS * TOKENS, 2)).astype(np.float32),
    )
    placed = [jax.device_put(a, NamedSharding(mesh, P("ep"))) for a in arguments]
    with jax_ep.init(mesh, "ep", config, transport="collective") as ep:
        run = mapped(ep, mesh)

        def loss(x, ids, weights):
            return jnp.sum(run(x, ids, weights) ** 2)

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 2)))
        with pytest.raises(ValueError, match="ep_"):
            export.export(step)(*placed)
        exporting, loading = python_blocks("docs/sharp_bits.md", "export")
        names = {"jax_ep": jax_ep, "step": step, "arguments": placed}
        exec(exporting, names)
        wanted = jax.tree.leaves(step(*placed))
    (tmp_path / "program").write_bytes(names["program"])
    np.savez(tmp_path / "arguments.npz", *arguments)
    paths = [str(pathlib.Path(jax_ep.__file__).parent.parent)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    own = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}
    own |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(RANKS)}
    done = run_to_end(
        [sys.executable, "-c", LOADER.format(block=loading), str(tmp_path)],
        env={**os.environ, **own},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    got = list(np.load(tmp_path / "results.npz").values())
    assert len(got) == 3
    for array, expected in zip(got, wanted, strict=True):
        assert np.abs(expected).sum() > 0
        np.testing.assert_array_equal(array, expected)


def test_targets_are_those_of_the_native_modules():
    found = jax_ep.custom_call_targets
    assert list(found) == sorted(set(found))
    assert {"ep_init", "ep_dispatch_pack", "ep_combine_unpack"} <= set(found)
    assert set(jax_ep._native.ffi.native.targets()) <= set(found)


@pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "cuda"]])
def test_export_for_gpus_that_are_not_here(platforms):
    """Programs of `collective` do not refer to devices."""
    mesh = helpers.make_mesh(helpers.some_ranks(RANKS))
    config = helpers.make_config(dtype="float32", pending_calls=1)
    rng = np.random.default_rng(1)
    made = helpers.make_inputs(rng, config, mesh.size, fill=helpers.normal)
    operands = [helpers.put(mesh, p) for p in (made.tokens, made.ids, made.weights)]
    allowed = [
        export.DisabledSafetyCheck.custom_call(name)
        for name in jax_ep.custom_call_targets
    ]
    with jax_ep.init(mesh, "ep", config, transport="collective") as ep:
        step = jax.jit(mapped(ep, mesh))
        make = export.export(step, platforms=platforms, disabled_checks=allowed)
        program = make(*operands)
    assert program.platforms == tuple(platforms)
    assert program.nr_devices == mesh.size
    text = program.mlir_module()
    names = ["@ep_dispatch_pack", "@ep_combine_unpack"]
    if mesh.size > 1:  # JAX leaves it out for a single rank
        names.append("all_to_all")
    assert all(name in text for name in names)
