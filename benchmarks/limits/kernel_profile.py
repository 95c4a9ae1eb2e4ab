"""Profiles what the matmul kernels and cuBLAS wait for, by Nsight Compute.

    python -m benchmarks.limits.kernel_profile --binary PROGRAM [--cases mid]
    python -m benchmarks.limits.kernel_profile --mxfp4 ROWS...

`PROGRAM` is that of grouped_kernels.py, built with its `--keep`. For each product, its
kernel and the batched cuBLAS matmul run once under ncu. With `--mxfp4`, the four-bit
kernels run alone (mxfp4_calls.py). ncu counts how busy the tensor cores, the integer
units (ALU) and the issue slots were (percent), how often L2 had what was requested
(percent), what DRAM moved (GB/s), and what warps waited for. The clock is left as it
is; times are microseconds of single calls.
Writes benchmarks/results/profile-<gpu>x1-<date>.json, with `--mxfp4`
mxfp4-profile-<gpu>x1-<date>.json, and prints a table.
"""

import csv
import pathlib
import shutil
import sys
import tempfile

from benchmarks.common import arguments as common
from benchmarks.common import programs, recording
from benchmarks.limits import grouped_kernels
from jax_ep._cli.bench import record

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "WarpStateStats",
)
OURS = "MatmulKernel", "FourBitKernel"  # one of them is in the name of each kernel
_STALLED = "smsp__average_warps_issue_stalled_"
_PER_ISSUE = "_per_issue_active.ratio"
_L2_HITS = "lts__t_sector_hit_rate.pct"
_TIME = "gpu__time_duration.sum"  # ns
_DRAM = "dram__bytes_read.sum", "dram__bytes_write.sum"
# Percent of the cycles in which a multiprocessor is active.
_BUSY = {
    "issue_percent": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "alu_percent": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
}
_MOST_STALLS = 4
LIMIT = 300


def number(text):
    """Parses a number of ncu's, which may have commas; returns None for other text."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def kernels(log):
    """Parses ncu's `--csv --page raw` into a dict of numbers by metric for each kernel.

    The kernel's name is under `Kernel Name`.
    """
    lines = log.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise SystemExit(f"ncu has reported no kernel: {log[-2000:]}")
    header, _, *rows = csv.reader(lines[start:])
    found = []
    for row in rows:
        if len(row) != len(header):
            continue  # other output of ncu
        named = dict(zip(header, row, strict=True))
        numbers = {name: number(text) for name, text in named.items()}
        kept = {name: value for name, value in numbers.items() if value is not None}
        found.append({**kept, "Kernel Name": named["Kernel Name"]})
    return found


def stalls(metrics):
    """Returns the warps that wait per issued instruction, by reason, most first."""
    found = {
        name.removeprefix(_STALLED).removesuffix(_PER_ISSUE): round(value, 2)
        for name, value in metrics.items()
        if name.startswith(_STALLED) and name.endswith(_PER_ISSUE)
    }
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return dict(ordered[:_MOST_STALLS])


def is_ours(metrics):
    return any(name in metrics["Kernel Name"] for name in OURS)


def rounded(value):
    return None if value is None else round(value, 1)


def summary(metrics):
    """Returns the metrics of a kernel that are recorded, None for missing ones."""
    busy = [
        value
        for name, value in metrics.items()
        if "pipe_tensor" in name
        and "cycles_active" in name
        and name.endswith(".pct_of_peak_sustained_active")
    ]
    time = metrics.get(_TIME)
    moved = [metrics[name] for name in _DRAM if name in metrics]
    return {
        "kernel": metrics["Kernel Name"],
        "us": None if time is None else round(time / 1e3, 1),
        "tensor_percent": rounded(max(busy, default=None)),
        **{name: rounded(metrics.get(metric)) for name, metric in _BUSY.items()},
        "l2_hit_percent": rounded(metrics.get(_L2_HITS)),
        "dram_gb_s": round(sum(moved) / time) if moved and time else None,
        "stalls": stalls(metrics),
    }


def results(products, found):
    """Returns a row per kernel; `found` has the kernels in the order of `products`."""
    first = [i for i, metrics in enumerate(found) if is_ours(metrics)]
    if len(first) != len(products) or first[:1] not in ([0], []):
        names = [metrics["Kernel Name"] for metrics in found]
        raise SystemExit(
            "kernel_profile: each product must begin with jax_ep's kernel, got "
            f"{len(products)} products and {names}"
        )
    rows = []
    for product, start, end in zip(
        products, first, [*first[1:], len(found)], strict=True
    ):
        for metrics in found[start:end]:
            whose = "jax_ep" if is_ours(metrics) else "cuBLAS"
            rows.append(product | {"whose": whose} | summary(metrics))
    return rows


def print_table(rows):
    print(
        f"{'case':<10} {'product':<24} {'':<7} {'us':>8} {'tensor':>7} {'issue':>6} "
        f"{'ALU':>6} {'L2':>6} GB/s"
    )
    names = "us", "tensor_percent", *_BUSY, "l2_hit_percent"
    for row in rows:
        us, *percents = ("-" if row[name] is None else row[name] for name in names)
        tensor, issue, alu, hits = percents
        waits = ", ".join(f"{name} {value}" for name, value in row["stalls"].items())
        print(
            f"{row['case']:<10} {row['product']:<24} {row['whose']:<7} {us:>8} "
            f"{tensor:>7} {issue:>6} {alu:>6} {hits:>6} {row['dram_gb_s']} {waits}"
        )


def parse(arguments):
    parser = common.parser(__doc__)
    cases = grouped_kernels.CASES
    parser.add_argument("--cases", nargs="+", choices=cases, default=["mid"])
    parser.add_argument("--only", default="", help="part of a product's name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cublas", type=pathlib.Path, metavar="PATH")
    of = parser.add_mutually_exclusive_group(required=True)
    of.add_argument("--binary", type=pathlib.Path, metavar="PROGRAM")
    of.add_argument("--mxfp4", type=int, nargs="+", metavar="ROWS")
    parser.set_defaults(seconds=1.0)  # for grouped_kernels.words; nothing is timed here
    return common.parsed(parser, arguments)


def program(args):
    """Returns how ncu selects the kernels to profile, and the program that has them."""
    if args.mxfp4:
        chosen = ["--kernel-name", "regex:FourBitKernel"]
        run = [sys.executable, "-m", "benchmarks.limits.mxfp4_calls"]
        return chosen, [*run, *map(str, args.mxfp4)]
    run = [str(args.binary.resolve()), "--once", "--no-check"]
    return ["--profile-from-start", "off"], [*run, *grouped_kernels.words(args)]


def profiled(ncu, chosen, program):
    """Runs the program under ncu; returns its report, and ncu's log."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log")
        words = [*chosen, "--clock-control", "none"]
        words += ["--cache-control", "none", "--print-units", "base", "--csv"]
        words += ["--page", "raw", "--log-file", str(log)]
        for section in SECTIONS:
            words += ["--section", section]
        words += ["--metrics", ",".join([*_DRAM, *_BUSY.values()])]
        try:
            return programs.report(ncu, [*words, *program], LIMIT), log.read_text()
        except SystemExit as failed:
            told = log.read_text()[-2000:] if log.exists() else ""
            raise SystemExit(f"{failed}\n{told}") from None


def main(arguments=None):
    args = parse(arguments)
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("kernel_profile: needs Nsight Compute's ncu on PATH")
    reported, log = profiled(pathlib.Path(ncu), *program(args))
    rows = results(reported.pop("results"), kernels(log))
    told = recording.command("limits.kernel_profile", arguments)
    made = recording.head("profile", driver=record.driver(), command=told)
    made |= reported | {"results": rows}
    prefix = "mxfp4-profile" if args.mxfp4 else "profile"
    recording.write(recording.of(prefix, made), made, args.results)
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
