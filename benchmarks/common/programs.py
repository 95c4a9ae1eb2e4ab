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


def build(source, *flags):
    """The program of a .cu file, and nvcc's version."""
    include = str(recording.ROOT / "xla_ffi")
    with _ending():
        return cuda.build(cuda.find_nvcc(), pathlib.Path(source), "-I", include, *flags)


def run(source, words, limit):
    """What the program of a .cu file reports in `limit` seconds, and nvcc's version."""
    program, nvcc = build(source)
    with _ending():
        return cuda.run(program, words, limit), nvcc


def measure(kind, prefix, source, words, limit, folder):
    """A record of what `run` reports, written to `folder` under `prefix`."""
    report, nvcc = run(source, words, limit)
    made = recording.head(kind, driver=record.driver(), nvcc=nvcc) | report
    recording.write(recording.of(prefix, made), made, folder)
    return made
