"""jax_ep.stats: loads over steps against counts taken on the host."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import stats
from jax_ep._stats import picture as _load_picture
from jax_ep._stats.layout import Layout
from support import helpers
from support.errors import check_form, raises
from support.loads import EXPERTS, ROWS, STEPS, check_numbers, make, placed, step

pytestmark = pytest.mark.usefixtures("quick_compiles")


def all_to_rank_0(mesh, ep, axes):
    """Operands of `step` with which all tokens of an EP group go to its rank 0."""
    rows = 8 * math.prod(mesh.shape[axis] for axis in axes)
    ids = np.arange(rows * 3, dtype=np.int32).reshape(rows, 3) % ep.local_experts
    return placed(mesh, axes, np.zeros((rows, 16), jnp.bfloat16), ids)


def test_sums_over_steps_inside_shard_map_and_outside():
    mesh, ep, ids = make()
    run = step(mesh, ep)
    load, outside = stats.init(ep), stats.init(ep)
    x = jnp.zeros((ids.shape[1], 16), jnp.bfloat16)
    for each in ids:
        load, aux = run(load, x, each)
        outside = jax.jit(stats.update)(outside, aux)
    for a, b in zip(jax.tree.leaves(load), jax.tree.leaves(outside), strict=True):
        np.testing.assert_array_equal(a, b)
    groups = ids.reshape(STEPS, 2, -1)
    counts = np.array(
        [[np.bincount(g[g >= 0], minlength=EXPERTS) for g in s] for s in groups]
    )
    by_rank = counts.reshape(STEPS, 4, EXPERTS // 2)
    found = stats.summary(load)
    assert found.steps == STEPS
    np.testing.assert_array_equal(found.rows, by_rank.sum(0))
    lost = np.maximum(by_rank.sum(2) - ep.recv_capacity, 0)
    np.testing.assert_array_equal(found.dropped, lost.sum(0))
    assert lost.sum() > 0
    invalid = (ids == -2).sum((0, 2)).reshape(4, -1).sum(1)
    np.testing.assert_array_equal(found.invalid, invalid)
    assert invalid.min() > 0
    whole = counts.sum(1)
    worst = EXPERTS * whole.max(1) / whole.sum(1)
    np.testing.assert_allclose(found.mean_imbalance, worst.mean(), rtol=1e-5)
    np.testing.assert_allclose(found.worst_imbalance, worst.max(), rtol=1e-5)
    assert found.fullest == by_rank.sum(2).max()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("fused", "axes"), [(False, ("ep", "dp")), (True, ("dp", "ep"))]
)
def test_a_dispatched(fused, axes, kind):
    """A Dispatched counts per layer in a scan in shard_map, or for a stack outside."""
    mesh = helpers.make_mesh({"dp": 2, "ep": 2}, kind=kind)
    changes = {"fused_shared_expert": fused, "recv_capacity": ROWS - 8 + 8 * fused}
    config = helpers.make_config(num_experts=EXPERTS, **changes)
    ep = helpers.make_ep(mesh, config)
    ids = np.random.default_rng(0).integers(-2, EXPERTS, (STEPS, 32, 3), np.int32)
    at = P(None, axes)

    def body(loads, ids):
        def layer(_, given):
            load, ids = given
            d = jax_ep.dispatch(ep, jnp.ones((8, 16), jnp.bfloat16), ids)
            return None, (stats.update(load, d), d)

        return jax.lax.scan(layer, None, (loads, ids))[1]

    run = jax.shard_map(body, mesh=mesh, in_specs=(at, at), out_specs=(at, at))
    one = stats.init(ep, axes)
    sharding = NamedSharding(mesh, at)
    loads = jax.device_put(
        jax.tree.map(lambda leaf: np.stack([leaf] * STEPS), one), sharding
    )
    inside, d = jax.jit(run)(loads, jax.device_put(ids, sharding))
    update = jax.jit(stats.update).lower(loads, d).compile()
    assert not re.search(r"all-(reduce|gather|to-all)|collective", update.as_text())
    outside = update(loads, d)
    # For each EP group; the tokens' ranks are stacked in the order of `axes`.
    by_rank = ids.reshape(STEPS, 2, 2, 24)
    by_rank = by_rank.swapaxes(1, 2) if axes[0] == "ep" else by_rank
    groups = by_rank.reshape(STEPS, 2, 48)
    counts = [[np.bincount(g[g >= 0], minlength=EXPERTS) for g in s] for s in groups]
    rows = np.reshape(counts, (STEPS, 4, -1))
    assert (np.asarray(inside.place) >= 0).all()
    for load in (inside, outside):
        found = stats.summary(load)
        np.testing.assert_array_equal(found.rows, rows)
        np.testing.assert_array_equal(found.expert_rows, np.sum(counts, 1))
        lost = np.maximum(rows.sum(2) - (ROWS - 8), 0)
        np.testing.assert_array_equal(found.dropped, lost)
        assert lost.any()
        invalid = (by_rank == -2).sum(3).reshape(STEPS, 4)
        np.testing.assert_array_equal(found.invalid, invalid)
        np.testing.assert_array_equal(found.fullest, rows.sum(2).max(1))
        assert np.isnan(found.mean_imbalance).all()
        assert np.isnan(found.worst_imbalance).all()
        by_id = np.sum(counts, 1)
        np.testing.assert_allclose(found.imbalance, by_id.max(1) / by_id.mean(1))
        assert "in a step" not in stats.heat_map(load)


@pytest.mark.parametrize("group", [("c",), ("c", "a"), ("a", "c"), ("b", "c", "a")])
def test_who_holds_which_experts(group):
    """As the mesh numbers an EP group's ranks, and ranks stacked over its axes."""
    mesh = helpers.make_mesh({"a": 2, "b": 2, "c": 2})
    layout = Layout(mesh.axis_names, (2, 2, 2), ("c", "a", "b"), group)
    for (over, axes), expected in zip(
        ((mesh.axis_names, group), (layout.stacked, mesh.axis_names)),
        (layout.owners(), layout.places()),
        strict=True,
    ):
        index = jax.shard_map(
            lambda axes=axes: jax.lax.axis_index(axes)[None],
            mesh=mesh,
            in_specs=(),
            out_specs=P(over),
            check_vma=False,
        )
        np.testing.assert_array_equal(jax.jit(index)(), expected)


def test_a_dispatched_of_another_layer_is_refused():
    """Also if it has one expert more, as with a shared expert."""
    mesh = helpers.make_mesh(1)
    load = stats.init(helpers.make_ep(mesh, helpers.make_config(num_experts=4)))
    ep = helpers.make_ep(mesh, helpers.make_config(num_experts=5))
    ids = jnp.zeros((8, 3), jnp.int32)
    d = jax_ep.sharded.dispatch(ep, jnp.ones((8, 16), jnp.bfloat16), ids)
    with pytest.raises(
        ValueError, match=r"^jax_ep\.stats\.update: aux must be .* 5 gr"
    ):
        stats.update(load, d)


def test_steps_of_both_kinds():
    """Once unknown, the imbalance within a step stays unknown."""
    ep = helpers.make_ep(helpers.make_mesh(1), helpers.make_config(num_experts=4))
    ids = jnp.zeros((8, 3), jnp.int32)
    d = jax_ep.sharded.dispatch(ep, jnp.ones((8, 16), jnp.bfloat16), ids)
    update = jax.jit(stats.update)
    load = update(update(stats.init(ep), d), some_aux(1, 4))
    found = stats.summary(load)
    assert found.steps == 2
    assert found.expert_rows.tolist() == [24, 0, 0, 0]
    assert math.isnan(found.mean_imbalance)
    assert found.imbalance == 4


def test_a_layer_with_a_tensor_parallel_axis():
    mesh = helpers.make_mesh({"ep": 2, "tp": 2})
    ep = helpers.make_ep(mesh, helpers.make_config(num_experts=EXPERTS))
    load = stats.init(ep, ("ep",))
    assert load.rows.shape == (2, EXPERTS // 2, 2)
    counts = jnp.arange(EXPERTS, dtype=jnp.int32)
    zeros = jnp.zeros(2, jnp.int32)
    aux = jax_ep.MoEAux(*[jnp.zeros(())] * 2, counts / 28, counts, zeros, zeros)
    found = stats.summary(jax.jit(stats.update)(load, aux))
    np.testing.assert_array_equal(found.rows, [[0, 1, 2, 3], [4, 5, 6, 7]])
    np.testing.assert_allclose(found.worst_imbalance, 2.0)


def test_counts_pass_32_bits():
    total = jnp.array([[2**32 - 3, 7]], jnp.uint32)
    found = stats._add(total, jnp.array([5], jnp.int32))
    np.testing.assert_array_equal(found, [[2, 8]])


def a_load(experts, ranks, groups=1, layers=(), hot=0, scale=1):
    """A load on the host, with most rows for expert `hot`."""
    rng = np.random.default_rng(experts + ranks)
    rows = rng.integers(100, 200, (*layers, groups, experts)) * scale
    rows[..., hot] = 400 * scale
    rows = rows.reshape(*layers, groups * ranks, experts // ranks)
    ones = np.ones(rows.shape[:-1])
    dropped, none = rows.sum(-1) // 3, np.zeros(rows.shape[:-1], int)
    dropped = np.where(dropped == dropped.max(), dropped, 0)
    words = [
        np.stack([each & 0xFFFFFFFF, each >> 32], -1).astype(np.uint32)
        for each in (rows, dropped, none)
    ]
    layout = Layout(("dp", "ep"), (groups, ranks), ("dp", "ep"), ("ep",))
    sums = 20 * ones.astype(int), 60 * ones, 5 * ones, rows.sum(-1) // 10, words[2]
    return stats.Load(*words[:2], *sums, layout=layout)


def experts_marked(text):
    """The global ids of experts that a one-layer heat map's text marks with `@`."""
    found = []
    for line in text.splitlines():
        if line.count("|") >= 2:
            before, *cells, _ = line.split("|")
            start, _, last = before.split()[-1].partition("-")
            shades = "".join(cells)
            assert len(shades) == int(last or start) - int(start) + 1, line
            found += [int(start) + at for at, mark in enumerate(shades) if mark == "@"]
    return found


SIZES = [(8, 1), (8, 8), (60, 4), (64, 64), (256, 1), (256, 64), (512, 2), (2048, 2048)]


@pytest.mark.parametrize(("experts", "ranks"), SIZES)
def test_text_names_global_ids_in_80_columns(experts, ranks):
    hot = experts - 3
    for groups, scale in ((1, 1), (2, 10**12)):
        text = stats.heat_map(a_load(experts, ranks, groups, hot=hot, scale=scale))
        assert experts_marked(text) == [hot]
        assert f"busiest expert {hot}, " in text
        assert max(map(len, text.splitlines())) <= 80, text
        loads = a_load(experts, ranks, groups, (128,), hot, scale)
        text = stats.heat_map(loads)
        assert max(map(len, text.splitlines())) <= 80, text
        lines = [line.split("|") for line in text.splitlines()]
        found = [line for line in lines if len(line) == 3 and "@" in line[1]]
        assert found
        for _, shades, rest in found:
            # The last bin may have fewer experts.
            each = -(-experts // len(shades))
            assert shades.index("@") == hot // each
            assert rest.split()[0] == f"{hot},"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("load.bmp", "path must be a file name in one of .png"),
        ("no/load.png", "path must be a file in a folder that can be"),
        (5, "path must be a file name, got 5"),
    ],
)
def test_paths_are_checked_before_the_load_is_read(path, words, tmp_path):
    """Except in a job of several processes, which wait for each other's parts."""
    given = tmp_path / path if isinstance(path, str) else path
    load = a_load(4, 2, 1)
    with raises() as caught:
        stats.heat_map({}, given)
    check_form(caught, "stats.heat_map", words)
    with pytest.MonkeyPatch.context() as patch:
        read = []
        patch.setattr(jax, "process_count", lambda: 2)
        patch.setattr(stats, "_view", lambda *given: read.append(given))
        with raises() as caught:
            stats.heat_map(load, given)
        assert read
    check_form(caught, "stats.heat_map", words)


def test_heat_map_as_text():
    rows = np.zeros((2, 4, 2), np.uint32)
    rows[:, :, 0] = [[0, 1, 50, 100], [10, 20, 30, 40]]
    dropped = np.array([[3, 0], [0, 0]], np.uint32)
    invalid = np.array([[0, 0], [1, 1]], np.uint32)
    ones = np.ones(2, np.float32)
    sums = rows, dropped, np.array([2, 2]), 3 * ones, 2 * ones, ones, invalid
    assert stats.heat_map(stats.Load(*sums)).splitlines() == [
        "8 experts on 2 ranks, 2 steps",
        "a character for each expert; blank no rows, @ 100 rows",
        "rank experts        rows dropped",
        "   0     0-3 | .+@|  151       3",
        "   1     4-7 |.:-=|  100",
        "busiest expert 3, 3.19 x the mean; in a step 1.50 x on average, 2.00 x at "
        "worst",
        "dropped 3 of 251 rows (1.2%); 4.29G invalid ids; fullest rank 1 row per step",
        "1 expert without rows",
    ]


def test_a_load_without_steps(tmp_path):
    load = stats.init(helpers.make_ep(helpers.make_mesh(1), helpers.make_config()))
    assert stats.summary(load).imbalance == 0
    assert "no rows" in stats.heat_map(load, picture(tmp_path))


def picture(tmp_path):
    """A path for a picture if matplotlib is installed."""
    found = importlib.util.find_spec("matplotlib")
    return tmp_path / "load.png" if found else None


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("experts", "ranks", "layers"),
    [
        (8, 2, ()),
        (60, 4, ()),
        (256, 1, ()),
        (512, 16, ()),
        (8, 2, (1,)),
        (256, 8, (64,)),
    ],
)
def test_heat_map_as_a_picture(experts, ranks, layers, tmp_path):
    """It has a viewable size, integer ticks, and the hot expert at its id."""
    pytest.importorskip("matplotlib")
    hot = experts - 3
    load = a_load(experts, ranks, groups=2, layers=layers, hot=hot)
    path = tmp_path / "load.png"
    stats.heat_map(load, path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert 800 <= width <= 1600
    assert 400 <= height <= 1200
    figure = _load_picture.figure(stats._view(load))
    figure.draw_without_rendering()
    title = figure.get_suptitle()
    assert all(
        words in title for words in (f"{experts} experts", "2 EP groups", "20 st")
    )
    cells = figure.axes[0]
    facts = cells.get_title("left")
    assert all(words in facts for words in (f"expert {hot}", "3.00 x", "dropped"))
    assert figure.axes[-1].get_ylabel() == "rows, as a multiple of the mean"
    ticks = {"x": [], "y": []}
    for axes in figure.axes:
        for name in ("expert", "rank", "layer", "line's"):
            for axis in (axes.xaxis, axes.yaxis):
                if axis.get_label_text().startswith(name):
                    labels = [label.get_text() for label in axis.get_ticklabels()]
                    assert labels
                    assert all(re.fullmatch(r"\+?\d+", label) for label in labels)
                    ticks[axis.axis_name] += labels
    assert 2 <= len(cells.get_xticks()) <= 16
    # The id at the hottest cell, as a reader would find it.
    values = cells.images[0].get_array()
    line, column = np.unravel_index(values.argmax(), values.shape)
    if layers or not len(cells.get_yticks()):
        assert column == hot
    else:
        at = np.searchsorted(cells.get_yticks(), line, "right") - 1
        skipped = line - int(cells.get_yticks()[at])
        first = int(cells.get_yticklabels()[at].get_text())
        assert first + skipped * values.shape[1] + column == hot


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("ranks", [2, 1])
def test_numbers_without_implicit_transfers(ranks, kind):
    """Also with explicit axes of size 1, which JAX splits off in a reshape."""
    check_numbers(kind, {"dp": 2, "ep": ranks})


@pytest.mark.parametrize("axes", [("dp", "ep"), ("ep", "dp")])
def test_ranks_are_the_mesh_s_however_they_were_stacked(axes):
    mesh, ep, _ = make()
    operands = all_to_rank_0(mesh, ep, axes)
    inside, aux = step(mesh, ep, axes)(stats.init(ep, axes), *operands)
    update = jax.jit(stats.update)
    loads = [inside, *(update(stats.init(ep, a), aux) for a in (None, axes))]
    for load in loads:
        each = stats.summary(load).rows.sum(1).tolist()
        assert each == [2 * ROWS, 0, 2 * ROWS, 0]
        assert stats.summary(load).expert_rows.tolist() == [ROWS] * 4 + [0] * 4
        lines = stats.heat_map(load).splitlines()[3:5]
        assert [line.split("|")[1] for line in lines] == ["@@@@", "    "]


def test_steps_stacked_in_different_orders_are_refused():
    mesh, ep, _ = make()
    load = stats.init(ep)
    for axes in (("dp", "ep"), ("ep", "dp"), ("dp", "ep")):
        _, aux = step(mesh, ep, axes)(
            stats.init(ep, axes), *all_to_rank_0(mesh, ep, axes)
        )
        load = jax.jit(stats.update)(load, aux)
    with pytest.raises(
        ValueError, match=r"^jax_ep\.stats\.summary: load must be .* at \[1, 2\]; make"
    ):
        stats.summary(load)


def test_explicit_axes_in_another_order_are_refused():
    mesh, ep, _ = make(kind=AxisType.Explicit)
    axes = "ep", "dp"
    operands = all_to_rank_0(mesh, ep, axes)
    load, aux = step(mesh, ep, axes)(stats.init(ep, axes), *operands)
    load = jax.jit(stats.update)(load, aux)
    assert stats.summary(load).rows.sum(1).tolist() == [4 * ROWS, 0, 4 * ROWS, 0]
    with pytest.raises(
        ValueError, match=r"^jax_ep\.stats\.update: load must be sharded .*'dp'"
    ):
        jax.jit(stats.update)(stats.init(ep), aux)


def test_rows_that_would_count_once_for_each_tensor_parallel_rank():
    mesh, ep, _ = make(sizes={"ep": 2, "tp": 2})
    operands = all_to_rank_0(mesh, ep, ("ep",))
    load, _ = step(mesh, ep, ("ep",))(stats.init(ep, "ep"), *operands)
    assert stats.summary(load).rows.sum(1).tolist() == [2 * ROWS, 0]
    with pytest.raises(
        ValueError, match=r"^jax_ep\.stats\.update: load must be .*\['tp'\].*spec"
    ):
        step(mesh, ep, ("ep",), ("ep", "tp"))(stats.init(ep), *operands)
    # Without check_vma a trace cannot detect it.
    run = step(mesh, ep, ("ep",), ("ep", "tp"), check_vma=False, tp_axis="tp")
    load, _ = run(stats.init(ep), *operands)
    with pytest.raises(
        ValueError, match=r"^jax_ep\.stats\.heat_map: load must count .*\[0, 0, 1, 1\]"
    ):
        stats.heat_map(load)


def some_aux(ranks, experts):
    shares = [jnp.zeros(())] * 2
    return jax_ep.MoEAux(*shares, *[jnp.zeros(experts)] * 2, *[jnp.zeros(ranks)] * 2)


@pytest.mark.parametrize(
    ("ranks", "experts"),
    [(6, 6), (4, 8), (1, 4), (2, 8), (8, 32)],
    ids=["both", "experts", "one rank", "fewer ranks", "more ranks"],
)
def test_aux_of_another_layer_is_refused(ranks, experts):
    _, ep, _ = make()
    with pytest.raises(
        ValueError, match=rf"^jax_ep\.stats\.update: aux must be .*got {ranks} ranks"
    ):
        stats.update(stats.init(ep), some_aux(ranks, experts))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda load: stats.update(load, 3), "update: aux must be .*got int; "),
        (lambda load: stats.update(None, 3), "update: load must be .*got NoneType; "),
        (lambda _: stats.summary(None), "summary: load must be .*got NoneType; "),
        (lambda _: stats.heat_map({}), "heat_map: load must be .*got dict; "),
        (lambda _: stats.init(None), "init: ep must be .*got NoneType; "),
    ],
)
def test_what_is_of_another_kind_is_refused(call, words):
    load = stats.init(helpers.make_ep(helpers.make_mesh(1), helpers.make_config()))
    with pytest.raises(TypeError, match=rf"^jax_ep\.stats\.{words}"):
        call(load)


def test_a_stack_of_layers():
    """A stack of layers is counted as a scan over layers reports it."""
    _, ep, _ = make()
    load, aux = stats.init(ep), some_aux(4, 16)
    counts = jnp.arange(3 * 16, dtype=jnp.int32).reshape(3, 16)
    loads, auxs = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), (load, aux))
    auxs = dataclasses.replace(auxs, expert_counts=counts)
    found = jax.jit(stats.update)(loads, auxs)
    vmapped = jax.jit(jax.vmap(stats.update))(loads, auxs)
    for a, b in zip(*map(jax.tree.leaves, (found, vmapped)), strict=True):
        np.testing.assert_array_equal(a, b)
    numbers = stats.summary(found)
    assert numbers.steps.tolist() == [1] * 3
    np.testing.assert_array_equal(numbers.rows, counts.reshape(3, 4, 4))
    by_id = np.array(counts).reshape(3, 2, 8).sum(1)
    np.testing.assert_array_equal(numbers.expert_rows, by_id)
    np.testing.assert_array_equal(numbers.imbalance, by_id.max(1) / by_id.mean(1))
    for layer in range(3):
        one = stats.summary(jax.tree.map(lambda leaf, i=layer: leaf[i], found))
        for field in dataclasses.fields(one):
            of_stack = getattr(numbers, field.name)
            if field.name != "expert_ids":
                of_stack = of_stack[layer]
            np.testing.assert_array_equal(of_stack, getattr(one, field.name))
    lines = stats.heat_map(found).splitlines()
    assert lines[0].startswith("3 layers of 8 experts on 2 ranks")
    assert [line.split()[0] for line in lines[3:6]] == ["0", "1", "2"]
    words = r"^jax_ep\.stats\.update: aux must have the layers of load, .* got \("
    for given in ((loads, aux), (load, auxs)):
        with pytest.raises(ValueError, match=words):
            stats.update(*given)


def test_no_numbers_inside_of_jit():
    load = stats.init(helpers.make_ep(helpers.make_mesh(1), helpers.make_config()))
    with pytest.raises(ValueError, match=r"^jax_ep\.stats\.summary: load must hold"):
        jax.jit(lambda load: stats.summary(load).steps)(load)


def test_axes_of_a_load():
    _, ep, _ = make()
    assert stats.init(ep, "ep").steps.shape == (2,)


@pytest.mark.parametrize(
    ("axes", "kind"),
    [
        (("ep", "tp"), ValueError),
        (("ep", "ep"), ValueError),
        ("dp", ValueError),
        ((), ValueError),
        (5, TypeError),
        (("ep", None), TypeError),
    ],
)
def test_what_are_no_axes_of_a_load(axes, kind):
    _, ep, _ = make()
    must = f"jax_ep.stats.init: axis_names must be distinct axes .*got {axes!r}; leave"
    with pytest.raises(kind, match="^" + re.escape(must).replace(r"\.\*", ".*")):
        stats.init(ep, axes)


@pytest.mark.parametrize("layers", [(), (3,)])
def test_places_of_a_placement(layers, tmp_path):
    """Sums are over copies and EP groups, ids are experts', and ranks are even."""
    pytest.importorskip("matplotlib")
    hot, ranks, places = 5, 4, 16
    loads = np.ones((*layers, 12))
    loads[..., hot] = 12
    placed = jax_ep.placement.balance(loads, places, ep_size=ranks)
    load = a_load(places, ranks, groups=2, layers=layers, hot=3)
    plain = stats.summary(load)
    found = stats.summary(load, placement=placed)
    np.testing.assert_array_equal(found.rows, plain.rows)
    owner = np.tile(np.arange(ranks), 2)
    ids = placed.expert_of.reshape(*layers, ranks, -1)[..., owner, :]
    np.testing.assert_array_equal(found.expert_ids, ids)
    want = np.zeros((*layers, 12), np.int64)
    for at in np.ndindex(ids.shape):
        want[(*at[:-2], ids[at])] += found.rows[at]
    np.testing.assert_array_equal(found.expert_rows, want)
    np.testing.assert_allclose(found.imbalance, want.max(-1) / want.mean(-1))
    rows = found.rows.sum(-1)
    np.testing.assert_allclose(found.rank_imbalance, rows.max(-1) / rows.mean(-1))
    text = stats.heat_map(load, tmp_path / "load.svg", placement=placed)
    assert "places of 12 experts on 4 ranks, sum of 2 EP" in text
    busiest = rf"(?s)busiest rank \d.*busiest expert {want.argmax() % 12}\D"
    assert re.search(busiest, text)
    assert "each place;" in text
    view = stats._view(load, placed)
    figure = _load_picture.figure(view)
    figure.draw_without_rendering()
    assert "place" in figure.axes[0].get_xlabel()
    if layers:
        same = jax.tree.map(lambda leaf: leaf[0], placed)
        one = stats.summary(load, placement=same)
        np.testing.assert_array_equal(one.expert_rows, want)


def test_another_placement_is_refused():
    load = a_load(16, 4)
    words = r"^jax_ep\.stats\.{}: placement must be .*"
    with pytest.raises(ValueError, match=words.format("heat_map") + r"\(15,\)"):
        stats.heat_map(load, placement=jax_ep.placement.identity(15))
    with pytest.raises(TypeError, match=words.format("summary") + "got int"):
        stats.summary(load, placement=3)
