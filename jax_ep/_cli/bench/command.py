"""The subcommand `jax-ep bench`: times calls here, or compares two recorded runs."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import subprocess
import sys
from typing import Any

from jax_ep._cli.bench import cuda, draw, measure, report
from jax_ep._cli.bench import record as run_record
from jax_ep._cli.bench.compare import compare, read_record
from jax_ep._cli.text import complain
from jax_ep._cli.values import (
    at_least,
    file_problem,
    no_backend,
    number,
    top_k_problem,
    write_file,
)

_TEXT = """\
Times dispatch and combine on the GPUs of this machine, or on 8 virtual CPU devices, and
compares every result bit for bit with that of the collective transport. Or compares two
recorded runs. With nvcc it also measures how fast GPUs here can write to each other.
"""

_EXAMPLES = """\
examples:
  jax-ep bench --quick  few sizes, about a minute
  jax-ep bench --json run.json --plot run.svg  everything
  jax-ep bench --tokens 128 4096 --transports p2p collective
  jax-ep bench --compare before.json after.json --tolerance 0.05

exit codes: 0 good, 1 a wrong result, a failed measurement, a file that could not be
written after all, or with --compare a call that became slower by more than the
tolerance, that AFTER lacks or has wrong, or runs of unlike devices or sizes, 2 usage,
or with --compare a file that is no record, 130 interrupted
"""

_SIZES: dict[str, Any] = {"hidden": 7168, "experts": 256, "top_k": 8}
# Options that have another default without GPUs.
_SMALL: dict[str, Any] = {"hidden": 128, "experts": 32, "top_k": 2, "milliseconds": 20}
_SMALL |= {"transports": ["collective"], "tokens": [128, 16]}


def _default(size: str) -> str:
    field = {"hidden": "hidden_size", "experts": "num_experts"}.get(size, size)
    return f"{field} (default {_SIZES[size]}, without GPUs {_SMALL[size]})"


def add(commands: Any) -> None:
    """Adds the subcommand's parser."""
    parser = commands.add_parser(
        "bench",
        help="time dispatch and combine here, or compare two runs",
        description=_TEXT,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--quick", action="store_true", help="few sizes, uniform routing"
    )
    count = at_least(1)
    parser.add_argument(
        "--tokens", type=count, nargs="+", metavar="T", help="tokens per rank"
    )
    parser.add_argument("--hidden", type=count, metavar="N", help=_default("hidden"))
    parser.add_argument("--experts", type=count, metavar="N", help=_default("experts"))
    parser.add_argument("--top-k", type=count, metavar="N", help=_default("top_k"))
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=measure.TRANSPORTS,
        metavar="NAME",
        help=f"what to time: {', '.join(measure.TRANSPORTS)} (JAX's "
        "ragged_all_to_all); default all, with --quick p2p, without GPUs collective",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of routing and tokens (default random, printed)",
    )
    parser.add_argument(
        "--budget",
        type=number(0, strict=True),
        metavar="S",
        help="seconds for all of it (default 300)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the record there")
    parser.add_argument("--plot", metavar="FILE", help="draw it (needs matplotlib)")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("BEFORE", "AFTER"),
        help="two records; measures nothing",
    )
    parser.add_argument(
        "--tolerance",
        type=number(0),
        default=0.1,
        metavar="X",
        help="share by which a call may be slower (default 0.1)",
    )
    parser.set_defaults(run=lambda args: _run(args, parser))


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.compare:
        return _compare_files(args.compare, args.tolerance)
    _check_paths(args, parser)
    return _measure(args)


def _compare_files(paths: list[str], tolerance: float) -> int:
    try:
        before, after = map(read_record, paths)
    except ValueError as error:
        complain(f"jax-ep bench: --compare must name two records: {error}")
        return 2
    lines, failed = compare(before, after, tolerance)
    # A name in a record may have letters that the terminal's encoding lacks.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print("\n".join(lines).encode(encoding, "backslashreplace").decode(encoding))
    return 1 if failed else 0


def _check_paths(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Checks the output files now, not after minutes of measuring."""
    from jax_ep._cli.demo import picture
    from jax_ep._stats.picture import problem as picture_problem

    if args.plot is not None:
        if problem := picture_problem(args.plot) or file_problem(args.plot):
            parser.error(f"--plot must be {problem}, got {args.plot!r}; name another")
        if not picture.available():
            parser.error(
                f"--plot must be left out without matplotlib, got {args.plot!r}; run "
                "pip install 'jax_ep[demo]'"
            )
    if args.json == "-":
        parser.error(
            "--json must be a file, got '-': standard output has the table; name a "
            "file, or ./- for one of that name"
        )
    if args.json is not None and (problem := file_problem(args.json)):
        parser.error(f"--json must be {problem}, got {args.json!r}; name another")


def _measure(args: argparse.Namespace) -> int:
    # Asks in a process that ends: one that keeps the GPUs would disturb the timing.
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    what = "import jax; print(jax.default_backend(), jax.device_count())"
    # -P: a jax.py in the current folder must not be imported.
    ask = [sys.executable, "-P", "-c", what]
    asked = subprocess.run(ask, capture_output=True, text=True, check=False)
    if asked.returncode:
        lines = asked.stderr.strip().splitlines() or [f"status {asked.returncode}"]
        complain(f"jax-ep bench: {no_backend(lines[-1])}")
        return 1
    backend, devices = asked.stdout.split()[-2:]
    on_cpu = backend == "cpu"
    problem = _sizes_problem(args, on_cpu, int(devices))
    if on_cpu and "p2p" in (args.transports or ()):
        # Reported now, because no case of it could be measured.
        problem = (
            "--transports p2p needs GPUs, and JAX found only CPU devices here; use "
            "--transports collective"
        )
    if problem:
        complain(f"jax-ep bench: {problem}")
        return 2
    given = _given(args)
    small = _SMALL if on_cpu else {}
    plan = measure.Plan(**{"seed": secrets.randbits(31), **small, **given})
    record = measure.measure(plan, _command(given), find_peak=_peak)
    report.print_table(record)
    code = 1 if report.failures(record) else 0
    written = True
    if args.json is not None:
        made = run_record.text(record)
        written &= write_file(args.json, lambda path: path.write_text(made))
    if args.plot is not None:
        written &= write_file(args.plot, lambda path: draw.save(record, path))
    return code if written else 1


def _sizes_problem(args: argparse.Namespace, on_cpu: bool, devices: int) -> str | None:
    """Returns why no run can have these sizes, or None if all is well."""
    from jax_ep._core.config import EPConfig

    usual = _SMALL if on_cpu else _SIZES
    hidden, experts, top_k = (getattr(args, name) or usual[name] for name in _SIZES)
    if problem := top_k_problem(experts, top_k):
        return problem
    try:
        EPConfig(
            num_experts=experts,
            top_k=top_k,
            hidden_size=hidden,
            max_tokens_per_rank=max(args.tokens or [1]),
        )
    except ValueError as error:
        return str(error).removeprefix("jax_ep.EPConfig: ")
    if experts % devices:
        below = experts // devices * devices
        choices = [str(each) for each in (below, below + devices) if each]
        return (
            f"--experts must be a multiple of the {devices} devices, got {experts}; "
            f"choose --experts {' or '.join(choices)}"
        )
    return None


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what the user chose, as entries of a plan."""
    found: dict[str, Any] = {"quick": True} if args.quick else {}
    for name in ("tokens", "transports"):
        if getattr(args, name):
            # A value given twice is one case.
            found[name] = list(dict.fromkeys(getattr(args, name)))
    for name in ("hidden", "experts", "top_k", "seed", "budget"):
        if getattr(args, name) is not None:
            found[name] = getattr(args, name)
    return found


def _command(given: dict[str, Any]) -> str:
    """Returns the command that makes the same record again."""
    words = ["jax-ep", "bench"]
    for name, value in given.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return shlex.join(words)


def _peak() -> measure.Peak:
    """Measures the peak; returns none if its copy kernels cannot be built or run."""
    try:
        return cuda.peer_write_peak()
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        complain(f"peer write peak not measured: {error}")
        return None, {}
