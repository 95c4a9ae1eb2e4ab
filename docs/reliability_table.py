"""Promises, what tests them and a recorded run of each: reliability.md.

Also what README.md says of a soak.
"""

import collections

import suite_table

# (promise, command, where its runs are recorded). A place is "ci", a kind of record,
# "gpu": the suite on GPUs that has run the command's tests, of p2p before collective,
# on the most devices, the newest of those; or "processes": those that ran in several.
PROMISES = (
    ("Ids outside [-1, E), of each value class, touch no memory and are reported by "
     "`ep.check()`", "pytest tests/test_misuse.py tests/test_dispatch.py",
     ("ci", "gpu")),
    ("NaN and Inf reach their own sums and blocks alone; n = 0; layouts; sizes that "
     "cannot be counted or held", "pytest tests/test_bad_values.py", ("ci", "gpu")),
    ("Wrong configs, shapes, dtypes, axes, routes of other handles: ValueError or "
     "TypeError while tracing, with value and remedy",
     "pytest tests/test_errors.py tests/test_errors_operands.py "
     "tests/test_options_errors.py tests/test_split_errors.py", ("ci", "gpu")),
    ("Changed routes: an index out of range counts as absent, before any access, and "
     "one in range shows nothing that was not sent in this call",
     "pytest tests/test_tampered.py; ctest -R tampered", ("ci", "gpu")),
    ("Any bytes as ids, counts, messages, routes, sizes or attributes: nothing is read "
     "or written outside of a buffer",
     "python benchmarks/fuzz.py --minutes 30; ctest -R fuzz", ("ci", "fuzz")),
    ("p2p, shmem: a custom call of which one operand has another size, rank or dtype, "
     "or an attribute another value, is refused, by itself or against the windows",
     "ctest -R window_operands", ("ci",)),
    ("Double close, use after close, fork, pickling, collection in any order, exit "
     "with calls in flight", "pytest tests/test_handle.py tests/test_handle_life.py",
     ("ci", "gpu")),
    ("A persistent compilation cache never meets another handle's or config's group",
     "pytest tests/test_handle.py -k persistent_cache", ("ci", "gpu")),
    ("Handles in any order of calls, with several at once, are as the model says",
     "pytest tests/test_state_machine.py", ("ci", "gpu")),
    ("Independent calls, many in flight, several threads: right, and no hang",
     "pytest tests/test_concurrency.py", ("ci", "gpu")),
    ("The same inputs give the same bytes under random delays of ranks",
     "pytest tests/test_determinism.py", ("ci", "gpu")),
    ("Right results for long, with random shapes, routing, skew, formats and options",
     "python benchmarks/soak.py --minutes 15", ("soak-cpu",)),
    ("The same on GPUs", "python benchmarks/soak.py --minutes 10 --no-compiling",
     ("soak-gpu",)),
    ("3,000 calls, 1,000 handles with their compilation (150 on GPUs) and 20,000 "
     "without leave no memory behind; p2p: nor do windows, opened and closed 1,000 "
     "times",
     "pytest tests/test_leaks.py", ("ci", "gpu")),
    ("p2p: memory is what `ep.buffer_bytes` says, to the driver's granule, and comes "
     "and goes with the handle", "pytest tests/test_p2p_faults.py -k memory", ("gpu",)),
    ("p2p: a rank that is missing, late, raises, closes, or is in another call: an "
     "error on every rank within `timeout_s` + 5 s that names both; the process and "
     "other handles go on", "pytest tests/test_p2p_faults.py", ("gpu",)),
    ("p2p: a process that raises and closes while the others are inside: they get the "
     "error, and all go on together",
     "pytest tests/test_processes_gpu.py -k raises", ("gpu",)),
    ("shmem: the same bytes as p2p, and the same with a process that raises or dies",
     "pytest tests/test_shmem_gpu.py", ("gpu",)),
    ("p2p: a process that is killed in a call: the others get the error, and go on "
     "over the living", "pytest tests/test_processes_gpu.py -k killed", ("gpu",)),
    ("Processes that meet in `init`, without GPUs: one that is killed before, at any "
     "step or after, gives up, comes late or with other arguments ends it for all, in "
     "time, and is named; descriptors go to the job's own processes alone",
     "pytest tests/test_multiprocess_windows.py tests/test_meeting.py "
     "tests/test_descriptors.py", ("ci",)),
    ("p2p over imagined hosts, without GPUs: one NVLink fabric serves; several, none "
     "or one whose handles fail are refused in the same words in all processes",
     "pytest tests/test_fabric.py", ("ci",)),
    ("The semantics with a process a GPU: p2p, and shmem over forced nodes",
     "python benchmarks/record_suite.py --processes 4 --transports p2p; "
     "python benchmarks/record_suite.py --processes 4 --ranks-per-node 2 "
     "--transports shmem", ("processes",)),
    ("p2p: calls keep their order, also from threads, graphs and beside XLA's "
     "collectives", "pytest tests/test_p2p_order.py", ("gpu",)),
    ("A whole layer in CUDA graphs, also in halves, replayed 10,000 times with routing "
     "that changes", "pytest tests/test_graph_layer.py", ("gpu",)),
    ("p2p: the kernels touch no memory but their own, in all formats, whole and in "
     "halves, and whole ones leave no barrier early; a bfloat16 call of hundreds of "
     "tokens has no races (racecheck leaves out those of few tokens, and helpers of "
     "quantised ones)",
     "benchmarks/sanitize.sh", ("sanitize",)),
    ("The protocol of flags and credits, under ThreadSanitizer and in a model "
     "that changes the order of steps",
     "ctest -R signals; pytest tests/test_protocol_model.py", ("ci",)),
    ("p2p: the kernels, run thread by thread in random order without a GPU, give the "
     "CPU's bytes, stay in their memory and end every wait; with an error put in, they "
     "do not", "ctest -R calls; ctest -R kernels; ctest -R mutant", ("ci",)),
    ("Runs on the oldest and the newest JAX, Python 3.11 to 3.13, one wheel for all of "
     "3.12 and up; tells what to do when JAX changes",
     ".ci/run newest python313 readme; pytest tests/test_compatibility.py", ("ci",)),
    ("No network and no processes at run time; all that a wheel contains is named",
     "pytest tests/test_supply.py", ("ci",)),
)  # fmt: skip
NOT_YET = "not yet run"


def _files(command):
    """The files of tests that a command names."""
    words = command.replace(";", " ").split()
    return [w.removeprefix("tests/") for w in words if w.startswith("tests/test_")]


def _source(data):
    return f"{data['date']}, {data['commit'][:12]}"


def _of_ci(records, command):
    # What runs in CI alone leaves no record.
    recorded = _of_suite(records, command, "cpu") if _files(command) else None
    return recorded or "no record; each `.ci/run` runs it"


def _of_gpus(records, command):
    return _of_suite(records, command, "gpu") or f"GPUs: {NOT_YET}"


def _of_suite(records, command, platform):
    newest_first = records("suite")[::-1]
    # Tests of several ranks need as many devices. Of equals the sort keeps the order.
    for data in sorted(newest_first, key=_reach, reverse=True):
        if data["devices"].get("platform", "gpu") != platform:
            continue
        if set(_files(command)) & suite_table.cut_off(data):
            continue
        # Of the semantics in several processes, which have a row of their own.
        if data.get("processes"):
            continue
        passed = _named(command, data.get("tests", {}))
        failed = _named(command, collections.Counter(_plain(data["failed"])))
        # Where a file's tests were all skipped nothing was run.
        if all(passed[name] + failed[name] for name in passed):
            count, kind = data["devices"]["count"], data["devices"]["kind"]
            tail = ", ".join(
                f"{sum(found.values())} {word}"
                for found, word in ((passed, "passed"), (failed, "failed"))
            )
            return f"{count} x {kind}, {_source(data)}: {tail}"
    return None


def _reach(data):
    return data.get("transport") == "p2p", data["devices"]["count"]


def _of_processes(records, command):
    """The newest suite of each transport, processes and nodes, in several processes."""
    newest = {
        (suite_table.name(data), data["devices"]["count"]): data
        for data in records("suite")
        if data.get("processes") and data["devices"].get("platform", "gpu") == "gpu"
    }
    found = []
    for (name, count), data in sorted(newest.items()):
        text = f"{name} on {count} x {data['devices']['kind']}, {_source(data)}: "
        text += f"{data['passed']} passed, {len(data['failed'])} failed"
        if missing := suite_table.cut_off(data):
            text += f", {len(missing)} files not run to their end"
        found.append(text)
    return "; ".join(found) or f"GPUs: {NOT_YET}"


def _plain(failed):
    """`module::test[parameters]` of pytest's report as `file.py::test`."""
    for name in failed:
        module, _, test = name.partition("::")
        yield f"{module.split('.')[-1]}.py::{test.split('[')[0]}"


def _named(command, counts):
    """How many of `counts`, by `file.py::test`, a command selects, by file."""
    words = command.partition(" -k ")[2].partition(";")[0].strip("'").split(" or ")
    return {
        file: sum(
            count
            for name, count in counts.items()
            if name.startswith(f"{file}::")
            and any(word in name.partition("::")[2] for word in words)
        )
        for file in _files(command)
    }


def _of_soak(platform):
    def last(records, command):
        for data in reversed(records("soak")):
            if (data["device"] == "cpu") == (platform == "cpu"):
                failed = sum(data["failures"].values())
                return (
                    f"{data['count']} x {data['device']}, {_source(data)}, seed "
                    f"{data['seed']}: {data['calls']} calls in "
                    f"{data['seconds'] / 60:.0f} min, {data['checks']} checks, "
                    f"{failed} failed"
                )
        return f"{'CPU' if platform == 'cpu' else 'GPUs'}: {NOT_YET}"

    return last


def _of_fuzz(records, command):
    for data in reversed(records("fuzz")):
        failed = sum(target["failed"] for target in data["targets"])
        return (
            f"{_source(data)}, seed {data['seed']}: {data['executions']} executions in "
            f"{data['seconds'] / 60:.0f} min by {data['engine']}, {failed} failed"
        )
    return NOT_YET


def _of_sanitize(records, command):
    for data in reversed(records("sanitize")):
        clean = sum(": clean;" in line for line in data["summary"])
        return (
            f"{data['count']} x {data['device']}, {_source(data)}: {clean} of "
            f"{len(data['summary'])} runs clean"
        )
    return f"GPUs: {NOT_YET}"


_LAST = {
    "ci": _of_ci,
    "gpu": _of_gpus,
    "processes": _of_processes,
    "fuzz": _of_fuzz,
    "soak-cpu": _of_soak("cpu"),
    "soak-gpu": _of_soak("gpu"),
    "sanitize": _of_sanitize,
}


def promises(records, table):
    """The table; `records(prefix)` are those of benchmarks/results, oldest first."""
    rows = [
        (
            promise,
            "; ".join(f"`{part}`" for part in command.split("; ")),
            "; ".join(_LAST[place](records, command) for place in places),
        )
        for promise, command, places in PROMISES
    ]
    return table(("promise", "tested by", "recorded run"), rows)


# Those tests of the files alone in which something fails.
_FAILING = "'missing or late or raises or order or other_configs or inside or differ"
_FAILING += " or killed or silent or dead or gives_up or dies'"
FAULTS = (
    "pytest tests/test_p2p_faults.py tests/test_processes_gpu.py "
    f"tests/test_shmem_gpu.py -k {_FAILING}"
)
FAULTS_ON_CPUS = (
    "pytest tests/test_multiprocess_windows.py tests/test_meeting.py "
    f"tests/test_descriptors.py -k {_FAILING}"
)
BAD_INPUTS = (
    "pytest tests/test_misuse.py tests/test_bad_values.py tests/test_errors.py "
    "tests/test_errors_operands.py tests/test_options_errors.py "
    "tests/test_split_errors.py tests/test_tampered.py tests/test_handle_life.py"
)


def figures(records, table):
    """How much was tried, by the same records."""
    return table(
        ("tried", "what came of it"),
        [
            ("faults injected, p2p and shmem", _of_gpus(records, FAULTS)),
            ("faults injected, init without GPUs", _of_ci(records, FAULTS_ON_CPUS)),
            ("bad inputs, GPUs", _of_gpus(records, BAD_INPUTS)),
            ("bad inputs, CPUs", _of_ci(records, BAD_INPUTS)),
            ("calls soaked, CPUs", _of_soak("cpu")(records, "")),
            ("calls soaked, GPUs", _of_soak("gpu")(records, "")),
            ("fuzzing", _of_fuzz(records, "")),
        ],
    )


def soak_part(data):
    text = (
        f"**Soak of {data['transport']}, {data['count']} x {data['device']}** "
        f"(jax {data['jax']}, {data['date']}, commit {data['commit'][:12]}, seed "
        f"{data['seed']}; `benchmarks/soak.py`): {data['calls']} calls in "
        f"{data['seconds']:.0f} s, with random routing, sizes and skew between ranks; "
        f"{data['rows']} rows placed, {data['dropped']} dropped for want of room; "
        f"{data['checks']} checks of results, {sum(data['failures'].values())} failed."
    )
    if data["error"]:
        text += f" It ended with an error: {data['error']}."
    if data["free_memory_start"] is None:
        return text
    lost = (data["free_memory_start"] - data["free_memory_end"]) / 2**20
    where = "free memory of the fullest GPU: {:.1f} MiB less"
    if data["device"] == "cpu":
        where = "memory of the process: {:.1f} MiB more"
    text += f" At the end {where.format(lost)}"
    if data.get("heap_start") is None:
        return f"{text}."
    # Since both were first looked at.
    heap = (data["heap_end"] - data["heap_start"]) / 2**20
    launches = data["launches"] - data["settled"][0]
    compilations = data["compilations"] - data["settled"][1]
    return (
        f"{text}, of the host's heap allocated and not freed: {heap:.2f} MiB more, "
        f"after {launches} launches and {compilations} other compilations."
    )
