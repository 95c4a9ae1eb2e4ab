"""Joins records of several runs on the same devices."""

OF_A_RUN = ("commit", "date", "seed", "command", "driver", "libraries", "seconds")


def require_same(program, name, before, after):
    """Ends the program if two records differ in what they must have in common."""
    if before != after:
        raise SystemExit(
            f"{program}: records to merge must have the same {name}, got {before!r} "
            f"and {after!r}; leave one of them out"
        )


def runs(record):
    """Returns the facts that tell a record's runs apart, one dict per run."""
    return record.get("runs") or [
        {name: record[name] for name in OF_A_RUN if name in record}
    ]


def joined(before, after, **entries):
    """Returns `after` with `entries`, and with the runs and problems of both."""
    lists = {"runs": [*runs(before), *runs(after)]}
    if "problems" in after:
        lists["problems"] = before["problems"] + after["problems"]
    return {**after, **entries, **lists}
