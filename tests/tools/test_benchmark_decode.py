"""benchmarks/layers/decode.py on CPUs, with stand-ins for the kernels.

Left to GPUs: the kernels, their times, and whether a read is as fast as memory.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common import recording
from benchmarks.layers import decode
from benchmarks.layers import decode_steps as steps
from support.grouped_kernels import fake_kernels as fake_kernels
from support.grouped_kernels import pretend
from support.tiny import ON_CPU, RANKS, rows_by, tiny, written

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.usefixtures("quick_compiles"),
    pytest.mark.skipif(not ON_CPU, reason="a GPU has the kernels or refuses"),
]
KINDS = [way for way in steps.WAYS if way != "batched"]
HIDDEN = decode.SMALL.hidden
PARAMETERS = 3 * HIDDEN * decode.SMALL.inner


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    for module in (decode, steps):
        monkeypatch.setattr(module, "DRAWS", 2)


def run(folder, *words):
    """Returns the exit status and the rows of the record."""
    words = ["--tiny", "--devices", str(RANKS), "--results", str(folder), *words]
    status = decode.main(words)
    return status, written(folder)["results"]


def changed(monkeypatch, change):
    """Replaces the result of each way by `change(way, result)`."""
    run_way = steps.run_way

    def other(way, draw, weights):
        return change(way, run_way(way, draw, weights))

    monkeypatch.setattr(steps, "run_way", other)


@pytest.mark.parametrize("flags", [" --one --two=3", None])
def test_a_record_has_the_flags_of_xla(monkeypatch, flags):
    if flags is None:
        monkeypatch.delenv("XLA_FLAGS", raising=False)
    else:
        monkeypatch.setenv("XLA_FLAGS", flags)
    record = recording.head_here("made-up", "made.up", ["--some"])
    assert record["xla_flags"] == ("--one --two=3" if flags else "")
    assert record["command"] == "python -m benchmarks.made.up --some"


def test_every_way_by_stand_ins(fake_kernels, tmp_path, capsys):
    taken = fake_kernels
    record = tiny(decode, tmp_path)
    assert record["kernels"] is True
    assert record["count"] == RANKS
    assert record["sizes"] == decode.SMALL._asdict()
    assert record["steps"] == 2 * steps.DRAWS
    assert {"experts", "code_experts", "four_bits", "quantize_matrices"} <= set(taken)
    rows = record["results"]
    assert not decode.unfit(rows)
    for row in rows:
        if row["part"] == "layer":
            traced = {"layer", "exchange"}
        else:
            traced = {"read" if row["way"] == "read" else "experts"}
        assert row["traces"].keys() == traced
        # A CPU's trace has no plane of a GPU.
        assert all("GPU" in each["error"] for each in row["traces"].values())
    parts = rows_by(rows, "part", "rows", "tokens", "way", "format")
    expected = {
        ("experts", count, None, way, name)
        for count in (16, 4)
        for way, name in [
            *(("read", name) for name in steps.FORMATS),
            *((way, name) for way, (name, _) in steps.WAYS.items()),
        ]
        if way != "batched" or count >= decode.SMALL.groups
    }
    layers = {("layer", None, 3, way, None) for way in KINDS}
    assert parts.keys() == expected | layers
    for row in rows:
        if row["part"] == "layer":
            assert row["exchange_share"] == row["exchange_us"] / row["us"]
        elif row["way"] != "read":
            limit = parts["experts", row["rows"], None, "read", row["format"]]
            assert row["of_read"] == row["us"] / limit["us"]
        assert row["us"] > 0
    # The experts that are hit: two per token.
    assert all(2 <= row["hit"] <= 4 for row in rows if row.get("rows") == 4)
    printed = capsys.readouterr().out
    assert "16 rows" in printed
    assert "of read" in printed
    assert "exchange" in printed
    assert "WRONG" not in printed


@pytest.mark.usefixtures("fake_kernels")
def test_bytes_that_a_step_reads():
    weights = steps.make_weights(decode.SMALL, 0)
    found = {name: steps.bytes_of_expert(each) for name, each in weights.items()}
    assert found == {
        "bf16": 2 * PARAMETERS,
        "fp8_block128": PARAMETERS + 3 * 4,
        "mxfp4": PARAMETERS // 2 + PARAMETERS // 32,
    }


def test_ways_of_the_true_sizes_are_lowered(monkeypatch):
    """Lowers for an absent GPU; checks how many custom calls two steps have."""
    pretend(monkeypatch)
    groups, hidden, inner = (
        getattr(decode.SIZES, name) for name in ("groups", "hidden", "inner")
    )
    struct = jax.ShapeDtypeStruct
    matrices = (
        struct((groups, hidden, 2, inner), jnp.bfloat16),
        struct((groups, inner, hidden), jnp.bfloat16),
    )
    weights = {
        name: jax.eval_shape(functools.partial(steps.in_format, name), *matrices)
        for name in steps.FORMATS
    }
    rows = 8
    draw = steps.Draw(
        struct((rows, hidden), jnp.bfloat16),
        struct((rows, hidden), jnp.float8_e4m3fn),
        struct((rows, hidden // 128), jnp.float32),
        struct((groups,), jnp.int32),
    )
    found = {}
    for way in KINDS:
        step = functools.partial(steps.run_way, way)
        given = [draw] * 2, weights[steps.WAYS[way][0]]
        lowered = jax.jit(steps.in_turn(step)).trace(*given)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
        found[way] = text.count("custom_call @ep_")
    # With codes, 4-bit kernels leave the activation's result to the quantiser.
    assert found == {"bf16": 2, "fp8": 2, "mxfp4": 4, "mxfp4-fp8": 6}


@pytest.mark.thorough
def test_without_kernels_what_runs_everywhere(tmp_path):
    words = ["--rows", "4", "--ways", "bf16", "mxfp4"]
    status, rows = run(tmp_path, *words)
    assert status == 0
    assert written(tmp_path)["kernels"] is False
    ways = [row["way"] for row in rows if row["way"] != "read"]
    assert ways == ["bf16", "mxfp4", "bf16", "mxfp4"]


def test_wrong_rows_are_seen(tmp_path, monkeypatch, capsys):
    """Rows of one way that belong to other rows, or are NaN, are reported."""
    for way, change in (
        ("mxfp4", lambda out: jnp.roll(out, 1, axis=0)),
        ("batched", lambda out: out.at[-1, 0].set(jnp.nan)),
    ):
        with monkeypatch.context() as patch:
            changed(
                patch, lambda w, out, way=way, f=change: f(out) if w == way else out
            )
            patch.setattr(decode, "PARTS", decode.PARTS[:1])
            words = ["--rows", "16", "--ways", "mxfp4", "bf16", "batched"]
            status, rows = run(tmp_path / way, *words)
        assert status == 1
        assert {row["way"] for row in rows if row.get("wrong")} == {way}
        assert capsys.readouterr().out.count("WRONG") == 1


def test_wrong_layers_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "plain_experts", lambda: lambda rows, *_: rows)
    monkeypatch.setattr(decode, "PARTS", [lambda *_: (), decode.measure_layers])
    status, rows = run(tmp_path, "--ways", "bf16", "fp8")
    assert status == 1
    assert {row["way"]: row["wrong"] for row in rows} == {"bf16": True, "fp8": False}


def test_a_way_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    def change(way, out):
        if way == "mxfp4":
            raise RuntimeError("made up\nmore")
        return out

    changed(monkeypatch, change)
    monkeypatch.setattr(decode, "PARTS", decode.PARTS[:1])
    status, rows = run(tmp_path, "--rows", "4", "--ways", "mxfp4", "bf16")
    assert status == 1
    errors = {row["way"]: row["error"] for row in rows if "us" not in row}
    assert errors == {"mxfp4": "RuntimeError: made up\nmore"}
    assert "mxfp4: RuntimeError: made up\n" in capsys.readouterr().out


def test_a_part_that_ends_leaves_what_was_measured(tmp_path, monkeypatch):
    def part(*_):
        yield {"part": "layer", "us": 1.0}
        raise RuntimeError("made up")

    monkeypatch.setattr(decode, "PARTS", [part])
    with pytest.raises(RuntimeError, match="made up"):
        run(tmp_path)
    assert [row["us"] for row in written(tmp_path)["results"]] == [1.0]


@pytest.mark.parametrize("how", steps.READS)
def test_reads_are_of_all_words(how):
    words = steps.make_words(2.2 * steps.WORDS * steps.STREAMS)
    assert len(words) == 2 * steps.WORDS * steps.STREAMS
    count = len(words) // 2
    read = steps.reading(how, words, count, 3)
    read(0)
    first, last, again = map(np.asarray, read.found)
    assert not steps.read_wrongly(how, first, count)
    assert first.max() == count - 1
    np.testing.assert_array_equal(last, first + count)
    np.testing.assert_array_equal(again, first)
    assert steps.read_wrongly(how, last, count)
    # Every word matters.
    for at in (0, count // 2, count - 1):
        read = steps.reading(how, words.at[at].set(2**31 - 1), count, 1)
        read(0)
        assert steps.read_wrongly(how, read.found[0], count)


def test_results_take_the_places_of_those_before():
    run = steps.Repeated(steps.in_turn(jnp.add), [jnp.arange(8), jnp.arange(8) + 1], 10)
    places = []
    for call in range(3):
        run(call).block_until_ready()
        places.append([each.unsafe_buffer_pointer() for each in run.found])
        np.testing.assert_array_equal(run.found[1], np.arange(8) + 11)
    assert len({tuple(sorted(each)) for each in places}) == 1


def test_experts_of_a_token_are_distinct():
    rng = np.random.default_rng(0)
    for rows in (8, 16, 1024):
        sizes = steps.draw_sizes(rng, decode.SIZES, rows)
        assert sizes.sum() == rows
        assert sizes.max() <= rows // decode.SIZES.top_k
        assert len(sizes) == decode.SIZES.groups


def test_what_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="must have GPUs of compute capability"):
        decode.main(["--rows", "8"])
    with pytest.raises(SystemExit):
        decode.main(["--rows", "12"])
    assert "--rows must be multiples of 8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        decode.main(["--rows", "8", "--unrolled", "0"])
    assert "--unrolled must be 1 or more, not 0" in capsys.readouterr().err


def test_times_are_by_turns(monkeypatch):
    """A measurement has as many calls as take MEASURED_S, or the time that is given."""
    called, took = [], {"a": 0.02, "b": 1.0}  # seconds per call

    def way(name):
        def run(_):
            return name

        return run

    def seconds(run, calls, in_flight):
        del in_flight
        called.append((run(0), calls))
        return took[run(0)]

    monkeypatch.setattr(decode.timing, "seconds", seconds)
    runs = {"a": (way("a"), 4), "b": (way("b"), 1)}
    for given, calls in ((10, math.ceil(decode.MEASURED_S / 0.02)), (0.04, 2), (0, 1)):
        called.clear()
        clock = iter([0.0, *[100.0] * 3])
        monkeypatch.setattr(decode.time, "monotonic", functools.partial(next, clock))
        us = decode.by_turns(runs, given)
        assert us == {"a": pytest.approx(5e3), "b": pytest.approx(1e6)}
        burst = [("a", calls), ("b", 1)]
        assert called == [("a", 4), ("b", 4)] + 3 * burst
