"""Measures transport p2p against the wire, the collective transport and JAX itself.

    python -m benchmarks.calls.p2p [--quick] [--num-sms 16 24 32] [--only p2p]
    python -m benchmarks.calls.p2p --format mxfp8 --combine-format fp8_block128
    python -m benchmarks.calls.p2p --formats bf16 fp8_block128 mxfp8 mxfp4 nvfp4

On all GPUs of this process, in one run: the peak of peer writes (a copy kernel on every
GPU at once), then dispatch and combine of each transport, then the same by sorting and
`jax.lax.ragged_all_to_all` (ragged.py), with XLA's default flags and with its better
ones. Routing is drawn anew from a printed seed, 4 draws a program in turn; tokens are
random. `recv_capacity` is 1.25 * T * K rounded up to 128, or what skewed routing needs,
and `zero_tail=False`; one more row has the defaults.

Of several `--formats`, dispatch is measured in each, one after the other on each case,
so that times can be divided by each other; combine with the first of them, and, given a
`--combine-format`, also in that, with the second. JAX's own path has no formats.

A time is that of a whole program of many calls, all GPUs, by the host's clock, divided
by its calls; nothing is subtracted; median of the repeats. Bytes are those of the rank
that sends or receives most: a row for each (token, other rank). Results are compared
bit for bit with the collective transport's (ragged's sums within a tolerance); wrong
ones are marked, and the command then exits 1.

Writes benchmarks/results/p2p-<gpu>x<n>-<date>.json, of another format than bf16 under a
name that begins with it, of several formats-<gpu>x<n>-<date>.json, and of one format a
picture where matplotlib is installed (draw.py makes it elsewhere), and prints a table
last.
"""

import argparse
import functools
import importlib.util
import json
import os
import pathlib
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
import traceback

from benchmarks.common import recording
from benchmarks.limits import gpu_limits
from jax_ep._cli.bench import draw, report

TOKENS = (4096, 128, 1, 1024, 8192, 512, 32, 8)  # what matters most comes first
QUICK_TOKENS = (4096, 128, 1, 1024)
FORMATS_TOKENS = (4096, 128, 1024, 8192)
TRANSPORTS = ("p2p", "collective", "ragged")
EXPERTS, TOP_K = 256, 8
GRAPHS = "--xla_gpu_graph_min_graph_size=1"
# XLA's flags, and (updates of ragged.py, label) measured with them.
RAGGED = (
    ("", (("rank", "default"), ("expert", "update an expert"))),
    (
        "--xla_gpu_unsupported_enable_ragged_all_to_all_decomposer=true",
        (("rank", "decomposer"),),
    ),
)

# What --tiny stands for: all kinds of cases that CPUs have.
TINY = (
    *("--transports", "collective", "ragged", "--routing", "uniform", "zipf"),
    *("--tokens", "8", "--num-sms", "8"),
)
TINY_CALLS = (
    *("--hidden", "128", "--experts", "8", "--top-k", "2", "--devices", "2"),
    *("--repeats", "1", "--milliseconds", "0.001", "--unrolled", "2"),
)


def add_place(parser):
    """Where a recorder measures."""
    parser.add_argument("--devices", type=int, help="so many of them, default: all")
    add_tiny(parser)


def add_tiny(parser):
    """For `parsed`."""
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="try every kind of case on a CPU, in this process: the times mean nothing",
    )


def add_common(parser, repeats, milliseconds, budget):
    """What can be said of every measurement of calls; overlap.py and others have it."""
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=EXPERTS)
    parser.add_argument("--top-k", type=int, default=TOP_K)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument(
        "--milliseconds", type=float, default=milliseconds, help="of a program"
    )
    parser.add_argument("--unrolled", type=int, default=0, help="calls in a loop body")
    parser.add_argument("--seed", type=int, help="of routing and tokens")
    parser.add_argument("--budget", type=float, default=budget, help="seconds in all")
    parser.add_argument("--results", type=pathlib.Path, default=recording.RESULTS)


def parsed(parser, arguments, tiny=()):
    """With a seed in any case; --tiny stands for the arguments `tiny`."""
    given = sys.argv[1:] if arguments is None else arguments
    if "--tiny" in given:
        # Not among the records that pages are made of.
        folder = pathlib.Path(tempfile.gettempdir(), "jax_ep_tiny")
        given = [*tiny, "--results", str(folder), *given]
    args = parser.parse_args(given)
    if args.seed is None:
        args.seed = secrets.randbits(31)
    return args


def plain_spec(args):
    """What the specification of a worker has, of bfloat16 calls."""
    return {
        "hidden": args.hidden,
        "dtype": "bfloat16",
        "format": "bf16",
        "combine_format": None,
        "experts": args.experts,
        "top_k": args.top_k,
        "seed": args.seed,
        "repeats": args.repeats,
        "milliseconds": args.milliseconds,
        "unrolled": args.unrolled,
        "peak_gb_s": None,
    }


def place(args):
    """Where a worker runs: on how many devices, and whether in this process."""
    return {"devices": args.devices, "here": args.tiny}


def parse(arguments):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="p2p, few T, uniform")
    parser.add_argument("--tokens", type=int, nargs="+", help="T, in this order")
    parser.add_argument("--ragged-tokens", type=int, nargs="+", help="T of ragged")
    parser.add_argument("--routing", nargs="+", choices=("uniform", "zipf"))
    parser.add_argument(
        "--transports", "--only", nargs="+", choices=TRANSPORTS, help="default all"
    )
    parser.add_argument(
        "--num-sms", type=int, nargs="+", default=[], help="besides the default"
    )
    add_common(parser, repeats=7, milliseconds=100, budget=300)
    add_place(parser)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--formats", "--format", nargs="+", default=["bf16"], help="dispatch_format"
    )
    parser.add_argument("--combine-format", help="default None")
    args = parsed(parser, arguments, [*TINY, *TINY_CALLS])
    args.formats = list(dict.fromkeys(args.formats))
    few = args.quick or several(args)
    tokens = FORMATS_TOKENS if several(args) else TOKENS
    args.tokens = args.tokens or (QUICK_TOKENS if args.quick else tokens)
    args.ragged_tokens = args.ragged_tokens or args.tokens
    args.routing = args.routing or (["uniform"] if few else ["uniform", "zipf"])
    plain = args.formats == ["bf16"] and args.combine_format is None
    if args.transports is None:
        args.transports = ["p2p"] if few else TRANSPORTS if plain else TRANSPORTS[:2]
    if "ragged" in args.transports and not plain:
        parser.error("ragged has no formats: leave it, or --formats and the like, out")
    return args


def several(args):
    return len(args.formats) > 1


def variants(args):
    """The handles of each case: what a specification says of each."""
    if not several(args):
        (name,) = args.formats
        return [{"format": name, "combine_format": args.combine_format}]
    found = [
        {"format": name, "combine_format": None, "ops": ["dispatch"]}
        for name in args.formats
    ]
    found[0]["ops"] = ["dispatch", "combine"]
    if args.combine_format:
        found[1] |= {"combine_format": args.combine_format, "ops": found[0]["ops"]}
    return found


def find_peak():
    """GB/s, None where there is nothing to measure, and the report."""
    if gpu_limits.driver() == "unknown":
        return None, {}
    return gpu_limits.peer_write_peak()


def workers(args):
    """(what it measures, XLA flags, its share of the time, its specification)."""
    common = {
        "hidden": args.hidden,
        "dtype": args.dtype,
        "variants": variants(args),
        "experts": args.experts,
        "top_k": args.top_k,
        "seed": args.seed,
        "repeats": args.repeats,
        "milliseconds": args.milliseconds,
        "unrolled": args.unrolled,
        "defaults_at": 0,
        "ragged": (),
        "routings": args.routing,
        **place(args),
    }
    ours = [name for name in args.transports if name != "ragged"]
    if ours:
        few = args.quick or several(args)
        defaults_at = 0 if few else min(4096, max(args.tokens))
        yield (
            report.OURS,
            GRAPHS,
            0.65 if "ragged" in args.transports else 1,
            {
                **common,
                "transports": ours,
                "tokens": args.tokens,
                "num_sms": [None, *args.num_sms],
                "defaults_at": defaults_at,
            },
        )
    if "ragged" in args.transports:
        for index, (flags, measured) in enumerate(RAGGED):
            yield (
                f"ragged_all_to_all with {flags or 'the default flags'}",
                flags,
                0.85 + 0.15 * index,
                {
                    **common,
                    "tokens": args.ragged_tokens,
                    "routings": args.routing[:1],
                    "ragged": measured,
                },
            )


def take(record, rows, key="results", **facts):
    """Adds a worker's rows and `facts`; the one of devices is of the record itself."""
    for row in rows:
        if "device" in row:
            record |= row
        else:
            record[key].append(row | facts)


def run_worker(flags, spec, script="p2p_worker.py"):
    """Runs a worker; returns the lines that it wrote, and what went wrong or "".

    In a process of its own with these flags, or, where the specification says "here",
    in this one, which has its flags already.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "rows.jsonl"
        run = _run_here if spec["here"] else _run_apart
        problem = run(flags, spec, script, output)
        lines = output.read_text().splitlines() if output.exists() else []
    return [json.loads(line) for line in lines], problem


@functools.cache
def _worker(script):
    # By its path: of a name that other modules of this process may have.
    path = pathlib.Path(__file__).with_name(script)
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run_here(_, spec, script, output):
    try:
        _worker(script).main([json.dumps(spec), str(output)])
    except Exception as error:  # of one worker of several, as of a process
        traceback.print_exc()
        return f"worker raised {type(error).__name__}: {error}"
    return ""


def _run_apart(flags, spec, script, output):
    environment = dict(os.environ)
    # Multicast over NVLink can take the GPUs of a shared host out of service.
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}".strip()
    path = pathlib.Path(__file__).with_name(script)
    # A case that began in time may end after the deadline.
    limit = max(0, spec["deadline"] - time.time()) + 60
    command = [sys.executable, str(path), json.dumps(spec), str(output)]
    try:
        done = subprocess.run(command, env=environment, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"worker killed after {limit:.0f} s"
    return f"worker ended with {done.returncode}" if done.returncode else ""


def main(arguments=None):
    args = parse(arguments)
    start = time.time()
    print(f"seed {args.seed}")
    peak, peak_report = (None, {}) if args.tiny else find_peak()
    if peak_report:  # else there are no GPUs
        shown = f"{peak:.1f} GB/s per GPU" if peak else "not measured"
        print(f"peer write peak: {shown}; {time.time() - start:.0f} s")
    record = {
        "kind": "formats" if several(args) else "p2p",
        "device": peak_report.get("device", "unknown"),
        "count": int(peak_report.get("count", 0)),
        "driver": gpu_limits.driver(),
        "commit": recording.commit(),
        "date": recording.date(),
        "seed": args.seed,
        "command": command("p2p.py", arguments or sys.argv[1:]),
        "hidden": args.hidden,
        "dtype": args.dtype,
        "formats": args.formats,
        "combine_format": args.combine_format,
        "top_k": args.top_k,
        "experts": args.experts,
        "peak_gb_s": peak,
        "peak": peak_report,
        "flags": {},
        "results": [],
        "problems": [],
    }
    for name, flags, share, spec in workers(args):
        print(f"timing {name}, after {time.time() - start:.0f} s", flush=True)
        spec |= {"peak_gb_s": peak, "deadline": start + share * args.budget}
        record["flags"][name] = flags
        rows, problem = run_worker(flags, spec)
        take(record, rows)
        if problem:
            record["problems"].append({"worker": name, "problem": problem})
    record["seconds"] = round(time.time() - start, 1)
    path = save(args, record)
    if draw.available() and not several(args):
        draw.save(record, path.with_suffix(".svg"))
    report.print_table(record)
    return 1 if report.failures(record) else 0


def command(script, arguments):
    """As it can be run elsewhere: without the folder for its results."""
    if "--results" in arguments:
        at = arguments.index("--results")
        arguments = [*arguments[:at], *arguments[at + 2 :]]
    return shlex.join([f"benchmarks/{script}", *arguments])


def save(args, record):
    device = recording.short_device(record["device"])
    # The README's table is of tokens as they are.
    names = [args.combine_format, *args.formats]
    kind = "p2p"
    if several(args):
        names, kind = [], "formats"
    if args.quick:
        kind = f"quick-{kind}"
    for name in names:
        if name not in (None, "bf16"):
            kind = f"{name}-{kind}"
    return recording.write(f"{kind}-{device}x{record['count']}", record, args.results)


if __name__ == "__main__":
    sys.exit(main())
