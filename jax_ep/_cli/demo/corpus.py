"""The text that the demo learns: the sources of Python's standard library."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sysconfig

import numpy as np

MAX_BYTES = 6_000_000
MAX_FILE_BYTES = 60_000  # so that no single file dominates
HELD_OUT_EVERY = 16  # one file in this many is held out from training
_SKIPPED = frozenset({"__pycache__", "idlelib", "lib2to3", "test", "tests"})


class CorpusError(RuntimeError):
    """The sources of Python's standard library are missing."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as uint8: `train` and `held_out`, of `files` files under `root`."""

    train: np.ndarray
    held_out: np.ndarray
    files: int
    root: pathlib.Path


def load(root: pathlib.Path | None = None) -> Corpus:
    """Reads at most MAX_BYTES of sources, in order of their paths.

    Raises:
        CorpusError: there are too few, for example if the library is zipped.
    """
    root = root or pathlib.Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    files = size = 0
    for path in _sources(root):
        text = path.read_bytes()[:MAX_FILE_BYTES]
        parts[files % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(text)
        files, size = files + 1, size + len(text)
        if size >= MAX_BYTES:
            break
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    if min(train.size, held_out.size) < 10_000:
        raise CorpusError(
            f"the sources of Python's standard library must be under {root}, got "
            f"{size} bytes of .py files; use a Python that has them"
        )
    return Corpus(train, held_out, files, root)


def sample(
    text: np.ndarray, sequences: int, length: int, rng: np.random.Generator
) -> np.ndarray:
    """Draws random windows of the text: uint8 `[sequences, length + 1]`."""
    starts = rng.integers(0, text.size - length, sequences)
    return text[starts[:, None] + np.arange(length + 1)]


def _sources(root: pathlib.Path) -> list[pathlib.Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in _SKIPPED and not name.endswith("-packages")
        ]
        found += [pathlib.Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
