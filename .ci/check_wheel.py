"""Compares what a wheel contains with what it may and must; `.ci/run` calls it.

    check_wheel.py WHEEL

Without a tracked source beside it a name is refused, so that nothing gets in by lying
in the tree when a wheel is built.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Beside the package: one native module of each kind, of any interpreter.
NATIVE = r"jax_ep/_native_(cpu|cuda|shmem)\.[\w.-]*so"
METADATA = (
    "METADATA",
    "RECORD",
    "WHEEL",
    "entry_points.txt",
    "licenses/LICENSE",
    "licenses/THIRD_PARTY.md",
)


def faults(names: list[str], tracked: set[str]) -> list[str]:
    """What is wrong with the names in a wheel, given the files of the repository."""
    found, natives, metadata = [], [], set()
    package = {name for name in tracked if name.startswith("jax_ep/")}
    for name in names:
        inside = re.fullmatch(r"jax_ep-[\w.]+\.dist-info/(.+)", name)
        if inside:
            metadata.add(inside[1])
        elif re.fullmatch(NATIVE, name):
            natives.append(name.split(".")[0])
        elif name not in package:
            found.append(f"{name}: no file of the package")
    found += [f"{name}: missing" for name in sorted(package - set(names))]
    if "jax_ep/_native_cpu" not in natives or len(set(natives)) != len(natives):
        found.append(f"native modules: {natives}, not one for CPUs and one of a kind")
    if metadata != set(METADATA):
        found.append(f"metadata: {sorted(metadata ^ set(METADATA))}, one more or less")
    return found


def tracked_files() -> set[str]:
    """The files of the repository."""
    listed = ["git", "-C", str(ROOT), "ls-files"]
    done = subprocess.run(listed, check=True, capture_output=True, text=True)
    return set(done.stdout.splitlines())


def main() -> int:
    """Prints what is wrong; the exit status."""
    names = zipfile.ZipFile(sys.argv[1]).namelist()
    found = faults(names, tracked_files())
    for fault in found:
        print(f"{sys.argv[1]}: {fault}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
