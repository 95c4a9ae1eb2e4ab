"""benchmarks/limits/kernel_profile.py with a fake ncu, and its table."""

import csv
import io
import json
import pathlib

import jax.numpy as jnp
import matmul_tables
import pytest

from benchmarks.layers import decode
from benchmarks.limits import kernel_profile, mxfp4_calls
from jax_ep._experts import kernels
from support import grouped_kernels
from support.tiny import written

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
TENSOR = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"
METRICS = {
    "gpu__time_duration.sum": ("ns", "212,345.00"),
    TENSOR: ("%", "81.25"),
    TENSOR.replace("_op_hmma", "_op_imma"): ("%", "0.00"),
    "sm__inst_issued.avg.pct_of_peak_sustained_active": ("%", "64.04"),
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": ("%", "60.21"),
    "lts__t_sector_hit_rate.pct": ("%", "63.70"),
    "dram__bytes_read.sum": ("byte", "318,517,500"),
    "dram__bytes_write.sum": ("byte", "106,172,500"),
    STALL.format("long_scoreboard"): ("inst", "3.10"),
    STALL.format("gmma"): ("inst", "7.21"),
    STALL.format("wait"): ("inst", "0.50"),
    STALL.format("barrier"): ("inst", "0.25"),
    STALL.format("lg_throttle"): ("inst", "0.00"),
}
PRODUCTS = [{"case": "mid", "product": name} for name in ("gate_up", "down")]
REPORT = {"device": "NVIDIA H200", "count": 1, "checks": []}


def log(*names):
    """ncu's log for kernels of these names."""
    text = io.StringIO()
    print("==PROF== Connected to process 7", file=text)
    rows = csv.writer(text, quoting=csv.QUOTE_ALL)
    rows.writerow(["ID", "Kernel Name", *METRICS])
    rows.writerow(["", "", *(unit for unit, _ in METRICS.values())])
    for index, name in enumerate(names):
        rows.writerow([index, name, *(value for _, value in METRICS.values())])
    return text.getvalue()


OURS, OTHER = "void jax_ep::cuda::MatmulKernel<...>(...)", "nvjet_hsh_128x256"


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Puts an ncu on the path that writes `text` and exits like the program."""

    def make(text, status=0):
        told, reported = tmp_path / "told", tmp_path / "reported"
        told.write_text(text)
        reported.write_text(json.dumps(REPORT | {"results": PRODUCTS}))
        program = tmp_path / "ncu"
        program.write_text(
            "#!/bin/sh\n"
            f'echo "$@" >{tmp_path}/given\n'
            'while [ "$1" != --log-file ]; do shift; done\n'
            f'cat {told} >"$2"\ncat {reported}\nexit {status}\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


def profile(tmp_path):
    results = tmp_path / "results"
    words = ["--binary", "./kernels", "--cases", "mid", "--results", str(results)]
    assert kernel_profile.main(words) == 0
    return written(results)


def test_both_kernels_of_each_product(ncu, tmp_path, capsys):
    ncu(log(OURS, OTHER, OURS, OTHER))
    record = profile(tmp_path)
    found = [(row["product"], row["whose"]) for row in record["results"]]
    names = ("gate_up", "down")
    assert found == [(name, whose) for name in names for whose in ("jax_ep", "cuBLAS")]
    row = record["results"][0]
    assert row["us"] == 212.3
    assert row["tensor_percent"] == 81.2
    assert (row["issue_percent"], row["alu_percent"]) == (64.0, 60.2)
    assert row["l2_hit_percent"] == 63.7
    assert row["dram_gb_s"] == 2000
    assert list(row["stalls"])[:2] == ["gmma", "long_scoreboard"]
    assert len(row["stalls"]) == 4
    given = (tmp_path / "given").read_text().split()
    # No setting of the GPU is changed.
    assert given[given.index("--clock-control") + 1] == "none"
    program = given.index("--once") - 1
    assert pathlib.Path(given[program]) == pathlib.Path("kernels").resolve()
    assert "gmma 7.21" in capsys.readouterr().out

    table = matmul_tables.profile(record, lambda header, rows: f"{header}{list(rows)}")
    assert "gmma 7.2" in table
    assert "cuBLAS" in table


def test_kernels_for_few_rows(ncu, tmp_path, capsys):
    """They run in a Python process, all of whose other kernels are left out."""
    ncu(log(*["void jax_ep::cuda::FourBitKernel<0, 1>(jax_ep::FourBitStep)"] * 2))
    words = ["--mxfp4", "16", "1024", "--results", str(tmp_path / "results")]
    assert kernel_profile.main(words) == 0
    record = written(tmp_path / "results")
    assert [row["whose"] for row in record["results"]] == ["jax_ep"] * 2
    given = (tmp_path / "given").read_text().split()
    assert given[-4:] == ["-m", "benchmarks.limits.mxfp4_calls", "16", "1024"]
    assert given[given.index("--kernel-name") + 1] == "regex:FourBitKernel"
    assert "--profile-from-start" not in given
    assert "FourBitKernel" in record["results"][0]["kernel"]
    assert " 64.0 " in capsys.readouterr().out


def test_calls_for_few_rows(monkeypatch, capsys):
    """Codes and scales are those of weights, and rows those of decode."""
    products = []

    def product(rows, scales, tiles, sizes, columns, dtype, gate_up):
        assert scales is None
        values = grouped_kernels.values_of_tiles(tiles, 2 if gate_up else 1)
        assert 0 < jnp.max(jnp.abs(values)) < 1
        assert jnp.sum(sizes) == len(rows)
        sums = grouped_kernels.four_bits(
            rows, scales, tiles, sizes, columns, dtype, gate_up
        )
        products.append((gate_up, bool(jnp.all(jnp.isfinite(sums)))))
        return sums

    monkeypatch.setattr(kernels, "four_bits", product)
    monkeypatch.setattr(mxfp4_calls.decode, "SIZES", decode.SMALL)
    assert mxfp4_calls.main(["4", "8"]) == 0
    assert products == [(True, True), (False, True)] * 2
    told = json.loads(capsys.readouterr().out)
    assert [tuple(row.values()) for row in told["results"]] == [
        (f"{rows} rows", f"mxfp4 {name}")
        for rows in (4, 8)
        for name in ("gate_up", "down")
    ]


def test_without_a_metric(ncu, tmp_path):
    """A metric may be missing, as other versions of ncu may not have it."""
    ncu(log(OURS, OTHER, OURS, OTHER).replace("lts__t_sector", "lts__other"))
    record = profile(tmp_path)
    assert {row["l2_hit_percent"] for row in record["results"]} == {None}
    matmul_tables.profile(record, lambda header, rows: str(list(rows)))


@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", 1, "ERR_NVGPUCTRPERM"),
        ("==WARNING== No kernels were profiled", 0, "No kernels were profiled"),
        (log(OTHER, OURS), 0, "jax_ep's kernel"),
        (log(OURS, OTHER), 0, "jax_ep's kernel"),
    ],
)
def test_says_what_went_wrong(ncu, tmp_path, text, status, error):
    ncu(text, status)
    with pytest.raises(SystemExit, match=error):
        profile(tmp_path)


def test_without_ncu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="needs Nsight Compute's ncu on PATH"):
        profile(tmp_path)
