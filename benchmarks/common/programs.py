"""Builds the CUDA programs of benchmarks, runs them and records what they report."""

import contextlib
import pathlib

from benchmarks.common import recording
from jax_ep._cli.bench import cuda, record


@contextlib.contextmanager
def _ending():
    """Ends this program with an error's message, without a traceback."""
    try:
        yield
    except RuntimeError as error:
        raise SystemExit(str(error)) from None


def build(source, *flags, arch="sm_90"):
    """Builds the program of a .cu file; returns its path and nvcc's version."""
    words = ("-I", str(recording.ROOT / "xla_ffi"), *flags)
    with _ending():
        return cuda.build(cuda.find_nvcc(), pathlib.Path(source), *words, arch=arch)


def report(program, words, limit):
    """Runs a built program for at most `limit` seconds; returns its report."""
    with _ending():
        return cuda.run(program, words, limit)


def run(source, words, limit):
    """Builds and runs the program of a .cu file; returns its report and nvcc's version.

    It may run for `limit` seconds.
    """
    program, nvcc = build(source)
    return report(program, words, limit), nvcc


def measure(kind, prefix, source, words, limit, folder):
    """Makes a record of what `run` reports and writes it to `folder` under `prefix`."""
    reported, nvcc = run(source, words, limit)
    made = recording.head(kind, driver=record.driver(), nvcc=nvcc) | reported
    recording.write(recording.of(prefix, made), made, folder)
    return made
