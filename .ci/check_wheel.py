"""Checks that wheels contain what they must and nothing else; `.ci/run` calls it.

    check_wheel.py WHEEL...

A WHEEL is one of jax_ep or of a plugin. Every file must be tracked in the repository,
so that nothing gets in just because it lay in the tree when the wheel was built. Native
modules and metadata are exempt.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A native module: a package has at most one of each kind, for any interpreter.
NATIVE = r"{}/_native_(cpu|cuda|shmem)\.[\w.-]*so"
METADATA = (
    "METADATA",
    "RECORD",
    "WHEEL",
    "entry_points.txt",
    "licenses/LICENSE",
    "licenses/THIRD_PARTY.md",
)


def faults(names: list[str], tracked: set[str], package: str = "jax_ep") -> list[str]:
    """Returns what is wrong with a wheel's file names, given the repository's files."""
    found, natives, metadata = [], [], set()
    plugin = re.fullmatch(r"jax_ep_(cuda\d+)_plugin", package)
    folder = f"plugins/{plugin[1]}/" if plugin else ""
    own = f"{folder}{package}/"
    files = {name.removeprefix(folder) for name in tracked if name.startswith(own)}
    for name in names:
        inside = re.fullmatch(rf"{package}-[\w.]+\.dist-info/(.+)", name)
        if inside:
            metadata.add(inside[1])
        elif re.fullmatch(NATIVE.format(package), name):
            natives.append(name.split(".")[0])
        elif name not in files:
            found.append(f"{name}: no file of the package")
    found += [f"{name}: missing" for name in sorted(files - set(names))]
    main = f"{package}/_native_{'cuda' if plugin else 'cpu'}"
    if main not in natives or len(set(natives)) != len(natives):
        found.append(f"native modules: {natives}, not {main} and one of a kind")
    if metadata != set(METADATA):
        found.append(f"metadata: {sorted(metadata ^ set(METADATA))}, one more or less")
    return found


def tracked_files() -> set[str]:
    """Returns the files that are tracked in the repository."""
    listed = ["git", "-C", str(ROOT), "ls-files"]
    done = subprocess.run(listed, check=True, capture_output=True, text=True)
    return set(done.stdout.splitlines())


def main() -> int:
    """Prints what is wrong and returns the exit status."""
    tracked, bad = tracked_files(), False
    for wheel in map(pathlib.Path, sys.argv[1:]):
        listed = zipfile.ZipFile(wheel).namelist()
        names = [name for name in listed if not name.endswith("/")]
        for fault in faults(names, tracked, wheel.name.split("-")[0]):
            print(f"{wheel}: {fault}")
            bad = True
    return bad


if __name__ == "__main__":
    sys.exit(main())
