"""What gradients of a layer on apply_experts move between devices, by the HLO."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from support import maxtext

# A collective: the shapes of its results, its kind, and its participants, written as
# lists of devices, as the shape of such lists, or as axes of a mesh.
COLLECTIVE = re.compile(
    r"= (\(?[^=]*?) (all-to-all|all-gather|reduce-scatter|all-reduce)(?:-start)?\("
    r".*replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]<=|mesh\[(.*?)\] \{(.*?)\})"
)


def devices(line: re.Match[str]) -> int:
    """How many devices take part in one group of a collective."""
    _, _, members, size, mesh, axes = line.groups()
    if members:
        return members.count(",") + 1
    if size:
        return int(size)
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", axes))


def collectives(layer: Any, inputs: Any, params: Any) -> dict[str, list[int]]:
    """Elements of the largest result of each collective in the gradients, by kind.

    Leaves out collectives over axes of size 1, which XLA keeps.
    """

    def total(inputs: Any, params: Any) -> Any:
        return jnp.sum(jnp.sin(layer(inputs, params)[0]))

    shardings = jax.tree.map(lambda a: a.sharding, (inputs, params))
    run = jax.jit(jax.grad(total, (0, 1)), out_shardings=shardings)
    text = run.lower(inputs, params).compile().as_text()
    found: dict[str, list[int]] = {}
    for line in COLLECTIVE.finditer(text):
        if devices(line) == 1:
            continue
        shapes, kind = line.group(1), line.group(2)
        sizes = [
            math.prod(map(int, dims.split(",")))
            for dims in re.findall(r"\w\d+\[([\d,]+)\]", shapes)
        ]
        found.setdefault(kind, []).append(max(sizes, default=1))
    return found


def given(mesh: Any, biases: bool = False) -> Any:
    host = maxtext.make_inputs(), maxtext.make_params(biases=biases)
    return maxtext.placed(mesh, *host)


# One rank's part of a weight, split over fsdp 2 and expert 4.
SHARD = maxtext.EXPERTS * maxtext.EMB * maxtext.MLP // 8


@pytest.mark.parametrize("check_vma", [True, False])
def test_weights_cross_once(check_vma: bool) -> None:
    """One all-gather and one reduce-scatter per weight, and no all-reduce of it."""
    mesh = maxtext.make_mesh(fsdp=2, expert=4)
    layer = maxtext.Layer(
        mesh, options=(("transport", "collective"),), check_vma=check_vma
    )
    found = collectives(layer, *given(mesh))
    assert found["all-gather"] == [2 * SHARD] * 3
    assert found["reduce-scatter"] == [SHARD] * 3
    assert len(found["all-to-all"]) == 4
    # Only the gradient of the router's matrix is all-reduced.
    assert found["all-reduce"] == [maxtext.EMB * maxtext.EXPERTS]


def test_scattered_columns_are_summed_once() -> None:
    """Rows are reduce-scattered once, gathered backward, and never all-reduced."""
    mesh = maxtext.make_mesh(fsdp=2, tensor=2, expert=2)
    options = (("transport", "collective"), ("recv_capacity", 64))
    layer = maxtext.Layer(mesh, scatter=True, options=options)
    found = collectives(layer, *given(mesh))
    rows = 64 * maxtext.EMB
    assert sorted(found["all-gather"]) == sorted([2 * SHARD] * 3 + [rows])
    assert sorted(found["reduce-scatter"]) == sorted([SHARD] * 3 + [rows // 2])
    assert len(found["all-to-all"]) == 4
    tokens = maxtext.BATCH_SIZE * maxtext.SEQUENCE // 4 * maxtext.EMB
    assert max(found["all-reduce"]) == tokens < rows // 2 + 1
    whole = maxtext.Layer(mesh, options=options)
    assert rows in collectives(whole, *given(mesh))["all-reduce"]
