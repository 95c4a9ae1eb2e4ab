"""Traces one call with the profiler, and sums up what it saw.

A failure here must not cost a measurement: the row says what could not be traced.
"""

import collections
import pathlib
import tempfile

import jax

from jax_ep._cli.bench import process

_NAME = 120  # characters of a kernel's name: template arguments may fill a page
_EXCHANGE = ("jax_ep", "nccl")
# jax_ep's kernels that multiply, or that quantise weights.
_EXPERTS = ("matmulkernel", "fourbitkernel", "quantizematriceskernel")


def _is_peer_copy(name):
    return "memcpy" in name.lower() and (
        "p2p" in name.lower() or "ptop" in name.lower()
    )


def _is_exchange(name):
    if any(word in name.lower() for word in _EXPERTS):
        return False
    return _is_peer_copy(name) or any(word in name.lower() for word in _EXCHANGE)


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


def summary(planes):
    """Returns when the exchange and the rest began and ended, by GPU and stream.

    Times are in microseconds since the GPU's first event. Also counts the copies
    between GPUs.
    """
    streams, copies = [], 0
    for plane, lines in _streams(planes):
        spans = []
        for line in lines:
            kinds = collections.defaultdict(list)
            for event in line.events:
                copies += _is_peer_copy(event.name)
                kind = "exchange" if _is_exchange(event.name) else "other"
                end_ns = event.start_ns + event.duration_ns
                kinds[kind].append((event.start_ns, end_ns))
            spans.append((line.name, kinds))
        starts = [s for _, kinds in spans for k in kinds.values() for s, _ in k]
        for name, kinds in spans:
            stream = {"gpu": plane.name, "stream": name}
            for kind, events in kinds.items():
                stream[kind] = {
                    "events": len(events),
                    "start_us": (min(s for s, _ in events) - min(starts)) / 1e3,
                    "end_us": (max(e for _, e in events) - min(starts)) / 1e3,
                    "busy_us": sum(e - s for s, e in events) / 1e3,
                }
            streams.append(stream)
    if not any("exchange" in stream for stream in streams):
        names = [plane.name for plane in planes]
        return {"error": f"no exchange on a GPU's stream in the planes {names}"}
    return {"streams": streams, "peer_copies": copies}


def traced(program, *arguments, made=summary):
    """Traces one call of a compiled program; returns `made` of it, or an error."""
    try:
        jax.block_until_ready(program(*arguments))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(program(*arguments))
            (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
            profile = jax.profiler.ProfileData.from_file(str(path))
            found = made(list(profile.planes))
    except Exception as error:  # a profiler that is not there, or another format
        found = {"error": process.error_text(error)[:300]}
    if "error" in found:
        print(f"  no trace: {found['error']}", flush=True)
    return found


def require_copies(arrangement, trace):
    """Raises if copy engines should have moved rows but no copies were seen."""
    if arrangement == "copy_halves" and trace.get("peer_copies") == 0:
        raise RuntimeError("no copies between GPUs in the trace: others moved the rows")
