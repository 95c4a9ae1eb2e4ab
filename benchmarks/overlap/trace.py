"""What the profiler saw of one call beside other work.

Nothing here may cost a measurement: a row says what could not be traced.
"""

import collections
import pathlib
import tempfile

import jax

from jax_ep._cli.bench import process

_EXCHANGE = ("jax_ep", "nccl")
# Kernels of jax_ep's that multiply, or quantise weights.
_EXPERTS = ("matmulkernel", "fourbitkernel", "quantizematriceskernel")


def _is_peer_copy(name):
    return "memcpy" in name.lower() and (
        "p2p" in name.lower() or "ptop" in name.lower()
    )


def _is_exchange(name):
    if any(word in name.lower() for word in _EXPERTS):
        return False
    return _is_peer_copy(name) or any(word in name.lower() for word in _EXCHANGE)


def summary(planes):
    """When the exchange and the rest began and ended, for each stream of each GPU.

    In microseconds since the first event of a GPU; also counts the copies between GPUs.
    """
    streams, copies = [], 0
    for plane in planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        spans = []
        for line in plane.lines:
            # XLA's own lines repeat, by module and by op, what streams did.
            if not line.name.startswith("Stream"):
                continue
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


def traced(program, *arguments):
    """`summary` of one call of a compiled program, or what went wrong."""
    try:
        jax.block_until_ready(program(*arguments))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(program(*arguments))
            (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
            profile = jax.profiler.ProfileData.from_file(str(path))
            found = summary(list(profile.planes))
    except Exception as error:  # a profiler that is not there, or another format
        found = {"error": process.error_text(error)[:300]}
    if "error" in found:
        print(f"  no trace: {found['error']}", flush=True)
    return found


def require_copies(arrangement, trace):
    """Raises where copy engines should have moved rows and no copies were seen."""
    if arrangement == "copy_halves" and trace.get("peer_copies") == 0:
        raise RuntimeError("no copies between GPUs in the trace: others moved the rows")
