"""Builds the CUDA programs of benchmarks and runs them."""

import contextlib
import pathlib

from benchmarks.common import recording
from jax_ep._cli.bench import cuda


@contextlib.contextmanager
def _ending():
    """Ends this program with an error's message, without a traceback."""
    try:
        yield
    except RuntimeError as error:
        raise SystemExit(str(error)) from None


def build(source, *flags, arch="sm_90"):
    """Builds the program of a .cu file; returns its path."""
    words = ("-I", str(recording.ROOT / "xla_ffi"), *flags)
    with _ending():
        return cuda.build(cuda.find_nvcc(), pathlib.Path(source), *words, arch=arch)[0]


def report(program, words, limit):
    """Runs a built program for at most `limit` seconds; returns its report."""
    with _ending():
        return cuda.run(program, words, limit)
