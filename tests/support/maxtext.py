"""A layer shaped like MaxText's MoE, on its mesh axes, and the dense formula.

The axis names, the shapes and the options are MaxText's, but not the code.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, oracle

AXES = ("data", "stage", "fsdp", "context", "tensor", "expert")
BATCH = ("data", "fsdp", "expert")  # the sequence is sharded over "context"
INPUTS = P(BATCH, "context", None)
SPECS = {
    "gate": P(),
    "wi_0": P("expert", "fsdp", "tensor"),
    "wi_1": P("expert", "fsdp", "tensor"),
    "wo": P("expert", "tensor", "fsdp"),
    "wi_0_bias": P("expert", "tensor"),
    "wi_1_bias": P("expert", "tensor"),
    "wo_bias": P("expert"),
}
EXPERTS, TOP_K, EMB, MLP, BATCH_SIZE, SEQUENCE = 8, 2, 16, 8, 16, 4


def make_mesh(**sizes: int) -> Mesh:
    """A mesh of all of MaxText's axes; those not given have size 1."""
    return helpers.make_mesh({axis: sizes.get(axis, 1) for axis in AXES})


@dataclasses.dataclass(frozen=True)
class Layer:
    """The layer, its mesh and its options.

    Attributes:
        mesh: a mesh of all axes.
        scatter: whether columns are scattered over "tensor" before the combine.
        options: further arguments of apply_experts.
    """

    mesh: Mesh
    scatter: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    check_vma: bool = True

    def experts(self, params: Mapping[str, Any], rows: Any, sizes: Any, expert_of: Any):
        """MaxText's matmuls; with "tensor" above 1 they return partial sums."""
        biases = {
            name: params[f"{name}_bias"][expert_of]
            for name in ("wi_0", "wi_1", "wo")
            if f"{name}_bias" in params
        }
        gate = jax.lax.ragged_dot(rows, params["wi_0"], sizes) + biases.get("wi_0", 0)
        up = jax.lax.ragged_dot(rows, params["wi_1"], sizes) + biases.get("wi_1", 0)
        rows = jax.lax.ragged_dot(jax.nn.silu(gate) * up, params["wo"], sizes)
        if "wo" in biases:
            # As the sums are partial, only one rank of "tensor" adds the bias.
            first = jax.lax.axis_index("tensor") == 0
            rows = rows + jnp.where(first, biases["wo"], 0)
        return rows

    def gathered(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's experts, gathered over "fsdp"."""
        dims = {"wi_0": 1, "wi_1": 1, "wo": 2}
        gather = functools.partial(jax.lax.all_gather, axis_name="fsdp", tiled=True)
        return dict(params) | {n: gather(params[n], axis=d) for n, d in dims.items()}

    def swapped(self, inputs: Any, ids: Any, weights: Any, params: Any) -> Any:
        def matmuls(rows, group_sizes, expert_of_row):
            rows = self.experts(params, rows, group_sizes, expert_of_row)
            return rows if self.scatter else jax.lax.psum(rows, "tensor")

        return jax_ep.apply_experts(
            matmuls,
            inputs,
            ids,
            weights,
            num_experts=EXPERTS,
            axis_name="expert",
            mesh=self.mesh,
            scatter_axis="tensor" if self.scatter else None,
            return_dropped=True,
            **dict(self.options),
        )

    def body(self, inputs: Any, params: Any) -> Any:
        """What MaxText does inside its shard_map."""
        ids, weights = route(inputs, params["gate"])
        return self.swapped(inputs, ids, weights, self.gathered(params))

    def __call__(self, inputs: Any, params: Any) -> Any:
        """Global inputs `[batch, sequence, emb]` to outputs and drops by rank."""
        y_spec = P(*INPUTS[:2], "tensor" if self.scatter else None)
        return jax.shard_map(
            self.body,
            mesh=self.mesh,
            in_specs=(INPUTS, {name: SPECS[name] for name in params}),
            out_specs=(y_spec, P((*BATCH, "context"))),
            check_vma=self.check_vma,
        )(inputs, params)


def lines_of_the_swap() -> int:
    """How many lines the function has that replaces MaxText's own exchange."""
    lines = inspect.getsource(Layer.swapped).splitlines()
    return len([line for line in lines[1:] if line.strip()])


def route(inputs: Any, gate: Any) -> tuple[Any, Any]:
    """Top-k of a softmax; the chosen weights sum to 1."""
    weights, ids = jax.lax.top_k(jax.nn.softmax(inputs @ gate), TOP_K)
    return ids, weights / jnp.sum(weights, axis=-1, keepdims=True)


def dense(inputs: Any, params: Any, kept: Any = 1.0) -> Any:
    """Every expert on every token; `kept` `[..., K]` is 0 for dropped rows."""
    ids, weights = route(inputs, params["gate"])
    chosen = jax.nn.one_hot(ids, EXPERTS) * (weights * kept)[..., None]
    dot = functools.partial(jnp.einsum, "...h,ehf->...ef")
    gate, up = dot(inputs, params["wi_0"]), dot(inputs, params["wi_1"])
    gate, up = gate + params.get("wi_0_bias", 0), up + params.get("wi_1_bias", 0)
    rows = jnp.einsum("...ef,efh->...eh", jax.nn.silu(gate) * up, params["wo"])
    rows = rows + params.get("wo_bias", 0)
    return jnp.einsum("...ke,...eh->...h", chosen, rows)


def make_params(seed: int = 0, *, biases: bool, leading: tuple[int, ...] = ()) -> Any:
    """Float32 parameters on the host."""
    rng = np.random.default_rng(seed)
    shapes = {
        "gate": (EMB, EXPERTS),
        "wi_0": (EXPERTS, EMB, MLP),
        "wi_1": (EXPERTS, EMB, MLP),
        "wo": (EXPERTS, MLP, EMB),
    }
    if biases:
        shapes |= {"wi_0_bias": (EXPERTS, MLP), "wi_1_bias": (EXPERTS, MLP)}
        shapes["wo_bias"] = (EXPERTS, EMB)
    return {
        name: (rng.standard_normal((*leading, *shape)) / shape[-2] ** 0.5).astype("f4")
        for name, shape in shapes.items()
    }


def make_inputs(seed: int = 1, leading: tuple[int, ...] = ()) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (*leading, BATCH_SIZE, SEQUENCE, EMB)
    return rng.standard_normal(shape).astype(np.float32)


def placed(mesh: Mesh, inputs: Any, params: Any, leading: Any = ()) -> Any:
    """Both as global arrays, sharded as the layer expects."""

    def put(value: Any, spec: P) -> Any:
        return jax.device_put(value, NamedSharding(mesh, P(*leading, *spec)))

    return put(inputs, INPUTS), {n: put(v, SPECS[n]) for n, v in params.items()}


def kept_rows(mesh: Mesh, ids: np.ndarray, config: Any) -> np.ndarray:
    """1 or 0 for each of `ids` `[batch, sequence, K]`: 0 if the row is dropped."""
    sizes = [mesh.shape[axis] for axis in (*BATCH, "context")]
    data, fsdp, expert, context = sizes
    ranks = ids.reshape(data, fsdp, expert, -1, context, SEQUENCE // context, TOP_K)
    # One group for each position on the other axes; each rank's tokens in order.
    groups = np.moveaxis(ranks, (0, 1, 4, 2), (0, 1, 2, 3))
    kept = np.zeros(groups.shape, np.float32)
    for at in np.ndindex(data, fsdp, context):
        own = groups[at].reshape(expert, -1, TOP_K)
        places = kept[at].reshape(expert, -1, TOP_K)
        for placement in oracle.place(config, list(own)):
            for row in placement.kept:
                places[row.source, row.token, row.k] = 1
    return np.moveaxis(kept, (0, 1, 2, 3), (0, 1, 4, 2)).reshape(ids.shape)
