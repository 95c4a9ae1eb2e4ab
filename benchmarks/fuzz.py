"""Fuzzes the C++ that handles what callers and peers send, and records the run.

    python benchmarks/fuzz.py --minutes 30 [--seed S] [--corpus]

Builds tests/cc with AddressSanitizer, UBSan and coverage, fuzzes each target for its
share of the time from the corpus in tests/cc/corpus, and writes
benchmarks/results/fuzz-<date>.json. `--corpus` also puts a small corpus of what was
found in the place of the old one. Ends with 1 where an input failed; it is kept in
the build folder.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

import recording

TESTS = recording.ROOT / "tests" / "cc"
CORPUS = TESTS / "corpus"
TARGETS = {"routing_fuzz": 1, "calls_fuzz": 3}  # shares of the time


def build(folder):
    import jaxlib

    include = pathlib.Path(jaxlib.__file__).parent / "include"
    options = {
        "JAX_EP_SANITIZE": "address,undefined",
        "JAX_EP_FUZZ": "ON",
        "XLA_FFI_INCLUDE": str(include),
    }
    defines = [f"-D{name}={value}" for name, value in options.items()]
    make = ["cmake", "-GNinja", "-S", str(TESTS), "-B", str(folder), *defines]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    make = ["cmake", "--build", str(folder), "-j", "1", "--target", *TARGETS]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)


def fuzz(folder, target, seconds, seed):
    """One target's run, as driver.cc or libFuzzer tells it."""
    merged = folder / f"{target}-corpus"
    shutil.rmtree(merged, ignore_errors=True)
    command = [
        str(folder / target),
        f"-seed={seed}",
        f"-max_total_time={int(seconds)}",
        f"-merge_to={merged}",
        str(CORPUS / target),
    ]
    print(" ".join(command), flush=True)
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    found = {"target": target, "failed": done.returncode != 0}
    if not found["failed"]:
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


def keep_corpus(folder):
    for target in TARGETS:
        shutil.rmtree(CORPUS / target, ignore_errors=True)
        shutil.copytree(folder / f"{target}-corpus", CORPUS / target)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--build", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path, default=recording.RESULTS)
    parser.add_argument("--corpus", action="store_true", help="renew tests/cc/corpus")
    args = parser.parse_args()
    folder = (args.build or recording.ROOT / "build" / "fuzz").resolve()
    commit = recording.commit()  # of the sources that are built
    build(folder)
    share = args.minutes * 60 / sum(TARGETS.values())
    found = [
        fuzz(folder, target, weight * share, args.seed)
        for target, weight in TARGETS.items()
    ]
    record = {
        "kind": "fuzz",
        "commit": commit,
        "date": recording.date(),
        "seed": args.seed,
        "command": f"python benchmarks/fuzz.py --minutes {args.minutes:g} "
        f"--seed {args.seed}",
        "sanitizers": "address,undefined",
        "executions": sum(target.get("executions", 0) for target in found),
        "seconds": round(sum(target.get("seconds", 0) for target in found), 1),
        "cpu_seconds": round(sum(target.get("cpu_seconds", 0) for target in found), 1),
        "targets": found,
    }
    recording.write("fuzz", record, args.folder)
    if any(target["failed"] for target in found):
        return 1
    if args.corpus:
        keep_corpus(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
