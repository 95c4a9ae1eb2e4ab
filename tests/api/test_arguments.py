"""Arguments at the edge of what is allowed: meshes, tables, weak types, names."""

import copy
import dataclasses
import gc
import math
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from support import compare_transports, helpers

pytestmark = pytest.mark.usefixtures("quick_compiles")

MIXED = [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)]


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(helpers.some_ranks(2))


@pytest.fixture(scope="module")
def ep(mesh):
    return helpers.make_ep(mesh, helpers.make_config())


def operands(ep, n=8):
    tokens = jnp.ones((n * ep.ep_size, ep.config.hidden_size), ep.config.dtype)
    return tokens, jnp.zeros((n * ep.ep_size, ep.config.top_k), jnp.int32)


@pytest.mark.parametrize("kinds", MIXED)
def test_mesh_of_mixed_axis_types(kinds):
    auto = helpers.make_mesh({"dp": 2, "ep": 2})
    mesh = Mesh(auto.devices, auto.axis_names, axis_types=kinds)
    with helpers.init(mesh) as ep:
        assert ep.my_rank.tolist() == [0, 1, 0, 1]
        tokens, ids = (jnp.concatenate([a, a]) for a in operands(ep))
        d = jax_ep.sharded.dispatch(ep, tokens, ids)
        y = jax_ep.sharded.combine(ep, d.tokens, d.route)
        np.testing.assert_array_equal(np.asarray(y, np.float32), ep.config.top_k)


def test_init_inside_the_context_of_another_mesh(mesh):
    other = Mesh(mesh.devices, ("other",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(other), helpers.init(mesh) as ep:
        assert ep.my_rank.tolist() == list(range(mesh.size))


@pytest.mark.parametrize("names", [None, 0, [["ep"]], (), ("ep", "ep"), "zz"])
def test_init_axis_names(mesh, names):
    with pytest.raises(ValueError, match=r"jax_ep.init: axis_name must name"):
        jax_ep.init(mesh, names, helpers.make_config())


def test_route_of_another_dtype(ep):
    d = jax_ep.sharded.dispatch(ep, *operands(ep))
    cast = jax.tree.map(lambda a: a.astype(jnp.bfloat16), d.route)
    with pytest.raises(TypeError, match=r"route.slot_of must be int32, got bfloat16"):
        jax_ep.sharded.combine(ep, d.tokens, cast)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"slot_of": None}, TypeError, r"route.slot_of must be an array, got None "),
        ({"row_slot": [1, 2]}, TypeError, r"row_slot must be an array, got \[1, 2\]"),
        ({"key": "7"}, TypeError, r"route.key must be the int .* got '7'"),
        ({"key": [7]}, TypeError, r"route.key must be the int .* got \[7\]"),
        ({"key": True}, TypeError, r"route.key must be the int .* got True"),
        ({"key": 7}, ValueError, r"route must come from a dispatch of the same ep"),
    ],
)
def test_route_of_other_things(mesh, ep, change, error, words):
    def body(tokens, ids):
        d = jax_ep.dispatch(ep, tokens, ids)
        return jax_ep.combine(ep, d.tokens, dataclasses.replace(d.route, **change))

    with pytest.raises(error, match=r"jax_ep.combine: .*" + words):
        jax.eval_shape(compare_transports.mapped(mesh, body), *operands(ep))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": [[0, 1]]}, r"topk_ids must be an array, got \[\[0, 1\]\] of .* list"),
        ({"ids": None}, r"topk_ids must be an array, got None; pass .* route="),
        ({"ids": np.zeros((8, 1), np.int32)}, r"\[n, K\].*top_k.*; .*-1 where it has"),
        ({"weights": np.ones(8, np.float32)}, r"router_weights .*\(8,\); give each id"),
        ({"rows": np.ones((8, 16), jnp.bfloat16)}, r"\[N, columns\].*d.tokens"),
        ({"rank_weights": np.ones((8, 3), "f")}, r"\[N\].*pass d.router_weights"),
        ({"residual": np.ones((7, 16), jnp.bfloat16)}, r"residual .*; pass a row for"),
    ],
)
def test_what_was_given_and_what_to_give(mesh, ep, change, words):
    def body(tokens, ids):
        ids = change.get("ids", ids)
        d = jax_ep.dispatch(ep, tokens, ids, change.get("weights"))
        rows, residual = change.get("rows", d.tokens), change.get("residual")
        weights = change.get("rank_weights", d.router_weights)
        return jax_ep.combine(ep, rows, d.route, weights, residual=residual)

    with pytest.raises((TypeError, ValueError), match=words):
        jax.eval_shape(compare_transports.mapped(mesh, body), *operands(ep))


@pytest.mark.parametrize("seconds", [0, -1.0, math.inf, -math.inf, math.nan, 1e300])
def test_timeouts_end(seconds):
    with pytest.raises(ValueError, match=r"timeout_s must be a positive number of at"):
        helpers.make_config(timeout_s=seconds)
    for large in (10**400, 1_000_001):
        with pytest.raises(ValueError, match=r"timeout_s must be .* at most 1e\+06"):
            helpers.make_config(timeout_s=large)
    assert helpers.make_config(timeout_s=10**6).timeout_s == 10**6


def test_pickles_of_configs_are_validated():
    config = helpers.make_config()
    for name, value in (("timeout_s", math.inf), ("top_k", -1), ("dtype", "int4")):
        changed = copy.copy(config)
        vars(changed)[name] = value
        with pytest.raises((ValueError, TypeError), match=rf"jax_ep.EPConfig: {name}"):
            pickle.loads(pickle.dumps(changed))


def test_results_are_never_weakly_typed(mesh):
    ep = helpers.make_ep(mesh, helpers.make_config(dtype="float32"))
    _, ids = operands(ep)
    tokens = jnp.full((ids.shape[0], ep.config.hidden_size), 1.0)
    assert tokens.weak_type
    d = jax_ep.sharded.dispatch(ep, tokens, ids)
    y = jax_ep.sharded.combine(ep, d.tokens, d.route)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((d, y)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_alignment": 2**31}, "expert_alignment must be in"),
        ({"max_tokens_per_rank": 2**64}, "max_tokens_per_rank must be in"),
        ({"capacity_factor": 1e308}, "capacity_factor must be a positive"),
        ({"capacity_factor": True}, "capacity_factor must be a positive"),
        ({"timeout_s": True}, "timeout_s must be a positive"),
    ],
)
def test_config_bounds(changes, words):
    with pytest.raises(ValueError, match=words):
        helpers.make_config(**changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, i: ((x[:-1], i), {}), "tokens must have a positive multiple"),
        (lambda x, i: ((x[:0], i[:0]), {}), "tokens must have a positive multiple"),
        (lambda x, i: ((x, i[0, 0]), {}), "topk_ids must have a positive multiple"),
        (lambda x, i: ((x, i), {"spec": "ep"}), "spec must be a PartitionSpec"),
        (lambda x, i: ((x, i), {"spec": P(("ep", "zz"))}), "spec must be a Part"),
        (lambda x, i: ((x, i), {"spec": P("ep", "ep")}), "spec must be a Part"),
        (lambda x, i: ((x, i), {"spec": P(P.UNCONSTRAINED)}), "spec must be a Part"),
        (lambda x, i: ((x, i), {"spec": P(("ep", "ep"))}), "spec must be a Part"),
    ],
)
def test_sharded_dispatch_arguments(ep, change, words):
    if ep.ep_size == 1 and "multiple" in words:
        pytest.skip("every count is a multiple of one rank")
    arguments, keywords = change(*operands(ep))
    with pytest.raises(ValueError, match=f"jax_ep.sharded.dispatch: {words}"):
        jax_ep.sharded.dispatch(ep, *arguments, **keywords)


def test_what_is_no_array_is_named(ep):
    x, i = operands(ep)
    for given, word in (((None, i), "tokens"), ((x, None), "topk_ids")):
        with pytest.raises(TypeError, match=f"sharded.dispatch: {word} must be an arr"):
            jax_ep.sharded.dispatch(ep, *given)
    with pytest.raises(TypeError, match="tokens must have a dtype that JAX keeps"):
        jax_ep.sharded.dispatch(ep, np.asarray(x).astype(object), i)
    route = jax_ep.sharded.dispatch(ep, x, i).route
    with pytest.raises(TypeError, match=r"sharded.combine: expert_out must be an arr"):
        jax_ep.sharded.combine(ep, None, route)


class Shaped:
    """Has only a shape and a dtype, like abstract arrays of other libraries."""

    def __init__(self, like):
        self.shape, self.dtype = like.shape, like.dtype


@pytest.mark.parametrize(
    "emptied", [jax.typeof, Shaped, lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)]
)
def test_shapes_without_values_are_named(ep, emptied):
    """Traced values have no contents either, but are accepted."""

    def run(x, i, w):
        return jax_ep.sharded.dispatch(ep, x, i, w)

    x, i = operands(ep)
    given = {"tokens": x, "topk_ids": i, "router_weights": jnp.ones(i.shape)}
    for name, array in given.items():
        words = f"sharded.dispatch: {name} must be an array with values, got .*; pass"
        with pytest.raises(TypeError, match=words):
            run(*(given | {name: emptied(array)}).values())
    with pytest.raises(TypeError, match=r"quantize: tokens must be an array with val"):
        jax_ep.formats.quantize(emptied(x), "bf16")


def test_shapes_are_enough_to_trace(ep):
    def run(x, i):
        d = jax_ep.sharded.dispatch(ep, x, i)
        return jax_ep.sharded.combine(ep, d.tokens, d.route)

    x, i = operands(ep)
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, i)]
    assert jax.eval_shape(run, *structs) == structs[0]
    y = jax.jit(run).lower(*structs).compile()(x, i)
    np.testing.assert_array_equal(np.asarray(y, np.float32), ep.config.top_k)


def test_sharded_inside_shard_map_names_the_other_form(ep, mesh):
    def body(tokens, ids):
        return jax_ep.sharded.dispatch(ep, tokens, ids).tokens

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    with pytest.raises(ValueError, match=r"call jax_ep.dispatch there"):
        mapped(*operands(ep))


def test_mesh_of_another_shape(ep):
    other = helpers.make_mesh({"dp": 2, "ep": ep.ep_size})

    def body(tokens, ids):
        return jax_ep.dispatch(ep, tokens, ids).tokens

    mapped = jax.shard_map(body, mesh=other, in_specs=P("ep"), out_specs=P("ep"))
    with pytest.raises(ValueError, match="over the mesh of ep"):
        mapped(*operands(ep))


def test_handle_used_by_sharded_is_collected(mesh):
    ep = helpers.init(mesh)
    jax.block_until_ready(jax_ep.sharded.dispatch(ep, *operands(ep)).tokens)
    alive = weakref.ref(ep)
    del ep
    jax.clear_caches()
    gc.collect()
    assert alive() is None


def test_check_counts_the_other_devices(mesh):
    if mesh.size < 2:
        pytest.skip("needs 2 devices")
    with helpers.init(mesh) as ep:
        tokens, ids = operands(ep)
        jax.block_until_ready(jax_ep.sharded.dispatch(ep, tokens, ids + 99))
        with pytest.raises(jax_ep.InvalidIdError, match=r"at rank 0, .*1 more devices"):
            ep.check()
        ep.check()


def test_closed_handle_is_not_entered(mesh):
    ep = helpers.init(mesh)
    ep.close()
    with pytest.raises(ValueError, match=r"jax_ep.EPHandle: this handle is closed; "):
        ep.__enter__()


def test_dequantize_wants_the_whole(ep):
    d = jax_ep.sharded.dispatch(ep, *operands(ep))
    assert jax_ep.dequantize(d) is d.tokens
    with pytest.raises(TypeError, match=r"jax_ep.dequantize: d must be"):
        jax_ep.dequantize(d.tokens)
