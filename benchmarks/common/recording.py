"""Writes records, and makes the entries that all of them have."""

import os
import pathlib
import shlex
import sys

import jax

from jax_ep._cli.bench import record as run_record

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
date = run_record.date


def commit():
    """Returns the measured commit; outside a checkout JAX_EP_COMMIT names it."""
    return run_record.commit(ROOT)


def short_device(kind):
    """Turns a device kind into part of a file name."""
    return kind.lower().replace("nvidia ", "").replace(" ", "-")


def of(prefix, record):
    """Returns the name of a record, with its device and their number."""
    return f"{prefix}-{short_device(record['device'])}x{record['count']}"


def write(name, record, folder=RESULTS):
    """Writes <folder>/<name>-<date>.json and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{record['date']}.json"
    path.write_text(run_record.text(record))
    print(f"wrote {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return path


def command(module, arguments=None):
    """Returns the command that makes the same record, without `--results`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--results" in words:
        at = words.index("--results")
        words = [*words[:at], *words[at + 2 :]]
    return shlex.join(["python", "-m", f"benchmarks.{module}", *words])


def run(kind, module, args, arguments, **facts):
    """Returns the `Run` of a `module` of benchmarks that has parsed `args`."""
    told = command(module, arguments)
    return run_record.Run(kind, told, args.seed, args.budget, ROOT, **facts)


def head(kind, **facts):
    """Returns the first entries of a record, for a run without workers."""
    made = {"kind": kind, "commit": commit(), "date": date()}
    versions = {"driver": run_record.driver(), "libraries": run_record.libraries()}
    return {**made, **versions, **facts}


def head_here(kind, module, arguments, count=1, **facts):
    """Returns `head` for a run of `module` on `count` devices of this process.

    It has XLA_FLAGS of the environment as `xla_flags`.
    """
    return head(
        kind,
        device=jax.devices()[0].device_kind,
        count=count,
        jax=jax.__version__,
        command=command(module, arguments),
        xla_flags=os.environ.get("XLA_FLAGS", "").strip(),
        **facts,
    )
