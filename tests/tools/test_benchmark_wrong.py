"""Benchmarks see wrong results, mark their rows and exit 1."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.calls import host_time, options_cost, options_worker
from benchmarks.layers import cases as layer_cases
from benchmarks.layers import decode, layer, routers
from benchmarks.layers import decode_steps as steps
from benchmarks.layers import kinds as layer_kinds
from benchmarks.overlap import cases as overlap_cases
from benchmarks.overlap import overlap
from benchmarks.overlap import worker as overlap_worker
from jax_ep._cli.bench import transports as p2p_transports
from support import ROOT, helpers
from support.tiny import RANKS, written

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("quick_compiles")]


def run(module, folder, *words, status=1):
    """Runs a benchmark in its tiny form; returns the rows that are wrong."""
    words = ["--tiny", "--results", str(folder), *words]
    assert module.main(words) == status
    rows = written(folder)["results"]
    return [row for row in rows if row.get("wrong")]


def test_layers(tmp_path, monkeypatch, capsys):
    """The dense layer's output is off."""
    make = layer_kinds.over_dense

    def other(sizes):
        right = make(sizes)

        def changed(tokens, params):
            y, dropped = right(tokens, params)
            return y * 2, dropped

        return changed

    monkeypatch.setattr(layer_kinds, "over_dense", other)
    words = ["--layers", "collective", "dense", "--devices", str(RANKS)]
    wrong = run(layer, tmp_path, *words, "--transport", "collective")
    assert {row["layer"] for row in wrong} == {"dense"}
    assert all("d tokens" in row["errors"] for row in wrong)
    assert "WRONG" in capsys.readouterr().out


def test_errors_of_layers():
    """NaN, and one wrong element of one gradient, are seen."""
    y, dropped = jnp.ones((4, 8)), jnp.zeros(4, bool)
    right = ((y, dropped), (y, {"down": jnp.ones((2, 8))}))
    assert max(layer_cases.errors(right, right).values()) == 0
    off = ((y, dropped), (y, {"down": jnp.ones((2, 8)).at[1, 3].set(2)}))
    found = layer_cases.errors(off, right)
    assert found.pop("d down") > 0.5
    assert max(found.values()) == 0
    broken = ((y.at[0, 0].set(jnp.nan), dropped), right[1])
    assert layer_cases.errors(broken, right)["y"] == np.inf


def test_decode(tmp_path, monkeypatch, capsys):
    """Rows of one way that belong to other rows, or are NaN, are reported."""
    run_way = steps.run_way
    for way, change in (
        ("mxfp4", lambda out: jnp.roll(out, 1, axis=0)),
        ("batched", lambda out: out.at[-1, 0].set(jnp.nan)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(
                steps,
                "run_way",
                lambda each, *given, way=way, change=change: (
                    change(run_way(each, *given))
                    if each == way
                    else run_way(each, *given)
                ),
            )
            patch.setattr(decode, "PARTS", decode.PARTS[:1])
            words = ["--rows", "16", "--ways", "mxfp4", "bf16", "batched"]
            wrong = run(decode, tmp_path / way, *words)
        assert {row["way"] for row in wrong} == {way}
        assert capsys.readouterr().out.count("WRONG") == 1


def test_decode_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "plain_experts", lambda: lambda rows, *_: rows)
    monkeypatch.setattr(decode, "PARTS", [lambda *_: (), decode.measure_layers])
    wrong = run(decode, tmp_path, "--ways", "bf16", "fp8", "--devices", str(RANKS))
    assert {row["way"] for row in wrong} == {"bf16"}


@pytest.mark.parametrize("what", ["ids", "weights", "gradient"])
def test_routers(what, tmp_path, monkeypatch):
    """Wrong results of either way are noticed."""
    true_program = routers.program

    def program(mesh, way, part, router):
        right = true_program(mesh, way, part, router)
        if way == "plain" or (part == "gradient") != (what == "gradient"):
            return right

        def other(*given):
            *others, (ids, values) = right(*given)
            last = (ids + 1, values) if what == "ids" else (ids, values * 1.001)
            return *others, last

        return other

    monkeypatch.setattr(routers, "program", program)
    part = "gradient" if what == "gradient" else "forward"
    found = {(row["part"], row["way"]) for row in run(routers, tmp_path)}
    assert found == {(part, "kernel")}


def test_options(monkeypatch):
    """Wrong results are noticed in compared calls and in timed calls."""
    monkeypatch.setattr(options_worker, "_sizes", lambda *_: (1, 1))
    args = ["--tiny", "--transport", helpers.TRANSPORT]
    spec = options_cost.specification(options_cost.parse(args))
    spec["deadline"] = float("inf")
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    made = p2p_transports.make_case(mesh, spec, 6, "uniform", defaults=False)
    option = options_worker.Option(made, spec, "added", None)
    right, combine = [option.other], options_worker._CALLS["combine"]

    def off_by_one(ep, name, *inputs):
        y = combine(ep, name, *inputs)
        return y if ep in right else y.at[-1, -1].add(1)

    monkeypatch.setitem(options_worker._CALLS, "combine", off_by_one)
    assert options_worker._measured(spec, option, "combine")["differences"]["y"] > 0
    monkeypatch.setitem(options_worker._CALLS, "combine", combine)
    last = option.last("combine")
    monkeypatch.setattr(option, "last", lambda op: [each + 1 for each in last])
    found = options_worker._measured(spec, option, "combine")["differences"]
    assert found == {"checksum of the timed calls": 1}
    option.close()


def test_overlap(monkeypatch):
    monkeypatch.setattr(overlap_worker, "_UNROLLED", 2)
    args = overlap.parse(["--tiny", "--transport", helpers.TRANSPORT])
    _, spec = next(overlap.overlap_workers(args))
    spec |= {"deadline": float("inf"), "num_sms": []}
    rows, mesh = [], helpers.make_mesh(helpers.some_ranks(2))
    run = overlap_worker.Worker(spec, mesh, rows.append)
    run.open(None)
    y = run.other.combined[0]
    bits = np.array(jax.lax.bitcast_convert_type(y, np.uint16))
    bits[-1, -1] ^= 1
    changed = jax.lax.bitcast_convert_type(jax.numpy.asarray(bits), y.dtype)
    made = [jax.device_put(changed, y.sharding)] * 4
    monkeypatch.setattr(run.other, "combined", made)
    beside = overlap_cases.elementwise(run.mesh, 1)
    rows.clear()
    run.measure([("combine", "halves", None), ("dispatch", "halves", None)], beside)
    combine, dispatch = rows
    assert combine["differences"] == {"y": 1, "checksum of the timed calls": 1}
    assert combine["wrong"]
    assert not dispatch["wrong"]
    for transport in (*run.transports.values(), run.other):
        transport.ep.close()


def test_host_time(tmp_path, monkeypatch, capsys):
    """Both builds are this one, but one of them has a different result once."""
    given = host_time.worker.measured
    seen = []

    def measured(case, op, spec):
        seen.append(op)
        row = given(case, op, spec)
        return row | {"checksum": row["checksum"] + (seen == ["dispatch"])}

    monkeypatch.setattr(host_time.worker, "measured", measured)
    # The native modules of an installed jax_ep are elsewhere.
    monkeypatch.setattr(host_time, "foreign", lambda head, folder: [])
    words = ["--processes", "1", "--transports", helpers.TRANSPORT]
    words += ["--devices", str(RANKS), "--old", str(ROOT), "--old-commit", "abc"]
    wrong = run(host_time, tmp_path, *words)
    assert {row["op"] for row in wrong} == {"dispatch"}
    assert capsys.readouterr().out.count("RESULTS DIFFER") == 1
