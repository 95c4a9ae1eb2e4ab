"""Fuzzes the C++ that handles what callers and peers send.

    python -m tools.fuzz --minutes 30 [--seed S] [--corpus]

Builds tests/cc with AddressSanitizer, UBSan and coverage, fuzzes each target for its
share of the time from the corpus in tests/cc/corpus, and prints what they did.
`--corpus` also replaces the corpus by a small one of what was found. Exits 1 if an
input failed; the input is kept in the build folder.
"""

import argparse
import json
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import time

from benchmarks.common import recording

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


def engine(folder):
    """Names what drives the targets: libFuzzer if clang has built them."""
    cache = (folder / "CMakeCache.txt").read_text()
    compiler = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", cache, re.MULTILINE)[1]
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    return "libFuzzer" if "clang" in told.stdout else "tests/cc/fuzz/driver.cc"


def fuzz(folder, target, seconds, seed, driver):
    """Fuzzes one target; returns what its engine reports."""
    merged = folder / f"{target}-corpus"
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir(parents=True)
    command = [str(folder / target), f"-seed={seed}"]
    command += [f"-max_total_time={int(seconds)}"]
    run = run_libfuzzer if driver == "libFuzzer" else run_own
    failed, told = run(command, merged, CORPUS / target, folder)
    return {"target": target, "failed": failed} | told


def run_own(command, merged, corpus, folder):
    """Runs driver.cc; returns whether an input failed, and what it reports."""
    done = started([*command, f"-merge_to={merged}", str(corpus)], folder)
    failed = done.returncode != 0
    return failed, {} if failed else json.loads(done.stdout.splitlines()[-1])


def run_libfuzzer(command, merged, corpus, folder):
    """Does the same with libFuzzer, which writes what it finds to a scratch corpus.

    Another run merges the two into a small corpus.
    """
    scratch = folder / f"{merged.name}-scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    start, busy = time.monotonic(), cpu_seconds()
    # It reports everything on stderr.
    command = [*command, "-print_final_stats=1", str(scratch), str(corpus)]
    done = started(command, folder, stderr=subprocess.STDOUT)
    seconds = round(time.monotonic() - start, 1)
    busy = round(cpu_seconds() - busy, 1)
    stats = {
        name: int(value)
        for name, value in re.findall(r"^stat::(\w+):\s+(\d+)", done.stdout, re.M)
    }
    edges = re.findall(r"\bcov: (\d+)", done.stdout)
    found = {
        "seconds": seconds,
        "cpu_seconds": busy,
        "executions": stats.get("number_of_executed_units", 0),
        "edges": int(edges[-1]) if edges else 0,
        "inputs_given": len(list(corpus.iterdir())),
        "inputs_found": len(list(scratch.iterdir())),
    }
    if done.returncode == 0:
        merge = [command[0], "-merge=1", str(merged), str(corpus), str(scratch)]
        done = started(merge, folder, stderr=subprocess.STDOUT)
        found["merged"] = len(list(merged.iterdir()))
    if done.returncode != 0:
        print(done.stdout[-8000:], flush=True)
    return done.returncode != 0, found


def cpu_seconds():
    """Returns the CPU time of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def started(command, folder, **options):
    """Runs a command and returns the completed process."""
    print(" ".join(command), flush=True)
    return subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, **options
    )


def keep_corpus(folder):
    for target in TARGETS:
        shutil.rmtree(CORPUS / target, ignore_errors=True)
        shutil.copytree(folder / f"{target}-corpus", CORPUS / target)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--build", type=pathlib.Path)
    parser.add_argument("--corpus", action="store_true", help="renew tests/cc/corpus")
    args = parser.parse_args(arguments)
    folder = (args.build or recording.ROOT / "build" / "fuzz").resolve()
    commit = recording.commit()  # read first: it is that of the sources to be built
    build(folder)
    share = args.minutes * 60 / sum(TARGETS.values())
    driver = engine(folder)
    found = [
        fuzz(folder, target, weight * share, args.seed, driver)
        for target, weight in TARGETS.items()
    ]
    print(json.dumps(found, indent=1))
    executions = sum(target.get("executions", 0) for target in found)
    failed = sum(target["failed"] for target in found)
    seconds = sum(target.get("seconds", 0) for target in found)
    print(
        f"{recording.date()}, {commit[:12]}, seed {args.seed}: {executions} executions "
        f"in {seconds / 60:.0f} min by {driver}, {failed} targets failed"
    )
    if failed:
        return 1
    if args.corpus:
        keep_corpus(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
