"""Joins records of several runs on the same devices."""

OF_A_RUN = ("commit", "date", "seed", "command", "driver", "seconds")


def require_same(program, name, before, after):
    """Ends the program where two records differ in what they must share."""
    if before != after:
        raise SystemExit(
            f"{program}: records to merge must have the same {name}, got {before!r} "
            f"and {after!r}; leave one of them out"
        )


def runs(record):
    """What tells the runs of a record from each other."""
    return record.get("runs") or [{name: record[name] for name in OF_A_RUN}]


def joined(before, after, **entries):
    """`after` with `entries`, and what both have of runs and problems."""
    lists = {"runs": [*runs(before), *runs(after)]}
    lists["problems"] = before["problems"] + after["problems"]
    return {**after, **entries, **lists}
