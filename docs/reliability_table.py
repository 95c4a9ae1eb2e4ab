"""Makes the tables of reliability.md: promises, their tests and a recorded run of each.

Also makes what README.md says about a soak.
"""

import collections

import suite_table
from reliability_promises import PROMISES

# Records have the names that files had when the tests ran.
_RENAMED = {
    "test_meeting.py": "test_rendezvous.py",
    "test_supply.py": "test_wheel_contents.py",
}

NOT_YET = "not yet run"


def _files(command):
    """Returns the test files that a command names, without folders, as in records."""
    words = command.replace(";", " ").split()
    names = [word.rpartition("/")[2] for word in words if word.startswith("tests/")]
    return [name for name in names if name.startswith("test_")]


def _file_of(test):
    """Returns the current name of the file in a record's `file.py::test`."""
    file = test.partition("::")[0]
    return _RENAMED.get(file, file)


def _source(data):
    return f"{data['date']}, {data['commit'][:12]}"


def _of_ci(records, command):
    # What only runs in CI leaves no record.
    recorded = _of_suite(records, command, "cpu") if _files(command) else None
    return recorded or "no record; `.ci/run` runs it"


def _of_gpus(records, command):
    return _of_suite(records, command, "gpu") or f"GPUs: {NOT_YET}"


def _of_suite(records, command, platform):
    newest_first = records("suite")[::-1]
    # Tests of several ranks need as many devices. The sort is stable, so the newest of
    # equals stays first.
    for data in sorted(newest_first, key=_reach, reverse=True):
        if data["devices"].get("platform", "gpu") != platform:
            continue
        if set(_files(command)) & set(map(_file_of, suite_table.cut_off(data))):
            continue
        # Suites in several processes have a row of their own.
        if data.get("processes"):
            continue
        passed = _named(command, data.get("tests", {}))
        failed = _named(command, collections.Counter(_plain(data["failed"])))
        # If all tests of a file were skipped, it did not run.
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
    """Shows the newest suite of each transport, processes, nodes and devices."""
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
            files = "file" if len(missing) == 1 else "files"
            text += f", {len(missing)} {files} did not finish"
        found.append(text)
    return "; ".join(found) or f"GPUs: {NOT_YET}"


def _plain(failed):
    """Turns `module::test[parameters]` of pytest's report into `file.py::test`."""
    for name in failed:
        module, _, test = name.partition("::")
        yield f"{module.split('.')[-1]}.py::{test.split('[')[0]}"


def _named(command, counts):
    """Sums, by file, those of `counts` (by `file.py::test`) that a command selects."""
    words = command.partition(" -k ")[2].partition(";")[0].strip("'").split(" or ")
    return {
        file: sum(
            count
            for name, count in counts.items()
            if _file_of(name) == file
            and any(word in name.partition("::")[2] for word in words)
        )
        for file in _files(command)
    }


def _of_soak(platform):
    def last(records, command):
        for data in reversed(records("soak")):
            if (data["device"] == "cpu") == (platform == "cpu"):
                return f"{data['count']} x {data['device']}, {_soaked(data)}"
        return f"{'CPU' if platform == 'cpu' else 'GPUs'}: {NOT_YET}"

    return last


def _soaked(data):
    failed = sum(data["failures"].values())
    return (
        f"{_source(data)}, seed {data['seed']}: {data['calls']} calls in "
        f"{data['seconds'] / 60:.0f} min, {data['checks']} checks, {failed} failed"
        + (f"; an error: {data['error']}" if data.get("error") else "")
    )


def _of_soaks_in_processes(records, command):
    """Shows the newest soak of each transport, number of processes and of nodes."""
    newest = {}
    for data in records("processes-soak"):
        if data["device"] == "cpu":
            continue
        devices = 1 if data["one_gpu"] else data["count"]
        facts = data | {"devices": {"count": devices}}
        newest[suite_table.name(facts), f"{devices} x {data['device']}"] = data
    return (
        "; ".join(
            f"{name} on {devices}, {_soaked(data)}"
            for (name, devices), data in sorted(newest.items())
        )
        or f"GPUs: {NOT_YET}"
    )


def _of_fuzz(records, command):
    for data in reversed(records("fuzz")):
        failed = sum(target["failed"] for target in data["targets"])
        return (
            f"{_source(data)}, seed {data['seed']}: {data['executions']} executions in "
            f"{data['seconds'] / 60:.0f} min by {data['engine']}, {failed} failed"
        )
    return NOT_YET


def _of_attacks(records, command):
    for data in reversed(records("attack-init")):
        good = sum(data["survived"].values())
        return (
            f"{_source(data)}: {data['attacks']} attacks at {data['points']} points "
            f"in {data['processes']} processes, {good} survived; "
            "`.ci/run` runs some of them"
        )
    return NOT_YET


def _of_sanitize(records, command):
    """Shows the newest run on each number of GPUs: a single one runs fewer tests."""
    newest = {f"{d['count']} x {d['device']}": d for d in records("sanitize")}
    found = []
    for devices, data in sorted(newest.items()):
        clean = sum(": clean;" in line for line in data["summary"])
        runs = f"{clean} of {len(data['summary'])} runs clean"
        found.append(f"{devices}, {_source(data)}: {runs}")
    return "; ".join(found) or f"GPUs: {NOT_YET}"


_LAST = {
    "ci": _of_ci,
    "gpu": _of_gpus,
    "processes": _of_processes,
    "fuzz": _of_fuzz,
    "attack": _of_attacks,
    "soak-cpu": _of_soak("cpu"),
    "soak-gpu": _of_soak("gpu"),
    "soak-processes": _of_soaks_in_processes,
    "sanitize": _of_sanitize,
}


def promises(records, table):
    """Makes the table of promises.

    `records(prefix)` returns those of benchmarks/results, oldest first.
    """
    rows = [
        (
            promise,
            "; ".join(f"`{part}`" for part in command.split("; ")),
            "; ".join(_LAST[place](records, command) for place in places),
        )
        for promise, command, places in PROMISES
    ]
    return table(("promise", "tested by", "recorded run"), rows)


# Only the tests of these files in which something fails.
_FAILING = "'missing or late or raises or order or other_configs or inside or differ"
_FAILING += " or killed or silent or dead or gives_up or dies'"
FAULTS = (
    "pytest tests/transports/test_p2p_faults.py tests/transports/test_processes_gpu.py "
    f"tests/transports/test_shmem_gpu.py -k {_FAILING}"
)
FAULTS_ON_CPUS = (
    "pytest tests/transports/test_multiprocess_windows.py "
    "tests/transports/test_rendezvous.py "
    f"tests/transports/test_descriptors.py -k {_FAILING}"
)
BAD_INPUTS = (
    "pytest tests/api/test_misuse.py tests/api/test_bad_values.py "
    "tests/api/test_errors.py tests/api/test_errors_operands.py "
    "tests/api/test_options_errors.py tests/api/test_split_errors.py "
    "tests/api/test_tampered.py tests/api/test_handle_life.py"
)


def figures(records, table):
    """Makes the table of how much was tried, from the same records."""
    return table(
        ("tried", "result"),
        [
            ("faults injected, p2p and shmem", _of_gpus(records, FAULTS)),
            ("faults injected, init without GPUs", _of_ci(records, FAULTS_ON_CPUS)),
            ("bad inputs, GPUs", _of_gpus(records, BAD_INPUTS)),
            ("bad inputs, CPUs", _of_ci(records, BAD_INPUTS)),
            ("calls soaked, CPUs", _of_soak("cpu")(records, "")),
            ("calls soaked, GPUs", _of_soak("gpu")(records, "")),
            ("fuzzing", _of_fuzz(records, "")),
            ("attacks on a process during init", _of_attacks(records, "")),
        ],
    )


def soak_part(data, _table=None):
    """Describes the newest soak in words."""
    text = (
        f"**Soak of {data['transport']}, {data['count']} x {data['device']}** "
        f"(jax {data['jax']}, {data['date']}, commit {data['commit'][:12]}, seed "
        f"{data['seed']}; `benchmarks/soak/soak.py`): {data['calls']} calls in "
        f"{data['seconds']:.0f} s, with random routing, sizes and skew between ranks; "
        f"{data['rows']} rows placed, {data['dropped']} dropped for lack of room; "
        f"{data['checks']} checks of results, {sum(data['failures'].values())} failed."
    )
    if data["error"]:
        text += f" It ended with an error: {data['error']}."
    if data["free_memory_start"] is None:
        return text
    lost = (data["free_memory_start"] - data["free_memory_end"]) / 2**20
    where = "the fullest GPU had {:.1f} MiB less free memory"
    if data["device"] == "cpu":
        where = "the process had {:.1f} MiB more memory"
    text += f" At the end {where.format(lost)}"
    if data.get("heap_start") is None:
        return f"{text}."
    # Counted since memory was first measured.
    heap = (data["heap_end"] - data["heap_start"]) / 2**20
    launches = data["launches"] - data["settled"][0]
    compilations = data["compilations"] - data["settled"][1]
    return (
        f"{text}, and {heap:.2f} MiB more of the host's heap were allocated and not "
        f"freed, after {launches} launches and {compilations} other compilations."
    )
