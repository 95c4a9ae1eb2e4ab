"""Measures the limits of the GPUs of this host and tests the window's memory order.

    python -m benchmarks.limits.gpu_limits [--seconds 20]

Builds gpu_limits.cu for this GPU and runs it on all GPUs present, up to 8. With one
GPU, what needs peers is left out, and the litmus test runs within the GPU. `--seconds`
is the length of the litmus test; the rest takes about 20 s more.
GB/s count the bytes that a pattern reads and writes on one GPU; for peer writes they
count what each GPU sends while all of them send. Latencies are in microseconds: those
of `publish` and `cells` are for one lockstep round of all GPUs, until every GPU has
everything from every other. All are medians of five.
Fails if the litmus test of the recipe, or a cell, ever showed wrong data. Mutants of
the recipe only report what they showed.
Writes benchmarks/results/limits-<gpu>x<n>-<date>.json and prints a table.
"""

import pathlib
import sys

from benchmarks.common import arguments as common
from benchmarks.common import programs
from jax_ep._cli.bench import cuda, record

SOURCE = pathlib.Path(__file__).with_suffix(".cu")


def find_peak():
    """Returns the peak at which every GPU writes to the others at once, and its report.

    The peak is in GB/s, that of the best of the copy kernels on 64 and on 132 SMs, as
    in all records of calls. It is None for a single GPU. Without GPUs the report is
    empty.
    """
    if record.driver() == "unknown":
        return None, {}
    report, _ = programs.run(SOURCE, ["--peak"], 60)
    return cuda.copy_peak(report), report


def print_bandwidths(title, rows):
    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    speed = {(row["pattern"], row["blocks"]): row["gb_s"] for row in rows}
    print(f"\n{title}, GB/s")
    print(f"{'blocks':>8}" + "".join(f"{pattern:>13}" for pattern in patterns))
    for blocks in dict.fromkeys(row["blocks"] for row in rows):
        speeds = "".join(f"{speed[pattern, blocks]:>13.1f}" for pattern in patterns)
        print(f"{blocks:>8}{speeds}")


def print_best_shapes(title, rows):
    print(f"\n{title}: the best shapes and the worst")
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
            f"  cells, {row['rows_a_peer']} rows per peer, {row['blocks_a_row']} "
            f"blocks per row: {row['us']:.2f}"
        )


def print_litmus(name, row):
    print(
        f"  {name:<41}{row['messages']:>12.0f} messages {row['rows']:>12.0f} rows: "
        f"{row['bad_reads']:.0f} bad reads, {row['wrong_units']:.0f} wrong units; "
        f"{row['round_us']:.1f} us per round, {row['round_under_load_us']:.1f} under "
        "load"
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
        print(
            f"\nsending {both['rows_sent']} rows beside placing {both['rows_placed']}"
        )
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
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20, help="of the litmus test")
    return parser.parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    words, limit = ["--seconds", str(args.seconds)], 120 + 2 * args.seconds
    made = programs.measure(
        "limits of the GPUs of one host", "limits", SOURCE, words, limit, args.results
    )
    print_table(made)
    if made["litmus"]["bad_reads"] or made.get("wrong_cells"):
        sys.exit("gpu_limits.py: WRONG DATA, see the litmus lines and cells")


if __name__ == "__main__":
    main()
