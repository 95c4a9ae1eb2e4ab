"""`jax.export` and Flax's serialisation know jax_ep's pytrees, under lasting names."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._core import pytrees
from jax_ep._stats.layout import Layout
from support import helpers
from support.errors import check_form, raises
from support.pages import python_blocks

pytestmark = pytest.mark.usefixtures("quick_compiles")

RANKS = 2
CONFIG = helpers.make_config(pending_calls=1)
# The fields of each class in the first version that saved them: arrays, and static
# ones. Values that were saved then must load for ever.
FIRST = {
    "Dispatched": (
        "tokens scales row_offsets group_sizes expert_counts expert_ids src_info "
        "router_weights num_dropped num_invalid route grad_port scales_offsets "
        "input_scale",
        "format rows_dtype scale_layout",
    ),
    "Load": ("rows dropped steps imbalance worst fullest invalid place", "layout"),
    "Losses": ("balance_loss z_loss load", ""),
    "MoEAux": (
        "balance_loss z_loss load expert_counts num_dropped num_invalid place",
        "",
    ),
    "Pending": ("held ports", "kind key"),
    "Placement": ("expert_of places offsets", ""),
    "QuantizedWeights": (
        "gate_up gate_up_scales down down_scales gate_up_transposed down_transposed",
        "format",
    ),
    "Route": (
        "slot_of row_of row_slot slot_counts row_offsets expert_counts src_info "
        "num_dropped num_invalid",
        "key",
    ),
    "Routing": ("ids weights logits probabilities loss", ""),
    "SumInputs": ("slot_of entry_weights residual shared_rows shared_part", ""),
    "Way": ("order place_of there back grouped arrived", ""),  # of the benchmarks
}


def import_everything() -> None:
    left_out = ["_native_", "__main__"]
    if importlib.util.find_spec("flax") is None:
        left_out.append("jax_ep.flax")
    for module in pkgutil.walk_packages(
        jax_ep.__path__, "jax_ep.", onerror=lambda name: None
    ):
        if not any(each in module.name for each in left_out):
            importlib.import_module(module.name)


def pytree_classes() -> set[type]:
    """Those that JAX knows."""
    from jax._src import tree_util

    return {
        kind for kind in tree_util._registry if kind.__module__.startswith("jax_ep.")
    }


def test_every_pytree_class_can_be_saved() -> None:
    pytest.importorskip("flax")
    import_everything()
    known = {kind.__name__: kind for kind in pytrees.classes()}
    assert len(known) == len(list(pytrees.classes()))
    # Flax's modules and variables are pytrees of Flax.
    own = {kind for kind in pytree_classes() if "flax" not in kind.__module__}
    assert own - set(known.values()) == set()
    assert {kind.__name__ for kind in own} == set(FIRST) - {"SumInputs"}
    assert set(known) == set(FIRST)
    assert Layout._fields == ("names", "sizes", "stacked", "group")


@pytest.mark.parametrize("name", FIRST)
def test_saved_fields_stay(name: str) -> None:
    """Fields are neither renamed nor removed, and those added later have defaults."""
    import_everything()
    kinds = {kind.__name__: kind for kind in pytrees.classes()}
    kind = pytrees._kinds[kinds[name]]
    for found, first in zip((kind.arrays, kind.static), FIRST[name], strict=True):
        before = first.split()
        assert tuple(each for each in found if each in before) == tuple(before)
    parameters = inspect.signature(kind.cls).parameters
    added = {*kind.arrays, *kind.static} - set(" ".join(FIRST[name]).split())
    for each in added:
        assert parameters[each].default is not inspect.Parameter.empty
    for each in added & set(kind.arrays):
        assert parameters[each].default is None


@functools.cache
def values() -> dict[str, Any]:
    """One value of each class that reaches users, from calls of jax_ep."""
    mesh = helpers.make_mesh(RANKS)
    ep = helpers.make_ep(mesh, CONFIG)
    rng = np.random.default_rng(0)
    made = helpers.make_inputs(rng, CONFIG, RANKS, fill=helpers.normal)
    x, ids, weights = (
        helpers.put(mesh, part) for part in (made.tokens, made.ids, made.weights)
    )
    pending = jax_ep.sharded.dispatch_async(ep, x, ids, weights)
    d = jax_ep.sharded.dispatch_wait(pending)
    back = jax_ep.sharded.combine_async(ep, d.tokens, d.route)
    jax_ep.sharded.combine_wait(back)
    routing = jax_ep.router.route(jnp.arange(12.0).reshape(3, 4), 2)
    one = jnp.ones(())
    return {
        "Dispatched": d,
        "Load": jax_ep.stats.update(jax_ep.stats.init(ep, "ep"), d),
        "Losses": jax_ep.router.losses(routing),
        "MoEAux": jax_ep.MoEAux(one, one, *(jnp.arange(2),) * 4),
        "Pending": pending,
        "Pending of a combine": back,
        "Placement": jax_ep.placement.balance(np.arange(4), 6, ep_size=2),
        "QuantizedWeights": jax_ep.experts.quantize_weights(
            jnp.ones((2, 128, 2, 128)), jnp.ones((2, 128, 128)), format="mxfp4"
        ),
        "Route": d.route,
        "Routing": routing,
    }


VALUES = [
    *(name for name in FIRST if name not in ("SumInputs", "Way")),
    "Pending of a combine",
]


def assert_same(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.few(5)
@pytest.mark.parametrize("name", VALUES)
def test_exported_programs_take_and_return_it(name: str) -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    value = values()[name]
    program = export.export(jax.jit(lambda v: v))(value).serialize()
    loaded = export.deserialize(program)
    assert loaded.in_tree == jax.tree.structure(((value,), {}))
    assert loaded.out_tree == jax.tree.structure(value)
    assert_same(loaded.call(value), value)


@pytest.mark.parametrize("name", VALUES)
def test_flax_saves_it(name: str) -> None:
    serialization = pytest.importorskip("flax.serialization")
    importlib.import_module("jax_ep.flax")
    value = values()[name]
    empty = jax.tree.map(jnp.zeros_like, value)
    assert_same(serialization.from_bytes(empty, serialization.to_bytes(value)), value)
    state = serialization.to_state_dict({"a": [value]})
    assert_same(serialization.from_state_dict({"a": [empty]}, state), {"a": [value]})


def older(value: Any, fields: tuple[str, ...]) -> Any:
    """What `value` is if the program that saved it did not know some fields."""
    kind = pytrees._kinds[type(value)]
    tree = jax.tree_util.tree_structure(value)
    saved = pytrees._written(kind, tree.node_data()[1])
    children = dict(zip(kind.arrays, tree.children(), strict=True))
    found = pytrees.json.loads(saved)
    found["arrays"] = [name for name in found["arrays"] if name not in fields]
    static = {k: v for k, v in found["static"].items() if k not in fields}
    leaves = [children[name] for name in found["arrays"]]
    return pytrees._read(kind, found | {"static": static}, leaves)


def test_a_program_saved_before_fields_were_added() -> None:
    found = older(values()["Dispatched"], ("input_scale", "scale_layout"))
    assert found.input_scale is None
    assert found.scale_layout == "rows"
    with raises() as caught:
        older(values()["Dispatched"], ("tokens",))
    check_form(caught, "Dispatched", "none of ['tokens']", "version of jax_ep")


class TestFlaxState:
    """States that do not fit."""

    @pytest.fixture(autouse=True)
    def serialization(self):
        serialization = pytest.importorskip("flax.serialization")
        importlib.import_module("jax_ep.flax")
        return serialization

    def test_saved_before_a_field_was_added(self, serialization) -> None:
        value = values()["QuantizedWeights"].canonical()
        state = serialization.to_state_dict(value)
        del state["gate_up_transposed"]
        restored = serialization.from_state_dict(value, state)
        assert_same(restored, value)

    def test_of_other_fields(self, serialization) -> None:
        value = values()["Losses"]
        state = serialization.to_state_dict(value)
        with raises() as caught:
            serialization.from_state_dict(value, state | {"spread": 1})
        check_form(caught, "Losses", "also ['spread']")
        del state["load"]
        with raises() as caught:
            serialization.from_state_dict(value, state)
        check_form(caught, "Losses", "none of ['load']")
        with raises() as caught:
            serialization.from_state_dict(value, 3)
        check_form(caught, "Losses", "mapping")

    def test_of_another_format(self, serialization) -> None:
        value = values()["QuantizedWeights"]
        state = serialization.to_state_dict(value)
        target = dataclasses.replace(value, format="fp8_block128")
        with raises() as caught:
            serialization.from_state_dict(target, state)
        check_form(caught, "QuantizedWeights", "format", "fp8_block128, got mxfp4")

    def test_of_another_layout(self, serialization) -> None:
        value = values()["Load"]
        assert isinstance(value.layout, Layout)
        state = serialization.to_state_dict(value)
        sizes = (RANKS + 1,)
        other = dataclasses.replace(value, layout=value.layout._replace(sizes=sizes))
        with raises() as caught:
            serialization.from_state_dict(other, state)
        check_form(caught, "Load", "layout of the saved value")

    def test_of_another_handle(self, serialization) -> None:
        """A handle of equal content has another number, and so another key."""
        value = values()["Route"]
        other = dataclasses.replace(value, key=value.key + 1)
        for one in (value, values()["Pending"]):
            state = serialization.to_state_dict(one) | {"key": other.key}
            with raises() as caught:
                serialization.from_state_dict(one, state)
            words = (f"{value.key:#x}, got {other.key:#x}", "equal content and number")
            check_form(caught, type(one).__name__, *words)


def test_calls_say_that_a_saved_route_is_of_another_handle() -> None:
    mesh = helpers.make_mesh(RANKS)
    twin = helpers.init(mesh, pending_calls=1)
    d = values()["Dispatched"]
    assert d.route.key != twin.key
    with twin, raises() as caught:
        jax_ep.sharded.combine(twin, d.tokens, d.route)
    check_form(caught, "sharded.combine", f"{d.route.key:#x}", "content and number")


def test_a_route_from_an_exported_program_combines() -> None:
    """The second half of a layer, in a process that makes an equal handle."""
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    mesh = helpers.make_mesh(RANKS)
    ep, d = helpers.make_ep(mesh, CONFIG), values()["Dispatched"]
    again = export.export(jax.jit(lambda d: d))(d)
    loaded = export.deserialize(again.serialize()).call(d)

    def back(d: Any) -> Any:
        return jax_ep.combine(ep, d.tokens, d.route)

    run = jax.jit(jax.shard_map(back, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    helpers.assert_bits(run(loaded), run(d))


def test_the_example_of_the_docs() -> None:
    pytest.importorskip("flax")
    codes = values()["QuantizedWeights"]
    (block,) = python_blocks("docs/sharp_bits.md", "to_bytes")
    names = {"codes": codes, "like": jax.tree.map(jnp.zeros_like, codes)}
    exec(block, names)
    assert_same(names["restored"], codes)
