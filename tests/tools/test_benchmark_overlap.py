"""The basis of overlap.py: all work is done, and results are compared."""

from __future__ import annotations

import functools
import json
import types

import jax
import numpy as np
import pytest

from benchmarks.common import trace
from benchmarks.overlap import cases as overlap_cases
from benchmarks.overlap import overlap
from benchmarks.overlap import report as overlap_report
from benchmarks.overlap import worker as overlap_worker
from jax_ep._cli.bench import loops as p2p_programs
from jax_ep._cli.bench import process
from support import helpers

pytestmark = pytest.mark.usefixtures("quick_compiles")

TINY = [
    *("--transport", helpers.TRANSPORT, "--tokens", "8", "--hidden", "128"),
    *("--experts", "8", "--top-k", "2", "--inner", "128", "--matmul", "64"),
    *("--ragged-inner", "64", "--megabytes", "1", "--repeats", "2"),
    *("--milliseconds", "1", "--seed", "3"),
]


@pytest.fixture(autouse=True)
def short_programs(monkeypatch):
    monkeypatch.setattr(overlap_worker, "_UNROLLED", 2)


def specification(*arguments, **changes):
    args = overlap.parse([*TINY, *arguments])
    _, spec = next(overlap.overlap_workers(args))
    return spec | {"deadline": float("inf")} | changes


def close(run):
    for transport in (*run.transports.values(), run.other):
        transport.ep.close()


def uncopied(run):
    """The step that is missing with one rank, which has no all-to-alls."""
    return ["copies"] * (run.mesh.size == 1)


@pytest.fixture(scope="module")
def opened():
    rows = []
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    run = overlap_worker.Worker(specification("--num-sms"), mesh, rows.append)
    run.open(None)
    yield run, rows
    close(run)


@pytest.mark.parametrize("name", ["elementwise", "ragged_dot"])
def test_work_is_all_done(opened, name):
    """A program's text has the work once per call, on the whole array."""
    run, _ = opened
    run.spec["beside"] = [name]
    (beside,) = run.besides()
    made = overlap_cases.operation(run.transports[None], "combine", "whole", beside)
    lowered, _ = p2p_programs.trace(run.mesh, made, 3, 2, "data")
    whole, columns = beside.operands[0].shape
    assert beside.facts.get("shape", [64])[-1] == 64
    text = lowered.as_text()
    assert f"tensor<{whole // run.mesh.size}x{columns}xbf16>" in text
    assert text.count("call @step") == 3


def test_merged_work_is_seen() -> None:
    """XLA may merge the work of several calls, which the compiled text shows."""
    lines = (
        "  %gemm.1 = (bf16[1,64,8]{2,1,0}, s8[32]{0}) custom-call(%a, %b), target=x",
        "  %of = bf16[8,64]{1,0} get-tuple-element(%gemm.1), index=0",
        "  ROOT %loop = bf16[8,64]{1,0} fusion(%of), kind=kLoop, calls=%c",
        "  %other = bf16[8,640]{1,0} fusion(%of), kind=kLoop, calls=%d",
        "  %wide = f32[8,64]{1,0} fusion(%of), kind=kLoop, calls=%e",
    )
    product = jax.ShapeDtypeStruct((8, 64), jax.numpy.bfloat16)
    assert p2p_programs.times_made("\n".join(lines), product) == 2


@pytest.mark.parametrize("name", ["elementwise", "matmul"])
def test_work_alone_is_done_in_every_call(opened, name, monkeypatch):
    run, _ = opened
    run.spec["beside"] = [name]
    (beside,) = run.besides()
    made = overlap_cases.operation(run.transports[None], "dispatch", None, beside)
    compiling = functools.partial(p2p_programs.compiling, run.mesh, made, 3, 2, "data")
    if jax.default_backend() == "gpu":
        compiling()()
    # XLA's CPU compiler merges it.
    else:
        assert made.product is None
        made.product = jax.ShapeDtypeStruct((1,), jax.numpy.float32)
    monkeypatch.setattr(p2p_programs, "times_made", lambda text, product: 1)
    with pytest.raises(RuntimeError, match="work of 3 calls 1 times"):
        compiling()()


def test_wrong_results_are_seen(opened, monkeypatch):
    run, rows = opened
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
    rows.clear()
    run.measure_parts()
    wrong = [(row["op"], row["arrangement"]) for row in rows if row.get("wrong")]
    parts = [part for part in overlap_report.PARTS if part not in uncopied(run)]
    assert wrong == [("combine", part) for part in parts]


def test_steps_without_a_time_say_why(opened, monkeypatch):
    run, rows = opened
    keys = [(op, p) for op in ("dispatch", "combine") for p in overlap_report.PARTS]
    for patch, error in (
        ((run, "other", None), "AttributeError"),
        ((run, "late", lambda: True), process.NO_TIME),
    ):
        rows.clear()
        monkeypatch.setattr(*patch)
        run.measure_parts()
        assert [(row["op"], row["arrangement"]) for row in rows] == keys
        assert all(row["error"].startswith(error) for row in rows)


ROW = {
    "op": "dispatch",
    "beside": "matmul",
    "arrangement": "stream_halves",
    "num_sms": None,
    "tokens": 4096,
    "wrong": False,
} | overlap_report.exposed(1500.0, 1400.0, 500.0)


def event(name, start_us, us):
    return types.SimpleNamespace(
        name=name, start_ns=1e3 * start_us, duration_ns=1e3 * us
    )


def plane(name, **lines):
    made = [
        types.SimpleNamespace(name=line, events=events)
        for line, events in lines.items()
    ]
    return types.SimpleNamespace(name=name, lines=made)


def test_trace_is_summed_up():
    kernels = [
        event("void jax_ep::cuda::PackKernel<int>()", 10, 5),
        event("void jax_ep::cuda::MatmulKernel<int>()", 20, 20),
        event("gemm", 40, 20),
    ]
    copies = [event("MemcpyP2P", 16, 9), event("MemcpyP2P", 26, 9)]
    lines = {"Stream #13(Compute)": kernels, "Stream #14": copies, "XLA Ops": kernels}
    planes = [plane("/host:CPU", python=kernels), plane("/device:GPU:0", **lines)]
    found = trace.summary(planes)
    assert found["peer_copies"] == 2
    ran = trace.kernels(planes)
    assert (ran["span_us"], ran["busy_us"]) == (50, 63)
    names = ["jax_ep::cuda::MatmulKernel<int>", "gemm", "MemcpyP2P"]
    assert all(n in row["name"] for n, row in zip(names, ran["kernels"], strict=False))
    assert ran["kernels"][2] == {"name": "MemcpyP2P", "count": 2, "us": 18.0}
    assert "error" in trace.kernels(planes[:1])
    compute, side = found["streams"]
    assert compute["other"] == {
        "events": 2,
        "start_us": 10,
        "end_us": 50,
        "busy_us": 40,
    }
    assert side["exchange"]["end_us"] == 25
    trace.require_copies("copy_halves", found)
    with pytest.raises(RuntimeError, match="no copies"):
        trace.require_copies("copy_halves", found | {"peer_copies": 0})
    trace.require_copies("halves", found | {"peer_copies": 0})


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of machines without a GPU")
def test_trace_that_cannot_be_costs_nothing(capsys):
    found = trace.traced(jax.jit(lambda x: x + 1), np.float32(1))
    assert "no exchange on a GPU's stream" in found["error"]
    trace.require_copies("copy_halves", found)
    assert "no trace" in capsys.readouterr().out


def test_record_has_what_every_worker_wrote(tmp_path, monkeypatch, capsys):
    calls = []

    def run_worker(flags, spec, script, root):
        calls.append((flags, spec, script))
        first = {"device": "Made Up", "count": 4, "jax": "9.9"}
        if script == overlap.WORKER:
            return [first, ROW | {"us": 1500.0, "flags": spec["flags"]}], ""
        return [first, {"tokens": 1, "op": "combine", "us": 9.0, "wrong": False}], ""

    monkeypatch.setattr(process, "start", run_worker)
    arguments = ["--results", str(tmp_path), "--graph-tokens", "1", "--seed", "1"]
    assert overlap.main(arguments) == 0
    (path,) = tmp_path.glob("overlap-made-upx4-*.json")
    written = json.loads(path.read_text())
    copies = f"{overlap.COPIES} {overlap.SCHEDULER}"
    flags = ["", copies, "", overlap.SCHEDULER]
    assert [spec["flags"] for _, spec, _ in calls[:4]] == flags
    assert len(written["results"]) == 4
    # Both belong together: the flag says who copies, the option what is copied.
    overlaps = ["sm", "copy", *["stream"] * 2]
    assert [spec.get("overlap") for _, spec, _ in calls[:4]] == overlaps
    assert [each["graphs"] for each in written["graphs"]] == [True, False]
    assert [flags for flags, *_ in calls] == [*flags, *overlap.GRAPHS.values()]
    deadlines = [spec["deadline"] for _, spec, _ in calls]
    assert deadlines == sorted(deadlines)
    assert "100 (80%)" in capsys.readouterr().out
    # A run that measured nothing fails even if it is merged into a good record.
    monkeypatch.setattr(process, "start", lambda *_: ([], "worker killed"))
    arguments += ["--merge", str(path)]
    assert overlap.main(arguments) == 1
    assert "MISSING: worker killed" in capsys.readouterr().out
    assert overlap.main([*arguments, "--beside", "--graph-tokens"]) == 0
