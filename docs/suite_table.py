"""Makes the table of test suites recorded on GPUs.

It has the newest record in benchmarks/results of each transport and number of devices.
"""

import itertools


def name(data):
    """Names a suite: its transport, processes, forced nodes and chosen files."""
    # A record that names no transport is of collective.
    parts = [f"`{data.get('transport', 'collective')}`"]
    if data.get("processes"):
        shared = data["devices"]["count"] < data["processes"]
        parts.append(f"{data['processes']} processes" + " sharing the GPU" * shared)
    elif "--one-gpu" in data.get("arguments", []):
        parts.append("files whose tests start processes that share the GPU")
    if data.get("ranks_per_node"):
        per_node = data["ranks_per_node"]
        parts.append(f"{per_node} rank{'s' * (per_node > 1)} per node")
    if files := asked_files(data.get("arguments", [])):
        parts.append(f"only {' and '.join(files)}")
    return ", ".join(parts)


def asked_files(arguments):
    """Returns the test files that were requested of a suite; none if all were."""
    _, found, rest = " ".join(arguments).partition("--files ")
    words = rest.split() if found else []
    return list(itertools.takewhile(lambda word: not word.startswith("-"), words))


def cut_off(data):
    """Returns the files of a suite that did not finish, even if only parts of them."""
    return {file.split()[0] for file in data.get("not_run", ())}


def on_gpus(records, table):
    """Makes the table, or "" if there is nothing to show.

    `records(prefix)` returns those of benchmarks/results, oldest first.
    """
    newest = {
        (data["devices"]["kind"], name(data), data["devices"]["count"]): data
        for data in records("suite")
        if data["devices"].get("platform", "gpu") == "gpu"
    }
    if not newest:
        return ""
    rows = [
        (
            f"{count} x {kind}",
            suite,
            data["passed"],
            len(data["failed"]),
            sum(data["skipped"].values()),
            len(cut_off(data)) or "",
            data["devices"]["jax"],
            data["date"],
            data["commit"][:12],
        )
        for (kind, suite, count), data in sorted(newest.items(), reverse=True)
    ]
    counts = ("passed", "failed", "skipped", "cut off")
    return (
        "Recorded by `tools/record_suite.py`; `cut off` counts files that had not "
        "finished when the time ran out.\n\n"
        + table(("on", "transport", *counts, "jax", "date", "commit"), rows)
    )
