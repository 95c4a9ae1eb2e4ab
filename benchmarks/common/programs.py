"""CUDA programs of benchmarks: built beside the kernels' headers, run, recorded."""

import pathlib

from benchmarks.common import recording
from jax_ep._cli.bench import cuda, record


def build(source, *flags):
    """The program of a .cu file, and nvcc's version."""
    include = str(recording.ROOT / "xla_ffi")
    return cuda.build(cuda.find_nvcc(), pathlib.Path(source), "-I", include, *flags)


def measure(kind, prefix, source, words, limit, folder):
    """A record of what the program of a .cu file reports.

    Args:
      kind: of the record.
      prefix: of its name.
      source: the .cu file.
      words: the program's arguments.
      limit: its seconds.
      folder: where the record is written.
    """
    program, nvcc = build(source)
    report = cuda.run(program, words, limit)
    made = recording.head(kind, driver=record.driver(), nvcc=nvcc) | report
    recording.write(recording.of(prefix, made), made, folder)
    return made
