"""CUDA programs of benchmarks: built beside the kernels' headers, run, recorded."""

import contextlib
import pathlib

from benchmarks.common import recording
from jax_ep._cli.bench import cuda, record


@contextlib.contextmanager
def _ending():
    """Ends this program with what goes wrong, without a traceback."""
    try:
        yield
    except RuntimeError as error:
        raise SystemExit(str(error)) from None


def build(source, *flags, arch="sm_90"):
    """The program of a .cu file, and nvcc's version."""
    words = ("-I", str(recording.ROOT / "xla_ffi"), *flags)
    with _ending():
        return cuda.build(cuda.find_nvcc(), pathlib.Path(source), *words, arch=arch)


def report(program, words, limit):
    """What a program that is built reports in `limit` seconds."""
    with _ending():
        return cuda.run(program, words, limit)


def run(source, words, limit):
    """What the program of a .cu file reports in `limit` seconds, and nvcc's version."""
    program, nvcc = build(source)
    return report(program, words, limit), nvcc


def measure(kind, prefix, source, words, limit, folder):
    """A record of what `run` reports, written to `folder` under `prefix`."""
    reported, nvcc = run(source, words, limit)
    made = recording.head(kind, driver=record.driver(), nvcc=nvcc) | reported
    recording.write(recording.of(prefix, made), made, folder)
    return made
