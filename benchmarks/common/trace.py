"""Traces one call with the profiler, and sums up what it saw.

A failure here must not cost a measurement: the row says what could not be traced.
"""

import collections
import pathlib
import tempfile

import jax

from jax_ep._cli.bench import process

_NAME = 120  # characters of a kernel's name: template arguments may fill a page


def _streams(planes):
    """Yields each GPU's plane and the lines of its streams."""
    for plane in planes:
        if plane.name.startswith("/device:GPU"):
            # XLA's own lines repeat what streams did, by module and by op.
            lines = [line for line in plane.lines if line.name.startswith("Stream")]
            yield plane, lines


def kernels(planes):
    """Returns the kernels that the first GPU ran, longest first, and its busy time.

    `busy_us` is the sum over the kernels of all streams. With a single stream, the rest
    of `span_us` is gaps between them.
    """
    for _, lines in _streams(planes):
        events = [event for line in lines for event in line.events]
        if not events:
            continue
        found = collections.defaultdict(lambda: {"count": 0, "us": 0.0})
        for event in events:
            each = found[event.name[:_NAME]]
            each["count"] += 1
            each["us"] += event.duration_ns / 1e3
        first = min(event.start_ns for event in events)
        last = max(event.start_ns + event.duration_ns for event in events)
        rows = [{"name": name, **each} for name, each in found.items()]
        return {
            "span_us": (last - first) / 1e3,
            "busy_us": sum(row["us"] for row in rows),
            "kernels": sorted(rows, key=lambda row: -row["us"]),
        }
    return {"error": f"nothing on a GPU's stream in {[p.name for p in planes]}"}


def traced(program, *arguments):
    """Traces one call of a compiled program; returns `kernels` of it, or an error."""
    try:
        jax.block_until_ready(program(*arguments))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(program(*arguments))
            (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
            profile = jax.profiler.ProfileData.from_file(str(path))
            found = kernels(list(profile.planes))
    except Exception as error:  # a profiler that is not there, or another format
        found = {"error": process.error_text(error)[:300]}
    if "error" in found:
        print(f"  no trace: {found['error']}", flush=True)
    return found
