"""Measures the limits of the GPUs of this host and tests the window's memory order.

    python -m benchmarks.limits.gpu_limits [--seconds 20]

Builds benchmarks/limits/gpu_limits.cu for this GPU and runs it on all GPUs present, up to 8;
with one, what needs peers is left out and the litmus test runs within the GPU.
`--seconds` is the length of the litmus test, the rest takes about 20 s more.
GB/s count the bytes that a pattern reads and writes on one GPU; for peer writes what
each GPU sends, all of them at once. A time of `publish` and `cells` is one lockstep
round of all GPUs: until every GPU has everything from every other. Medians of five.
Fails if the litmus test of the recipe, or a cell, ever showed wrong data; mutants of
the recipe only report what they showed.
Writes benchmarks/results/limits-<gpu>x<n>-<date>.json and prints a table.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from benchmarks.common import recording

# In the repository, or where jax_ep is installed.
HERE = pathlib.Path(__file__).resolve().parent
INCLUDE = next(
    (f for f in (HERE / "xla_ffi", HERE.parent / "xla_ffi") if f.exists()), HERE
)


def find_nvcc():
    home = os.environ.get("CUDA_HOME")
    candidates = [pathlib.Path(home, "bin", "nvcc")] if home else []
    candidates += [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return str(candidate)
    return sys.exit(f"{sys.argv[0]}: no nvcc in CUDA_HOME or PATH")


def build(nvcc, source="gpu_limits.cu", *flags):
    """Compiles a program of this folder; returns its path and nvcc's version."""
    made = pathlib.Path(tempfile.mkdtemp(prefix="jax_ep_")) / source.removesuffix(".cu")
    warnings = ["-Xcompiler=-Wall,-Wextra", "--Werror=all-warnings"]
    flags = ["-O3", "-std=c++20", "-arch=sm_90", *warnings, "-I", str(INCLUDE), *flags]
    done = subprocess.run(
        [nvcc, *flags, "-o", str(made), str(HERE / source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"benchmarks/{source}: the build failed\n{done.stdout}")
    version = subprocess.run(
        [nvcc, "--version"], capture_output=True, text=True, check=True
    )
    return made, version.stdout.strip().splitlines()[-1]


def driver():
    try:
        query = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return "unknown"
    return query.stdout.strip().splitlines()[0] if query.returncode == 0 else "unknown"


def run(program, arguments, limit):
    """Returns the program's report; what it had measured is shown if it fails."""
    # What it measures is bounded by itself; a hung GPU is not.
    try:
        done = subprocess.run(
            [str(program), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"{program.name}: no answer in {limit:.0f} s")
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{program.name}: failed, see above")
    return json.loads(done.stdout)


def peer_write_peak():
    """What each GPU can write to the others, all at once: GB/s, None for one GPU.

    The best of copy kernels on 64 and 132 SMs; with the report it is from.
    """
    program, _ = build(find_nvcc())
    report = run(program, ["--peak"], 60)
    rows = report.get("peer_write", [])
    copies = [row["gb_s"] for row in rows if row["pattern"].endswith("copy")]
    return max(copies, default=None), report


def print_bandwidths(title, rows):
    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    speed = {(row["pattern"], row["blocks"]): row["gb_s"] for row in rows}
    print(f"\n{title}, GB/s")
    print(f"{'blocks':>8}" + "".join(f"{pattern:>13}" for pattern in patterns))
    for blocks in dict.fromkeys(row["blocks"] for row in rows):
        speeds = "".join(f"{speed[pattern, blocks]:>13.1f}" for pattern in patterns)
        print(f"{blocks:>8}{speeds}")


def print_best_shapes(title, rows):
    print(f"\n{title}: best shapes and the least")
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        ranked = sorted(
            (row for row in rows if row["pattern"] == pattern),
            key=lambda row: -row["gb_s"],
        )
        for row in [*ranked[:4], ranked[-1]]:
            print(
                f"{pattern:>12}  {row['row_bytes']:>5} B x {row['stages']:>2} stages x "
                f"{row['warps']} warps, {row['blocks']} blocks: {row['gb_s']:7.1f} GB/s"
            )


def print_signals(report):
    print("\nlatency, us")
    for pair in report["one_way"]:
        print(
            f"  0 to {pair['peer']} and back, one way: relaxed cell "
            f"{pair['relaxed_us']:.2f}, published and observed "
            f"{pair['publish_observe_us']:.2f}"
        )
    print(f"  barrier of {report['count']} GPUs: {report['barrier_us']:.2f}")
    for row in report["publish"]:
        print(
            f"  publish {row['variant']:<21}{row['bytes_a_peer']:>6} B: "
            f"{row['us']:5.2f} = stores {row['store_and_wait_us']:.2f}"
            f" + fence {row['fence_us']:.2f} + flags {row['flags_us']:.2f}"
            f" + load {row['load_us']:.2f}"
        )
    for row in report["cells"]:
        print(
            f"  cells, {row['rows_a_peer']} rows a peer, {row['blocks_a_row']} blocks "
            f"a row: {row['us']:.2f}"
        )


def print_litmus(name, row):
    print(
        f"  {name:<41}{row['messages']:>12.0f} messages {row['rows']:>12.0f} rows: "
        f"{row['bad_reads']:.0f} bad reads, {row['wrong_units']:.0f} wrong units; "
        f"{row['round_us']:.1f} us a round, {row['round_under_load_us']:.1f} under load"
    )


def print_table(report):
    print(f"local memcpy {report['local_memcpy_gb_s']:.0f} GB/s read + written")
    print_bandwidths("local rows of 14336 B, 8 stages, 1 warp", report["local"])
    print_best_shapes("local", report["local_shapes"])
    launch = report["launch"]
    print(
        f"\nempty kernel: graph node {launch['graph_node_us']:.2f} us, graph of one "
        f"{launch['graph_of_one_us']:.2f} us, launches back to back "
        f"{launch['graph_launch_us']:.2f} (graph) {launch['kernel_launch_us']:.2f} us"
    )
    if "peer_write" in report:
        print_bandwidths("written to peers by each GPU", report["peer_write"])
        print_best_shapes("written to peers", report["peer_write_shapes"])
        both = report["send_and_place"]
        print(f"\nsend {both['rows_sent']} rows beside placing {both['rows_placed']}")
        for row in both["splits"]:
            print(
                f"{row['senders']:>8} + {row['placers']:>2} blocks {row['us']:8.1f} us"
            )
        print_signals(report)
    print("\nlitmus")
    print_litmus("the recipe", report["litmus"])
    for name, row in report["litmus_mutants"].items():
        print_litmus(name, row)


def parse(arguments):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20, help="of the litmus test")
    parser.add_argument("--results", type=pathlib.Path, default=recording.RESULTS)
    return parser.parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    program, nvcc = build(find_nvcc())
    report = run(program, ["--seconds", str(args.seconds)], 120 + 2 * args.seconds)
    record = {
        "kind": "limits of the GPUs of one host",
        "driver": driver(),
        "nvcc": nvcc,
        "commit": recording.commit(),
        "date": recording.date(),
        **report,
    }
    name = recording.short_device(record["device"])
    recording.write(f"limits-{name}x{record['count']}", record, args.results)
    print_table(record)
    if record["litmus"]["bad_reads"] or record.get("wrong_cells"):
        sys.exit("benchmarks/limits/gpu_limits.py: WRONG DATA, see the litmus lines and cells")


if __name__ == "__main__":
    main()
